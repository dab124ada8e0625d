"""Configuration: a Python file that returns a tree of frozen dataclasses, typed overrides, and their
provenance.

Owns how a tree is loaded, overridden from text, printed and compared; config_json.py saves it. Leaves to
others what the fields mean: a dataclass lives beside the code that reads it and checks itself in
`__post_init__`.
"""

import ast
import contextlib
import dataclasses
import json
import pathlib
import re
import runpy
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from shardlm import config_tree as tree
from shardlm.config_json import from_json, to_json
from shardlm.errors import ShardlmError

__all__ = [
    "ABSENT",
    "Resolved",
    "difference",
    "format_resolved",
    "from_json",
    "leaves",
    "load",
    "override",
    "resolve",
    "to_json",
]

ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration and where each leaf came from: "default", "file FILE" or "command line"."""

    config: Any
    sources: Mapping[str, str]


def load(path: str) -> Any:
    """The tree that `get_config()` in the Python file `path` returns, its leaves checked against their types.

    Raises: ShardlmError naming the file, and the line where there is one.
    """
    if not pathlib.Path(path).is_file():
        siblings = map(str, pathlib.Path(path).parent.glob("*.py"))
        if pathlib.Path(path).is_dir():
            raise ShardlmError(f"config file {path} is a folder; name a file in it")
        raise ShardlmError(f"config file {path} does not exist{tree.suggest(path, siblings)}")
    if pathlib.Path(path).suffix in (".json", ".yaml", ".yml", ".toml"):
        raise ShardlmError(
            f"config file {path}: a configuration is a Python file whose get_config() returns it, such as "
            "configs/tiny.py; a run goes on by the command that began it, and its config.json is a record"
        )
    try:
        get_config = runpy.run_path(path, run_name="config_file").get("get_config")
        if not callable(get_config):
            raise ShardlmError("it has no get_config(); define one without arguments that returns the configuration")
        config = get_config()
        if not tree.is_group(config):
            raise ShardlmError(f"get_config() returned {config!r}; it must return a frozen dataclass")
        tree.check(config, type(config))
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ShardlmError) else f"{type(error).__name__}: "
        raise ShardlmError(f"config file {_position(path, error)}: {kind}{error}") from error
    return config


def override(config: Any, assignments: Sequence[tuple[str, str]]) -> Any:
    """A copy of `config` with each `(dotted path, text)` applied; of two for one path the later wins.

    Text is read by the type of the field: `50`, `3e-4`, `true`, `none`, a word; for tuples `a,b,c`, JSON or `(a, b)`.
    The groups in a tuple go by index, as in `segments.0.repeats`.

    Raises: ShardlmError for an unknown field (naming the nearest), a wrong type, or what a dataclass refuses.
    """
    wanted: dict[str, Any] = {}
    for path, text in assignments:
        *parents, last = path.split(".")
        place: Any = wanted
        for key in parents:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place
        if not isinstance(place, dict) or isinstance(place.get(last), dict):
            raise ShardlmError(f"{path}: given both as a whole and in part; give one or the other")
        place[last] = text
    return _rebuild(config, type(config), wanted, "")


def resolve(path: str, assignments: Sequence[tuple[str, str]]) -> Resolved:
    """Loads `path`, applies the overrides and records where each leaf came from. Raises as those two do."""
    config = override(load(path), assignments)
    given = tuple(name for name, _ in assignments)
    defaults = dict(_default_leaves(config, None, ""))

    def source(leaf: str, value: Any) -> str:
        if any(leaf == name or leaf.startswith(name + ".") for name in given):
            return "command line"
        return "default" if leaf in defaults and tree.same(defaults[leaf], value) else f"file {path}"

    return Resolved(config, {leaf: source(leaf, value) for leaf, value in leaves(config).items()})


def format_resolved(resolved: Resolved) -> str:
    """Aligned lines `path = value   # where from`, after a comment line for each group of a chosen class."""
    values = {path: repr(value) for path, value in leaves(resolved.config).items()}
    left, middle = max(map(len, values), default=0), max(map(len, values.values()), default=0)
    groups = tree.groups(resolved.config)
    chosen = [f"# {path} is a {tree.type_name(group)}" for path, group, settled in groups if not settled]
    rows = [f"{path:<{left}} = {text:<{middle}}   # {resolved.sources[path]}" for path, text in values.items()]
    return "\n".join(chosen + rows)


def leaves(config: Any) -> dict[str, Any]:
    """Every field that is not itself a group, by dotted path; a tuple of plain values is one leaf."""
    return dict(tree.leaves(config))


def difference(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """`(path, value in a, value in b)` for each leaf that differs and, as `path._type`, each group of another
    class; `ABSENT` stands for what one of them lacks."""

    def flat(config: Any) -> dict[str, Any]:
        kinds = {tree.join(path, "_type"): tree.type_name(group) for path, group, _ in tree.groups(config)}
        return kinds | leaves(config)

    one, two = flat(a), flat(b)
    pairs = [(path, one.get(path, ABSENT), two.get(path, ABSENT)) for path in one | two]
    return [(path, x, y) for path, x, y in pairs if not tree.same(x, y)]


def _position(path: str, error: BaseException) -> str:
    """`path:line` of the last line of the file that an exception went through, or `path` if there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    return f"{path}:{lines[-1]}" if lines else path


def _default_leaves(group: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of `group` that have a default: from `default`, which its parent's field gives, or their
    own."""
    for field in (field for field in dataclasses.fields(group) if field.init):
        part, here = getattr(group, field.name), tree.join(path, field.name)
        if type(default) is type(group):
            given = getattr(default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            given = field.default_factory()
        else:
            given = field.default
        if tree.is_group(part):
            yield from _default_leaves(part, given, here)
        elif given is not dataclasses.MISSING:
            yield from tree.leaves(given, here)


def _rebuild(value: Any, hint: Any, wanted: Mapping[str, Any] | str, path: str) -> Any:
    """`value` with what is `wanted`: text for a leaf; key -> wanted for a group, whose fields change
    together."""
    if isinstance(wanted, str):
        return _read(wanted, hint, value, path)
    if not tree.has_parts(value):
        inside = tree.join(path, next(iter(wanted)))
        raise ShardlmError(f"{inside}: {path} is {value!r}, not a group of fields; set it as a whole in the file")
    parts, changed = tree.parts(value, hint), {}
    for key, want in wanted.items():
        here = tree.join(path, key)
        if key not in parts:
            raise tree.unknown(here, type(value).__name__, parts)
        changed[key] = _rebuild(*parts[key], want, here)
    if not tree.is_group(value):
        return tuple(changed.get(key, part) for key, (part, _) in parts.items())
    try:
        return dataclasses.replace(value, **changed)
    except (ValueError, TypeError, ShardlmError) as error:
        where = "" if path in str(error) else f"{path}: "
        named = [key for key in wanted if re.search(rf"\b{re.escape(key)}\b", str(error))]
        flags = " ".join(f"--config.{tree.join(path, key)}" for key in named or wanted)
        raise ShardlmError(f"{where}{error} (set by {flags})") from error


def _read(text: str, hint: Any, current: Any, path: str) -> Any:
    """The value that `text` means for a field of type `hint` that holds `current`."""
    if text.lower() in ("none", "null") and not {types.NoneType, Any}.isdisjoint(tree.options(hint)):
        return None
    if tree.has_parts(current):
        keys = list(tree.parts(current, hint))
        first = tree.join(path, keys[0]) if keys else path
        raise ShardlmError(
            f"{path} is a group ({type(current).__name__}), not one value; set its fields one by one, "
            f"as in --config.{first}=... (it has: {', '.join(keys)})"
        )
    plain = tree.leaf_hint(hint, path, text)
    if plain is Any and isinstance(current, bool | int | float | str):
        plain = type(current)
    for reading, strict in _readings(text, plain):
        with contextlib.suppress(msgspec.ValidationError):
            return tree.from_plain(reading, Any) if plain is Any else msgspec.convert(reading, plain, strict=strict)
    raise tree.wrong(path, plain, text)


def _readings(text: str, hint: Any) -> Iterator[tuple[Any, bool]]:
    """What `text` may stand for, in the order to try, and whether its type is to be taken as it is."""
    if not {str, types.NoneType}.issuperset(tree.options(hint)):
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(text), True
    yield text, False
    if any(typing.get_origin(option) is tuple for option in tree.options(hint)):
        if text.startswith("("):  # as --print_config shows it
            with contextlib.suppress(SyntaxError, ValueError):
                yield ast.literal_eval(text), True
        yield [item.strip() for item in text.split(",")] if text else [], False
