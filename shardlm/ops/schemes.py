"""Schemes by which checkpoints in few bits are published, by llm-compressor's names
(https://github.com/vllm-project/llm-compressor, "Schemes"): how projections are rounded when a folder is written
(launch.convert --quantization) and when a run trains what it will serve (matmul=W4A16 and so on).

Groups run along all that a weight sums over, as matrices of files have it, [results, inputs]. Their numbers are made by
operations that every backend rounds alike but for one division, whose result is put right: what trains is what is
written, to the bit. Those with a scale for each result are as serving makes them on the host, by one division for a
result: to the bit on a CPU; a GPU's reciprocal may be off in its last bit (rcp.approx.f32, compiled for an H100), and
then the few numbers in the middle between two, to that bit, may be written as the other one.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from shardlm.mesh import shard_map
from shardlm.ops import dynamic_matmul
from shardlm.ops.grouped_weights import STORED
from shardlm.ops.quantized_matmul import quantize

SchemeName = Literal["W4A16", "W8A16", "FP8_DYNAMIC", "W8A8"]
_LARGEST = {"int8": 127, "int4": 7}
SMALLER = (0.93, 0.86, 0.79, 0.72, 0.65)  # times the scale by which the largest number fits, those that are tried
AT_ONCE = 1 << 19  # numbers that are rounded together, in a core's caches


@dataclasses.dataclass(frozen=True)
class Scheme:
    """numbers  of weights
    group       inputs that share a scale, in bfloat16; 0: all of a result, a scale in float32
    served_as   the `--quantization` of serving whose numbers they are, where activations are rounded too, with a scale
                for each token; "": none, activations stay in 16 bits
    """

    numbers: Literal["int8", "int4", "fp8"]
    group: int
    served_as: str = ""

    @property
    def bits(self) -> int:
        return 4 if self.numbers == "int4" else 8


SCHEMES: dict[str, Scheme] = {
    "W4A16": Scheme("int4", 128),
    "W8A16": Scheme("int8", 128),
    "FP8_DYNAMIC": Scheme("fp8", 0, "fp8_dynamic"),
    "W8A8": Scheme("int8", 0, "int8_dynamic"),
}


class Written(NamedTuple):
    """A matrix [O, I] as a file has it: numbers, of 4 bits too in int8, and scales [O, groups]."""

    numbers: np.ndarray
    scale: np.ndarray


def on_host(w: np.ndarray, scheme: Scheme, searched: bool = False) -> Written:
    """The numbers of a matrix float32 [O, I], of whole groups. `searched`: groups' scales are those of the least
    squared error among some, and a result's the one by which its weights are e4m3 numbers already, if they are, instead
    of those by which the largest number fits, as in training."""
    if scheme.served_as:
        of = dynamic_matmul.scales if searched else dynamic_matmul.by_largest
        scale = of(w, (1,), scheme.served_as)
        return Written(dynamic_matmul.by_result(w, scale, scheme.served_as), scale[:, None])
    made = [_groups_on_host(rows, scheme, searched) for rows in np.array_split(w, max(1, w.size // AT_ONCE))]
    return Written(*(np.concatenate(parts) for parts in zip(*made, strict=True)))


def _groups_on_host(w: np.ndarray, scheme: Scheme, searched: bool) -> Written:
    split, limit = w.reshape(len(w), w.shape[1] // scheme.group, scheme.group), _LARGEST[scheme.numbers]
    largest = np.abs(split).max(-1, keepdims=True) * (np.float32(1) / np.float32(limit))

    def tried(factor: float) -> tuple[np.ndarray, np.ndarray]:
        scale = (largest * np.float32(factor)).astype(ml_dtypes.bfloat16).astype(np.float32)
        return scale, _rounded(np, split, scale, limit)

    scale, numbers = tried(1)
    if searched:
        least = np.square(split - numbers * scale).sum(-1, keepdims=True)
        for factor in SMALLER:
            smaller, rounded = tried(factor)
            found = np.square(split - rounded * smaller).sum(-1, keepdims=True)
            better = found < least
            scale, least = np.where(better, smaller, scale), np.where(better, found, least)
            numbers = np.where(better, rounded, numbers)
    return Written(numbers.astype(np.int8).reshape(w.shape), scale[..., 0].astype(ml_dtypes.bfloat16))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def as_served(w: jax.Array, summed: tuple[int, ...], scheme: Scheme) -> jax.Array:
    """What w, float32, stands for when it is rounded as `on_host` does: float32, where it rests. `summed`: the
    dimensions that are summed over, one after the other. The gradient goes to w as it comes (the straight-through
    estimator, https://arxiv.org/abs/1308.3432)."""
    return _as_served(w, summed, scheme)


def _as_served(w: jax.Array, summed: tuple[int, ...], scheme: Scheme) -> jax.Array:
    if scheme.served_as:
        found = quantize(w, STORED[scheme.numbers], summed, doublings=False)
        return found.values.astype(jnp.float32) * found.scale
    spec = _parts(jax.typeof(w).sharding.spec, w.ndim)
    mesh = jax.sharding.get_abstract_mesh()

    def ways(dim: int) -> int:
        axes = spec[dim] if isinstance(spec[dim], tuple) else (spec[dim],)
        return math.prod(mesh.shape[axis] for axis in axes if axis is not None)

    # Where a device's numbers are not one after the other: all of what is summed over, then back.
    if any(ways(dim) > 1 for dim in summed[1:]):
        whole = PartitionSpec(*(None if dim in summed else part for dim, part in enumerate(spec)))
        return jax.reshard(_in_groups(jax.reshard(w, whole), summed, scheme, whole), spec)
    return _in_groups(w, summed, scheme, spec)


as_served.defvjp(lambda w, summed, scheme: (_as_served(w, summed, scheme), None), lambda summed, scheme, _, dw: (dw,))


def _in_groups(w: jax.Array, summed: tuple[int, ...], scheme: Scheme, spec: PartitionSpec) -> jax.Array:
    """Of a weight whose devices have numbers one after the other. Where groups lie across devices, these tell each
    other their largest numbers alone."""
    limit, at, group, over = _LARGEST[scheme.numbers], summed[0], scheme.group, spec[summed[0]]

    def local(w):
        lead, numbers, made = w.shape[:at], math.prod(w.shape[at : summed[-1] + 1]), w.shape[summed[-1] + 1 :]
        part = math.gcd(numbers, group)
        split = w.reshape(*lead, -1, part, *made)
        largest = jnp.max(jnp.abs(split), axis=at + 1)
        if part < group:
            largest = _of_groups(largest, at, group // part, over)
        largest = jnp.expand_dims(largest, at + 1) * np.float32(1 / np.float32(limit))
        # Not a cast to bfloat16 and back, which XLA may leave out.
        scale = jax.lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=7)
        return (_rounded(jnp, split, scale, limit) * scale).reshape(w.shape)

    return shard_map(local, in_specs=spec, out_specs=spec)(w)


def _of_groups(largest: jax.Array, at: int, each: int, over: Any) -> jax.Array:
    """Of a device's parts of groups, along dimension `at`, what is the largest in all of the group; a group is so many
    (`each`) parts, one after the other on the devices along `over`."""
    count = largest.shape[at]
    every = jax.lax.all_gather(largest, over, axis=at, tiled=True)
    groups = every.reshape(*every.shape[:at], -1, each, *every.shape[at + 1 :]).max(at + 1)
    return jax.lax.dynamic_slice_in_dim(jnp.repeat(groups, each, at), jax.lax.axis_index(over) * count, count, at)


def _rounded(xp: Any, split: Any, scale: Any, limit: int) -> Any:
    """The nearest whole numbers, of two that are as near the even one, by numpy or jax.numpy (`xp`). A quotient may be
    off in its last bit, by which the nearest of two is not told near the middle between them; what is left is exact, as
    numbers of 8 bits times a scale of 8 are."""
    step = xp.where(scale == 0, np.float32(1), scale)
    near = xp.round(split / step)
    left, half = split - near * step, step * np.float32(0.5)
    odd = near - 2 * xp.floor(near * np.float32(0.5)) == 1
    up = (left > half) | ((left == half) & odd)
    down = (left < -half) | ((left == -half) & odd)
    return xp.clip(near + up.astype(np.float32) - down.astype(np.float32), -limit, limit)


def _parts(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)))
