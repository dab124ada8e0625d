"""Trees of frozen dataclasses as JSON values and back, exactly. Owns the form in which a configuration is
saved; only classes of this package are loaded by name."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import msgspec

from shardlm import config_tree as tree
from shardlm.errors import ShardlmError

PACKAGE = "shardlm"
TYPE = "_type"


def to_json(config: Any) -> dict[str, Any]:
    """Dicts, lists and scalars from which `from_json` makes an equal tree. A group whose class the
    declaration of its field does not settle carries it: `"_type": "shardlm.models.llama.LlamaConfig"`.

    Raises: ShardlmError for a leaf that is not plain data, and for a chosen class outside the package.
    """
    tree.check(config, type(config))
    return _encode(config, type(config), "")


def from_json(cls: type, data: Mapping[str, Any]) -> Any:
    """The tree that `to_json` wrote, as a `cls`. A field that is not there has its default: it came after the tree was
    saved, and by its default nothing changes.

    Raises: ShardlmError for an unknown or ill-typed field, for a missing one without a default, and for a `_type`
    outside the package.
    """
    return _decode(data, cls, "")


def _encode(value: Any, hint: Any, path: str) -> Any:
    if not tree.has_parts(value):
        return tree.to_plain(value)
    inside = tree.parts(value, hint).items()
    encoded = {key: _encode(part, kind, tree.join(path, key)) for key, (part, kind) in inside}
    if not tree.is_group(value):
        return list(encoded.values())
    if tree.declared(hint) is type(value):
        return encoded
    name = tree.type_name(value)
    if _class(name, path) is not type(value):
        raise ShardlmError(f"{path}: importing {name} gives another class; define it once, in its module")
    return {TYPE: name, **encoded}


def _decode(data: Any, hint: Any, path: str) -> Any:
    open_to = tree.options(hint)
    if isinstance(data, Mapping) and (TYPE in data or Any in open_to or any(map(dataclasses.is_dataclass, open_to))):
        return _decode_group(data, hint, path)
    if isinstance(data, list):
        items = [_decode(item, tree.item_hint(hint, i), tree.join(path, i)) for i, item in enumerate(data)]
        if any(map(tree.has_parts, items)):
            return tuple(items)
    plain = tree.leaf_hint(hint, path, data)
    try:
        return tree.from_plain(data, plain)
    except msgspec.ValidationError as error:
        raise tree.wrong(path, plain, data) from error


def _decode_group(data: Mapping[str, Any], hint: Any, path: str) -> Any:
    where = path or "configuration"
    cls = _class(data[TYPE], path) if TYPE in data else tree.declared(hint)
    if cls is None:
        raise ShardlmError(f"{where}: several classes are possible here; say which with {TYPE!r}")
    if not tree.fits(cls, hint):
        raise ShardlmError(f"{where}: expected {tree.describe(hint)}, got a {cls.__name__}")
    kinds = tree.fields(cls)
    given = {key: value for key, value in data.items() if key != TYPE}
    for key in given:
        if key not in kinds:
            raise tree.unknown(tree.join(path, key), cls.__name__, kinds)
    missing = [field.name for field in dataclasses.fields(cls) if _required(field) and field.name not in given]
    if missing:
        raise ShardlmError(f"{where}: {cls.__name__} needs {', '.join(missing)}, which is not there")
    values = {key: _decode(value, kinds[key], tree.join(path, key)) for key, value in given.items()}
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise ShardlmError(f"{where}: {error}") from error


def _required(field: dataclasses.Field) -> bool:
    return field.init and field.default is field.default_factory is dataclasses.MISSING


def _class(name: Any, path: str) -> type:
    """The dataclass of this package that a `_type` names. Nothing outside the package is imported."""
    where = path or "configuration"
    module, _, attribute = str(name).rpartition(".")
    if module.partition(".")[0] != PACKAGE:
        raise ShardlmError(f"{where}: {name} is not a class of {PACKAGE}; only those are saved and loaded by name")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError:
        found = None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module):
        raise ShardlmError(f"{where}: there is no dataclass {name} in this version of {PACKAGE}")
    return found
