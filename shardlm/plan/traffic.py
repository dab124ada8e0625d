"""Bytes that one device sends in a training step, by mesh axes, as each parallelism's algorithm demands: the least that
a compiled program can be expected to send. Nothing is compiled here; what XLA makes of a program is hlo/bill.py's.

Bytes are counted by the ring algorithm as there: of n devices, a gather or a scatter of an array sends (n-1)/n of it,
an all-reduce twice that, a permutation the array.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from shardlm.layers.moe import MoeConfig
from shardlm.ops.expert_dispatch import choose as choose_exchange

WEIGHT, MASTER = 2, 4  # bytes of a number in use (16 bits) and at rest (float32)


@dataclasses.dataclass(frozen=True)
class Sent:
    """axes over which, why, and how many bytes in a step."""

    axes: tuple[str, ...]
    why: str
    nbytes: float


def training_traffic(program: Any) -> list[Sent]:
    """All that a step of a 16-bit run has to send, but for scalars, norms and integers. `program` is a
    train/program.py Program, which this wing does not import."""
    found = [*_weights(program), *_layers(program)]
    return [sent for sent in found if sent.nbytes and sent.axes]


def by_axes(found: list[Sent]) -> dict[str, float]:
    """Axes joined by "+" -> bytes."""
    totals: dict[str, float] = {}
    for sent in found:
        key = "+".join(sent.axes)
        totals[key] = totals.get(key, 0) + sent.nbytes
    return totals


def _share(n: int) -> float:
    return (n - 1) / n


def _weights(program: Any) -> Iterator[Sent]:
    """Gathers, scatters and reductions of weights and their gradients."""
    rules, mesh, config = program.rules, program.rules.mesh, program.config
    segment = program.model.config.pipelined_segment()
    forward = 2 if config.remat in ("full", "offload", "dots", "names") else 1  # weights are gathered again
    for (path, leaf), (stack, names) in zip(
        jax.tree_util.tree_flatten_with_path(program.model.shapes)[0],
        jax.tree.leaves(program.model.names, is_leaf=lambda x: isinstance(x, tuple)),
        strict=True,
    ):
        if len(names) < 2:
            continue  # norms, biases
        rest, use = ({axis for name in names for axis in table.axes(name)} for table in (rules.rest, rules.use))
        gathered = _ordered(mesh, rest - use - {"pipeline"})
        staged = mesh.pipeline > 1 and path[0].key == "segments" and path[1].key == segment
        stages = mesh.pipeline if staged else 1
        numbers = math.prod(leaf.shape) / mesh.size(*use) / stages  # of one device while in use
        passes = config.train.accumulation
        where = ".".join(str(key.key) for key in path)
        in_loop = bool(stack)
        if gathered:
            times = passes * ((forward if in_loop else 1) + 1)  # a gradient is scattered once for each pass
            once = numbers * WEIGHT * _share(mesh.size(*gathered))
            yield Sent(gathered, f"{where}: gathers and scatters", once * times)
        if staged:
            moved = numbers * MASTER * _share(stages) / mesh.size(*gathered)
            yield Sent(("pipeline",), f"{where}: to its stage and back", 2 * moved)
        seen = {"data", "fsdp", "context", "expert"} - set(gathered) - use
        copies = _ordered(mesh, seen if config.local_sgd.inner_steps == 0 else seen - {"data"})
        if copies:
            held = numbers * MASTER / mesh.size(*gathered)
            yield Sent(copies, f"{where}: sum of gradients", 2 * held * _share(mesh.size(*copies)))


def _ordered(mesh: Any, axes: set[str]) -> tuple[str, ...]:
    return tuple(axis for axis, size in mesh.sizes().items() if axis in axes and size > 1)


def _layers(program: Any) -> Iterator[Sent]:
    """Activations, of all layers and microbatches."""
    mesh, config, shape = program.rules.mesh, program.config, program.model.config
    train = config.train
    rows = train.global_batch / train.accumulation / mesh.size("data", "fsdp", "expert")
    tokens = rows * train.seq_len / mesh.context
    stream = tokens * shape.embed_dim * WEIGHT  # of one microbatch where the sequence is whole over tensor
    layers = train.accumulation / mesh.pipeline  # passes of each layer through one device
    again = 1 if config.remat == "full" else 0
    if mesh.tensor > 1:
        # Two layers, each a gather and a scatter: forward, backward; again all but the last scatter.
        times = 8 + 3 * again
        yield Sent(("tensor",), "the sequence", times * stream * _share(mesh.tensor) * layers * shape.cached_layers)
    if mesh.pipeline > 1:
        laps = config.pipeline.laps
        edges = (mesh.pipeline * laps - 1) / mesh.pipeline
        yield Sent(("pipeline",), "between stages", 2 * edges * train.accumulation * stream / mesh.tensor)
    for block in shape.all_blocks():
        if isinstance(block.mlp, MoeConfig) and mesh.expert > 1:
            yield _experts(block.mlp, stream / mesh.tensor, mesh.expert, layers, again)
        if mesh.context > 1:
            yield from _context(program, block.attention, tokens, layers, again)


def _experts(moe: MoeConfig, stream: float, ranks: int, layers: float, again: int) -> Sent:
    """To the experts and back: forward, backward and again."""
    if choose_exchange(ranks, moe.top_k) == "gather":
        return Sent(("expert",), "tokens gathered", (4 + 2 * again) * stream * (ranks - 1) * layers)
    # The results of the experts need not come back a second time.
    return Sent(("expert",), "tokens sent", (4 + again) * stream * moe.top_k * _share(ranks) * layers)


def _context(program: Any, attention: Any, tokens: float, layers: float, again: int) -> Iterator[Sent]:
    mesh = program.rules.mesh
    heads, kv = attention.num_heads / mesh.tensor, max(1, attention.num_kv_heads / mesh.tensor)
    if program.model.execution.context_attention == "ring":
        keys_values = tokens * 2 * kv * attention.head_dim * WEIGHT
        moves = mesh.context - 1
        # Keys and values go round forward, again, and backward beside their float32 gradients, which also come home.
        times = (1 + again + 1) * moves + 2 * (moves + 1)
        yield Sent(("context",), "keys, values and their gradients", times * keys_values * layers)
    else:
        moved = tokens * (2 * heads + 2 * kv) * attention.head_dim * WEIGHT * _share(mesh.context)
        yield Sent(("context",), "heads for tokens", (2 + again) * moved * layers)
