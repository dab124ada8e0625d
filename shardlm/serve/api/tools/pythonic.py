"""Calls as Python writes them, as LFM2 does: [f(x=1), g(y="a")] between marks, with text around them; or the same in
JSON, if it was asked to. A call comes when all of them are there."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardlm.serve.api.reasoning.marks import until
from shardlm.serve.api.tools.reader import ARGUMENTS, CallDelta

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by the name of the function
_HEAD = re.compile(r"[\s,;]*([\w.\-/:]+)\s*\(")
_TEXT = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_TOKEN = re.compile(rf"{_TEXT.pattern}|[()\[\]{{}}]", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}
_UNREADABLE = (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError)


class PythonParser:
    """Push the text of a reply; contents (texts) and calls come out in order. What is between the marks and is no call
    is content."""

    def __init__(self, schemas: Schemas):
        self.calls = 0
        self._schemas = schemas
        self._held = ""  # text that may be the beginning of a mark
        self._inside: list[str] | None = None  # all since the mark
        self._after_mark = False  # and no text since

    def push(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        self._held += text
        while self._content(found) if self._inside is None else self._call(found):
            pass
        return found

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no text follows: calls without the mark behind them too."""
        rest, self._held = self._held, ""
        if self._inside is None:
            return [rest] if rest else []
        inside, self._inside = "".join(self._inside) + rest, None
        return self._read(inside) or [BEGIN + inside]

    def _content(self, found: list) -> bool:
        """Up to the next calls. Returns whether they begin here."""
        if self._after_mark:
            self._held = self._held.lstrip("\n")
        text, mark, self._held = until(self._held, (BEGIN,))
        if text:
            found.append(text)
            self._after_mark = False
        self._inside = [] if mark else None
        return bool(mark)

    def _call(self, found: list) -> bool:
        """Up to the end of the calls, which is none in a text."""
        text, mark, self._held = until(self._held, (END,))
        self._inside.append(text)
        if not mark:
            return False
        inside = "".join(self._inside)
        read = self._read(inside)
        if not read and not {"'", '"'}.isdisjoint(_TEXT.sub("", inside)):
            self._inside.append(mark)
            return True
        found += read or [BEGIN + inside + END]
        self._inside, self._after_mark = None, True
        return True

    def _read(self, inside: str) -> list[CallDelta]:
        """The calls; none where anything is none."""
        try:
            read = list(_calls(inside.strip(), self._schemas))
            texts = [json.dumps(given, ensure_ascii=False, allow_nan=False) for _, given in read]
        except _UNREADABLE:
            return []
        first, self.calls = self.calls, self.calls + len(read)
        return [CallDelta(first + i, name, text) for i, ((name, _), text) in enumerate(zip(read, texts, strict=True))]


def _calls(text: str, schemas: Schemas) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, arguments) of each. Raises one of _UNREADABLE."""
    if re.match(r"\[?\s*\{", text):
        read = json.loads(text)
        for call in read if isinstance(read, list) else [read]:
            given = next((call[key] for key in ARGUMENTS if key in call), {})
            if not isinstance(call["name"], str) or not isinstance(given, Mapping):
                raise ValueError
            yield call["name"], given
        return
    text = text[1:-1] if text[:1] + text[-1:] == "[]" else text
    at = 0
    while rest := text[at:].strip(" \t\r\n,;"):
        head = _HEAD.match(text, at)
        if not head:
            raise ValueError(rest)
        close = _closing(text, head.end() - 1)
        yield head[1], _given(text[head.end() : close], schemas.get(head[1], {}))
        at = close + 1


def _closing(text: str, opening: int) -> int:
    """Where the bracket closes that opens there."""
    depth = 0
    for token in _TOKEN.finditer(text, opening):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if not depth:
            return token.start()
    raise ValueError(text)


def _given(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; those without one are of the schema's properties in turn."""
    one_line = _TEXT.sub(lambda found: found[0].replace("\n", "\\n"), text)
    call = ast.parse(f"f({one_line})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(text)
    names = list(schema.get("properties") or ())[: len(call.args)]
    pairs = [*zip(names, call.args, strict=True), *((word.arg, word.value) for word in call.keywords)]
    given: dict[str, Any] = {}
    for name, value in pairs:
        read = ast.literal_eval(_Words().visit(value))
        given |= read if name is None else {name: read}
    return given


class _Words(ast.NodeTransformer):
    """JSON's words as values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node
