"""Calls whose arguments stand between marks and not in JSON, as Qwen3-Coder and Qwen 3.5, GLM-4.5 and MiniMax-M2 write
them. Values are text; the tool's schema tells which of them are numbers or JSON. A call comes when it is whole."""

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shardlm.serve.api.tools.reader import CallDelta

Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by the name of the function
Written = tuple[str, list[tuple[str, str]]]  # a call: its name, and its arguments by name as they are written

LONGEST_END = 256  # characters of what closes calls, or of a name before it
_WORDS = {"true": True, "false": False, "null": None, "none": None}


@dataclasses.dataclass(frozen=True)
class Marks:
    """begin   what opens calls
    end     an expression for what closes them, that no value holds
    read    what is between, as calls of functions with these names or, where marks say that it is one, others; none
            where it is no call
    """

    begin: str
    end: re.Pattern
    read: Callable[[str, Collection[str]], list[Written]]


class MarkedParser:
    """Push the text of a reply; contents (texts) and calls come out in order. What is between marks and is no call is
    content; a call that was cut off has the arguments that are whole."""

    def __init__(self, marks: Marks, schemas: Schemas):
        self.calls = 0
        self._marks, self._schemas = marks, schemas
        self._held = ""  # text that may be the beginning of a mark, or all since the mark
        self._inside = self._after_call = False
        self._searched = 0  # so much of what is held is known to have no end

    def push(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        self._held += text
        while self._call(found) if self._inside else self._content(found):
            pass
        return found

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no text follows."""
        rest, self._held = self._held, ""
        if not self._inside:
            return [rest] if rest else []
        self._inside = False
        return self._deltas(rest) or [self._marks.begin + rest]

    def _content(self, found: list[str | CallDelta]) -> bool:
        """Up to the next calls. Returns whether they begin here."""
        if self._after_call:
            self._held = self._held.lstrip("\n")
        before, mark, rest = self._held.partition(self._marks.begin)
        keep = 0 if mark else _begun(before, self._marks.begin)
        self._held = rest if mark else before[len(before) - keep :]
        if content := before[: len(before) - keep]:
            found.append(content)
            self._after_call = False
        self._inside = bool(mark)
        return self._inside

    def _call(self, found: list[str | CallDelta]) -> bool:
        """Whether the end of calls is here."""
        end = self._marks.end.search(self._held, max(0, self._searched - LONGEST_END))
        self._searched = 0 if end else len(self._held)
        if end is None:
            return False
        inside, self._held = self._held[: end.end()], self._held[end.end() :]
        found.extend(self._deltas(inside) or [self._marks.begin + inside])
        self._inside, self._after_call = False, True
        return True

    def _deltas(self, inside: str) -> list[CallDelta]:
        made = []
        for name, arguments in self._marks.read(inside, self._schemas):
            properties = self._schemas.get(name, {}).get("properties") or {}
            values = {key: typed(value, properties.get(key)) for key, value in arguments}
            made.append(CallDelta(self.calls, name, json.dumps(values, ensure_ascii=False)))
            self.calls += 1
        return made


def _begun(text: str, mark: str) -> int:
    """How much of the text's end may be the beginning of the mark."""
    return next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if mark.startswith(text[len(text) - n :]))


def typed(text: str, schema: Any) -> Any:
    """A value that is written as text, by its schema: text where it may be no other, else the JSON that it is, if that
    is of a kind that may be; text where it is neither."""
    kinds = _kinds(schema)
    if not kinds - {"string"}:
        return text
    word = text.strip()
    try:
        value = _WORDS[word.lower()] if word.lower() in _WORDS else _json(word)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if _kind(value) & kinds else text


def _json(text: str) -> Any:
    """Or what Python writes of it, as models do. Raises ValueError, or what ast.literal_eval does."""

    def refused(constant: str):
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refused)
    except ValueError:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)  # which refuses sets and bytes with a TypeError
        return value


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names, in its alternatives too; none: not said."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    found = {own} if isinstance(own, str) else set(own) if isinstance(own, Sequence) else set()
    for value in (schema.get("enum") or []) if not found else []:
        found |= _kind(value)
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(name) or ():
            found |= _kinds(one)
    return found or ({"object"} if "properties" in schema or "$ref" in schema else set())


def _kind(value: Any) -> set[str]:
    """The names of a value's type."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", tuple: "array", dict: "object", type(None): "null"}
    return {names.get(type(value), "")} | ({"integer"} if isinstance(value, float) and value.is_integer() else set())


def _qwen(inside: str, names: Collection[str]) -> list[Written]:
    call = re.search(r"<function=([^>\n]+)>(.*)", inside, re.DOTALL)
    if call is None:
        return []
    given = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", call[2], re.DOTALL)
    return [(call[1].strip(), [(key.strip(), value) for key, value in given])]


def _glm(inside: str, names: Collection[str]) -> list[Written]:
    call = re.match(r"\s*([^\s<]+)\s*(?=<arg_key>|</tool_call>|\Z)", inside)
    if call is None or call[1] not in names:
        return []
    given = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    return [(call[1], [(key.strip(), value) for key, value in re.findall(given, inside, re.DOTALL)])]


def _minimax(inside: str, names: Collection[str]) -> list[Written]:
    found = []
    for call in re.split(r"(?=<invoke name=)", inside):
        if name := re.match(r"<invoke name=\"?([^\">]+)\"?>", call):
            given = re.findall(r"<parameter name=\"?([^\">]+)\"?>\n?(.*?)\n?</parameter>", call, re.DOTALL)
            found.append((name[1], given))
    return found


QWEN = Marks("<tool_call>", re.compile(r"</function>\s*</tool_call>"), _qwen)
GLM = Marks("<tool_call>", re.compile(r"(?:</arg_value>|\A[^<]*)\s*</tool_call>"), _glm)
MINIMAX = Marks("<minimax:tool_call>", re.compile(r"</invoke>\s*</minimax:tool_call>"), _minimax)
STYLES = {"qwen3_coder": QWEN, "glm45": GLM, "minimax_m2": MINIMAX}  # by vLLM's names of its parsers
