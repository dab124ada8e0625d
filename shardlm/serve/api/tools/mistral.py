"""Calls as Mistral's models write them: [TOOL_CALLS] and a list of {"name": ..., "arguments": ...}, or since Mistral
Small 3.2 [TOOL_CALLS]NAME[ARGS]{...} for each, where [CALL_ID]... may stand before [ARGS], and that may be left out."""

from collections.abc import Callable

from shardlm.serve.api.reasoning.marks import until
from shardlm.serve.api.tools.reader import CallDelta, CallReader, JsonEnd

BEGIN, ID, TO = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser:
    """Push the text of a reply; contents (texts) and parts of calls come out in order. What follows the mark and is no
    call, or was cut off before its arguments, is content."""

    def __init__(self):
        self.calls = 0
        self._held = ""  # text that may be the beginning of a mark
        self._step: Callable[[list], bool] = self._content
        self._said = ""  # all since the mark, until it is known what follows
        self._name: str | None = None
        self._json = JsonEnd()
        self._reader: CallReader | None = None  # of an object in a list

    def push(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        self._held += text
        while self._held and self._step(found):
            pass
        return found

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no text follows."""
        rest, self._held = self._said + self._held, ""
        if self._reader is not None and not self._reader.begun:
            rest += self._reader.text
        return [rest] if rest else []

    def _content(self, found: list) -> bool:
        """Up to the mark."""
        before, mark, self._held = until(self._held, (BEGIN,))
        if before:
            found.append(before)
        if mark:
            self._step, self._said, self._name = self._either, mark, None
        return bool(mark)

    def _either(self, found: list) -> bool:
        """Whether a list follows, a call on its own, or a name."""
        words = self._held.lstrip()
        self._said += self._held[: len(self._held) - len(words)]
        self._held = words
        if words:
            self._step = self._list if words[0] in "[{" else self._to_arguments
        return bool(words)

    def _list(self, found: list) -> bool:
        """Up to the next object of a list, or its end."""
        char = self._held[0]
        if char == "{":
            self._reader, self._step = CallReader(self.calls), self._object
        elif char in "[, \t\r\n":
            self._held = self._held[1:]
            self._said += char if self._said else ""  # no call so far
        else:
            self._held = self._held if self._said else self._held.removeprefix("]")
            found += [self._said] if self._said else []
            self._said, self._step = "", self._content
        return True

    def _object(self, found: list) -> bool:
        reader = self._reader
        self._held, deltas = reader.push(self._held)
        found.extend(deltas)
        self.calls = reader.index + reader.begun
        if reader.done:
            found += [] if reader.begun else [self._said + reader.text]
            self._reader, self._step = None, self._list if reader.begun else self._content
        if reader.done or reader.begun:
            self._said = ""
        return reader.done

    def _to_arguments(self, found: list) -> bool:
        """Up to the arguments' brace."""
        text, mark, self._held = until(self._held, ("{", ID, TO, BEGIN))
        self._said += text
        if mark and self._name is None:
            self._name = self._said.removeprefix(BEGIN).strip()
        if mark == "{" and self._name:
            found.append(CallDelta(self.calls, self._name, ""))
            self.calls, self._said, self._held = self.calls + 1, "", mark + self._held
            self._json, self._step = JsonEnd(), self._arguments
        elif mark in ("{", BEGIN):
            found.append(self._said)
            self._held, self._said, self._step = mark + self._held, "", self._content
        else:
            self._said += mark
        return bool(mark)

    def _arguments(self, found: list) -> bool:
        """Up to their end."""
        taken = self._json.take(self._held)
        found.append(CallDelta(self.calls - 1, None, taken))
        self._held = self._held[len(taken) :]
        if self._json.done:
            self._step = self._content
        return self._json.done
