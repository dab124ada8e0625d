"""A configuration as the Python file that returns it, for launch.train: only what differs from the defaults."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from shardlm import config_tree as tree

WIDTH = 100


def source(config: Any, docstring: str) -> str:
    """The file's text. `config` holds groups of this package and plain values alone, as every configuration does."""
    names: dict[str, set[str]] = {}
    for group in _groups(config):
        names.setdefault(type(group).__module__, set()).add(type(group).__name__)
    lines = [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())]
    body = _text(config, 1)
    quoted = docstring.replace("\\", "\\\\").replace('"""', "'''")
    head = f'"""{quoted}\n"""\n\n' if "\n" in quoted else f'"""{quoted}"""\n\n'
    return f"{head}{chr(10).join(lines)}\n\n\ndef get_config() -> {type(config).__name__}:\n    return {body}\n"


def _groups(value: Any) -> Iterator[Any]:
    """Every group that the text names."""
    if isinstance(value, tuple):
        for item in value:
            yield from _groups(item)
    elif tree.is_group(value):
        yield value
        for part in _given(value).values():
            yield from _groups(part)


def _given(group: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = {field.name: getattr(group, field.name) for field in dataclasses.fields(group) if field.init}
    defaults = {field.name: _default(field) for field in dataclasses.fields(group)}
    return {name: value for name, value in values.items() if not tree.same(value, defaults[name])}


def _text(value: Any, depth: int) -> str:
    if isinstance(value, tuple) and tree.has_parts(value):
        items = [_text(item, depth + 1) for item in value]
        return _laid("(", [f"{item}," if len(items) == 1 else item for item in items], ")", depth)
    if not tree.is_group(value):
        return repr(value)
    words = [f"{name}={_text(part, depth + 1)}" for name, part in _given(value).items()]
    return _laid(f"{type(value).__name__}(", words, ")", depth)


def _laid(start: str, items: list[str], end: str, depth: int) -> str:
    """On one line where it fits, else an item a line."""
    line = start + ", ".join(items) + end
    if len(line) + 4 * depth <= WIDTH and "\n" not in line:
        return line
    inner = "    " * (depth + 1)
    return start + "".join(f"\n{inner}{item.rstrip(',')}," for item in items) + "\n" + "    " * depth + end


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING
