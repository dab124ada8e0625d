"""Weights between Hugging Face folders and parameter trees, each device reading its own slices only. What tensors are
called is the architectures' business (models/naming.py), what files hold hf_files.py's."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Planned, Stored
from shardlm.hf_quantised import dequantised
from shardlm.layers.block import BlockConfig
from shardlm.models import registry
from shardlm.models.naming import Names, Tensor, join, read, shape_of
from shardlm.models.transformer import TransformerConfig
from shardlm.ops.grouped_weights import BITS, quantised
from shardlm.state import ModelDef

Tree = Any
# In published checkpoints, and not part of the language model: buffers, the halves of what also sees, and heads that
# predict tokens further ahead.
NOT_OURS = re.compile(
    r"\.rotary_emb\.inv_freq$|(^|\.)h\.\d+\.attn\.(bias|masked_bias)$|(^|\.)(vision_tower|multi_modal_projector)\."
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its tensor, and the layer that each index of its stack dimension is; () where it has none."""

    path: tuple
    tensor: Tensor
    layers: tuple[int, ...]

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """The tensors of theirs that it is read from."""
        layers = self.layers or (0,)
        experts = range(shape[bool(self.layers)]) if self.tensor.per_expert() else (0,)
        return [self.tensor.name.format(layer=layer, expert=e) for layer in layers for e in experts]


def leaves(config: TransformerConfig, shapes: Tree, names: Callable[[BlockConfig], Names]) -> list[Leaf]:
    """All parameters of a model with these shapes. Raises ShardlmError for one that the architecture does not name."""
    found = []
    first = list(itertools.accumulate((s.num_layers for s in config.segments), initial=0))
    for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        keys = tuple(key.key for key in path)
        layers, own, block = (), keys, next(config.blocks())
        if keys[0] == "segments":
            _, number, _, offset, *rest = keys
            segment, own = config.segments[number], tuple(rest)
            period = len(segment.pattern)
            block = segment.pattern[offset]
            layers = tuple(first[number] + repeat * period + offset for repeat in range(segment.repeats))
        dotted = ".".join(map(str, own))
        known = names(block)
        if dotted not in known:
            raise ShardlmError(f"this architecture's checkpoints have no place for {dotted}; it cannot be exchanged")
        found.append(Leaf(keys, known[dotted], layers))
    return found


def load(model: ModelDef, folder: Folder, shapes: Tree) -> Tree:
    """The parameters of a checkpoint, in the dtypes and at rest where `shapes` (with shardings on real devices) says;
    what is in few bits there is made so on the host, slice by slice.

    Raises ShardlmError for tensors that are missing, left over or of another shape, all named.
    """
    stored = _own(folder)
    whole, packed = _unpacked(shapes, BITS.get(model.execution.weights))
    named = leaves(model.config, whole, lambda block: registry.names(folder.config, model.config, block))
    _check(model.config, named, whole, stored)
    made = {}
    for leaf, shape in zip(named, jax.tree.leaves(whole), strict=True):
        if leaf.path in packed:
            made |= _packed_arrays(leaf, shape, packed[leaf.path], stored)
        else:
            made[leaf.path] = _array(shape, lambda index, a=leaf, s=shape: _slice(a, s.shape, index, stored, s.dtype))
    return unflatten_dict(made)


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A weight in few bits: the shapes of its bytes and of its scales, and the dimension that is grouped."""

    values: jax.ShapeDtypeStruct
    scale: jax.ShapeDtypeStruct
    axis: int
    bits: int


def unpacked(model: ModelDef) -> Tree:
    """The shapes of the weights of a model that has adapters, without those and as a checkpoint has them."""
    return _unpacked(model.frozen_shapes, BITS.get(model.execution.weights))[0]


def _unpacked(shapes: Tree, bits: int | None) -> tuple[Tree, dict[tuple, _Packed]]:
    """(the shapes as a checkpoint has them, without scales; what is in few bits, by path)."""
    flat, packed = flatten_dict(shapes), {}
    for path, values in list(flat.items()):
        if values.dtype != jnp.int8:
            continue
        scale = flat.pop((*path[:-1], f"{path[-1]}_scale"))
        axis = next(i for i, (n, m) in enumerate(zip(values.shape, scale.shape, strict=True)) if n != m)
        packed[path] = _Packed(values, scale, axis, bits)
        full = (*values.shape[:axis], values.shape[axis] * 8 // bits, *values.shape[axis + 1 :])
        flat[path] = jax.ShapeDtypeStruct(full, jnp.float32, sharding=values.sharding)
    return unflatten_dict(flat), packed


def _packed_arrays(leaf: Leaf, whole, packed: _Packed, stored: Mapping[str, Stored]) -> dict[tuple, jax.Array]:
    """The bytes and the scales of a weight, by path; where a device's slice cuts a group, the whole group is read."""
    axis, groups = packed.axis, packed.scale.shape[packed.axis]
    group = whole.shape[axis] // groups

    def make(part: int, per_group: int):
        def read_slice(index):
            start, stop, _ = index[axis].indices(groups * per_group)
            first, last = start // per_group, -(-stop // per_group)
            rows = (*index[:axis], slice(first * group, last * group), *index[axis + 1 :])
            w = _slice(leaf, whole.shape, rows, stored, np.dtype("float32"))
            both = quantised(w, axis, group, packed.bits)
            return np.take(both[part], range(start - first * per_group, stop - first * per_group), axis)

        return read_slice

    values = _array(packed.values, make(0, packed.values.shape[axis] // groups))
    scale = _array(packed.scale, make(1, 1))
    return {leaf.path: values, (*leaf.path[:-1], f"{leaf.path[-1]}_scale"): scale}


def _own(folder: Folder) -> dict[str, Stored]:
    """The language model's tensors, by the names of a checkpoint of it alone."""
    found = {}
    for name, stored in dequantised(folder.tensors, folder.config).items():
        if NOT_OURS.search(name):
            continue
        name = re.sub(r"^(model\.)?language_model\.(?=model\.)|^model\.language_model\.", "", name)
        if name.startswith(("layers.", "embed_tokens.", "norm.")):
            name = f"model.{name}"
        if re.match(r"(h\.\d|wte|wpe|ln_f)", name):
            name = f"transformer.{name}"
        found[name] = stored
    return found


def _check(config: TransformerConfig, named: list[Leaf], shapes: Tree, stored: Mapping[str, Stored]) -> None:
    """Refuses what does not fit, with all names."""
    flat = jax.tree.leaves(shapes)
    needed: dict[str, tuple[int, ...]] = {}
    for group in _groups(named, flat).values():
        shape = _their_shape(group)
        for name in {name for leaf, ours in group for name in leaf.names(ours)}:
            needed[name] = shape
    extra = [name for name in stored if name not in needed and not _unused(config, name)]
    missing = [name for name in needed if name not in stored]
    wrong = [
        f"{name} is {list(stored[name].shape)} and the model needs {list(shape)}"
        for name, shape in needed.items()
        if name in stored and stored[name].shape != shape
    ]
    problems = [*wrong, *(f"{name} is missing" for name in missing), *(f"{name} is not known" for name in extra)]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ShardlmError(f"the checkpoint does not fit its config.json: {'; '.join(problems[:8])}{more}")


def _unused(config: TransformerConfig, name: str) -> bool:
    """A head that repeats the embedding, and layers after the last (those that predict further tokens)."""
    if name == "lm_head.weight" and config.tie_embeddings:
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(layer) and int(layer[1]) >= config.num_layers


def _groups(named: list[Leaf], flat: list) -> dict[str, list[tuple[Leaf, tuple[int, ...]]]]:
    """The leaves that share a tensor, by its name before layers and experts are filled in, segment by segment."""
    groups: dict[str, list] = {}
    for leaf, shape in zip(named, flat, strict=True):
        groups.setdefault(f"{leaf.path[:4] if leaf.layers else ()} {leaf.tensor.name}", []).append((leaf, shape.shape))
    return groups


def _one(leaf: Leaf, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Our shape of one tensor of theirs: without the stack's dimension and, where each has its own, the experts'."""
    return shape[bool(leaf.layers) :]


def _their_shape(group: list[tuple[Leaf, tuple[int, ...]]]) -> tuple[int, ...]:
    ones = [(leaf.tensor, _one(leaf, shape)[leaf.tensor.per_expert() :]) for leaf, shape in group]
    return shape_of([(_without_experts(tensor), one) for tensor, one in ones])


def _without_experts(tensor: Tensor) -> Tensor:
    """The layout of one expert's tensor."""
    if not tensor.per_expert():
        return tensor
    theirs, ours = tensor.layout.split("->")
    return dataclasses.replace(tensor, layout=f"{theirs}->{ours.replace('E ', '', 1)}")


def _array(shape: jax.ShapeDtypeStruct, read_slice: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """One parameter, read and sent device by device: the host holds one device's slice at a time. Devices that follow
    each other and hold the same share one reading."""
    made, last, on_host = [], None, None
    for device, index in shape.sharding.addressable_devices_indices_map(shape.shape).items():
        if index != last:
            last, on_host = index, read_slice(index)
        made.append(jax.device_put(on_host, device).block_until_ready())
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, made)


def _slice(leaf: Leaf, shape, index: tuple[slice, ...], stored: Mapping[str, Stored], dtype: np.dtype) -> np.ndarray:
    if not leaf.layers:
        return _one_layer(leaf.tensor, 0, shape, index, stored, dtype)
    layers = leaf.layers[index[0]]
    out = None
    for place, layer in enumerate(layers):
        one = _one_layer(leaf.tensor, layer, shape[1:], index[1:], stored, dtype)
        out = np.empty((len(layers), *one.shape), dtype) if out is None else out
        out[place] = one
    return out


def _one_layer(tensor: Tensor, layer: int, shape, index, stored: Mapping[str, Stored], dtype) -> np.ndarray:
    if not tensor.per_expert():
        return read(tensor, shape, index, stored[tensor.name.format(layer=layer)].read).astype(dtype)
    plain, experts = _without_experts(tensor), range(*index[0].indices(shape[0]))
    read_one = (stored[tensor.name.format(layer=layer, expert=expert)].read for expert in experts)
    return np.stack([read(plain, shape[1:], index[1:], fetch).astype(dtype) for fetch in read_one])


def planned(
    config: TransformerConfig, params: Tree, names: Callable[[BlockConfig], Names], dtype: np.dtype
) -> Iterator[Planned]:
    """The tensors of a checkpoint of these parameters, in `dtype`; each is brought to the host when it is written."""
    flat = jax.tree.leaves(params)
    named = leaves(config, params, names)
    arrays = {leaf.path: a for leaf, a in zip(named, flat, strict=True)}
    for group in _groups(named, flat).values():
        shape = _their_shape(group)
        first, ours = group[0]
        for place, layer in enumerate(first.layers or (0,)):
            for expert in range(_one(first, ours)[0]) if first.tensor.per_expert() else (0,):

                def make(group=group, place=place, expert=expert) -> np.ndarray:
                    parts = []
                    for leaf, _ in group:
                        a = arrays[leaf.path]
                        a = a[place] if leaf.layers else a
                        a = a[expert] if leaf.tensor.per_expert() else a
                        parts.append((_without_experts(leaf.tensor), np.asarray(a).astype(dtype)))
                    return join(parts)

                name = first.tensor.name.format(layer=layer, expert=expert)
                yield Planned(name, dtype, shape, make)
