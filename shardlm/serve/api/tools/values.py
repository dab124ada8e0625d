"""Values of arguments that are written as text and not as JSON: the tool's schema tells which are numbers or JSON."""

import ast
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

TEXT = frozenset({"string"})
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_DEEPEST = 8  # references and alternatives inside of each other


def typed(text: str, kinds: Set[str]) -> Any:
    """A value that is written as text and may be of these types: text where it may be no other, else the JSON that it
    is, if that is of a type that may be; text where it is neither."""
    if not kinds - TEXT:
        return text
    word = text.strip()
    try:
        value = _WORDS[word.lower()] if word.lower() in _WORDS else _json(word)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if _kind(value) & kinds else text


def kinds(schema: Mapping[str, Any], name: str) -> set[str]:
    """The types that a schema of arguments allows the one of this name; none: not said."""
    properties = schema.get("properties")
    return _kinds(properties.get(name), schema, _DEEPEST) if isinstance(properties, Mapping) else set()


def _kinds(schema: Any, root: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if found := {kind for kind in _listed(schema.get("type")) if isinstance(kind, str)}:
        return found
    for value in (*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])):
        found |= _kind(value)
    for name in ("anyOf", "oneOf", "allOf"):
        for one in _listed(schema.get(name)):
            found |= _kinds(one, root, depth - 1)
    if isinstance(schema.get("$ref"), str):
        # Of what is not here, references are mostly of these.
        found |= _kinds(_referred(schema["$ref"], root), root, depth - 1) or {"object", "array"}
    return found or {kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


def _referred(reference: str, root: Any) -> Any:
    """What a reference within the schema means; None for another."""
    at = root if reference[:1] == "#" else None
    for name in filter(None, reference[1:].split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        at = at.get(name) if isinstance(at, Mapping) else None
    return at


def _kind(value: Any) -> set[str]:
    """The names of a value's type."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", tuple: "array", dict: "object", type(None): "null"}
    return {names.get(type(value), "")} | ({"integer"} if isinstance(value, float) and value.is_integer() else set())


def _json(text: str) -> Any:
    """Or what Python writes of it, as models do. Raises ValueError, or what ast.literal_eval does."""

    def refused(constant: str):
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text, parse_constant=refused)
    except ValueError:
        value = ast.literal_eval(text)
    json.dumps(value, allow_nan=False)  # which refuses 1e999, and sets and bytes with a TypeError
    return value
