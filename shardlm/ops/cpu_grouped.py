"""Products of rows with weights in few bits, for a CPU: weights are read as they are held, a block at a time or all of
it, so that nothing of a weight's size in float32 is written.

Made anew as a whole, 16.8 M numbers [2048, 8192] are written and read again in float32: 32 ms beside one row. The same,
ms of two cores (Intel Xeon, Sapphire Rapids) by rows x, weights in groups of 64, of 32 (int4) or 128 (fp4):

              1     2     4     8    32   128
    float32   2.0   2.5   2.3   2.8   5.0  17.6   (ops/cpu_einsum.py)
    int8      1.0   1.9   3.4   6.0   9.1  21.2
    int4      0.9   1.6   3.0   5.4   9.3  23.2
    fp8       2.2   3.4   5.3   7.1  10.9  23.4
    fp4       1.4   2.7   4.7   5.8   9.6  23.1
"""

import jax
import jax.numpy as jnp

from shardlm.ops.grouped_matmul import block_rows, divisor
from shardlm.ops.grouped_weights import Grouped, Groups
from shardlm.ops.or_zero import or_zero

ROWS = 16  # of bytes that are added up at once for one row; 8 and 32 take up to a quarter longer
# Rows that are multiplied so: 8 took 7.9 ms of int4 and 10.5 of int8, by blocks 6.3 and 6.8; 4 of fp8 17 for 6.5.
FEW = {"int8": 4, "int4": 4, "fp8": 2, "fp4": 2}
# Numbers of a block, 8 MiB of float32, and how wide it is at most: both cores make a part of each. Blocks of 1 MiB are
# less of one core (6.6 ms for 8 rows of int8), but two wait for each other (9.1).
BLOCK, WIDTH = 2**21, 2**13
# By what each number of a byte is too large when it is made as below.
TOO_LARGE = {"int8": (1.0,), "fp8": (2.0**-8,), "int4": (2.0**28, 16.0), "fp4": (2.0**-14, 2.0**-14)}


def looped(x: jax.Array, held: Grouped, groups: Groups) -> jax.Array:
    """x [M, K] times a weight [K, F] in groups along K, on the arrays of one device: [M, F] in x's dtype, sums in
    float32."""
    return _product(x.astype(jnp.float32), held, groups, held.scale.shape[0], 0).astype(x.dtype)


def looped_experts(x: jax.Array, held: Grouped, group_sizes: jax.Array, groups: Groups) -> jax.Array:
    """The same of experts [E, K, F], of which each has group_sizes [E] rows of x [n, K], one after the other: [n, F], 0
    in rows beyond their sum. Experts without rows are not read."""
    (n, _), (E, count, F) = x.shape, held.scale.shape
    size = block_rows(n, E)  # of a turn
    held = Grouped(*(a if a is None else a.reshape(-1, F) for a in held))
    padded = jnp.pad(x.astype(jnp.float32), ((0, size), (0, 0)))
    turns = -(-group_sizes // size)
    ends, first = jnp.cumsum(turns), jnp.cumsum(group_sizes) - group_sizes

    def turn(t, y):
        expert = jnp.sum(ends <= t)
        at = first[expert] + (t - ends[expert] + turns[expert]) * size
        part = _product(jax.lax.dynamic_slice_in_dim(padded, at, size), held, groups, count, expert)
        return jax.lax.dynamic_update_slice_in_dim(y, part, at, 0)  # rows of the next expert are written again

    y = jax.lax.fori_loop(0, ends[-1], turn, jnp.zeros((n + size, F)))[:n]
    return or_zero(jnp.arange(n) < jnp.sum(group_sizes), y.astype(x.dtype))


def _as_bytes(values: jax.Array) -> jax.Array:
    """fp8 as int8, though by a copy of all of it: read as it is, each number was converted alone, which took 60 ms for
    4, and where a part of it is sliced XLA makes float16 of the whole first."""
    if values.dtype == jnp.int8:
        return values
    return jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(values, jnp.int8))


def _product(x: jax.Array, held: Grouped, groups: Groups, count: int, which) -> jax.Array:
    """Of float32, with one of several weights that lie below each other and have `count` groups along K each."""
    by = _by_rows if x.shape[0] <= FEW[groups.numbers] else _by_blocks
    # Numbers that depend on the weight alone XLA would make once for all turns of a loop of steps, and keep them.
    x, held = jax.lax.optimization_barrier((x, held._replace(values=_as_bytes(held.values))))
    return by(x, held, groups, count, which)


def _by_rows(x: jax.Array, held: Grouped, groups: Groups, count: int, which) -> jax.Array:
    """For few rows: the numbers of a row of bytes, neighbours of which are neighbours of the result, times one of x. So
    some rows are added up in one operation, of which all cores do a part, and what they make by a product. (A loop over
    them took as much of one core, and did not gain from a second.)"""
    (M, K), F, halves = x.shape, held.scale.shape[1], groups.a_byte
    step = divisor(K // count // halves, ROWS)
    cut = K // count // halves // step  # of each group
    split = x.reshape(M, count, halves, cut, step).swapaxes(2, 3)
    each = (split / jnp.asarray(TOO_LARGE[groups.numbers])[:, None]).reshape(M, count * cut, halves, step)
    rows = jax.lax.dynamic_slice_in_dim(held.values, which * count * cut * step, count * cut * step)
    rows = rows.reshape(count * cut, step, F)
    scale, zero = (_groups(a, which * count, count, 0, F) for a in (held.scale, held.zero))
    parts = [jnp.zeros((count * cut, F))] * M
    for j in range(step):
        for half, numbers in enumerate(_made(rows[:, j], groups)):
            parts = [part + each[m, :, half, j, None] * numbers for m, part in enumerate(parts)]
    parts = [part.reshape(count, cut, F) for part in parts]
    if zero is not None:
        parts = [part - one.sum((2, 3))[..., None] * zero[:, None] for part, one in zip(parts, split, strict=True)]
    ones = jnp.ones((1, count * cut))
    return jnp.concatenate([ones @ (part * scale[:, None]).reshape(count * cut, F) for part in parts])


def _by_blocks(x: jax.Array, held: Grouped, groups: Groups, count: int, which) -> jax.Array:
    """A product for each block and half of its bytes: put together, the halves of int4 took 48 ms for 8."""
    (M, K), F, halves = x.shape, held.scale.shape[1], groups.a_byte
    of_group = K // count // halves  # rows of bytes
    width = divisor(F, WIDTH)
    # Two blocks at least: without a loop XLA makes the numbers of all weights of a program first.
    several = divisor(count, max(1, min(BLOCK // width // (K // count), count // 2)))
    rows = several * of_group
    split = x.reshape(M, count, halves, of_group).transpose(2, 0, 1, 3).reshape(halves, M, count * of_group)

    def columns(c, y):
        def block(k, part):
            xs = jax.lax.dynamic_slice_in_dim(split, k * rows, rows, 2)
            k += which * (count // several)
            held_rows = jax.lax.dynamic_slice(held.values, (k * rows, c * width), (rows, width))
            scale, zero = (_groups(a, k * several, several, c * width, width) for a in (held.scale, held.zero))
            made = _made(held_rows.reshape(several, of_group, width), groups)
            for half, (numbers, too_large) in enumerate(zip(made, TOO_LARGE[groups.numbers], strict=True)):
                numbers = numbers / too_large if zero is None else numbers / too_large - zero[:, None]
                part += xs[half] @ (numbers * scale[:, None]).reshape(rows, width)
            return part

        part = jax.lax.fori_loop(0, count // several, block, jnp.zeros((M, width)))
        return jax.lax.dynamic_update_slice_in_dim(y, part, c * width, 1)

    return jax.lax.fori_loop(0, F // width, columns, jnp.zeros((M, F)))


def _groups(a: jax.Array | None, first, count: int, column, width: int) -> jax.Array | None:
    """Scales or zeros of some groups and columns, in float32."""
    return None if a is None else jax.lax.dynamic_slice(a, (first, column), (count, width)).astype(jnp.float32)


def _made(held: jax.Array, groups: Groups) -> list[jax.Array]:
    """The numbers of bytes (int8), those in the low bits first, in float32 and too large by TOO_LARGE."""
    if groups.numbers == "int8":
        return [held.astype(jnp.float32)]
    if groups.numbers == "int4":  # where their bits are: the sign is that of the word
        word = held.astype(jnp.int32)
        return [(word << 28).astype(jnp.float32), (word & -16).astype(jnp.float32)]
    # As float16, whose exponent is wider: those too small to be normal are numbers to what makes float32 of them. By
    # float32's own bits a row of fp8 took 1.1 times as long, one of fp4 twice.
    word, sign = held.astype(jnp.int16), jnp.int16(-0x8000)
    if groups.numbers == "fp8":
        return [_half(word << 7 & jnp.int16(-0x4001))]
    return [_half((word << 12 & sign) | (word << 9 & 0x0E00)), _half((word << 8 & sign) | (word << 5 & 0x0E00))]


def _half(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
