"""Whether a checkpoint in few bits can be served as its file has it, number for number: which of our weights are held
in what groups (ops/weight_format.py's AsPublished)."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from shardlm import weights
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Stored
from shardlm.hf_quantised import kept_as
from shardlm.hf_quantised.kept import Kept
from shardlm.layers.param import Execution
from shardlm.models import registry
from shardlm.models.naming import Tensor
from shardlm.models.transformer import Transformer, TransformerConfig
from shardlm.ops.grouped_weights import LONGEST, Groups
from shardlm.ops.weight_format import AsPublished, key
from shardlm.rules import Rules

SMALLER = 4  # times that groups are halved at most, where devices cannot split whole ones


@dataclasses.dataclass
class Kind:
    """Weights of one key in all layers.

    kept   how their tensors are held, None: not as they are
    few    whether any is in few bits
    along  (size, name) of the dimension that is grouped
    """

    kept: set[Kept | None] = dataclasses.field(default_factory=set)
    few: bool = False
    along: set[tuple[int, str]] = dataclasses.field(default_factory=set)


def kinds_in(folder: Folder, config: TransformerConfig, rules: Rules) -> dict[str, Kind]:
    """Of a folder's files: headers are read, and lists of groups. `rules`: any, of the mesh in use."""
    stored = weights.own_tensors(folder)

    def look(name: str) -> tuple[Kept | None, bool]:
        tensor = stored.get(name)
        return getattr(tensor, "kept", None), tensor is not None and not isinstance(tensor, Stored)

    return _kinds(folder.config, config, rules, look)


def kinds_told(options: Mapping[str, Any], config: TransformerConfig, rules: Rules) -> dict[str, Kind]:
    """The same by config.json alone."""
    kept_by = kept_as(options)

    def look(name: str) -> tuple[Kept | None, bool]:
        kept = kept_by(name)
        return (kept if kept and kept.numbers else None), kept is not None

    return _kinds(options, config, rules, look)


def as_published(kinds: Mapping[str, Kind], rules: Rules) -> AsPublished:
    """By groups that the devices of a mesh can split; nothing where none are held as they are."""
    found = {own: _groups(kind, rules) for own, kind in kinds.items()}
    left = (own for own, groups in found.items() if not groups and kinds[own].few)
    return AsPublished(tuple((own, groups) for own, groups in sorted(found.items()) if groups), tuple(sorted(left)))


def _kinds(
    options: Mapping[str, Any],
    config: TransformerConfig,
    rules: Rules,
    look: Callable[[str], tuple[Kept | None, bool]],
) -> dict[str, Kind]:
    """Of all projections and experts, by key; `look` says of a tensor how it is held and whether it is in few bits."""
    params = _projections(config, rules)
    shapes = unflatten_dict({path: jax.ShapeDtypeStruct(param.shape, param.dtype) for path, param in params.items()})
    found: dict[str, Kind] = {}
    for leaf in weights.leaves(config, shapes, lambda block: registry.names(options, config, block)):
        param = params[leaf.path]
        names, into = param.get_metadata("names"), param.get_metadata("into")
        kind = found.setdefault(key(leaf.path[-1], names[0], _place(leaf.path)), Kind())
        kind.along.add((param.shape[into - 1 - len(names)], names[into - 1]))
        along = _as_stored(leaf.tensor, param.shape[-len(names) :], into - 1)
        for name in leaf.names(param.shape):
            kept, few = look(name)
            kind.kept.add(kept if along else None)
            kind.few |= few
    return found


def _as_stored(tensor: Tensor, shape: tuple[int, ...], axis: int) -> bool:
    """Whether the dimension of ours that is grouped lies along the inputs of theirs, [*, inputs] or [E, inputs, *]."""
    return tensor.theirs(shape)[1][-1] == tensor.letters(shape)[axis]


def _projections(config: TransformerConfig, rules: Rules) -> dict[tuple, nnx.Param]:
    """Shapes, with their metadata, of what may be held in few bits."""
    _, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, Execution(rules), nnx.Rngs(0))))
    params = {path: param for path, param in nnx.to_flat_state(state) if path[0] in ("segments", "mtp")}
    return {path: param for path, param in params.items() if param.get_metadata("into")}


def _place(path: tuple) -> str:
    return "mtp." * (path[0] == "mtp") + "shared." * (path[-2] == "shared")


def _groups(kind: Kind, rules: Rules) -> Groups | None:
    """None where they cannot be held as they are, in all layers alike."""
    if None in kind.kept or len({kept.numbers for kept in kind.kept}) != 1:
        return None
    scales, (numbers,) = {kept.scale for kept in kind.kept}, {kept.numbers for kept in kind.kept}
    within, zeros = math.gcd(*(kept.group for kept in kind.kept)), any(kept.zeros for kept in kind.kept)
    scale = scales.pop() if len(scales) == 1 else "float32"
    each = (Groups(numbers, LONGEST >> i, scale, zeros, within, published=True) for i in range(SMALLER + 1))
    return next((groups for groups in each if _divides(groups, kind.along, rules)), None)


def _divides(groups: Groups, along: Iterable[tuple[int, str]], rules: Rules) -> bool:
    try:
        return all(size // groups.size(size) % rules.mesh.size(*rules.rest.axes(name)) == 0 for size, name in along)
    except ShardlmError:
        return False
