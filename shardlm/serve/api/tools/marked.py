"""Calls whose arguments stand between marks and not in JSON, as Qwen3-Coder and Qwen 3.5, GLM-4.5 and MiniMax-M2 write
them. Texts come as they are written, other values when they are whole (values.py)."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

from shardlm.serve.api.reasoning.marks import until
from shardlm.serve.api.tools import values
from shardlm.serve.api.tools.reader import CallDelta

Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by the name of the function
_SPACE = re.compile(r"\s*")
_LONGEST = 64  # characters of a mark
_NAME = re.compile(r"""["']?([^\s<>"']+)["']?""")


@dataclasses.dataclass(frozen=True)
class Marks:
    """begin, end    around calls
    call, named      around a function's name; "": it stands right behind `begin`, and ends before what follows
    over             behind a call
    key, keyed       around an argument's name
    value, valued    around its value
    lines            a value may stand on lines of its own, between line ends that are not its
    """

    begin: str
    end: str
    call: str
    named: str
    over: str
    key: str
    keyed: str
    value: str
    valued: str
    lines: bool


QWEN = Marks(
    *("<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>"),
    lines=True,
)
GLM = Marks(
    *("<tool_call>", "</tool_call>", "", "", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    lines=False,
)
MINIMAX = Marks(
    *("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", ">", "</invoke>"),
    *("<parameter name=", ">", "", "</parameter>"),
    lines=True,
)
STYLES = {"qwen3_coder": QWEN, "glm45": GLM, "minimax_m2": MINIMAX}  # by vLLM's names of its parsers


class MarkedParser:
    """Push the text of a reply; contents (texts) and parts of calls come out in order. What is between marks and has no
    name is content, and where no marks say that it is a name, another than a function's too."""

    def __init__(self, marks: Marks, schemas: Schemas):
        self.calls = 0
        self._marks, self._schemas = marks, schemas
        self._held = ""  # text that may be the beginning of a mark
        self._step: Callable[[list], bool] = self._content
        self._said = ""  # marks whose call is not known yet to be one
        self._inside = False  # between the marks around calls
        self._after_mark = False  # and no text since
        self._argument = Argument(marks, set(), "")
        self._schema: Mapping[str, Any] = {}  # of the function's parameters
        self._key: str | None = None
        self._first = True  # the argument is the call's first one

    def push(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        self._held += text
        while self._held and self._step(found):
            pass
        return found

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no text follows."""
        found: list[str | CallDelta] = []
        if self._step == self._value and self._value(found, last=True):
            found += self.push("")
        if self._step in (self._content, self._to_call, self._to_name):
            rest = self._said + self._held
            found += [rest] if rest else []
        self._held = self._said = ""
        return found

    def _content(self, found: list) -> bool:
        """Up to the next call. Models may leave out the marks around it, or the last one."""
        if self._after_mark:
            self._held = self._held.lstrip(None if self._inside else "\n")
        marks = [self._marks.begin, self._marks.call, self._marks.end if self._inside else ""]
        text, mark, self._held = until(self._held, [mark for mark in marks if mark])
        if text:
            found.append(text)
        self._after_mark = bool(mark) or (self._after_mark and not text)
        if mark == self._marks.end:
            self._inside = False
        elif mark:
            self._inside = self._inside or mark == self._marks.begin
            self._said = mark
            self._step = self._to_call if mark == self._marks.begin else self._to_name
        return bool(mark)

    def _to_call(self, found: list) -> bool:
        """Between the mark and that of the name there is space alone."""
        words = self._held.lstrip()
        if words.startswith(self._marks.call):
            self._said += self._held.removesuffix(words) + self._marks.call
            self._held, self._step = words[len(self._marks.call) :], self._to_name
        elif not self._marks.call.startswith(words):
            self._is_text(found)
        return words.startswith(self._marks.call) or self._step == self._content

    def _to_name(self, found: list) -> bool:
        marks = self._marks
        ends = (marks.named, "\n") if marks.named else ("\n", marks.key, marks.over)
        text, mark, rest = until(self._held.lstrip(), ends)
        if not mark:
            return False
        name = _NAME.fullmatch(text.strip())
        sure = self._inside and marks.named and mark == marks.named
        if not name or not (sure or name[1] in self._schemas):
            self._is_text(found)
            return True
        self._held = rest if mark == marks.named else mark + rest
        self._said, self._step, self._first = "", self._between, True
        self._schema = self._schemas.get(name[1], {})
        found.append(CallDelta(self.calls, name[1], ""))
        self.calls += 1
        return True

    def _is_text(self, found: list) -> None:
        found.append(self._said)
        self._said, self._step, self._inside, self._after_mark = "", self._content, False, False

    def _between(self, found: list) -> bool:
        """Up to the next argument, or the end of the call."""
        marks = self._marks
        _, mark, self._held = until(self._held, (marks.key, marks.over, marks.end))
        if mark == marks.key:
            self._key, self._said, self._step = None, "", self._to_value
        elif mark:
            self._grows(found, "{}" if self._first else "}")
            self._step, self._inside, self._after_mark = self._content, mark != marks.end, True
        return bool(mark)

    def _to_value(self, found: list) -> bool:
        """The argument's name, and what stands before its value."""
        marks = self._marks
        text, mark, self._held = until(self._held, (marks.keyed if self._key is None else marks.value, marks.over))
        self._said += text
        if mark == marks.over:
            self._held, self._said, self._step = mark + self._held, "", self._between
        elif mark:
            if self._key is None:
                self._key = self._said.strip().strip("\"'")
            if mark == (marks.value or marks.keyed):
                opening = f"{'{' if self._first else ', '}{json.dumps(self._key, ensure_ascii=False)}: "
                self._argument = Argument(marks, values.kinds(self._schema, self._key), opening)
                self._first, self._step = False, self._value
            self._said = ""
        return bool(mark)

    def _value(self, found: list, last: bool = False) -> bool:
        """Up to the end of a value. Returns whether it is here."""
        written, self._held, ended = self._argument.read(self._held, last)
        self._grows(found, written)
        if ended:
            self._step = self._between
        return ended

    def _grows(self, found: list, arguments: str) -> None:
        if arguments:
            found.append(CallDelta(self.calls - 1, None, arguments))


class Argument:
    """One value, as JSON: a text while it is written, others when they are whole."""

    def __init__(self, marks: Marks, kinds: Set[str], opening: str):
        """`kinds`: types that it may have. `opening`: of the JSON, before the value."""
        self._marks, self._kinds = marks, kinds
        self._is_text = not kinds - values.TEXT
        self._opening = opening + '"' * self._is_text
        self._lines: bool | None = None  # it stands on lines of its own; None: not known yet
        self._written = ""  # of what is no text
        # What ends a value, by what follows: in values that speak of calls other things do, or nothing. A call may end
        # without the mark behind its last value, where it has a mark of its own.
        self._ends = {marks.valued: (marks.key, marks.over, marks.end)}
        if marks.over != marks.end:
            self._ends[marks.over] = (marks.end, marks.call)

    def read(self, held: str, last: bool) -> tuple[str, str, bool]:
        """(what is new of the JSON, the rest of what was held, whether the value ended). `last`: no text follows."""
        if self._lines is None:
            self._lines = self._marks.lines and held.startswith("\n")
            held = held[self._lines :]
        at, end = self._end(held, last)
        rest = held[at:].removeprefix(self._marks.valued) if end else held[at:]
        at -= self._lines and (bool(end) or not last) and held.endswith("\n", 0, at)
        return self._as_json(held[:at], bool(end), last), rest if end else held[at:], bool(end)

    def _as_json(self, text: str, ended: bool, last: bool) -> str:
        opening, self._opening = self._opening, ""
        if self._is_text:
            return opening + json.dumps(text, ensure_ascii=False)[1:-1] + '"' * ended
        self._written += text
        if ended:
            return opening + json.dumps(values.typed(self._written, self._kinds), ensure_ascii=False)
        return opening + self._written * last

    def _end(self, held: str, last: bool) -> tuple[int, str]:
        """(where the value ends, the mark there); without one (up to where it is known that it does not, "")."""
        searched = 0
        for found in re.finditer("|".join(map(re.escape, self._ends)), held):
            behind, searched = self._ends[found[0]], found.end()
            after = _SPACE.match(held, searched).end()
            follows = held[after : after + _LONGEST]
            comes = any(mark.startswith(follows) for mark in behind)
            if follows.startswith(behind) or (comes and last):
                return found.start(), found[0]
            if comes:
                return found.start(), ""
        return len(held) if last else len(held) - len(until(held[searched:], self._ends)[2]), ""
