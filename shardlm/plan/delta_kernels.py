"""The gated delta rule by kernels (ops/gated_delta_kernel.py, gated_delta_back_kernel.py) as formulas see it: prompts,
and training steps. What is moved and held besides is read from programs compiled for H100s (jax 0.10.2)."""

import dataclasses
from collections.abc import Iterator

from shardlm.ops.gated_delta_sizes import has_kernels, macs_back, macs_of_changes, macs_of_outputs, macs_of_states
from shardlm.ops.summed_sizes import ROWS
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op

WIDE = 4  # bytes of a float32
# Of bytes of values, and of keys and queries, how often they are moved, and in how many kernels (8,192 tokens of 32
# heads of 128 with 16 and with 8 heads of keys: 666 and 506 MiB forward, 1,458 and 1,194 for gradients, gate and norm
# with it).
MOVED, KERNELS = (5.4, 5.0), 26
MOVED_BACK, KERNELS_BACK = (14.5, 8.2), 37
# Of bytes that go through convolutions, as many arrays are there of each layer of a pattern that was made again, gates
# and outputs with them; and are kept without recomputation.
AT_WORK, HELD = 3.5, 11
# Seconds in which gradients go back by a chunk: two products wait for each other where forward one does. An estimate
# without a source, as TURN (linear_attention.py) is.
BACK = 1.5


def fits(rule) -> bool:
    """Whether there are kernels for a `rule` (linear_attention.Rule)."""
    takes_back = not rule.summed and not rule.by_channel and not rule.on_cpu
    return takes_back and has_kernels(rule.C, rule.H, rule.V, rule.itemsize)


def operations(rule, narrow: float, turn: float) -> Iterator[Op]:
    """Of prompts, with convolutions of `narrow` bytes, where states wait `turn` seconds a chunk for each other."""
    for op in forward(rule):
        yield dataclasses.replace(op, host=rule.chunks * turn) if op.what == "states" else op
    yield moved(rule, narrow)


def forward(rule) -> Iterator[Op]:
    """Of a forward pass alone."""
    H, V, size = rule.H, rule.V, rule.itemsize
    tokens, keys = rule.C * rule.squares, size * rule.C * rule.of_keys * H  # of each head; bytes of keys
    values, by_keys, rates = size * tokens * V, size * tokens * H, WIDE * tokens
    macs = tokens * macs_of_changes(H, V)
    yield _op(rule, "changes of an empty state", macs, keys + 2 * values + by_keys + 4 * rates)
    states = rule.states + 2 * WIDE * rule.states / size / rule.chunks  # the first and the last are float32
    macs = tokens * macs_of_states(H, V)
    yield _op(rule, "states", macs, keys + 2 * values + by_keys + rates + states)
    yield _op(rule, "outputs", tokens * macs_of_outputs(H, V), 2 * keys + 2 * values + rule.states + 5 * rates)


def products(rule) -> Iterator[Op]:
    """Of training: of the kernels for gradients that which carries states beside the one that does forward, the others
    beside that of outputs, as many of its executions as they have FLOPs. With recomputation all is made again."""
    H, V, back = rule.H, rule.V, macs_back(rule.H, rule.V)
    tokens, keys = rule.C * rule.squares, rule.C * rule.of_keys
    macs = {name: tokens * of_values + keys * of_keys for name, (of_values, of_keys) in back.items()}
    states = macs.pop("states_back") / (tokens * macs_of_states(H, V))
    gradients = {"states": states, "outputs": sum(macs.values()) / (tokens * macs_of_outputs(H, V))}
    for op in forward(rule):
        yield dataclasses.replace(op, gradients=gradients.get(op.what, 0.0))


def moved(rule, narrow: float) -> Op:
    """What moves memory besides the kernels, of convolutions of `narrow` bytes, values' and keys' and queries': these,
    lengths, decays, and the norm and gate behind."""
    values = rule.itemsize * rule.C * rule.squares * rule.V
    there, back = (own * values + others * (narrow - values) for own, others in (MOVED, MOVED_BACK))
    kernels = {"host": (KERNELS - 1) * GAP, "gradient_host": (KERNELS_BACK - 1) * GAP}
    return Op("linear attention", "convolutions and decays", "memory", 0, there, 1, gradient_bytes=back, **kernels)


def turns(rule, turn: float) -> Op:
    """What states wait for each other in training."""
    seconds = {"host": rule.chunks * turn, "gradient_host": BACK * rule.chunks * turn}
    return Op("linear attention", "from chunk to chunk", "memory", 0, 0, 1, gradient_bytes=0, **seconds)


def held(rule, narrow: float) -> float:
    """Bytes that a layer without recomputation keeps besides its projections and its output, of convolutions of
    `narrow` bytes."""
    return _kept(rule) + HELD * narrow


def at_work(rule, narrow: float) -> float:
    """Bytes of each layer of a pattern, made again before one is done backwards."""
    return _kept(rule) + AT_WORK * narrow


def _kept(rule) -> float:
    """For gradients, beside the arguments (gated_delta_kernel.Kept)."""
    return rule.itemsize * rule.C * rule.squares * (ROWS + rule.V) + rule.states


def _op(rule, what: str, macs: float, nbytes: float) -> Op:
    dims = (rule.C, rule.V, rule.H)
    return Op("linear attention", what, "matmul", 2.0 * macs, nbytes, 1, dims=dims, both=True)
