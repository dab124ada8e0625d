"""Bytes that one device sends in a training step, by mesh axes, as each parallelism's algorithm demands: the least that
a compiled program can be expected to send. Nothing is compiled here; what XLA makes of a program is hlo/bill.py's.

Bytes are counted by the ring algorithm as there: of n devices, a gather or a scatter of an array sends (n-1)/n of it,
an all-reduce twice that, a permutation the array.
"""

import dataclasses
from collections.abc import Iterator

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig
from shardlm.mesh import MeshSpec
from shardlm.ops.expert_dispatch import choose as choose_exchange
from shardlm.plan.sketch import Sketch

WEIGHT, MASTER = 2, 4  # bytes of a number in use (16 bits) and at rest (float32)


@dataclasses.dataclass(frozen=True)
class Sent:
    """axes over which, why, and how many bytes in a step."""

    axes: tuple[str, ...]
    why: str
    nbytes: float


def training_traffic(sketch: Sketch) -> list[Sent]:
    """All that a step of a 16-bit run has to send, but for scalars, norms and integers."""
    found = [*_weights(sketch), *_layers(sketch)]
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


def _weights(sketch: Sketch) -> Iterator[Sent]:
    """Gathers, scatters and reductions of weights and their gradients."""
    rules, mesh, config = sketch.rules, sketch.mesh, sketch.config
    forward = 2 if config.remat in ("full", "offload", "dots", "names") else 1  # weights are gathered again
    for weight in sketch.weights:
        if not weight.is_matrix:
            continue
        rest, use = set(weight.axes(rules.rest)), set(weight.axes(rules.use))
        gathered = _ordered(mesh, rest - use - {"pipeline"})
        staged = sketch.staged(weight)
        stages = mesh.pipeline if staged else 1
        numbers = weight.numbers(rules.use) / stages  # of one device while in use
        if gathered:
            times = sketch.passes * ((forward if weight.stacked else 1) + 1)  # a gradient is scattered once a pass
            once = numbers * WEIGHT * _share(mesh.size(*gathered))
            yield Sent(gathered, f"{weight.path}: gathers and scatters", once * times)
        if staged:
            moved = numbers * MASTER * _share(stages) / mesh.size(*gathered)
            yield Sent(("pipeline",), f"{weight.path}: to its stage and back", 2 * moved)
        seen = {"data", "fsdp", "context", "expert"} - set(gathered) - use
        copies = _ordered(mesh, seen if config.local_sgd.inner_steps == 0 else seen - {"data"})
        if copies:
            held = numbers * MASTER / mesh.size(*gathered)
            yield Sent(copies, f"{weight.path}: sum of gradients", 2 * held * _share(mesh.size(*copies)))


def _ordered(mesh: MeshSpec, axes: set[str]) -> tuple[str, ...]:
    return tuple(axis for axis, size in mesh.sizes().items() if axis in axes and size > 1)


def _layers(sketch: Sketch) -> Iterator[Sent]:
    """Activations, of all layers and microbatches."""
    mesh, config, shape = sketch.mesh, sketch.config, sketch.shape
    stream = sketch.tokens * shape.embed_dim * WEIGHT  # of one microbatch where the sequence is whole over tensor
    layers = sketch.passes / mesh.pipeline  # passes of each layer through one device
    again = 1 if config.remat == "full" else 0
    if mesh.tensor > 1:
        # Two layers, each a gather and a scatter: forward, backward; again all but the last scatter.
        times = 8 + 3 * again
        yield Sent(("tensor",), "the sequence", times * stream * _share(mesh.tensor) * layers * shape.cached_layers)
    if mesh.pipeline > 1:
        edges = (mesh.pipeline * config.pipeline.laps - 1) / mesh.pipeline
        yield Sent(("pipeline",), "between stages", 2 * edges * sketch.passes * stream / mesh.tensor)
    for block in shape.all_blocks():
        if isinstance(block.mlp, MoeConfig) and mesh.expert > 1:
            yield _experts(block.mlp, stream / mesh.tensor, mesh.expert, layers, again)
        if mesh.context > 1:
            yield from _context(sketch, block.attention, layers, again)


def _experts(moe: MoeConfig, stream: float, ranks: int, layers: float, again: int) -> Sent:
    """To the experts and back: forward, backward and again."""
    if choose_exchange(ranks, moe.top_k) == "gather":
        return Sent(("expert",), "tokens gathered", (4 + 2 * again) * stream * (ranks - 1) * layers)
    # The results of the experts need not come back a second time.
    return Sent(("expert",), "tokens sent", (4 + again) * stream * moe.top_k * _share(ranks) * layers)


def _context(sketch: Sketch, attention: AttentionConfig | MlaConfig, layers: float, again: int) -> Iterator[Sent]:
    mesh, tokens = sketch.mesh, sketch.tokens
    heads, kv = attention.num_heads / mesh.tensor, max(1, attention.num_kv_heads / mesh.tensor)
    if sketch.execution.context_attention == "ring":
        keys_values = tokens * 2 * kv * attention.head_dim * WEIGHT
        moves = mesh.context - 1
        # Keys and values go round forward, again, and backward beside their float32 gradients, which also come home.
        times = (1 + again + 1) * moves + 2 * (moves + 1)
        yield Sent(("context",), "keys, values and their gradients", times * keys_values * layers)
    else:
        moved = tokens * (2 * heads + 2 * kv) * attention.head_dim * WEIGHT * _share(mesh.context)
        yield Sent(("context",), "heads for tokens", (2 + again) * moved * layers)
