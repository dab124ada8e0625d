"""Prompts of the gated delta rule as formulas see them: forward, by kernels (ops/gated_delta_kernel.py). What is moved
besides is read from programs compiled for H100s (jax 0.10.2)."""

from collections.abc import Iterator

from shardlm.ops.gated_delta_sizes import has_kernels, macs_of_changes, macs_of_states
from shardlm.ops.summed_sizes import ROWS
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op

WIDE = 4  # bytes of a float32
# Of bytes of values, and of keys and queries, how often they are moved, and in how many kernels (8,192 tokens of 32
# heads of 128 with 16 and with 8 heads of keys: 666 and 506 MiB).
MOVED, KERNELS = (5.4, 5.0), 26


def fits(rule) -> bool:
    """Whether there are kernels for a `rule` (linear_attention.Rule)."""
    takes_back = not rule.summed and not rule.by_channel and not rule.on_cpu
    return takes_back and has_kernels(rule.C, rule.H, rule.V, rule.itemsize)


def operations(rule, narrow: float, turn: float) -> Iterator[Op]:
    """Of convolutions of `narrow` bytes, where states wait `turn` seconds a chunk for each other."""
    C, H, V, size = rule.C, rule.H, rule.V, rule.itemsize
    tokens, keys = rule.C * rule.squares, size * rule.C * rule.of_keys * H  # of each head; bytes of keys
    values, by_keys, rates = size * tokens * V, size * tokens * H, WIDE * tokens
    macs = tokens * macs_of_changes(H, V)
    yield _op(rule, "changes of an empty state", macs, keys + 2 * values + by_keys + 4 * rates)
    states = rule.states + 2 * WIDE * rule.states / size / rule.chunks  # the first and the last are float32
    macs = tokens * macs_of_states(H, V)
    yield _op(rule, "states", macs, keys + 2 * values + by_keys + rates + states, host=rule.chunks * turn)
    macs = tokens * (H * V + ROWS * (H + V))
    yield _op(rule, "outputs", macs, 2 * keys + 2 * values + rule.states + 5 * rates)
    own = size * C * rule.squares * V
    moved = MOVED[0] * own + MOVED[1] * (narrow - own)
    yield Op("linear attention", "convolutions and decays", "memory", 0, moved, 1, host=(KERNELS - 1) * GAP)


def _op(rule, what: str, macs: float, moved: float, host: float = 0.0) -> Op:
    dims = (rule.C, rule.V, rule.H)
    return Op("linear attention", what, "matmul", 2.0 * macs, moved, 1, dims=dims, both=True, host=host)
