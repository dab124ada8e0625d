"""What our program sends of activations: between the devices of `tensor`, `context`, `expert` and `pipeline`. Weights
are program_traffic.py's."""

import dataclasses
import math
from collections.abc import Iterator

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig, dispatch_of
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.ops.ring_attention import stops
from shardlm.plan import sparse_attention as choosing
from shardlm.plan.beside import forward_activations
from shardlm.plan.compressed_attention import chooser_of, numbers
from shardlm.plan.short_convs import tokens_before
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import (
    GATHER,
    PERMUTE,
    RAGGED,
    REDUCE,
    SCATTER,
    Sent,
    entries_gathered,
    idling,
    ordered,
    rows_for_heads,
    share,
)
from shardlm.train.replicas import apart

EXCHANGE = "all-to-all"
WIDE = 4  # bytes of a float32
SEQUENCE, LOOKUP = "the head's sequence: gathers", "the lookup: sums"


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often one device runs a layer in a step, its rows being those of a microbatch.

    layers    runs that have a backward pass
    forward   forward passes of each run
    idle      share of the runs by stages that fill and drain, and of empty slots
    again     whether the backward pass repeats it
    whole     whether it repeats all of it, and not what some policy leaves out
    """

    layers: float
    forward: int
    idle: float
    again: int
    whole: bool


def runs_of(sketch: Sketch, forward: int = 1) -> Iterator[tuple[BlockConfig, Runs]]:
    """Of each block of each segment, and of modules that predict further tokens."""
    shape, mesh, schedule = sketch.shape, sketch.mesh, sketch.schedule
    again = 0 if sketch.config.remat == "none" else 1
    both_ways = mesh.pipeline > 1 and schedule.both_ways
    whole = sketch.config.remat in ("full", "offload")
    how = (again, whole)
    outside = schedule.ticks if both_ways else sketch.passes / mesh.pipeline
    idle = 1 - sketch.passes / outside if both_ways else 0.0
    for number, segment in enumerate(shape.segments):
        if mesh.pipeline > 1 and number == shape.pipelined_segment():
            ticks, bubble = schedule.ticks, schedule.bubble_fraction()
            runs = Runs(ticks * schedule.slots, forward, bubble, *how)
        else:
            ahead = both_ways and number < shape.pipelined_segment()
            runs = Runs(outside * segment.repeats, forward + ahead, idle, *how)
        for block in segment.pattern:
            yield block, runs
    for _ in range(shape.mtp.depth if shape.mtp else 0):
        yield shape.mtp.block, Runs(outside, forward, idle, *how)


def summed_once(sketch: Sketch) -> set[str]:
    """Axes over which devices of a stage sum gradients of projections for themselves (layers/own_sums.py)."""
    if sketch.config.matmul != "dtype" or sketch.mesh.pipeline == 1:
        return set()
    return {axis for axis in ("expert", "context") if sketch.mesh.size(axis) > 1} - set(sketch.rules.rest.axes("embed"))


def activations(sketch: Sketch) -> Iterator[Sent]:
    """Of all layers, the embedding and the head."""
    yield from _trained(sketch)
    if beside := sketch.beside:
        yield from (sent for sent in _embedding(beside, False) if sent.why in (SEQUENCE, LOOKUP))
        yield from forward_activations(_trained(beside), _trained(beside, 2))


def _trained(sketch: Sketch, forward: int = 1) -> Iterator[Sent]:
    """With so many forward passes of layers."""
    mesh = sketch.mesh
    if mesh.pipeline > 1:
        yield _between_stages(sketch)
        yield _rows(sketch)
    both_ways = mesh.pipeline > 1 and sketch.schedule.both_ways
    for sent in _embedding(sketch, both_ways):
        yield idling(sent, 1 - sketch.passes / sketch.schedule.ticks if both_ways else 0.0)
    made: dict[tuple[BlockConfig, Runs], list[Sent]] = {}  # of layers that are alike
    for block, runs in runs_of(sketch, forward):
        if (block, runs) not in made:
            made[block, runs] = [idling(sent, runs.idle) for sent in _layer(sketch, block, runs)]
        yield from made[block, runs]


def _layer(sketch: Sketch, block: BlockConfig, runs: Runs) -> Iterator[Sent]:
    mesh = sketch.mesh
    if mesh.tensor > 1:
        yield from _tensor(sketch, block, runs)
    if isinstance(block.mlp, MoeConfig) and mesh.expert > 1:
        yield from _experts(sketch, block, runs)
    if mesh.context > 1:
        for mixer in block.mixers:
            yield from _context(sketch, mixer, runs)


def stream_bytes(sketch: Sketch) -> float:
    """Of one microbatch on one device, where the sequence is whole over tensor."""
    return sketch.tokens * sketch.shape.embed_dim * sketch.itemsize


def _between_stages(sketch: Sketch) -> Sent:
    """On, and in the circular schedule back from the last stage to where the microbatch waits, in every tick forward
    and backward; with rounds, the ways back only in the ticks that need them."""
    mesh, schedule = sketch.mesh, sketch.schedule
    S, R = schedule.stages, schedule.rounds
    real = shown = 1.0
    if not schedule.both_ways:
        real, shown = (1 + (S - 1) / (S * R) + 1 / R, 3.0) if R > 1 else (3.0, 3.0)
    times = 2 * schedule.ticks * real
    moved = times * stream_bytes(sketch) / mesh.tensor
    sent = Sent(("pipeline",), "between stages", moved, PERMUTE, times, shown=shown / real)
    return idling(sent, 1 - sketch.passes * R / schedule.ticks)


def _rows(sketch: Sketch) -> Sent:
    """Tokens and what belongs to them, 32 bits each, of all microbatches to every stage: of the circular schedule three
    of a device's own rows, of 1F1B five, of all rows of its replica."""
    mesh, train = sketch.mesh, sketch.config.train
    own = sketch.tokens * sketch.passes
    if not sketch.schedule.both_ways:
        return Sent(("pipeline",), "rows", 3 * 4 * own * share(mesh.pipeline), GATHER, 3)
    own = train.global_batch * train.seq_len / mesh.size(*sketch.rules.replicas())
    return Sent(("pipeline",), "rows", 5 * 4 * own * share(mesh.pipeline), GATHER, 5)


def _embedding(sketch: Sketch, both_ways: bool) -> Iterator[Sent]:
    """The lookup and the head, where the vocabulary is split; and, inside one replica or stage, the lookup's gradient,
    for which XLA gathers all tokens."""
    mesh, shape = sketch.mesh, sketch.shape
    passes = sketch.schedule.ticks if both_ways else sketch.passes / mesh.pipeline
    passes *= 1 + (shape.mtp.depth if shape.mtp else 0)
    tensor = ("tensor",)
    part = stream_bytes(sketch) * share(mesh.tensor)
    manual = both_ways or apart(sketch.config)
    if mesh.tensor > 1:
        yield Sent(tensor, SEQUENCE, part * passes, GATHER, passes)
        yield Sent(tensor, "the head's sequence: scatters", part * passes, SCATTER, passes)
    if mesh.tensor > 1 and not manual:
        yield Sent(tensor, "the lookup: gathers", part * passes, GATHER, passes)
        # What is found is scaled, or positions are added, before it is split: XLA sums it whole.
        whole = shape.embed_scale != 1 or shape.max_positions > 0
        found = 2 * part * passes, REDUCE
        yield Sent(tensor, LOOKUP, *(found if whole else (part * passes, SCATTER)), passes)
        if shape.inputs:  # rows of a table that is split by tokens
            rows = sketch.tokens * shape.num_layers * shape.inputs.dim * sketch.itemsize * share(mesh.tensor) * passes
            yield Sent(tensor, "layers' inputs", rows, SCATTER, passes)
            yield Sent(tensor, "layers' inputs: gradients", rows, GATHER, passes)
    if not manual:
        return
    table = shape.vocab_size * shape.embed_dim / mesh.tensor * sketch.itemsize * share(mesh.tensor)
    times = 2 * passes
    if both_ways and shape.pipelined_segment():  # for layers ahead of the stages again
        times += sketch.schedule.ticks
    if mesh.tensor > 1:
        yield Sent(tensor, "the lookup", (table + part / mesh.tensor) * times, EXCHANGE, 2 * times)
    gathered = _embedding_gathered(sketch)
    held = stream_bytes(sketch) / mesh.tensor
    for axes in (gathered & {"context"}, gathered - {"context"}):
        over = ordered(mesh, axes)
        held *= mesh.size(*over)
        yield Sent(over, "the lookup's gradient: all tokens", held * share(mesh.size(*over)) * passes, GATHER, passes)


def _embedding_gathered(sketch: Sketch) -> set[str]:
    """Axes over which the embedding is gathered for the lookup, but for pipeline."""
    embedding = next(weight for weight in sketch.weights if weight.path == "embedding")
    return set(embedding.axes(sketch.rules.rest)) - set(embedding.axes(sketch.rules.use)) - {"pipeline"}


def sent_by_rest(sketch: Sketch) -> tuple:
    """What of where weights rest `activations` goes by: on meshes with the same inner axes (alike.INNER and pipeline)
    for which this is the same, the same is sent."""
    mesh = sketch.mesh
    both_ways = mesh.pipeline > 1 and sketch.schedule.both_ways
    rows = mesh.size(*sketch.rules.replicas()) if both_ways else 0
    lookup = ordered(mesh, _embedding_gathered(sketch)) if both_ways or apart(sketch.config) else ()
    return mesh.tensor > 1 and bool(summed_once(sketch)), rows, tuple((axis, mesh.size(axis)) for axis in lookup)


def _tensor(sketch: Sketch, block: BlockConfig, runs: Runs) -> Iterator[Sent]:
    """The sequence, whole inside attention and MLP and split between: gathered forward, again, and its gradient;
    scattered forward, and the gradient of what was gathered."""
    mesh, item, D = sketch.mesh, sketch.itemsize, sketch.shape.embed_dim
    there, back = runs.forward + runs.again, runs.forward
    moe = block.mlp
    gathers = scatters = sums = 0.0  # bytes a token
    repeated = runs.again if runs.whole else 0
    # Of both layers' gradients: inside a stage twice where XLA takes those for weights and for inputs apart, but not
    # where each device sums its own of weights.
    apart_in_stages = runs.again and runs.idle and runs.whole and not sketch.schedule.both_ways
    apart_in_stages = apart_in_stages and not summed_once(sketch)
    # So too where a microbatch is a single row, of which XLA does not see that both gathers are the same.
    alone = sketch.config.train.global_batch == sketch.passes and mesh.pipeline == 1
    L = moe.read_dim(D) if isinstance(moe, MoeConfig) else D * moe.there  # what the second of them sends
    gathers += (2 if apart_in_stages or alone else 1) * (D + L) * item
    # What a layer's last product makes is not asked for again, but by a norm, or of experts by what is behind a latent.
    several = block.mixes and not isinstance(moe, MoeConfig)  # how much of it goes to each is learned
    asked = block.norms in ("post", "both") or _latent(moe) or several
    scatters += (back * (D + L) + repeated * (D * moe.there + (L if asked else 0))) * item
    for mixer in block.mixers:
        of_mixer = _mixing(sketch, mixer, there)
        gathers, scatters, sums = gathers + of_mixer[0], scatters + of_mixer[1], sums + of_mixer[2]
    if block.memory:  # which reads what attention does, gathered once
        gathers -= there * D * item
    if isinstance(moe, MoeConfig):
        mixed = 4 * moe.top_k  # the weights of a token's experts; and which they are
        gathers += there * (L * item + 2 * mixed)
        scatters += L * item + mixed
        if moe.shared_dim:
            gathers += (there + 1) * D * item
            scatters += (back + 1) * D * item
        if block.mixes:  # how much of what is made goes to each is learned: it is made again
            scatters += repeated * (1 + bool(moe.shared_dim)) * D * item
    elif moe.there:
        gathers += there * D * item
        scatters += D * item
    one = sketch.tokens * share(mesh.tensor) * runs.layers
    for kind, nbytes, count in ((GATHER, gathers, 2 * there + 2), (SCATTER, scatters, 2 * back + 2), (REDUCE, sums, 1)):
        yield Sent(("tensor",), "the sequence", one * nbytes, kind, count * runs.layers)


def _mixing(sketch: Sketch, attention, there: int) -> tuple[float, float, float]:
    """Bytes a token that attention, or what is in its place or beside it, gathers in so many forward passes, scatters
    and sums."""
    mesh, item, D = sketch.mesh, sketch.itemsize, sketch.shape.embed_dim
    gathers = scatters = sums = 0.0
    if isinstance(attention, MlaConfig):
        narrow = attention.kv_latent_dim + attention.rope_dim
        # The stream itself, of queries without a latent and of gates, which have a gradient each.
        queries, gate = attention.q_latent_dim or D, D * (attention.gates > 0)
        gathers += there * (narrow + queries + (gate if attention.q_latent_dim else 0)) * item
        scatters += (queries + gate) * item
        if attention.rope:
            sums += 2 * narrow * item
            sums += 2 * 2 * WIDE * sketch.shape.frequencies  # gradients of what turns pairs, of all heads
        else:  # nothing stands between the sum of gradients and its split
            scatters += narrow * item
        if chooser := choosing.chooser_of(attention, sketch):
            own = D if chooser.of_stream else 0  # of whole rows, after a norm of their own
            gathers += there * ((chooser.kept_dim + own) * item + 4 * chooser.num_heads)
    elif isinstance(attention, CompressedConfig):  # what reads the stream is made of split tokens, by whole weights
        of_loss, of_choice = numbers(attention, sketch)
        own = chooser_of(attention, sketch)
        gathers += there * ((attention.q_latent_dim + of_loss + of_choice) * item + (4 * own.num_heads if own else 0))
        scatters += (attention.q_latent_dim + of_loss - attention.head_dim) * item
        sums += 2 * attention.head_dim * item  # keys' gradients, whole
    elif attention.num_kv_heads % mesh.tensor:  # keys and values of few heads are made on all devices
        gathers += there * D * item + 2 * mesh.tensor * attention.head_dim * item
        if getattr(attention, "reads", ""):  # and of a layer that reads another's, only gradients go there
            scatters += D * item
        else:
            sums += 2 * D * item
        if getattr(attention, "norms", "none") != "none":  # over several devices' heads (layers/mamba.py)
            gathers += (there + 1) * WIDE * attention.num_heads
    else:
        # Of gates and decays by channel the latents are made of split tokens, as wide as a key.
        latents = 2 * attention.head_dim if getattr(attention, "latents", False) else 0
        gathers += there * (D + latents) * item
        scatters += (D + latents) * item
    return gathers, scatters, sums


def _latent(mlp) -> bool:
    """Whether experts read and make a projection of the stream."""
    return isinstance(mlp, MoeConfig) and mlp.latent_dim > 0


def _experts(sketch: Sketch, block: BlockConfig, runs: Runs) -> Iterator[Sent]:
    """Tokens to the experts and back: forward, backward and again."""
    moe = block.mlp
    ranks, item, n = sketch.mesh.expert, sketch.itemsize, sketch.tokens
    times = (runs.forward + 1 + runs.again) * runs.layers
    row = moe.read_dim(sketch.shape.embed_dim) * item
    if dispatch_of(moe, sketch.execution).exchange == "gather":
        mixed = 4 * moe.top_k  # the weights of a token's experts; and which they are
        there = (row * times + 2 * mixed * (times - runs.layers)) * n * (ranks - 1)
        # The results of a second run are not needed, but where it is learned how much of them goes to each stream, or
        # a weight multiplies them.
        asked = runs.whole and (block.mixes or _latent(moe))
        scatters = (runs.forward + 1 + (runs.again if asked else 0)) * runs.layers
        back = (row * scatters + mixed * runs.layers) * n * (ranks - 1)
        yield Sent(("expert",), "tokens gathered", there, GATHER, times)
        yield Sent(("expert",), "results scattered", back, SCATTER, scatters)
        return
    sent = 2 * times * n * moe.working * row * share(ranks)
    yield Sent(("expert",), "tokens sent", sent, RAGGED, 2 * times, shown=1 / filled(moe, ranks, n))


def filled(moe: MoeConfig, ranks: int, tokens: float) -> float:
    """The share of the buffers of an exchange that holds tokens under an even load (ops/expert_dispatch.py)."""
    worst = tokens * min(moe.top_k, moe.num_experts // ranks)
    even = tokens * moe.top_k / ranks
    room = min(worst, math.ceil(even * moe.capacity_factor)) if moe.capacity_factor else worst
    return tokens * moe.working / ranks / room


def buffers_filled(sketch: Sketch) -> float:
    """The same of a run; of its mixtures, if they differ, the one that fills least. 1 where there are none."""
    mixtures = [block.mlp for block in sketch.shape.kinds if isinstance(block.mlp, MoeConfig)]
    return min((filled(moe, sketch.mesh.expert, sketch.tokens) for moe in mixtures), default=1.0)


def _context(sketch: Sketch, attention: AttentionConfig | MlaConfig | DeltaNetConfig, runs: Runs) -> Iterator[Sent]:
    mesh, tokens, item = sketch.mesh, sketch.tokens, sketch.itemsize
    if isinstance(attention, CompressedConfig):
        there, back = entries_gathered(attention, sketch)
        times = (runs.forward + runs.again) * runs.layers
        yield Sent(("context",), "keys and numbers of tokens", there * (mesh.context - 1) * times, GATHER, 3 * times)
        sums = back * (mesh.context - 1) * runs.layers
        yield Sent(("context",), "gradients of keys and numbers", sums, SCATTER, 2 * runs.layers)
        return
    heads, kv = attention.num_heads / mesh.tensor, max(1, attention.num_kv_heads / mesh.tensor)
    width = attention.head_dim + attention.value_dim
    if isinstance(attention, ShortConvConfig):
        times = (runs.forward + 1 + runs.again) * runs.layers
        yield Sent(("context",), "tokens before", tokens_before(attention, sketch) * times, PERMUTE, times)
        return
    if isinstance(attention, DeltaNetConfig):
        one = rows_for_heads(attention, sketch) * share(mesh.context)
        times = (runs.forward + 1 + runs.again) * runs.layers
        yield Sent(("context",), "heads for tokens", one * times, EXCHANGE, 6 * times)
        return
    if choosing.chosen_bytes(attention, sketch):
        yield from _choice(sketch, attention, runs)
    if sketch.execution.context_attention == "ring":
        moves = len(stops(mesh.context, sketch.config.train.seq_len // (2 * mesh.context), attention.window))
        if not moves:
            return
        # Forward, again and backward, of which the last two share the first move; float32 gradients come home besides.
        times = (moves * (runs.forward + 1 + runs.again) - runs.again) * runs.layers
        gradients = (moves + 1) * runs.layers
        moved = tokens * kv * width * (times * item + gradients * 4)
        yield Sent(("context",), "keys, values and their gradients", moved, PERMUTE, times + gradients, beside=True)
        return
    copies = max(1, mesh.context // kv)
    one = tokens * (heads + kv * copies) * width * item * share(mesh.context)
    times = (runs.forward + 1 + runs.again) * runs.layers
    yield Sent(("context",), "heads for tokens", one * times, EXCHANGE, 4 * times)


def _choice(sketch: Sketch, attention: MlaConfig, runs: Runs) -> Iterator[Sent]:
    """What an indexer chooses from, the keys of all tokens, and what each device has chosen of whole rows."""
    own, times = choosing.chooser_of(attention, sketch), (runs.forward + runs.again) * runs.layers
    if own:
        keys = sketch.tokens * own.kept_dim * sketch.itemsize * (sketch.mesh.context - 1)
        yield Sent(("context",), "keys of tokens to choose", keys * times, GATHER, times)
        chosen = choosing.chosen_bytes(attention, sketch) * share(sketch.mesh.context)
        yield Sent(("context",), "chosen tokens", chosen * times, GATHER, times)
