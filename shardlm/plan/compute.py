"""What one device computes in a training step: matmuls, attention and what only moves memory, by layer."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

from shardlm.layers.altup import AltUpConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.lora import A as ADAPTER
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.param import SCALE
from shardlm.plan import (
    altup,
    attention,
    compressed_attention,
    cpu_memory,
    linear_attention,
    program_memory,
    sparse_attention,
    streams,
)
from shardlm.plan.activations import kept, layer
from shardlm.plan.beside import forward_ops, turned_rows
from shardlm.plan.changed import changed
from shardlm.plan.expert_memory import moved
from shardlm.plan.muon import newton_schulz
from shardlm.plan.op import Layer, Op
from shardlm.plan.rounded import of_scheme, rounding
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.spread import Spread
from shardlm.plan.state import updated_bytes


def operations(sketch: Sketch, ours: bool = True) -> list[Op]:
    """All of a step but what takes no time worth a figure. Without `ours` experts' rows are moved as other systems move
    them, as many as there are, and stages hold their weights in the compute type."""
    return [*of_layers(sketch, ours), *of_weights(sketch, ours)]


def of_layers(sketch: Sketch, ours: bool = True) -> Iterator[Op]:
    """Of these, what is the same wherever weights rest, but for `experts_gathered`."""
    found = [*_layers(sketch, ours), *_head(sketch, ours)]
    if rank := sketch.config.lora.rank:
        yield from frozen(found)
        yield from adapters(sketch, rank)
        yield from _made_anew(sketch)
    else:
        yield from found
    if beside := sketch.beside:
        yield from forward_ops((*_layers(beside, ours), *_head(beside, ours), *_made_anew(beside)))
        yield from turned_rows(beside)


def frozen(ops: Iterable[Op]) -> Iterator[Op]:
    """The same with weights that are not trained: a gradient's product, worth a forward one, is left out."""
    for op in ops:
        yield changed(op, count=op.count - op.forward, frozen=True) if op.unit == "matmul" and not op.both else op


def adapters(sketch: Sketch, rank: int) -> Iterator[Op]:
    """Both products beside each projection, by matrices of so many columns; the second one's result is added to the
    projection's."""
    again = 0 if sketch.config.remat == "none" else 1
    for weight in _adapted(sketch):
        inside, out = _sides(weight, sketch)
        passes = sketch.passes / sketch.mesh.pipeline * math.prod(weight.shape[: weight.stacked])
        for n, k, added in ((rank, inside, 0), (out, rank, 2)):
            moved = sketch.itemsize * (sketch.tokens * ((1 + added) * n + k) + n * k)
            yield Op(
                *("other", f"adapter of {weight.path}", "matmul", 2.0 * sketch.tokens * n * k, moved),
                *(passes * (3 + again), passes, passes * again, (sketch.tokens, n, k)),
            )


def _made_anew(sketch: Sketch) -> Iterator[Op]:
    """Numbers of frozen weights in few bits, in the compute type: for the forward pass and for the backward one."""
    paths = {weight.path for weight in sketch.weights}
    for weight in sketch.weights:
        if weight.path + SCALE in paths:
            held = weight.numbers(sketch.rules.use) / math.prod(weight.shape[: weight.stacked])
            moved = held * (weight.itemsize + weight.packed * sketch.itemsize)
            passes = sketch.passes * math.prod(weight.shape[: weight.stacked])
            yield Op("other", f"{weight.path} made anew", "memory", 0, moved, 2 * passes, passes, gradient_bytes=moved)


def _adapted(sketch: Sketch) -> list[Weight]:
    """Projections that have an adapter; all where the run has no word for them."""
    paths = {weight.path for weight in sketch.weights}
    projections = [
        w for w in sketch.weights if w.stacked and w.is_matrix and w.trained != bool(sketch.config.lora.rank)
    ]
    if sketch.config.lora.rank:
        return [w for w in projections if w.path + ADAPTER in paths]
    return [w for w in projections if not {"experts", "router"} & set(w.names)]


def _sides(weight: Weight, sketch: Sketch) -> tuple[float, float]:
    """(summed, columns) of a projection on one device."""
    own, names = weight.shape[weight.stacked :], weight.names[weight.stacked :]
    ways = sketch.rules.use.ways(weight.names)
    if names[0] == "embed":
        return own[0] * weight.packed, math.prod(own[1:]) / ways
    return math.prod(own[:-1]) * weight.packed / ways, own[-1]


def of_weights(sketch: Sketch, ours: bool = True) -> Iterator[Op]:
    """All else."""
    if ours and sketch.mesh.pipeline > 1:
        yield from _of_a_stage(sketch)
    if ours and sketch.gpu.generation != "cpu":  # measured.py counts what XLA:CPU does besides
        yield from program_memory.of_weights(sketch)
        yield from program_memory.of_update(sketch)
    yield from _optimizer(sketch)


def _layers(sketch: Sketch, ours: bool) -> Iterator[Op]:
    shape, mesh, schedule = sketch.shape, sketch.mesh, sketch.schedule
    both_ways = mesh.pipeline > 1 and schedule.both_ways
    staged = shape.segments[shape.pipelined_segment()]
    for number, segment in enumerate(shape.segments):
        in_stages = mesh.pipeline > 1 and segment is staged
        made: dict[BlockConfig, list[Op]] = {}  # layers that are alike have the very same
        for block in segment.pattern:
            if block not in made:
                if in_stages:
                    idle = 1 / (1 - schedule.bubble_fraction())
                    run = _Run(sketch, _ends(block), sketch.passes * segment.repeats / mesh.pipeline, 0, idle)
                else:
                    run = _Run.outside(sketch, _ends(block), segment.repeats, number)
                ops = map(run, _all_of(sketch, block, ours))
                made[block] = [changed(op, in_stages=in_stages or both_ways) for op in ops]
            yield from made[block]
    for _ in range(shape.mtp.depth if shape.mtp else 0):
        run = _Run.outside(sketch, _ends(shape.mtp.block), 1, len(shape.segments))
        D, tokens = shape.embed_dim, sketch.tokens / mesh.tensor
        for op in (*_all_of(sketch, shape.mtp.block, ours), _matmul(sketch, "mlp", "join", tokens, D, 2 * D)):
            yield changed(run(op), in_stages=both_ways)


def _ends(block: BlockConfig) -> str:
    """A layer's last product, where no gradient asks for what it makes: it is added to the stream as it is."""
    if block.norms != "pre" or block.mixes:
        return ""
    return "down" if block.mlp.there else "output"


@dataclasses.dataclass(frozen=True)
class _Run:
    """How often a layer's operations run.

    unasked  a layer's last product, if no gradient asks for what it makes; "": each is asked for
    passes   of all its layers, forward and useful
    twice    share of the passes that 1F1B makes forward once more: those of layers ahead of its stages
    idle     runs of a device for each useful one
    """

    sketch: Sketch
    unasked: str
    passes: float
    twice: float
    idle: float

    @classmethod
    def outside(cls, sketch: Sketch, unasked: str, repeats: int, segment: int) -> "_Run":
        """Outside the stages each device of `pipeline` works on its own rows; of 1F1B one stage does, in every
        tick, for which the others wait: on their own, but CPU devices give it their cores."""
        mesh, schedule, stages = sketch.mesh, sketch.schedule, sketch.shape.pipelined_segment()
        if mesh.pipeline > 1 and schedule.both_ways and sketch.gpu.generation != "cpu":
            # XLA unrolls the loop twice; of an odd one the last layer is left, whose result nothing wants.
            ahead = repeats - (repeats % 2 if segment == stages - 1 else 0) if segment < stages else 0
            return cls(sketch, unasked, sketch.passes * repeats, ahead / repeats, schedule.ticks / sketch.passes)
        return cls(sketch, unasked, sketch.passes * repeats / mesh.pipeline, 0, 1.0)

    def __call__(self, op: Op) -> Op:
        """As often as a step's forward passes, recomputation and backward are worth executions of the forward one."""
        remat = self.sketch.config.remat
        kept = op.unit == "matmul" and not op.both  # by "dots": what is no batch of products
        again = {"none": 0, "dots": 0 if kept else 1, "names": 1, "full": 1, "offload": 1}[remat]
        # The router asks what each expert gave.
        last = op.what.endswith(("down", "of the latent")) and not op.grouped
        ends = op.what == "output" if self.unasked == "output" else last and self.unasked
        if ends or (remat == "names" and (last or op.what == "output")) or not op.anew:
            again = 0  # nothing in the backward pass asks for the result, or it was kept
        again += self.twice
        gradients = 2.5 if op.unit == "attention" else 2 if op.gradients is None else op.gradients
        passes = self.passes * op.count
        count = passes * (1 + again + gradients)
        executed = self.idle
        if op.unit == "attention":
            executed *= attention.attended(op, 1 + again, gradients, self.sketch)
        return changed(op, count=count, forward=passes, again=passes * again, executed=executed)


def _all_of(sketch: Sketch, block, ours: bool) -> list[Op]:
    """Of a layer, forward, once."""
    ops = list(_block(sketch, block, ours))
    if ours and sketch.gpu.generation != "cpu":
        return [*ops, *program_memory.of_block(sketch, block, len(ops))]
    return [*ops, *cpu_memory.of_block(sketch, block)] if ours else ops


def _block(sketch: Sketch, block, ours: bool) -> Iterator[Op]:
    """Forward, once."""
    D, tensor, tokens = sketch.shape.embed_dim, sketch.mesh.tensor, sketch.tokens
    matmul = functools.partial(_matmul, sketch)
    for mixer in block.mixers:
        yield from _mixing(sketch, mixer, matmul, ours)
    if isinstance(block.mlp, MlpConfig):
        F = block.mlp.mlp_dim / tensor
        yield matmul("mlp", "up", tokens, F * (2 if block.mlp.gated else 1), D)
        yield matmul("mlp", "down", tokens, D, F)
        yield Op("mlp", "activation", "memory", 0, 3 * sketch.itemsize * tokens * F, 1)
    elif isinstance(block.mlp, MoeConfig):
        yield from _experts(sketch, block.mlp, matmul, ours)
    if block.inputs:  # of tokens split as between blocks, by whole weights (layers/layer_inputs.py)
        P = block.inputs.dim
        yield matmul("mlp", "gate of the layer's input", tokens / tensor, P, D)
        yield matmul("mlp", "layer's input", tokens / tensor, D, P)
    if isinstance(block.streams, AltUpConfig):
        yield from altup.operations(block.streams, sketch, matmul)
    elif block.streams:
        yield from streams.operations(block.streams, sketch)
    yield from rounding(sketch)
    norms = (4 if block.norms == "both" else 2) if block.mlp.there else 1
    yield Op("norm", "norms and residuals", "memory", 0, norms * 4 * sketch.itemsize * tokens / tensor * D, 1)


def _mixing(sketch: Sketch, mixer, matmul, ours: bool) -> Iterator[Op]:
    """Of attention, or of what is in its place or beside it."""
    if isinstance(mixer, DeltaNetConfig):
        for what, n, k in linear_attention.projections(mixer, sketch.shape.embed_dim, sketch.mesh.tensor):
            yield matmul("linear attention", what, sketch.tokens, n, k)
        yield from linear_attention.operations(mixer, sketch)
    elif isinstance(mixer, CompressedConfig):
        yield from compressed_attention.operations(sketch, mixer, matmul)
    else:
        yield from attention.operations(sketch, mixer, matmul, ours)
        if own := sparse_attention.chooser_of(mixer, sketch):
            yield from sparse_attention.operations(sketch, own, mixer, matmul)


def _matmul(sketch: Sketch, layer: Layer, what: str, rows: float, n: float, k: float) -> Op:
    dtype = attention.dtype(sketch) if sketch.products == "dtype" else sketch.products
    moved = sketch.itemsize * (rows * n + rows * k + n * k)
    weights = attention.dtype(sketch) if dtype == "int8" else ""  # ops/quantized_matmul.py
    made = Op(layer, what, "matmul", 2.0 * rows * n * k, moved, 1, dims=(rows, n, k), dtype=dtype, weight_dtype=weights)
    return of_scheme(made, sketch)


def _experts(sketch: Sketch, moe: MoeConfig, matmul, ours: bool) -> Iterator[Op]:
    """An even load: of tokens that the devices of `expert` bring together, each device's experts take their share."""
    D, mesh = sketch.shape.embed_dim, sketch.mesh
    F, L, into = moe.expert_dim / mesh.tensor, moe.read_dim(D), len(moe.projections) - 1
    experts = moe.num_experts / mesh.expert
    rows = sketch.tokens * moe.working / experts
    for what, n, k in (("up", into * F, L), ("down", L, F)):
        one = matmul("moe", what, rows, n, k)
        # Tokamax's kernels leave float32 to the TF32 units.
        one = changed(one, dtype="tf32") if ours and one.dtype == "fp32" else one
        yield changed(one, flops=one.flops * experts, hbm_bytes=one.hbm_bytes * experts, grouped=True)
    if ours:
        yield from moved(sketch, moe)
    else:
        nbytes = sketch.itemsize * (3 * F + 4 * L) * rows * experts
        yield Op("moe", "activation and moving", "memory", 0, nbytes, 1)
    router = matmul("moe", "router", sketch.tokens / mesh.tensor, moe.choices, D)
    # layers/moe.py, precision="highest"
    yield changed(router, dtype="fp32", split=True) if ours else router
    if moe.latent_dim:  # of tokens split as between blocks, by whole weights
        yield matmul("moe", "latent", sketch.tokens / mesh.tensor, L, D)
        yield matmul("moe", "of the latent", sketch.tokens / mesh.tensor, D, L)
    if moe.shared_dim:
        yield matmul("moe", "shared up", sketch.tokens, into * moe.shared_dim / mesh.tensor, D)
        yield matmul("moe", "shared down", sketch.tokens, D, moe.shared_dim / mesh.tensor)


def _head(sketch: Sketch, ours: bool) -> Iterator[Op]:
    """Cross-entropy makes its gradients as it goes: three matmuls, and none again (ops/cross_entropy.py), but where
    these follow from the losses of tokens."""
    shape, mesh = sketch.shape, sketch.mesh
    V, D, tokens = shape.vocab_size / mesh.tensor, shape.embed_dim, sketch.tokens
    heads = 1 + (shape.mtp.depth if shape.mtp else 0)
    run = _Run.outside(sketch, "", heads, len(shape.segments))
    moved = sketch.itemsize * (tokens * D + V * D) + 4 * tokens * V
    again = run.passes if sketch.config.preference.beta or sketch.config.grpo.reward else 0
    yield Op(
        "head",
        "logits and loss",
        "matmul",
        2.0 * tokens * V * D,
        moved,
        3 * run.passes + again,
        run.passes,
        again,
        (tokens, V, D),
        dtype=attention.dtype(sketch),
        in_stages=run.idle > 1,
        executed=run.idle,
    )
    if ours and sketch.gpu.generation != "cpu":
        read = program_memory.of_losses(sketch)
        yield Op("head", "softmax", "memory", 0, read, run.passes, run.passes, in_stages=run.idle > 1)
    for of_ends in _of_streams(sketch):
        yield changed(of_ends, count=3 * run.passes, forward=run.passes)
    if shape.inputs:
        made = _matmul(
            sketch, "embedding", "layers' inputs", tokens / mesh.tensor, shape.num_layers * shape.inputs.dim, D
        )
        yield changed(made, count=3 * run.passes, forward=run.passes, in_stages=run.idle > 1)
    read = 3 * sketch.itemsize * tokens / mesh.tensor * D
    yield Op("embedding", "lookup", "memory", 0, read, 2 * run.passes, run.passes, in_stages=run.idle > 1)


def _of_streams(sketch: Sketch) -> Iterator[Op]:
    """Products of several streams outside the layers."""
    own = sketch.shape.streams
    if isinstance(own, AltUpConfig):
        yield from altup.at_ends(own, sketch, functools.partial(_matmul, sketch))
    elif own:
        yield from streams.joined(own, sketch)


def _optimizer(sketch: Sketch) -> Iterator[Op]:
    """What an update reads and writes. Muon multiplies float32, which jax leaves to the TF32 units."""
    yield Op("optimizer", "update", "memory", 0, updated_bytes(sketch.spread, sketch.config.optim), 1)
    for weight, many, *products in newton_schulz(sketch):
        for dims in products:
            rows, n, k = dims
            moved = 4.0 * (rows * n + rows * k + n * k)
            yield Op("optimizer", weight.path, "matmul", 2.0 * rows * n * k, moved, many, dims=dims, dtype="tf32")


def _of_a_stage(sketch: Sketch) -> Iterator[Op]:
    """What each tick does besides to a stage's weights, which are cast once a step, and to what it keeps. Each layer's
    weights are taken out of all, forward and backward. Its gradient is added to a float32 sum that is copied out
    first. What a layer keeps is written into the tick's stack, that into all ticks', and back the same way. Llama 3 70B
    on 256 H100, two rounds of 8 stages over tensor=8, remat=none: 0.18 s of the program's 0.32 s in kernels without a
    product, compiled."""
    schedule, size = sketch.schedule, sketch.itemsize
    held = _of_stage(sketch.spread, sketch.shape.pipelined_segment(), schedule.stages)
    one, ticks = held / schedule.rounds, sketch.passes * schedule.rounds
    how = {"count": 2 * ticks, "forward": ticks, "in_stages": True}
    taken, added = 2 * size * one, (size + 4 * 4) * one
    yield Op("other", "weights of a stage", "memory", 0, hbm_bytes=taken, gradient_bytes=taken + added, **how)
    blocks = sketch.shape.segments[sketch.shape.pipelined_segment()].pattern
    stacked = 4 * schedule.slots * sum(sum(kept(layer(block, sketch), sketch).values()) for block in blocks)
    yield Op("other", "stacks of a stage", "memory", 0, hbm_bytes=stacked, gradient_bytes=stacked, **how)


@functools.lru_cache(maxsize=4096)
def _of_stage(spread: Spread, segment: int, stages: int) -> float:
    """Numbers of one stage's weights at rest."""
    rest = spread.rules.rest
    staged = [(w, n) for w, n in zip(spread.weights, spread.rest, strict=True) if w.trained and w.segment == segment]
    return sum(n / (1 if "pipeline" in w.axes(rest) else stages) for w, n in staged)


def executed_flops(ops: list[Op]) -> float:
    """Of one device's step, as a compiled program shows it: all that it executes but the experts' kernels."""
    return math.fsum(op.flops * op.count * op.executed for op in ops if not op.grouped)
