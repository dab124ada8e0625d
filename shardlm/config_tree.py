"""Trees of frozen dataclasses: their parts, the types their fields declare, and what those types admit.

A dataclass in the tree is a group; everything else, a tuple of plain values included, is a leaf. A part is
reached by a dotted path, the groups in a tuple by index. How trees are loaded, changed and saved is for
config.py and config_json.py.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from shardlm.errors import ShardlmError

# ---- parts ----


def is_group(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def has_parts(value: Any) -> bool:
    """Whether `value` is a group or a tuple with groups in it."""
    return is_group(value) or (isinstance(value, tuple) and any(map(has_parts, value)))


def join(path: str, key: object) -> str:
    """The path of a part."""
    return f"{path}.{key}" if path else str(key)


def parts(value: Any, hint: Any = Any) -> dict[str, tuple[Any, Any]]:
    """The parts of something that has parts and is declared as `hint`: key -> (part, declared type)."""
    if is_group(value):
        return {name: (getattr(value, name), kind) for name, kind in fields(type(value)).items()}
    return {str(i): (item, item_hint(hint, i)) for i, item in enumerate(value)}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf and its path, in the order of the fields."""
    if has_parts(value):
        for key, (part, _) in parts(value).items():
            yield from leaves(part, join(path, key))
    else:
        yield path, value


def groups(value: Any, hint: Any = None, path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Every group: its path, itself, and whether the declaration of its field settles its class."""
    if is_group(value):
        yield path, value, hint is None or declared(hint) is type(value)
    if has_parts(value):
        for key, (part, kind) in parts(value, hint).items():
            yield from groups(part, kind, join(path, key))


def type_name(group: Any) -> str:
    """The full name of the class of a group."""
    return f"{type(group).__module__}.{type(group).__qualname__}"


def same(a: Any, b: Any) -> bool:
    """Equal, where True is not 1 and nan is nan."""
    return isinstance(a, bool) is isinstance(b, bool) and (a == b or (a != a and b != b))


# ---- declared types ----


def fields(cls: type) -> dict[str, Any]:
    """The fields of a dataclass that its constructor takes, and their types."""
    kinds = typing.get_type_hints(cls)
    return {field.name: kinds[field.name] for field in dataclasses.fields(cls) if field.init}


def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of another type, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def item_hint(hint: Any, index: int) -> Any:
    """The type that `hint` declares for item `index` of a tuple."""
    for option in options(hint):
        if typing.get_origin(option) is tuple:
            items = [item for item in typing.get_args(option) if item is not Ellipsis]
            return items[min(index, len(items) - 1)] if items else Any
    return Any


def declared(hint: Any) -> type | None:
    """The dataclass that a field of type `hint` holds, if its declaration leaves no choice."""
    named = [option for option in options(hint) if dataclasses.is_dataclass(option)]
    return named[0] if len(named) == 1 else None


def fits(cls: type, hint: Any) -> bool:
    """Whether a field of type `hint` may hold a group of class `cls`."""
    admitted = tuple(option for option in options(hint) if isinstance(option, type))
    return Any in options(hint) or issubclass(cls, admitted)


def leaf_hint(hint: Any, path: str, value: Any) -> Any:
    """`hint` without the dataclasses in it. Raises ShardlmError if none is left: the field holds a group."""
    plain = tuple(option for option in options(hint) if not dataclasses.is_dataclass(option))
    if not plain:
        raise ShardlmError(f"{path}: expected {describe(hint)}, got {value!r}")
    return typing.Union[plain]  # noqa: UP007  (its members are known at run time only)


def describe(hint: Any) -> str:
    """A type in the words of a user."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if len(options(hint)) > 1:
        return " or ".join(map(describe, options(hint)))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, items))
    if origin is tuple:
        inside = " and ".join(describe(item) for item in items if item is not Ellipsis)
        return f"a tuple of {inside} (a,b,c or JSON)"
    if hint in (bool, Any):
        return "true or false" if hint is bool else "numbers, text or tuples of them"
    return "none" if hint is types.NoneType else getattr(hint, "__name__", str(hint))


# ---- what a user got wrong ----


def wrong(path: str, hint: Any, got: Any) -> ShardlmError:
    """The error that says what a field expects and what it was given."""
    literals = [option for option in options(hint) if typing.get_origin(option) is typing.Literal]
    choices = [str(item) for option in literals for item in typing.get_args(option)]
    return ShardlmError(f"{path}: expected {describe(hint)}, got {got!r}{suggest(str(got), choices)}")


def unknown(path: str, owner: str, known: Iterable[str]) -> ShardlmError:
    """The error for a last step of `path` that is not among the `known` parts of `owner`."""
    key, names = path.rpartition(".")[2], list(known)
    return ShardlmError(f"{path}: {owner} has no field {key!r}{suggest(key, names)} (it has: {', '.join(names)})")


def suggest(word: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' if something known is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def check(value: Any, hint: Any, path: str = "") -> None:
    """Raises ShardlmError unless `value` is plain data of the types that `hint` and its fields declare."""
    if is_group(value):
        if not fits(type(value), hint):
            raise ShardlmError(f"{path}: expected {describe(hint)}, got a {type(value).__name__}")
        if not type(value).__dataclass_params__.frozen:
            raise ShardlmError(f"{path or 'configuration'}: {type(value).__name__} must be a frozen dataclass")
    if has_parts(value):
        for key, (part, kind) in parts(value, hint).items():
            check(part, kind, join(path, key))
        return
    plain = leaf_hint(hint, path, value)
    try:
        back = from_plain(to_plain(value), plain)
    except (msgspec.ValidationError, TypeError) as error:
        raise wrong(path, plain, value) from error
    if not same(back, value):
        raise ShardlmError(f"{path}: {value!r} would not be read back as it is saved; use tuples, not lists")


def to_plain(value: Any) -> Any:
    """A leaf in JSON's types. Raises TypeError for what has no such form."""
    return json.loads(json.dumps(msgspec.to_builtins(value)))


def from_plain(value: Any, hint: Any) -> Any:
    """A leaf from JSON's types. Where its type is open, lists become tuples: configurations do not change.

    Raises: msgspec.ValidationError for a value of another type.
    """
    if hint is not Any:
        return msgspec.convert(value, hint)
    if isinstance(value, dict):
        raise msgspec.ValidationError("a dict can change; use a dataclass or a tuple of pairs")
    return tuple(from_plain(item, Any) for item in value) if isinstance(value, list) else value
