"""Mamba 2 (layers/mamba.py) as formulas see it: linear attention that takes nothing back, by kernels on GPUs
(ops/summed_kernel.py, summed_back_kernel.py) or by XLA's products (ops/summed_states.py). What is moved and held
besides is read from programs compiled for H100s (jax 0.10.2)."""

import functools
from collections.abc import Callable, Iterator

from shardlm.ops.summed_sizes import ROWS, parts_of
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op

WIDE = 4  # bytes of a float32
# Of bytes of values, and of keys and queries, how often they are moved, and in how many kernels (6 layers of 32 heads
# of [128, 64] in 1 and in 8 groups, 2,048 tokens: 123 and 226 MiB of a layer forward, 336 and 467 for gradients).
FORWARD, BACKWARD = (13.5, 14.7), (40, 19)
KERNELS, KERNELS_BACK = 17, 37
# The same where nothing is convolved and decays are constants: what two programs of MiniMax-01's layers (3 of 16 heads
# of [128, 128] in as many groups, 4,096 tokens) have beyond all else that is foreseen of them.
PLAIN, PLAIN_BACK = (6, 4), (14, 7)
# Arrays of all that goes through convolutions, while layers are done backwards (of the same, and of 16 layers); and of
# values and of keys and queries, that are kept without recomputation.
AT_WORK, HELD = 10.5, (22.7, 7)


def by_xla(rule, op: Callable[..., Op]) -> Iterator[Op]:
    """Products of a `rule` (linear_attention.Rule). For gradients what is seen and states are made again."""
    C, H, V, s = rule.C, rule.H, rule.V, rule.squares
    yield op(rule, "keys and queries by keys", rule.of_keys, (C, C, H), gradients=3)
    yield op(rule, "states", s, (H, V, C), narrow=True, gradients=3)
    yield op(rule, "reads", s, (C, V, H), gradients=2)
    yield op(rule, "sums", s, (C, V, C), gradients=2)


def by_kernels(rule) -> Iterator[Op]:
    """Of which states are made again for gradients, and go back by one alike; and what three kernels make from them of
    values, of queries and of keys. As hlo/mamba_flops.py counts them: whole pieces of a chunk."""
    H, V, pairs = rule.H, rule.V, (rule.C + ROWS) / 2
    tokens, keys = rule.C * rule.squares, rule.C * rule.of_keys  # of each head
    size, rates = rule.itemsize, WIDE * tokens
    own = functools.partial(_op, rule)
    parts = parts_of(round(rule.squares / rule.of_keys))
    of_keys, of_values = size * keys * H, size * tokens * V
    yield own("states", tokens * H * V, of_keys + of_values + rates + rule.states, gradients=2, anew=False)
    forward = tokens * (H * V + pairs * (H + V))
    back = tokens * (3 * H * V + pairs * (H + 4 * V)) + 3 * keys * parts * pairs * H
    yield own("outputs", forward, 2 * (of_keys + of_values) + rule.states + 5 * rates, gradients=back / forward)


def _op(rule, what: str, macs: float, moved: float, **how) -> Op:
    dims = (rule.C, rule.V, rule.H)
    return Op("linear attention", what, "matmul", 2.0 * macs, moved, 1, dims=dims, both=True, **how)


def held(rule, narrow: float) -> float:
    """Bytes that a layer without recomputation keeps besides its projections and its output."""
    values = rule.itemsize * rule.C * rule.squares * rule.V
    return HELD[0] * values + HELD[1] * (narrow - values)


def at_work(narrow: float) -> float:
    """Bytes of each layer of a pattern while one is done backwards: what gradients of projections are made from."""
    return AT_WORK * narrow


def moved(rule, narrow: float) -> Op:
    """What moves memory besides the kernels, forward and for gradients, of convolutions of `narrow` bytes, values' and
    keys' and queries': these, decays, the gate and the norm behind it."""
    values = rule.itemsize * rule.C * rule.squares * rule.V
    keys = narrow - values
    forward, backward = (FORWARD, BACKWARD) if rule.convolves else (PLAIN, PLAIN_BACK)
    there, back = forward[0] * values + forward[1] * keys, backward[0] * values + backward[1] * keys
    kernels = {"host": (KERNELS - 1) * GAP, "gradient_host": (KERNELS_BACK - 1) * GAP}
    what = "convolutions, decays, gate and norm"
    return Op("linear attention", what, "memory", 0, there, 1, gradient_bytes=back, **kernels)
