"""How what leaves a pipeline stage comes to the devices of another, each of which has it whole: copied from device to
device where both stages are in this process, else sent by a program of both stages' processes. Weights too, to stages
that other processes have."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

HOP, LANE = "hop", "lane"  # from one stage to the other; the devices of each


class Carry(Protocol):
    """Into one stage; None where this process has no part of it."""

    def __call__(self, leaving: Sequence[Any] | None, shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple | None: ...

    def compile(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        """What is needed for arrays of these shapes."""


def is_here(mesh: Mesh) -> bool:
    """Whether this process has devices of a mesh."""
    return bool(mesh.local_devices)


class Copied:
    """Arrays of the host, or of devices of this process."""

    def __init__(self, target: Mesh):
        self._whole = NamedSharding(target, PartitionSpec())

    def __call__(self, leaving: Sequence[Any] | None, shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple | None:
        return jax.device_put(tuple(leaving), self._whole)

    def compile(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Nothing."""


class Sent:
    """Arrays that the devices of `source` have whole, to as many devices of `target`; each sends to one. For XLA it is
    one array of both, with a copy a device."""

    def __init__(self, source: Mesh, target: Mesh):
        self._both = of_both(source.devices, target.devices)
        self._target = NamedSharding(target, PartitionSpec())
        self._to = [device for device in target.devices.flat if device in target.local_devices]
        self._programs: dict[tuple, Callable] = {}
        self._nothing: dict[jax.ShapeDtypeStruct, list[jax.Array]] = {}

    def __call__(self, leaving: Sequence[Any] | None, shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple | None:
        """Both stages' processes call it, with nothing `leaving` where they have no part of the source."""
        given = [None] * len(shapes) if leaving is None else leaving
        both = tuple(self._joined(a, shape) for a, shape in zip(given, shapes, strict=True))
        sent = self._programs[key_of(shapes)](both)
        return tuple(map(self._arrived, sent, shapes)) if self._to else None

    def compile(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        """The program for arrays of these shapes, where there is none yet, and what a target has instead of them."""
        if key_of(shapes) in self._programs:
            return
        for shape in shapes:
            zeros = np.zeros(shape.shape, shape.dtype)
            self._nothing[shape] = [jax.device_put(zeros, device) for device in self._to]
        options = alone(self._both.mesh.devices.flat[0].platform)
        self._programs[key_of(shapes)] = lowered(self._both, shapes).compile(options)

    def _joined(self, a: jax.Array | None, shape: jax.ShapeDtypeStruct) -> jax.Array:
        shards = [] if a is None else [shard.data for shard in a.addressable_shards]
        both = [*shards, *self._nothing[shape]]
        return jax.make_array_from_single_device_arrays(_twice(shape), self._both, both)

    def _arrived(self, sent: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        shards = {shard.device: shard.data for shard in sent.addressable_shards}
        here = [shards[device] for device in self._to]
        return jax.make_array_from_single_device_arrays(shape.shape, self._target, here)


class Elsewhere:
    """Between stages that other processes have."""

    def __call__(self, leaving: Sequence[Any] | None, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        return None

    def compile(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Nothing."""


def carry(source: Mesh, target: Mesh) -> Carry:
    """What brings to the devices of `target` what those of `source` have whole."""
    own = {jax.process_index()}
    processes = {device.process_index for mesh in (source, target) for device in mesh.devices.flat}
    if processes == own:
        return Copied(target)
    return Sent(source, target) if own < processes else Elsewhere()


def key_of(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple:
    return tuple((shape.shape, shape.dtype) for shape in shapes)


def moved(a: jax.Array, sharding: NamedSharding, **options: Any) -> jax.Array:
    """An array at a place among its own devices, or anywhere in this process. Of several processes all that have some
    of its devices call it; `options` are device_put's. Without devices here what comes of it has no data."""
    if a.sharding == sharding or (a.is_fully_addressable and sharding.is_fully_addressable):
        return jax.device_put(a, sharding, **options)
    wider = jax.device_put(a, NamedSharding(a.sharding.mesh, sharding.spec))  # a copy in each stage
    shards = {shard.device: shard.data for shard in wider.addressable_shards}
    here = [shards[device] for device in sharding.mesh.devices.flat if device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(a.shape, sharding, here, dtype=a.dtype)


def alone(platform: str) -> dict[str, bool]:
    """Options of XLA for a program that not all processes of the job compile: on GPUs it would wait for what the others
    found as they tried kernels out, for a day (https://github.com/openxla/xla/pull/13108)."""
    return {} if platform == "cpu" else {"xla_gpu_shard_autotuning": False}


def of_both(source: np.ndarray, target: np.ndarray) -> NamedSharding:
    """Of an array whose first half each device of a stage has, and the second each of another."""
    mesh = Mesh(np.stack([source.ravel(), target.ravel()]), (HOP, LANE), axis_types=(AxisType.Explicit,) * 2)
    return NamedSharding(mesh, PartitionSpec(HOP))


def lowered(both: NamedSharding, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
    """The program that sends arrays of these shapes."""
    arrays = tuple(jax.ShapeDtypeStruct(_twice(shape), shape.dtype, sharding=both) for shape in shapes)
    with jax.set_mesh(both.mesh):
        return jax.jit(_shifted).lower(arrays)


def _twice(shape: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return (2 * shape.shape[0], *shape.shape[1:])


def _shifted(both: tuple) -> tuple:
    """What the first row of devices has, in the second."""

    def shift(a):
        return jax.lax.ppermute(a, HOP, [(0, 1)])

    spec = PartitionSpec(HOP)
    return jax.tree.map(lambda a: jax.shard_map(shift, in_specs=spec, out_specs=spec)(a), both)
