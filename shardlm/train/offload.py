"""Optimizer state and float32 weights in the host's pinned memory. An array's memory is part of its type, as its
sharding is: what rests on the host comes to the device where it is used, and goes back at the end of the step. The
update itself stays on the device. Activations are the business of remat="offload" (layers/stack.py).

The idea is ZeRO-Offload's (https://arxiv.org/abs/2101.06840), without its update on the CPU.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from shardlm.errors import ShardlmError
from shardlm.layers.stage_weights import computed_in
from shardlm.mesh import MeshSpec
from shardlm.state import TrainState, on_device, on_host
from shardlm.train.config import LocalSgdConfig, OffloadConfig

Tree = Any
HOST = "pinned_host"
FIELDS = {"optimizer": ("opt_state", "ema"), "params": ("params",)}  # of TrainState


def check_offload(offload: OffloadConfig, mesh: MeshSpec, local_sgd: LocalSgdConfig, device: jax.Device) -> None:
    """Refuses what cannot rest in host memory, before anything compiles."""
    asked = [f"offload.{name}" for name in FIELDS if getattr(offload, name)]
    if asked and local_sgd.inner_steps:
        raise ShardlmError(
            f"{' and '.join(asked)} with local_sgd.inner_steps={local_sgd.inner_steps}: replicas that train apart keep "
            f"their state on their devices; set {' and '.join(asked)} to False, or local_sgd.inner_steps to 0"
        )
    if offload.params and mesh.pipeline > 1:
        raise ShardlmError(
            f"offload.params with mesh.pipeline={mesh.pipeline}: a stage adds up gradients over microbatches in the "
            "type of the weights it holds, and a copy in 16 bits would round each sum; set offload.params to False or "
            "mesh.pipeline to 1 (offload.optimizer works with any)"
        )
    kinds = [memory.kind for memory in device.addressable_memories()]  # none of a GPU that is compiled for, not there
    if asked and kinds and HOST not in kinds:
        raise ShardlmError(
            f"{' and '.join(asked)}: {device.device_kind} has no {HOST} memory (it has {', '.join(kinds)}); "
            f"set {' and '.join(asked)} to False"
        )


def store(state: TrainState, offload: OffloadConfig) -> TrainState:
    """A new state, put where it rests; inside jit. Scalars stay on the device."""
    return _resting(state, offload, lambda a: jax.device_put(a, jax.memory.Space.Host))


def at_rest(shapes: TrainState, offload: OffloadConfig, mesh: Mesh) -> TrainState:
    """Shapes of a state with their shardings, in the memory where `store` puts each array."""
    # Devices that are compiled for and not there have no memories, and a sharding over them drops the word for one.
    mesh = mesh if mesh.devices.flat[0].addressable_memories() else mesh.abstract_mesh

    def place(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, shape.sharding.spec, memory_kind=HOST)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return _resting(shapes, offload, place)


def _resting(state: TrainState, offload: OffloadConfig, place: Callable) -> TrainState:
    fields = [field for name, fields in FIELDS.items() if getattr(offload, name) for field in fields]
    moved = {f: jax.tree.map(lambda a: place(a) if a.ndim else a, getattr(state, f)) for f in fields}
    return dataclasses.replace(state, **moved)


def with_copy(gradient: Callable, dtype: jnp.dtype) -> Callable:
    """A gradient function (train/step.py) whose parameters may rest on the host: it computes from a copy on the device,
    with the layers' matrices in `dtype`, and gives what it would without."""

    def run(params: Tree, *rest):
        return gradient(jax.tree_util.tree_map_with_path(lambda path, a: _copy(path, a, dtype), params), *rest)

    return run


def _copy(path, a: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What is copied into fewer bits comes a layer at a time: XLA begins all copies at once, before the first of them
    is converted (8B on one GPU, rows of 4,096: 47.5 GiB became 33.9, compiled)."""
    if not on_host(a):
        return a
    held = _copy_dtype(path, a, dtype)
    if held == a.dtype:
        return on_device(a)
    layer = functools.partial(jax.lax.dynamic_index_in_dim, a, keepdims=False)
    return jax.lax.map(lambda i: on_device(layer(i)).astype(held), jnp.arange(a.shape[0]))


def _copy_dtype(path, a: jax.Array, dtype: jnp.dtype) -> jnp.dtype:
    """As layers compute with it; embedding and head count on float32."""
    return computed_in(path, a, dtype) if getattr(path[0], "key", path[0]) == "segments" else a.dtype


def update(change: Callable, parts: tuple[Tree, ...], grads: Tree, *, by_layer: bool) -> tuple[Tree, ...]:
    """change(parts, grads) -> new parts, for trees of which some arrays rest on the host: they come to the device for
    it and go back.

    by_layer: `change` treats every element alone, so the layers of a segment take turns and the device holds the state
    of one at a time (8B over 8 H100, all of it on the host: 18.0 GiB of temporaries became 11.3, compiled).
    """
    if not any(map(on_host, jax.tree.leaves(parts))):
        return change(parts, grads)
    # Not before the gradients are there, so that it takes up no memory while they are computed.
    parts, grads = jax.lax.optimization_barrier((parts, grads))
    leaves, tree = jax.tree.flatten((parts, grads))
    count = len(jax.tree.leaves(parts))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((parts, grads))]
    groups = [_segment(path) if by_layer else None for path in paths]
    new = leaves[:count]
    for group in dict.fromkeys(groups):
        own = [n for n, g in enumerate(groups) if g == group]

        def turn(arrays, own=own):
            """The new arrays of `own`. Scalars, which count updates, serve every group; other groups stand still."""
            all_of_them = [leaf if leaf.ndim == 0 else jnp.float32(0) for leaf in leaves]
            for n, a in zip(own, arrays, strict=True):
                all_of_them[n] = on_device(a)
            changed = jax.tree.leaves(change(*jax.tree.unflatten(tree, all_of_them)))
            return [_like(changed[n], leaves[n]) for n in own if n < count]

        arrays, changing = [leaves[n] for n in own], [n for n in own if n < count]
        results = turn(arrays) if group is None else _in_turns(turn, arrays, len(changing))
        for n, a in zip(changing, results, strict=True):
            new[n] = a
    return jax.tree.unflatten(jax.tree.structure(parts), new)


def _in_turns(turn: Callable, arrays: list[jax.Array], changing: int) -> list[jax.Array]:
    """turn(arrays of one layer) for each layer, written over the first `changing` of the stacked arrays: a scan's
    results would be second copies of them, on the host too."""

    def layer(i, stacked):
        one = [jax.lax.dynamic_index_in_dim(a, i, keepdims=False) for a in (*stacked, *arrays[changing:])]
        return [jax.lax.dynamic_update_index_in_dim(a, new, i, 0) for a, new in zip(stacked, turn(one), strict=True)]

    return jax.lax.fori_loop(0, arrays[0].shape[0], layer, arrays[:changing])


def _segment(path) -> int | None:
    """Which of the model's segments a leaf of a parameter-shaped tree belongs to."""
    keys = [getattr(part, "key", getattr(part, "idx", getattr(part, "name", None))) for part in path]
    return keys[keys.index("segments") + 1] if "segments" in keys else None


def _like(a: jax.Array, old: jax.Array) -> jax.Array:
    """In the memory where `old` rests."""
    return jax.device_put(a, jax.memory.Space.Host) if on_host(old) and not on_host(a) else a


def returning(step: Callable) -> Callable:
    """A program on the training state whose new state rests where the old one did."""

    def run(state: TrainState, *batch):
        new, *rest = step(state, *batch)
        return jax.tree.map(_like, new, state), *rest

    return run


def saving(shapes: TrainState, dtype: jnp.dtype, device: jax.Device) -> str:
    """One line on the device memory that a state with these shapes (`at_rest`) saves by resting on the host, computed
    from the shapes; "" where nothing rests there."""
    rests = jax.tree.leaves(jax.tree.map(_host_bytes, shapes))
    if not any(rests):
        return ""
    params = jax.tree_util.tree_leaves_with_path(shapes.params)
    copy = sum(_host_bytes(a) * _copy_dtype(path, a, dtype).itemsize // a.dtype.itemsize for path, a in params)
    what = {"the optimizer's state": shapes.opt_state, "the weights": shapes.params}
    names = [name for name, part in what.items() if any(map(_host_bytes, jax.tree.leaves(part)))]
    back = f" ({copy / 2**30:,.3f} GiB of it taken back by the copy it computes with)" if copy else ""
    same = "; on a CPU that is the same memory" if device.platform == "cpu" else ""
    return (
        f"offload: {' and '.join(names)} in pinned host memory save {sum(rests) / 2**30:,.3f} GiB of each device's"
        f"{back}, computed{same}"
    )


def _host_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Of one device's share of an array, where it rests on the host; else 0."""
    if shape.sharding.memory_kind != HOST:
        return 0
    return math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
