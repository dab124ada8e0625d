"""Attention with linear biases (ALiBi, https://arxiv.org/abs/2108.12409): scores grow with the key's position, by a
slope of each head. Softmax does not see what all keys of a query have in common, so that growing with the key's
position is falling with its distance, as the paper has it.

Keys carry their position in a few dimensions more, and queries their head's slope: the product adds the bias, and every
implementation of attention has it without knowing. Positions are in three parts of 8 bits and slopes in two, so that
bfloat16 loses nothing of the first (float16 of those below 65,536) and 2**-17 of the second.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

DIMS = 8  # of which 6 are used: kernels want multiples of 8
PART = 256  # what 8 bits count to


def slopes(num_heads: int) -> tuple[float, ...]:
    """Of the paper's section 3: a geometric sequence; where heads are no power of two, those of the power below, and
    then every other one of the power above (as BLOOM and Falcon have them)."""
    below = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    more = [2 ** (-4 * (2 * i + 1) / below) for i in range(num_heads - below)]
    return tuple(first + more)


def slopes_above(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """As MPT has them: of the power of two above, every other one first, the rest behind. The last is 2**-largest."""
    above = 2 ** math.ceil(math.log2(num_heads))
    each = [2 ** (-largest * (i + 1) / above) for i in range(above)]
    return tuple(each if above == num_heads else (each[1::2] + each[::2])[:num_heads])


def with_slopes(q: jax.Array, of_heads: tuple[float, ...], scale: float) -> jax.Array:
    """Queries [B, T, N, H] -> [B, T, N, H + DIMS], whose product with keys is multiplied by `scale`."""
    grown = np.float32(of_heads) / np.float32(scale)
    coarse = grown.astype(q.dtype)
    fine = (grown - coarse.astype(np.float32)).astype(q.dtype)  # here, where XLA does not take both roundings away
    return _beside(q, jnp.asarray(np.stack([coarse, fine] * 3, axis=-1))[None, None])


def with_positions(k: jax.Array, positions: jax.Array) -> jax.Array:
    """Keys [B, T, K, H] -> [B, T, K, H + DIMS] at positions int32 [B, T]."""
    below = [positions % PART, positions % PART**2, positions]
    each = [below[0], below[1] - below[0], below[2] - below[1]]
    parts = jnp.stack([part for part in each for _ in range(2)], axis=-1).astype(k.dtype)
    return _beside(k, parts[:, :, None])


def _beside(a: jax.Array, more: jax.Array) -> jax.Array:
    """a [B, T, N, H] with `more`, as large or 1 where it is the same for all, [*, *, *, 6], and zeros behind."""
    spec = jax.typeof(a).sharding.spec
    same = (size == whole for size, whole in zip(more.shape[:3], a.shape[:3], strict=True))
    own = jax.P(*(axes if kept else None for axes, kept in zip(spec, same, strict=False)))
    more = jax.reshard(jnp.pad(more, [(0, 0)] * 3 + [(0, DIMS - more.shape[-1])]), own)
    wide = jnp.broadcast_to(more, (*a.shape[:3], DIMS), out_sharding=spec)
    return jnp.concatenate([a, wide], axis=-1)
