"""GPT-OSS's replies, which are messages on channels: analysis is thought, commentary to a function is a call, the rest
is content (https://cookbook.openai.com/articles/openai-harmony)."""

import re
from collections.abc import Collection

from shardlm.serve.api.reasoning.marks import Thought, until
from shardlm.serve.api.tools.reader import CallDelta

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", START, CHANNEL)
# Before the text that a reply is held to there are these, in this order; <|constrain|>json may be between them.
FINAL = (f"{CHANNEL}final", MESSAGE)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyThoughts:
    """As MarkedThoughts, and calls of functions as parts of calls.

    Attributes:
      calls: how many calls it found.
      thinking: whether what comes next is thought, or stands around messages.
    """

    over = False

    def __init__(self, names: Collection[str], begun: str = ""):
        """`names`: functions that there are. `begun`: how the prompt begins the message of the reply."""
        self.calls = 0
        self._names = names
        self._head: str | None = ""  # of the message that begins; None inside of one
        self._held = ""
        self._kind = ""  # of the message: thought, text or call
        self._empty = True  # a call without arguments so far
        self._plain = ""  # what stands where a head belongs
        self._bare = True  # no mark so far
        self.push(begun)
        if self._head is not None:
            self._head += self._plain
        self.calls, self._plain, self._bare = 0, "", True

    @property
    def thinking(self) -> bool:
        return self._head is not None or self._kind == "thought"

    def push(self, text: str) -> list[str | Thought | CallDelta]:
        found: list[str | Thought | CallDelta] = []
        self._held += text
        while self._inside(found) if self._head is None else self._before(found):
            pass
        return found

    def finish(self) -> list[str | Thought | CallDelta]:
        """The rest, when no text follows. A reply without any head is content."""
        rest, self._held = self._held, ""
        if self._head is None:
            return [*self._piece(rest), *self._call_ends()]
        plain = self._plain + rest
        return [plain] if self._bare and plain and CHANNEL not in plain else []

    def _before(self, found: list) -> bool:
        """Up to the text of the next message. Returns whether that begins here."""
        before, mark, self._held = until(self._held, (MESSAGE, START))
        self._plain += before
        self._bare = self._bare and not mark
        if mark == START:
            self._head = self._plain = ""
        if mark != MESSAGE:
            return bool(mark)
        head, self._head, self._plain = self._head + self._plain, None, ""
        channel, function = _CHANNEL.search(head), _FUNCTION.search(head)
        if function and function[1] in self._names:
            self._kind, self._empty = "call", True
            found.append(CallDelta(self.calls, function[1], ""))
            self.calls += 1
        else:
            thought = channel is not None and (channel[1] == "analysis" or "to=" in head)
            self._kind = "thought" if thought else "text"
        return True

    def _inside(self, found: list) -> bool:
        """Up to the end of a message. Returns whether it is here."""
        text, mark, self._held = until(self._held, _ENDS)
        found += self._piece(text)
        if mark:
            found += self._call_ends()
            self._head = CHANNEL if mark == CHANNEL else ""
            self._kind = self._plain = ""
        return bool(mark)

    def _piece(self, text: str) -> list[str | Thought | CallDelta]:
        if not text:
            return []
        if self._kind == "call":
            self._empty = False
            return [CallDelta(self.calls - 1, None, text)]
        return [Thought(text) if self._kind == "thought" else text]

    def _call_ends(self) -> list[CallDelta]:
        bare = self._kind == "call" and self._empty
        self._empty = False
        return [CallDelta(self.calls - 1, None, "{}")] if bare else []
