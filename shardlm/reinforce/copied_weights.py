"""Weights of a training state for the copies of its model that sample: from where they rest in training to where each
copy wants them, by collectives between the devices and never by the host, one parameter after the other."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.serve.layers import made_first, split, turned
from shardlm.serve.runner import Runner

Tree = Any
Path = tuple


@dataclasses.dataclass(frozen=True)
class CopiedWeights:
    """What copies hold.

    places  {path: shape, dtype and place over the copies of all processes}; over `data` each copy has all of it
    turned  of those that lie otherwise than in training: (path there, two numbers of serve.layers.turned)
    """

    places: Mapping[Path, jax.ShapeDtypeStruct]
    turned: Mapping[Path, tuple[Path, int, int]]

    @classmethod
    def of(cls, runner: Runner, copies: Mesh) -> "CopiedWeights":
        """Of copies that are all as this process's first; `copies` is the mesh of all devices, with one along data."""
        places = {
            path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(copies, a.sharding.spec))
            for path, a in flatten_dict(runner.params).items()
        }
        return cls(places, made_first(runner.model))

    @property
    def gib(self) -> float:
        """Of the weights on each device."""
        shards = [(place.sharding.shard_shape(place.shape), place.dtype) for place in self.places.values()]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards) / 2**30

    def placed(self, params: Tree) -> dict[Path, jax.Array]:
        """These weights, as training has them, over all copies; of several processes all must call it. What a copy
        wants as it rests in training (no stack of layers, of the same dtype, split alike) is that very array."""
        with jax.set_mesh(jax.tree.leaves(params)[0].sharding.mesh):
            given = flatten_dict(_unstacked(params))
            return {path: self._put(path, given, place) for path, place in self.places.items()}

    def _put(self, path: Path, given: Mapping[Path, "_Layers"], place: jax.ShapeDtypeStruct) -> jax.Array:
        plain, *how = self.turned.get(path, (path,))
        whole, rows = given[plain].whole, given[plain].rows
        alike = whole.dtype == place.dtype and whole.sharding.is_equivalent_to(place.sharding, whole.ndim)
        if rows is None and not how and alike:
            return whole
        ways, in_training = (one.mesh.shape["tensor"] for one in (place.sharding, whole.sharding))
        program = _program(place.sharding, place.dtype, tuple(how), rows is not None, ways not in (1, in_training))
        return program(whole, rows.start if rows else 0)


@functools.cache  # one for all layers
def _program(
    place: NamedSharding, dtype: jnp.dtype, how: tuple[int, ...], stacked: bool, whole_first: bool
) -> Callable:
    """A parameter, or a layer of a stack, cast before devices give it to each other, as it lies there. `whole_first`:
    each device has all of it before it keeps its part, as XLA does where no collective leads from one way of splitting
    to the other, and warns of."""

    def put(whole: jax.Array, layer: jax.Array) -> jax.Array:
        a = jax.lax.dynamic_slice_in_dim(whole, layer, 1) if stacked else whole
        a = a.astype(dtype)
        a = jax.reshard(a, PartitionSpec()) if whole_first else a
        return turned(a, *how) if how else a

    return jax.jit(put, out_shardings=place)


def of_copies(placed: Mapping[Path, jax.Array], meshes: Sequence[Mesh]) -> list[Tree]:
    """The parameters of each copy on its mesh, whose devices are this process's: the arrays that are there already."""
    each: list[dict[Path, jax.Array]] = [{} for _ in meshes]
    for path, a in placed.items():
        shards = {shard.device: shard.data for shard in a.addressable_shards}
        for own, mesh in zip(each, meshes, strict=True):
            there, parts = NamedSharding(mesh, a.sharding.spec), [shards[device] for device in mesh.devices.flat]
            own[path] = jax.make_array_from_single_device_arrays(a.shape, there, parts)
    return [unflatten_dict(own) for own in each]


@dataclasses.dataclass(frozen=True)
class _Layers:
    """Some rows of a stacked parameter, which are cut out when they are asked for: all layers at once would be all
    weights once more."""

    whole: jax.Array
    rows: slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    def __getitem__(self, rows: slice) -> "_Layers":
        return _Layers(self.whole, rows)


def _unstacked(params: Tree) -> Tree:
    lazy = jax.tree.map(_Layers, params)
    return {**lazy, "segments": split(lazy["segments"])}
