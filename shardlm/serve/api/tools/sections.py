"""Calls whose arguments are JSON behind a name and marks, as DeepSeek V3, V3.1 and Kimi K2 write them: several in one
section, with text before and after it. Arguments come as they are written."""

import dataclasses
import re
from collections.abc import Callable

from shardlm.serve.api.reasoning.marks import until
from shardlm.serve.api.tools.reader import CallDelta, JsonEnd


@dataclasses.dataclass(frozen=True)
class Section:
    """begin, end    around the calls of a reply
    call, to, over   before a call's head, between that and its arguments, and behind them
    name             of the function: from the head, and what stands before the arguments' brace; "" where it has none
    """

    begin: str
    end: str
    call: str
    to: str
    over: str
    name: Callable[[str, str], str]


class SectionParser:
    """Push the text of a reply; contents (texts) and parts of calls come out in order. A call without a name, or one
    that was cut off before its arguments, is content."""

    def __init__(self, section: Section):
        self.calls = 0
        self._marks = section
        self._held = ""  # text that may be the beginning of a mark
        self._step: Callable[[list], bool] = self._content
        self._said = ""  # all since the mark before a call, until its arguments begin
        self._head = self._before = ""  # what stands before the arguments' mark, and their brace
        self._json = JsonEnd()
        self._after_mark = False  # nor text since one

    def push(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        self._held += text
        while self._step(found):
            pass
        return found

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no text follows."""
        rest, self._held = self._held, ""
        if self._step in (self._to_mark, self._to_brace):
            rest = self._said + rest
        elif self._step != self._content:
            return []
        return [rest] if rest else []

    def _content(self, found: list) -> bool:
        """Up to the calls. A model may leave out what begins a section."""
        return self._text(found, "\n", (self._marks.begin, self._marks.call))

    def _between(self, found: list) -> bool:
        """Up to the next call, or the end of the section."""
        return self._text(found, None, (self._marks.call, self._marks.end))

    def _text(self, found: list, space: str | None, marks: tuple[str, ...]) -> bool:
        """Up to one of the marks. space: what is left out behind calls, or marks."""
        if self._after_mark:
            self._held = self._held.lstrip(space)
        text, mark, self._held = until(self._held, marks)
        if text:
            found.append(text)
            self._after_mark = False
        self._enter(mark)
        return bool(mark)

    def _enter(self, mark: str) -> None:
        if mark == self._marks.call:
            self._step, self._said, self._head, self._before = self._to_mark, mark, "", ""
        elif mark:
            self._step = self._content if mark == self._marks.end else self._between
            self._after_mark = True

    def _to_mark(self, found: list) -> bool:
        """Up to the mark before the arguments."""
        text, mark, self._held = until(self._held, (self._marks.to, self._marks.over, self._marks.end))
        self._head += text
        self._said += text + mark
        if mark == self._marks.to:
            self._step = self._to_brace
        elif mark:
            self._ends(found, mark)
        return bool(mark)

    def _to_brace(self, found: list) -> bool:
        """Up to the arguments themselves."""
        text, mark, self._held = until(self._held, ("{", self._marks.over, self._marks.end))
        self._before += text
        self._said += text + mark
        if mark == "{":
            begun = self._begun()
            found += begun or [self._said.removesuffix(mark)]
            self._held = mark + self._held
            self._json, self._step = JsonEnd(), self._arguments if begun else self._content
        elif mark:
            self._ends(found, mark)
        return bool(mark)

    def _ends(self, found: list, mark: str) -> None:
        """A call without arguments."""
        begun = self._begun()
        found += [dataclasses.replace(one, arguments="{}") for one in begun] or [self._said]
        self._enter(mark if mark == self._marks.end else self._marks.begin)

    def _begun(self) -> list[CallDelta]:
        """With the function's name; none if there is none."""
        name = self._marks.name(self._head.strip(), self._before.strip())
        self.calls += bool(name)
        return [CallDelta(self.calls - 1, name, "")] if name else []

    def _arguments(self, found: list) -> bool:
        """Up to the end of the arguments, or the mark behind them where they have none; in their texts it is none."""
        text, mark, rest = until(self._held, (self._marks.over, self._marks.end))
        taken, self._held = self._json.take(text), rest
        if self._json.done or (mark and not self._json.in_text):
            self._held, self._step = text[len(taken) :] + mark + rest, self._skipped
        else:
            taken += self._json.take(mark)
        if taken:
            found.append(CallDelta(self.calls - 1, None, taken))
        return bool(mark) or self._step == self._skipped

    def _skipped(self, found: list) -> bool:
        """Up to the end of the call."""
        _, mark, self._held = until(self._held, (self._marks.over, self._marks.end, self._marks.call))
        self._enter(mark if mark != self._marks.over else self._marks.begin)
        return bool(mark)


def _deepseek(head: str, before: str) -> str:
    """V3 writes the kind of call there (function), and the name and a fence before the arguments."""
    name, _, _ = before.partition("\n")
    return head if before.startswith("```") or not before else name.strip()


def _kimi(head: str, before: str) -> str:
    """functions.NAME:NUMBER"""
    return re.fullmatch(r"(?:functions\.)?(.*?)(?::\d+)?", head, re.DOTALL)[1]


DEEPSEEK = Section(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    to="<｜tool▁sep｜>",
    over="<｜tool▁call▁end｜>",
    name=_deepseek,
)
KIMI = Section(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    to="<|tool_call_argument_begin|>",
    over="<|tool_call_end|>",
    name=_kimi,
)
STYLES = {"deepseek_v3": DEEPSEEK, "kimi_k2": KIMI}  # by vLLM's names of its parsers
