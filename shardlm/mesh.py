"""Lays the six parallel axes over devices. Owns axis names, their physical order and the refusals of sizes that
do not fit; what is sharded over an axis is decided in rules.py."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardlm.config_tree import suggest
from shardlm.errors import ShardlmError

# Outermost first. Neighbouring devices differ in the last axis, so the axes that talk in every layer (tensor,
# context, expert, fsdp) stay inside a host's NVLink domain and the ones that talk once a step (data) or once a
# microbatch (pipeline) cross hosts.
AXES = ("data", "pipeline", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes. One may be -1: it takes whatever number of devices the others leave.

    data      replicas: the batch is split, weights may be replicated or sharded (rules.py)
    fsdp      the batch and the weights are split, weights gathered layer by layer
    context   the sequence is split
    pipeline  the layers are split
    expert    the experts of a mixture are split
    tensor    heads, MLP width and vocabulary are split, and the sequence between blocks

    Raises ShardlmError for a size that is no integer, or neither positive nor -1, and for more than one -1.
    """

    data: int = 1
    fsdp: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = self.sizes()
        if {*map(type, sizes.values())} != {int}:  # planners make hundreds of thousands of these
            _check_integers(sizes)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ShardlmError(f"mesh.{axis}={size}: an axis size is a positive number, or -1 for the rest")
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ShardlmError(f"mesh.{' and mesh.'.join(free)} are all -1; only one axis may take the rest")

    @classmethod
    def parse(cls, words: Sequence[str]) -> "MeshSpec":
        """The spec of words like "fsdp=4", as a command line has them.

        Raises: ShardlmError for a word of another form, and for an axis that there is not or that is named twice.
        """
        sizes: dict[str, int] = {}
        for word in words:
            axis, _, size = (part.strip() for part in word.partition("="))
            if axis not in AXES:
                raise ShardlmError(f"mesh: there is no axis {axis!r}{suggest(axis, AXES)} (axes: {', '.join(AXES)})")
            if not size.removeprefix("-").isdecimal():
                raise ShardlmError(
                    f"mesh: {word!r} gives {axis} no size; write {axis}=NUMBER, or {axis}=-1 for the rest"
                )
            if axis in sizes:
                raise ShardlmError(f"mesh: {axis} is given twice, as {sizes[axis]} and {size}")
            sizes[axis] = int(size)
        return cls(**sizes)

    def sizes(self) -> dict[str, int]:
        """Axis sizes in the physical order of AXES."""
        return {  # a planner asks half a million times
            "data": self.data,
            "pipeline": self.pipeline,
            "fsdp": self.fsdp,
            "expert": self.expert,
            "context": self.context,
            "tensor": self.tensor,
        }

    def __str__(self) -> str:
        return " x ".join(f"{a}={n}" for a, n in self.sizes().items() if n != 1) or "one device"

    def size(self, *axes: str) -> int:
        """Number of devices along the given axes together; 1 for none."""
        count = 1
        for axis in axes:  # a planner asks a million times
            count *= getattr(self, axis)
        return count

    def resolve(self, num_devices: int) -> "MeshSpec":
        """The same spec with -1 replaced, for exactly `num_devices` devices. Raises ShardlmError if they don't fit."""
        free = [axis for axis, size in self.sizes().items() if size == -1]
        fixed = math.prod(size for size in self.sizes().values() if size != -1)
        if free and num_devices % fixed == 0:
            return dataclasses.replace(self, **{free[0]: num_devices // fixed})
        if not free and fixed == num_devices:
            return self
        raise ShardlmError(_misfit(self, fixed, num_devices))

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """A device mesh with explicit axis types over `devices` (default: all), hosts outermost."""
        devices = jax.devices() if devices is None else devices
        spec = self.resolve(len(devices))
        grid = np.array(physical_order(devices)).reshape(tuple(spec.sizes().values()))
        return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))

    def abstract(self) -> AbstractMesh:
        """The same mesh without devices, for shapes and specs only. Every axis must have its size."""
        return AbstractMesh(tuple(self.sizes().values()), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def _check_integers(sizes: dict[str, Any]) -> None:
    """Raises ShardlmError for one that is none; numpy's are."""
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise ShardlmError(f"mesh.{axis}={size!r}: an axis size is an integer")


def shard_map(f: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
    """jax.shard_map over every axis of the current mesh that is not manual already, so that an op works both on the
    whole mesh and inside a pipeline stage or a replica (which are manual over their own axis); `f` itself where all
    are."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes and mesh.axis_names:
        return f
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def manual_over(axes: Sequence[str], f: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
    """jax.shard_map that is manual over `axes` alone; inside, the other axes stay explicit in the arrays' types.

    They pass its border as automatic axes: jax 0.10 closes the shardings of explicit axes there, so that XLA would
    gather every weight whole over fsdp and tensor on the way in and out (jax 0.11 does not). Not to be differentiated
    from outside, where what is kept for the backward pass would pass the border too: see `manual_with_gradient`.
    """
    options = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": set(axes), "check_vma": False}

    def run(*args):
        traced = jax.jit(f, inline=True)  # once for its types and its place, which take half of the tracing each
        mesh = jax.sharding.get_abstract_mesh()
        others = tuple(axis for axis in mesh.axis_names if axis not in axes and axis not in mesh.manual_axes)
        inside = jax.tree.map(lambda a: without_axes(jax.typeof(a).sharding.spec, axes), args)
        out = jax.tree.map(lambda s: s.sharding.spec, jax.eval_shape(jax.shard_map(traced, **options), *args))
        body = jax.sharding.explicit_axes(traced, axes=others, in_sharding=inside)
        return jax.sharding.auto_axes(jax.shard_map(body, **options), axes=others, out_sharding=out)(*args)

    return run


def manual_with_gradient(
    axes: Sequence[str],
    f: Callable,
    *,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: tuple[PartitionSpec, ...],
    fixed_specs: PartitionSpec,
) -> Callable:
    """`manual_over` of f(fixed, *args), differentiable in `args`, with a spec for each argument and result. A gradient
    is summed over those of `axes` that the argument's spec does not name; a result must be the same on the devices of
    those that its spec does not name."""
    each, specs = PartitionSpec(tuple(axes)), (fixed_specs, *in_specs)

    def unnamed(spec):
        return tuple(axis for axis in axes if axis not in jax.tree.leaves(tuple(spec)))

    structure = []  # of what the forward pass keeps, noted while it is traced

    @jax.custom_vjp
    def run(fixed, *args):
        return manual_over(axes, f, in_specs=specs, out_specs=out_specs)(fixed, *args)

    def forward(fixed, *args):
        def local(fixed, *args):
            out, back = jax.vjp(lambda *a: f(fixed, *a), *args)
            kept, structure[:] = jax.tree.flatten(back)[0], [jax.tree.structure(back)]
            return out, [a[None] for a in kept]

        return manual_over(axes, local, in_specs=specs, out_specs=(out_specs, each))(fixed, *args)

    def backward(kept, cotangent):
        def local(kept, cotangent):
            # What is summed over an axis hands its whole cotangent to each device there: a psum's transpose is a psum.
            shares = [math.prod(jax.lax.axis_size(a) for a in unnamed(spec)) for spec in out_specs]
            cotangent = tuple(jax.tree.map(lambda a, n=n: a / n, c) for c, n in zip(cotangent, shares, strict=True))
            gradients = jax.tree.unflatten(structure[0], [a[0] for a in kept])(cotangent)
            missing = map(unnamed, in_specs)
            return tuple(jax.lax.psum(g, a) if a else g for g, a in zip(gradients, missing, strict=True))

        return None, *manual_over(axes, local, in_specs=(each, out_specs), out_specs=in_specs)(kept, cotangent)

    run.defvjp(forward, backward)
    return run


def without_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The spec less these mesh axes."""
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    return PartitionSpec(*(tuple(axis for axis in part if axis not in axes) or None for part in parts))


def physical_order(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Devices sorted so that neighbours share the fastest link: by NVLink domain (slice), host, then device id."""

    def key(device):
        slice_index = getattr(device, "slice_index", None)
        return (0 if slice_index is None else slice_index, device.process_index, device.id)

    return sorted(devices, key=key)


def crossing_axes(spec: MeshSpec, devices_per_host: int) -> tuple[str, ...]:
    """Axes whose groups span more than one host, innermost first; for a warning when `tensor` is one of them."""
    crossing, inner = [], 1
    for axis in reversed(AXES):
        size = getattr(spec, axis)
        if size > 1 and (inner * size > devices_per_host or devices_per_host % (inner * size)):
            crossing.append(axis)
        inner *= size
    return tuple(crossing)


def _misfit(spec: MeshSpec, fixed: int, num_devices: int) -> str:
    """The message for a mesh that does not fit: values, requirement and the nearest choices that work."""
    choices = []
    for axis in AXES:
        size = getattr(spec, axis)
        others = fixed // size if size != -1 else fixed
        if size not in (1, -1) and num_devices % others == 0:
            choices.append(f"{axis}={num_devices // others}")
        elif size == 1 and num_devices % fixed == 0:
            choices.append(f"{axis}={num_devices // fixed}")
    if -1 in spec.sizes().values():
        problem = f"{num_devices} devices cannot be divided by the fixed axes, whose product is {fixed}"
    else:
        problem = f"it needs {fixed} devices and there are {num_devices}"
    remedy = f"change one axis: {', '.join(choices)}" if choices else "change more than one axis"
    return f"the mesh {spec} does not fit: {problem}; {remedy}, or use {fixed} devices or a multiple of it"
