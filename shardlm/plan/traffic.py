"""Bytes that one device sends in a training step, by mesh axes, as each parallelism's algorithm demands: the least that
a compiled program can be expected to send. Nothing is compiled here; what XLA makes of a program is hlo/bill.py's.

Bytes are counted by the ring algorithm as there: of n devices, a gather or a scatter of an array sends (n-1)/n of it,
an all-reduce twice that, a permutation the array.
"""

import dataclasses
import math
from collections.abc import Iterator

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig, dispatch_of
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.mesh import AXES, MeshSpec
from shardlm.ops.expert_dispatch import Exchange
from shardlm.plan.changed import changed
from shardlm.plan.compressed_attention import numbers
from shardlm.plan.linear_attention import convolved
from shardlm.plan.short_convs import tokens_before
from shardlm.plan.sketch import Sketch

WEIGHT, MASTER = 2, 4  # bytes of a number in use (16 bits) and at rest (float32)
GATHER, SCATTER, REDUCE, PERMUTE = "all-gather", "reduce-scatter", "all-reduce", "collective-permute"
RAGGED = "ragged-all-to-all"


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one device sends in a step for one reason.

    axes    over which
    why     what is moved
    nbytes  in a step, for work that is useful
    kind    the collective, as hlo/collectives.py names it; of gathers and scatters together the gather
    count   how often in a step, arrays that XLA may combine counted apart
    beside  whether kernels of other layers run meanwhile: weights and gradients, which no layer waits for
    idle_bytes  besides, by stages that fill and drain, and for their empty slots
    host    seconds of the host for each, which nothing hides: other systems' (systems.py); XLA's programs need none
    update  whether the optimizer does so, when the layers are done: only its own kernels run beside it
    shown   how many times as much a compiled program shows: of a ragged exchange the buffers, which hold the worst
            case, and a branch of a conditional as if it were always taken
    """

    axes: tuple[str, ...]
    why: str
    nbytes: float
    kind: str = "all-gather"
    count: float = 1
    beside: bool = False
    idle_bytes: float = 0.0
    shown: float = 1.0
    host: float = 0.0
    update: bool = False

    @property
    def shown_bytes(self) -> float:
        """As a compiled program shows it."""
        return (self.nbytes + self.idle_bytes) * self.shown


def idling(sent: Sent, idle: float) -> Sent:
    """The same, of which the share `idle` does no useful work."""
    if not idle:
        return sent
    useful = sent.nbytes * (1 - idle)
    return changed(sent, nbytes=useful, idle_bytes=sent.nbytes - useful, count=sent.count * (1 - idle))


def training_traffic(sketch: Sketch, exchange: Exchange | None = None) -> list[Sent]:
    """All that a step has to send, but for scalars, norms and integers. `exchange` reaches experts that others hold;
    None: as expert_dispatch.py chooses."""
    found = [*_weights(sketch), *_layers(sketch, exchange)]
    return [sent for sent in found if sent.nbytes and sent.axes]


def by_axes(found: list[Sent]) -> dict[str, float]:
    """Axes joined by "+" -> bytes."""
    totals: dict[str, float] = {}
    for sent in found:
        key = "+".join(sent.axes)
        totals[key] = totals.get(key, 0) + sent.nbytes
    return totals


def share(n: int) -> float:
    """Of n devices' array, what each sends in a gather or a scatter."""
    return (n - 1) / n


def _weights(sketch: Sketch) -> Iterator[Sent]:
    """Gathers, scatters and reductions of weights and their gradients."""
    rules, mesh, config = sketch.rules, sketch.mesh, sketch.config
    for weight in sketch.weights:
        if not weight.is_matrix:
            continue
        rest, use = set(weight.axes(rules.rest)), set(weight.axes(rules.use))
        gathered = ordered(mesh, rest - use - {"pipeline"})
        staged = sketch.staged(weight)
        stages = mesh.pipeline if staged else 1
        numbers = weight.numbers(rules.use) / stages  # of one device while in use
        if gathered:
            times = sketch.passes * (3 if weight.stacked else 2)  # forward, of layers again, and its gradient
            once = numbers * sketch.itemsize * share(mesh.size(*gathered))
            repeats = math.prod(weight.shape[: weight.stacked]) / stages
            yield Sent(
                gathered,
                f"{weight.path}: gathers",
                once * (times - sketch.passes),
                GATHER,
                repeats * (times - sketch.passes),
                beside=True,
            )
            yield Sent(
                gathered,
                f"{weight.path}: scatters",
                once * sketch.passes,
                SCATTER,
                repeats * sketch.passes,
                beside=True,
            )
        if staged:
            moved = numbers * MASTER * share(stages) / mesh.size(*gathered)
            yield Sent(("pipeline",), f"{weight.path}: to its stage and back", 2 * moved, "all-to-all", 2)
        seen = {"data", "fsdp", "context", "expert"} - set(gathered) - use
        copies = ordered(mesh, seen if config.local_sgd.inner_steps == 0 else seen - {"data"})
        if copies:
            held = numbers * MASTER / mesh.size(*gathered)
            total = 2 * held * share(mesh.size(*copies))
            yield Sent(copies, f"{weight.path}: sum of gradients", total, REDUCE, 1, beside=True)


def ordered(mesh: MeshSpec, axes: set[str]) -> tuple[str, ...]:
    """In the mesh's order, those larger than 1."""
    return tuple([axis for axis in AXES if axis in axes and getattr(mesh, axis) > 1])


def _layers(sketch: Sketch, exchange: Exchange | None) -> Iterator[Sent]:
    """Activations, of all layers and microbatches."""
    mesh, config, shape = sketch.mesh, sketch.config, sketch.shape
    # Of one microbatch where the sequence is whole over tensor.
    stream = sketch.tokens * shape.embed_dim * sketch.itemsize
    layers = sketch.passes / mesh.pipeline  # passes of each layer through one device
    again = 1 if config.remat == "full" else 0
    if mesh.tensor > 1:
        # Two layers, each a gather and a scatter: forward, backward; again all but the last scatter.
        each = stream * share(mesh.tensor) * layers * shape.cached_layers
        runs = layers * shape.cached_layers
        yield Sent(("tensor",), "the sequence: gathers", (4 + 2 * again) * each, GATHER, (4 + 2 * again) * runs)
        yield Sent(("tensor",), "the sequence: scatters", (4 + again) * each, SCATTER, (4 + again) * runs)
    if mesh.pipeline > 1:
        edges = (mesh.pipeline * config.pipeline.laps - 1) / mesh.pipeline
        moved = 2 * edges * sketch.passes
        yield Sent(("pipeline",), "between stages", moved * stream / mesh.tensor, PERMUTE, moved)
    for block in shape.all_blocks():
        if isinstance(block.mlp, MoeConfig) and mesh.expert > 1:
            chosen = exchange or dispatch_of(block.mlp, sketch.execution).exchange
            yield _experts(block.mlp, chosen, stream / mesh.tensor, mesh.expert, layers, again)
        if mesh.context > 1:
            for mixer in block.mixers:
                yield from _context(sketch, mixer, layers, again)


def _experts(moe: MoeConfig, exchange: Exchange, stream: float, ranks: int, layers: float, again: int) -> Sent:
    """To the experts and back: forward, backward and again."""
    times = 4 + again  # the results of the experts need not come back a second time
    if exchange == "gather":
        return Sent(("expert",), "tokens gathered", times * stream * (ranks - 1) * layers, GATHER, times * layers)
    sent = times * stream * moe.working * share(ranks) * layers
    return Sent(("expert",), "tokens sent", sent, RAGGED, times * layers)


def rows_for_heads(attention: DeltaNetConfig, sketch: Sketch) -> float:
    """Bytes that a device of `context` has of what linear attention exchanges by heads and back, whatever the heads:
    queries, keys, values and its output; decays, of heads or of each number of their keys, and rates in float32."""
    ways = sketch.mesh.size("tensor", "context")
    wide = convolved(attention, ways) + attention.num_heads * attention.value_dim
    rates = attention.num_heads * (1 + (attention.head_dim if attention.by_channel else 1))
    return sketch.tokens / sketch.mesh.tensor * (sketch.itemsize * wide + MASTER * rates)


def entries_gathered(attention: CompressedConfig, sketch: Sketch) -> tuple[float, float]:
    """(bytes, of these those that have gradients) of what one device of `context` gives all others, whatever the heads:
    its tokens' keys and what entries are made of, which are whole over tensor."""
    each, (of_loss, of_choice) = sketch.tokens * sketch.itemsize, numbers(attention, sketch)
    return each * (of_loss + of_choice), each * of_loss


def _context(
    sketch: Sketch, attention: AttentionConfig | MlaConfig | DeltaNetConfig, layers: float, again: int
) -> Iterator[Sent]:
    mesh, tokens = sketch.mesh, sketch.tokens
    if isinstance(attention, CompressedConfig):
        there, back = entries_gathered(attention, sketch)
        moved = ((1 + again) * there * layers, back * layers)
        for what, kind, nbytes, times in (("tokens", GATHER, moved[0], 1 + again), ("gradients", SCATTER, moved[1], 1)):
            yield Sent(("context",), f"keys and numbers of {what}", nbytes * (mesh.context - 1), kind, times * layers)
        return
    heads, kv = attention.num_heads / mesh.tensor, max(1, attention.num_kv_heads / mesh.tensor)
    width = attention.head_dim + attention.value_dim
    if isinstance(attention, ShortConvConfig):
        runs = (2 + again) * layers
        yield Sent(("context",), "tokens before", runs * tokens_before(attention, sketch), PERMUTE, runs)
        return
    if isinstance(attention, DeltaNetConfig):
        runs = (2 + again) * layers
        yield Sent(
            ("context",),
            "heads for tokens",
            runs * rows_for_heads(attention, sketch) * share(mesh.context),
            "all-to-all",
            runs,
        )
        return
    if sketch.execution.context_attention == "ring":
        keys_values = tokens * kv * width * sketch.itemsize
        moves = mesh.context - 1
        # Keys and values go round forward, again, and backward beside their float32 gradients, which also come home.
        times = (1 + again + 1) * moves + 2 * (moves + 1)
        sent = times * keys_values * layers
        yield Sent(("context",), "keys, values and their gradients", sent, PERMUTE, times * layers, beside=True)
    else:
        moved = tokens * (heads + kv) * width * sketch.itemsize * share(mesh.context)
        runs = (2 + again) * layers
        yield Sent(("context",), "heads for tokens", runs * moved, "all-to-all", runs)
