"""What becomes of a weight that is read: the slices that devices hold of it, in the compute dtype or in few bits with
scales beside them. Files and names are weights.py's."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.errors import ShardlmError
from shardlm.hf_quantised.kept import Kept
from shardlm.layers.param import SCALE, ZERO
from shardlm.ops import dynamic_matmul
from shardlm.ops.grouped_weights import Grouped, Groups, as_published, dequantised, grouped_axis, quantised
from shardlm.ops.weight_format import WeightFormat, grouped

Tree = Any
Index = tuple[slice, ...]


class View(NamedTuple):
    """What is read of a checkpoint's tensors.

    name   of their method
    whole  all of it
    index  the slice that is read
    every  inputs of which it is one, 0: of each
    """

    name: str
    whole: jax.ShapeDtypeStruct
    index: Index
    every: int = 0


@dataclasses.dataclass(frozen=True)
class Part:
    """What some devices hold of one parameter: the slice that is read for them, and the arrays it becomes, by path."""

    index: Index
    devices: tuple[jax.Device, ...]
    make: Callable[..., dict[tuple, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class InGroups:
    """A weight in few bits: the shapes of its bytes, of its scales and of its zeros where it has any, and the dimension
    that is grouped."""

    values: jax.ShapeDtypeStruct
    scale: jax.ShapeDtypeStruct
    zero: jax.ShapeDtypeStruct | None
    axis: int
    how: Groups

    reads_twice = False

    def views(self, index: Index) -> list[View]:
        """What is read for a part, one after the other: of a checkpoint's own numbers, the factors and the zeros of
        groups alone."""
        if not self.how.published:
            return [View("read", self.whole, index)]
        every = self.whole.shape[self.axis] // self.scale.shape[self.axis]
        rows = slice(index[self.axis].start // every, index[self.axis].stop // every)
        groups = (*index[: self.axis], rows, *index[self.axis + 1 :])
        beside = [("factors_of", self.scale), ("zeros_of", self.zero)][: 1 + self.how.zeros]
        return [View("codes", self.whole, index), *(View(name, shape, groups, every) for name, shape in beside)]

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """As a checkpoint has it."""
        shape = self.values.shape
        full = (*shape[: self.axis], shape[self.axis] * self.how.a_byte, *shape[self.axis + 1 :])
        return jax.ShapeDtypeStruct(full, jnp.float32, sharding=self.values.sharding)

    def parts(self, path: tuple, made: Callable[[], np.ndarray]) -> list[Part]:
        """Where a device's bytes or scales cut a group, the whole group is read."""
        whole, groups = self.whole.shape, self.scale.shape[self.axis]
        group, arrays = whole[self.axis] // groups, [a for a in (self.values, self.scale, self.zero) if a is not None]
        found = []
        for indices, devices in _holders(*arrays):
            cuts = zip(indices, (self.values.shape[self.axis] // groups, 1, 1), strict=False)
            spans = [(*cut[self.axis].indices(groups * each)[:2], each) for cut, each in cuts]
            first, last = min(s // each for s, _, each in spans), max(-(-e // each) for _, e, each in spans)

            def make(*read, spans=spans, first=first):
                if self.how.published:
                    held = as_published(*read, *[None] * (3 - len(read)), self.axis, group, self.how)
                else:
                    held = quantised(*read, self.axis, group, self.how.numbers)
                cuts = [slice(s - first * n, e - first * n) for s, e, n in spans]
                cut = [a[(slice(None),) * self.axis + (cut,)] for a, cut in zip(held, cuts, strict=False)]
                return dict(zip((path, of_scale(path), of_zero(path)), cut, strict=False))

            rows, index = slice(first * group, last * group), indices[0]
            found.append(Part((*index[: self.axis], rows, *index[self.axis + 1 :]), devices, make))
        return found


@dataclasses.dataclass(frozen=True)
class ByResult:
    """A weight of 8-bit numbers [L, *made, *summed] with a scale for each result (ops/dynamic_matmul.py), and the
    shapes of both. published: a checkpoint has both so, and they are not made again."""

    values: jax.ShapeDtypeStruct
    scale: jax.ShapeDtypeStruct
    how: WeightFormat
    published: bool = False

    def views(self, index: Index) -> list[View]:
        if not self.published:
            return [View("read", self.whole, index)]
        shape, last = self.whole.shape, len(self.summed)  # of summed dimensions, behind that of layers
        of_results = jax.ShapeDtypeStruct((*shape[:last], 1, *shape[last + 1 :]), self.scale.dtype)
        results = (index[0], *[slice(0, 1)] * last, *index[last + 1 :])
        return [View("codes", self.whole, index), View("factors_of", of_results, results, shape[last])]

    def as_held(self, tensors: Iterable[Any]) -> "ByResult":
        """Of a checkpoint with these tensors."""
        kept = [getattr(tensor, "kept", None) for tensor in tensors]
        same = all(own and own.numbers == grouped(self.how) and not own.group and not own.zeros for own in kept)
        return dataclasses.replace(self, published=same)

    @property
    def summed(self) -> range:
        """Of a layer as a checkpoint has it, [*summed, *made], the dimensions that are summed over."""
        return range(self.values.ndim - self.scale.ndim)

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """As a checkpoint has it, [L, *summed, *made]; where that rests is not said."""
        return jax.ShapeDtypeStruct(self._turned(self.values.shape), jnp.float32)

    @property
    def reads_twice(self) -> bool:
        """Whether devices hold parts of what is summed over: then all of it is read for the scales, and each part for
        its numbers."""
        if self.published:
            return False
        spec = (*self.values.sharding.spec, *(None,) * self.values.ndim)[self.scale.ndim : self.values.ndim]
        return any(self.values.sharding.mesh.shape[axis] > 1 for axis in jax.tree.leaves(spec))

    def parts(self, path: tuple, made: Callable[[], np.ndarray]) -> list[Part]:
        """`made` gives all scales where `reads_twice`. A layer at a time: beside its numbers a weight takes several
        times its size on the way."""
        last, found = range(-len(self.summed), 0), []
        for (index, scales), devices in _holders(self.values, self.scale):

            def make(w, factors=None, scales=scales):
                if self.published:
                    own = factors[(slice(None), *[0] * len(self.summed))].astype(self.scale.dtype)
                    turned = np.moveaxis(w, [dim + 1 for dim in self.summed], last)
                    return {path: np.ascontiguousarray(turned), of_scale(path): own}
                if self.reads_twice:
                    own = made()[scales]
                else:
                    own = scales_of(self, w)
                layers = (np.moveaxis(layer, self.summed, last) for layer in w)
                numbers = [dynamic_matmul.by_result(*each, self.how) for each in zip(layers, own, strict=True)]
                return {path: np.stack(numbers), of_scale(path): own}

            found.append(Part(self._turned(index), devices, make))
        return found

    def _turned(self, dimensions: tuple) -> tuple:
        """Of the values, in the order of `whole`."""
        made = self.scale.ndim
        return (dimensions[0], *dimensions[made:], *dimensions[1:made])


@dataclasses.dataclass(frozen=True)
class Plain:
    """A weight as a checkpoint has it."""

    whole: jax.ShapeDtypeStruct

    reads_twice = False

    def views(self, index: Index) -> list[View]:
        return [View("read", self.whole, index)]

    def parts(self, path: tuple, made: Callable[[], np.ndarray]) -> list[Part]:
        return [Part(index, devices, lambda a: {path: a}) for (index,), devices in _holders(self.whole)]


Held = Plain | InGroups | ByResult


def scales_of(held: ByResult, layers: Iterable[np.ndarray]) -> np.ndarray:
    """Of all results, [L, *made], from a weight's layers as a checkpoint has them."""
    return np.stack([dynamic_matmul.scales(w, held.summed, held.how) for w in layers])


def of_scale(path: tuple) -> tuple:
    """Where the scales of a weight in few bits are."""
    return (*path[:-1], path[-1] + SCALE)


def of_zero(path: tuple) -> tuple:
    """Where its zeros are, if it has any."""
    return (*path[:-1], path[-1] + ZERO)


def held_weights(shapes: Tree, how: WeightFormat, groups: Mapping[tuple, Groups]) -> dict[tuple, Held]:
    """Of a tree of shapes, by path in its order; scales and zeros are with their weights. `groups` as ModelDef has
    them."""
    flat, found = flatten_dict(shapes), {}
    beside = {of(path) for path in flat for of in (of_scale, of_zero) if how != "dtype"} & set(flat)
    for path, values in flat.items():
        if path in beside:
            continue
        scale = flat[of_scale(path)] if of_scale(path) in beside else None
        if scale is None:
            found[path] = Plain(values)
        elif path in groups:
            axis = grouped_axis(values.shape, scale.shape)
            found[path] = InGroups(values, scale, flat.get(of_zero(path)), axis, groups[path])
        else:
            found[path] = ByResult(values, scale, how)
    return found


def assembled(
    shapes: Mapping[tuple, jax.ShapeDtypeStruct], parts: Sequence[Part], read: Callable[[Part], Sequence[np.ndarray]]
) -> dict[tuple, jax.Array]:
    """The arrays of one parameter by path. `read` gives what a part is made of, one after the other."""
    made: dict[tuple, dict] = {path: {} for path in shapes}
    for part in parts:
        on_host = part.make(*read(part))
        for path, a in on_host.items():
            made[path] |= {device: jax.device_put(a, device).block_until_ready() for device in part.devices}
        del on_host, a  # before the next one is read
    found = {}
    for path, shape in shapes.items():
        ordered = [made[path][device] for device in shape.sharding.addressable_devices_indices_map(shape.shape)]
        found[path] = jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, ordered, dtype=shape.dtype)
    return found


def made_of(path: tuple, held: "Held", w: np.ndarray, flat: Mapping[tuple, jax.ShapeDtypeStruct]):
    """{path: an array} of a parameter that is on the host whole; `flat`: the shapes of all."""
    shapes = {own: flat[own] for own in paths_of(path, flat)}
    parts = held.parts(path, functools.partial(scales_of, held, w))
    return assembled(shapes, parts, lambda part: [w[part.index].astype(held.whole.dtype)])


def numbers_of(
    held: Plain | InGroups, part: Part, index: Index, read: Callable[[Index], Sequence[np.ndarray]], dtype: jnp.dtype
) -> np.ndarray:
    """A slice of the numbers, in `dtype`, that a weight stands for, of which `part` is all; read as for `assembled`."""
    if isinstance(held, Plain):
        return part.make(*read(index)).popitem()[1]
    axis, cut = held.axis, index[held.axis]
    group = held.whole.shape[axis] // held.scale.shape[axis]
    first, last = cut.start // group * group, -(-cut.stop // group) * group  # whole groups
    made = part.make(*read((*index[:axis], slice(first, last), *index[axis + 1 :])))
    numbers = np.asarray(dequantised(Grouped(*made.values()), axis, held.how, dtype))
    return numbers[(slice(None),) * axis + (slice(cut.start - first, cut.stop - first),)]


def paths_of(path: tuple, flat: Mapping[tuple, Any]) -> list[tuple]:
    """Of a weight's bytes and, where they are in `flat`, its scales and zeros."""
    return [own for own in (path, of_scale(path), of_zero(path)) if own in flat]


def check_kept(groups: Groups, tensors: Mapping[str, Any]) -> None:
    """Whether a weight that is held as a checkpoint had it may be read from these tensors. Raises ShardlmError for one
    that is not so."""
    for name, tensor in tensors.items():
        kept = getattr(tensor, "kept", None)
        exact = kept and groups.scale in (kept.scale, "float32") and groups.zeros >= kept.zeros
        exact = exact and (kept.whole or not groups.whole)
        inside = kept and ((groups.within and kept.group % groups.within == 0) or not kept.group)
        if not (exact and inside) or kept.numbers != groups.numbers:
            wanted = Kept(groups.numbers, groups.within, groups.scale, groups.zeros, groups.whole)
            other = "in another way" if hasattr(tensor, "kept") else f"in {tensor.dtype}"
            raise ShardlmError(
                f"{name} is not held {_how(wanted)}, as the model is served (quantization=checkpoint), but "
                f"{_how(kept) if kept else other}; serve it with quantization=dtype, or another, to put any weights in"
            )


def _how(kept: Kept) -> str:
    zeros = f" and {'' if kept.whole else 'fractional '}zeros" if kept.zeros else ""
    return f"in {kept.numbers} by groups of {kept.group or 'all inputs'} with scales in {kept.scale}{zeros}"


def as_read(held: Mapping[tuple, Held]) -> Tree:
    """The shapes as a checkpoint has them."""
    return unflatten_dict({path: one.whole for path, one in held.items()})


def _holders(*shapes: jax.ShapeDtypeStruct) -> list[tuple[tuple[Index, ...], tuple[jax.Device, ...]]]:
    """The different slices of arrays on this process's devices, each with the devices that hold them."""
    found: dict[str, tuple] = {}
    maps = [shape.sharding.addressable_devices_indices_map(shape.shape) for shape in shapes]
    for device in maps[0]:
        own = tuple(indices[device] for indices in maps)
        found.setdefault(str(own), (own, []))[1].append(device)
    return [(own, tuple(devices)) for own, devices in found.values()]
