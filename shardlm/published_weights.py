"""Whether a checkpoint in few bits can be served as its file has it, number for number: which of our weights are held
in what groups (ops/weight_format.py's AsPublished)."""

import dataclasses
import functools
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from shardlm import weights
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Stored, holds_weights
from shardlm.hf_quantised import kept_as, supported
from shardlm.hf_quantised.kept import Kept
from shardlm.layers.block import BlockConfig
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.naming import Names, Tensor
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer import Transformer
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.grouped_weights import LONGEST, GroupedFormat, Groups
from shardlm.ops.weight_format import PUBLISHED, QUANTIZATIONS, AsPublished, layers_differ, weight_key
from shardlm.rules import Rules

SMALLER = 4  # times that groups are halved at most, where devices cannot split whole ones


def not_published(why: str) -> ShardlmError:
    """What to say where quantization=checkpoint is asked for and cannot be."""
    return ShardlmError(
        f"quantization={PUBLISHED} serves weights in few bits as the checkpoint's file has them, and {why}; choose "
        f"from {', '.join(QUANTIZATIONS)}, or leave it out"
    )


def takes_no(what: str) -> ShardlmError:
    """What to say of new weights without the few bits of the checkpoint that is served."""
    return ShardlmError(
        f"the model is served in a checkpoint's own few bits (quantization={PUBLISHED}), and {what} none; serve it "
        "with quantization=dtype, or another, to update it from what is trained"
    )


@dataclasses.dataclass
class Kind:
    """Weights of one key.

    kept   of each layer how their tensors are held, None: not as they are
    few    layers where any is in few bits
    along  (size, name) of the dimension that is grouped
    """

    kept: dict[int, set[Kept | None]] = dataclasses.field(default_factory=dict)
    few: set[int] = dataclasses.field(default_factory=set)
    along: set[tuple[int, str]] = dataclasses.field(default_factory=set)

    @property
    def alike(self) -> list[int]:
        """Layers that are held as they are, in the same numbers: those of the most of them."""
        numbers = {layer: {kept.numbers for kept in own} for layer, own in self.kept.items() if None not in own}
        counts = Counter(one for own in numbers.values() if len(own) == 1 for one in own)
        most = max(counts, key=lambda one: (counts[one], one in ("int4", "fp4")), default="")  # of as many the smallest
        return [layer for layer, own in numbers.items() if own == {most}]


@functools.lru_cache(maxsize=8)
def kinds_of(source: Pretrained, config: TransformerConfig) -> Mapping[str, Kind]:
    """Of a checkpoint, by the headers of its files, or by config.json where they are not here."""
    one = MeshSpec()
    rules = Rules.make("zero3", one).fitting(config.widths())
    with jax.sharding.use_abstract_mesh(one.abstract()):
        if holds_weights(pathlib.Path(source.folder)):
            return kinds_in(Folder.open(source.folder), config, rules)
        return kinds_told(source.options, config, rules)


def frozen_as_published(source: Pretrained, config: TransformerConfig, rules: Rules) -> AsPublished:
    """What adapters stand on with lora.base=checkpoint. Raises ShardlmError where nothing can be held so."""

    def refused(why: str) -> ShardlmError:
        return ShardlmError(
            f"lora.base={PUBLISHED} holds weights in few bits as the checkpoint's file has them, and {why}; choose "
            f"from {', '.join(get_args(GroupedFormat))}"
        )

    if not (method := supported(source.options)):
        raise refused(f"{source.folder} has none (config.json has no quantization_config)")
    kinds = kinds_of(source, config)
    found = as_published(kinds, rules)
    if not found.kinds:
        cut = any(kind.alike for kind in kinds.values())
        why = f"can be split over the mesh {rules.mesh}" if cut else "is of a kind that is held so"
        raise refused(f"none of {source.folder}, in few bits by {method}, {why}")
    if layers_differ(found):
        differ = ", ".join(own for own, _ in found.but)
        raise refused(f"of {source.folder} some layers have {differ} in 16 bits: training holds all layers alike")
    return found


def kinds_in(folder: Folder, config: TransformerConfig, rules: Rules) -> dict[str, Kind]:
    """Of a folder's files: headers are read, and lists of groups. `rules`: any, of the mesh in use."""
    stored = weights.own_tensors(folder)

    def look(name: str) -> tuple[Kept | None, bool]:
        tensor = stored.get(name)
        few = tensor is not None and getattr(tensor, "few", not isinstance(tensor, Stored))
        return getattr(tensor, "kept", None), few

    return _kinds(weights.names_in(folder, stored, config), config, rules, look)


def kinds_told(options: Mapping[str, Any], config: TransformerConfig, rules: Rules) -> dict[str, Kind]:
    """The same by config.json alone."""
    kept_by = kept_as(options)

    def look(name: str) -> tuple[Kept | None, bool]:
        kept = kept_by(name)
        return (kept if kept and kept.numbers else None), kept is not None

    return _kinds(lambda block: registry.names(options, config, block), config, rules, look)


def as_published(kinds: Mapping[str, Kind], rules: Rules) -> AsPublished:
    """By groups that the devices of a mesh can split; nothing where none are held as they are."""
    found = {own: groups for own, kind in sorted(kinds.items()) if (groups := _groups(own, kind, rules))}
    held = {own: set(kinds[own].alike) for own in found}
    left = sorted(own for own, kind in kinds.items() if kind.few - held.get(own, set()))
    but = {own: tuple(sorted(kinds[own].kept.keys() - layers)) for own, layers in held.items()}
    return AsPublished(tuple(found.items()), tuple(left), tuple((own, some) for own, some in but.items() if some))


def _kinds(
    names_of: Callable[[BlockConfig], Names],
    config: TransformerConfig,
    rules: Rules,
    look: Callable[[str], tuple[Kept | None, bool]],
) -> dict[str, Kind]:
    """Of all projections and experts, by key; `look` says of a tensor how it is held and whether it is in few bits."""
    params = _projections(config, rules)
    shapes = unflatten_dict({path: jax.ShapeDtypeStruct(param.shape, param.dtype) for path, param in params.items()})
    found: dict[str, Kind] = {}
    for leaf in weights.leaves(config, shapes, names_of):
        param = params[leaf.path]
        names, into = param.get_metadata("names"), param.get_metadata("into")
        kind = found.setdefault(weight_key(leaf.path[-1], names[0], _place(leaf.path)), Kind())
        kind.along.add((param.shape[into - 1 - len(names)], names[into - 1]))
        along = _as_stored(leaf.tensor, param.shape[-len(names) :], into - 1)
        layers, each = leaf.layers or (0,), leaf.names(param.shape)
        for i, name in enumerate(each):
            layer = layers[i * len(layers) // len(each)]
            kept, few = look(name)
            kind.kept.setdefault(layer, set()).add(kept if along else None)
            kind.few |= {layer} if few else set()
    return found


def _as_stored(tensor: Tensor, shape: tuple[int, ...], axis: int) -> bool:
    """Whether the dimension of ours that is grouped lies along the inputs of theirs, [*, inputs] or [E, inputs, *]."""
    return tensor.theirs(shape)[1][-1] == tensor.letters(shape)[axis]


def _projections(config: TransformerConfig, rules: Rules) -> dict[tuple, nnx.Param]:
    """Of these shapes those of what may be held in few bits."""
    params = {path: param for path, param in parameters(config, rules).items() if path[0] in ("segments", "mtp")}
    return {path: param for path, param in params.items() if param.get_metadata("into")}


def parameters(config: TransformerConfig, rules: Rules) -> dict[tuple, nnx.Param]:
    """Shapes of all parameters, with their metadata; call under a mesh."""
    _, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, Execution(rules), None)))
    return dict(nnx.to_flat_state(state))


def _place(path: tuple) -> str:
    inside = path[-2] if path[-2] in ("shared", "indexer") else ""
    return "mtp." * (path[0] == "mtp") + (f"{inside}." if inside else "")


def _groups(own: str, kind: Kind, rules: Rules) -> Groups | None:
    """Of the layers that are alike; None where there are none, or other modules that predict further tokens."""
    held = set().union(*(kind.kept[layer] for layer in kind.alike))
    if not held or (own.startswith("mtp.") and len(kind.alike) < len(kind.kept)):
        return None
    scales, (numbers,) = {kept.scale for kept in held}, {kept.numbers for kept in held}
    within, zeros = math.gcd(*(kept.group for kept in held)), any(kept.zeros for kept in held)
    scale, whole = scales.pop() if len(scales) == 1 else "float32", all(kept.whole for kept in held)
    sizes = (LONGEST >> i for i in range(SMALLER + 1))
    each = (Groups(numbers, longest, scale, zeros, within, published=True, whole=whole) for longest in sizes)
    return next((groups for groups in each if _divides(groups, kind.along, rules)), None)


def _divides(groups: Groups, along: Iterable[tuple[int, str]], rules: Rules) -> bool:
    try:
        return all(size // groups.size(size) % rules.mesh.size(*rules.use.axes(name)) == 0 for size, name in along)
    except ShardlmError:
        return False
