"""Replies that must be calls: the schema they are held to, and how they are read back."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.serve.api.tools.reader import CallDelta, CallReader
from shardlm.serve.grammar import lenient

_ANY = {"type": "object"}


def one_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The reply is the arguments of this function."""
    return _held(dict(function.get("parameters") or _ANY), [function])


def any_schema(functions: Sequence[Mapping[str, Any]], most: int | None) -> dict[str, Any]:
    """The reply is a list of calls, [{"name": ..., "arguments": {...}}]."""
    arguments: dict[str, dict[str, Any]] = {}
    calls = []
    for number, function in enumerate(functions):
        own = f"arguments{number}"
        arguments[own] = _moved(function.get("parameters") or _ANY, f"#/$defs/{own}")
        members = {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{own}"}}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": members, "required": required, "additionalProperties": False})
    limit = {} if most is None else {"maxItems": most}
    return _held({"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": arguments}, functions)


def _held(schema: dict[str, Any], functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of it where a function is strict, which without a word it is not in chats."""
    return schema if any(function.get("strict") is True for function in functions) else lenient(schema)


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to itself (`#`, `#/$defs/x`, and `#/properties/x` as zod writes them) hold at `to`."""
    if isinstance(schema, list):
        return [_moved(one, to) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    refers = {key for key, value in schema.items() if key == "$ref" and isinstance(value, str) and value[:1] == "#"}
    return {key: to + value[1:] if key in refers else _moved(value, to) for key, value in schema.items()}


class ArgumentsParser:
    """All of the reply is the arguments of one named function."""

    def __init__(self, name: str):
        self.calls = 0
        self._name: str | None = name

    def push(self, text: str) -> list[str | CallDelta]:
        if not text:
            return []
        self.calls = 1
        name, self._name = self._name, None
        return [CallDelta(0, name, text)]

    def finish(self) -> list[str | CallDelta]:
        return []


class ListParser:
    """The reply is a list of calls."""

    def __init__(self):
        self.calls = 0
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        while text:
            if self._reader is None:
                text = text.lstrip("[], \t\r\n")
                if text:
                    self._reader = CallReader(self.calls)
                continue
            text, deltas = self._reader.push(text)
            found.extend(deltas)
            self.calls = self._reader.index + self._reader.begun
            if self._reader.done:
                self._reader = None
        return found

    def finish(self) -> list[str | CallDelta]:
        return []
