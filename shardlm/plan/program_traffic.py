"""Bytes that one device sends in a training step as our program sends them: what traffic.py's algorithms demand, and
what the program sends besides. Held to compiled programs in tests/plan/test_plan_matches_xla_traffic.py. Weights and
gradients are here, activations in program_layers.py.

What a program sends besides: stages compute and send while they fill and drain; 1F1B runs each layer's forward pass a
third time, and embedding and head in every tick; gradients of the head are float32; under zero1 and zero2 updated
weights are gathered in float32; gradients of the embedding are summed whole, or from all tokens, where XLA finds no
reduce-scatter.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardlm.plan.beside import forward_weights
from shardlm.plan.changed import changed
from shardlm.plan.muon import muon_traffic
from shardlm.plan.program_layers import activations, summed_once
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.spread import Spread
from shardlm.plan.traffic import GATHER, MASTER, PERMUTE, REDUCE, SCATTER, Sent, idling, ordered, share
from shardlm.rules import Rules
from shardlm.train.replicas import apart

EXCHANGE = "all-to-all"
# Not split over tensor, and used on each device's part of the sequence.
WHOLE_OVER_TENSOR = ("attention.wq_down", "attention.wkv_down", "attention.wkv", "mlp.router", "compressor.wkv")
WHOLE_OVER_TENSOR += ("compressor.wgate", "compressor.bias", "streams.fn", "indexer.heads", "attention.wg_down")
WHOLE_OVER_TENSOR += ("attention.decay_down", "mlp.latent_down", "mlp.latent_up", "inputs.gate", "inputs.up")
WHOLE_OVER_TENSOR += ("layer_inputs.from_embedding", "altup.router", "altup.predict", "altup.correct", "laurel.down")
WHOLE_OVER_TENSOR += ("laurel.up", "altup_ends.into", "altup_ends.out")
IN_FLOAT32 = ("router", "streams.fn", "compressor.bias")  # in use too
_NOTHING = Sent((), "nothing", 0.0)


def program_traffic(sketch: Sketch) -> list[Sent]:
    """All that a step of our program sends, but for norms, scalars and integers."""
    return [*weights_traffic(sketch), *layers_traffic(sketch)]


def weights_traffic(sketch: Sketch, moved: Iterable["Moved"] | None = None) -> list[Sent]:
    """Weights, their gradients and what the optimizer exchanges, whatever the forward pass keeps; `moved` are the
    weights, where they are known already."""
    found = [*_weights(sketch, moved_of(sketch) if moved is None else moved), *muon_traffic(sketch)]
    if beside := sketch.beside:
        gathers = (sent for one in moved_of(beside) for sent in _of_all(beside, one) if sent.kind == GATHER)
        found += forward_weights(gathers)
    return [sent for sent in found if sent.nbytes and sent.axes]


def layers_traffic(sketch: Sketch) -> list[Sent]:
    """Activations and their gradients."""
    return [sent for sent in activations(sketch) if sent.nbytes and sent.axes]


@dataclasses.dataclass(frozen=True)
class Moved:
    """A weight and where it goes.

    gathered  axes that it is split over at rest and not in use, but for pipeline
    copies    axes whose devices see other tokens and hold the same of it in use
    staged    whether it is split over pipeline at rest
    numbers   of one device while in use, of all layers
    rests     of one device at rest
    repeats   arrays that it is stacked of
    like      a number that weights share which differ in nothing but their layer of a pattern; None: others
    """

    weight: Weight
    gathered: tuple[str, ...]
    copies: tuple[str, ...]
    staged: bool
    numbers: float
    rests: float
    repeats: int
    itemsize: int
    like: int | None = None

    @classmethod
    def of(cls, weight: Weight, rules: Rules, size: int, meet: bool) -> "Moved":
        """`size` is of a number in use, and `meet` whether replicas send gradients in every step."""
        mesh = rules.mesh
        rest, use = set(weight.axes(rules.rest)), set(weight.axes(rules.use))
        gathered = rest - use - {"pipeline"}
        seen = {"data", "fsdp", "context", "expert"} - gathered - use
        copies = seen if meet else seen - {"data"}
        if weight.path.endswith(WHOLE_OVER_TENSOR):
            copies = copies | {"tensor"}
        itemsize = MASTER if weight.path.endswith(IN_FLOAT32) else size
        return cls(
            weight,
            ordered(mesh, gathered),
            ordered(mesh, copies),
            "pipeline" in rest,
            weight.numbers(rules.use),
            weight.numbers(rules.rest),
            math.prod(weight.shape[: weight.stacked]),
            itemsize,
        )

    def sent(self, axes, what: str, nbytes: float, kind: str, count: float = 1, idle: float = 0.0) -> Sent:
        if not nbytes or not axes:
            return _NOTHING
        return idling(Sent(tuple(axes), f"{self.weight.path}: {what}", nbytes, kind, count, beside=True), idle)


def moved_of(sketch: Sketch) -> Sequence[Moved]:
    """All that are moved."""
    return _moved(sketch.spread, sketch.itemsize, not sketch.config.local_sgd.inner_steps)


@functools.lru_cache(maxsize=4096)
def _moved(spread: Spread, size: int, meet: bool) -> tuple[Moved, ...]:
    firsts: dict[int, Moved] = {}
    found = []
    for first, weight in zip(spread.firsts, spread.weights, strict=True):
        if weight.is_matrix:
            if first not in firsts:
                firsts[first] = changed(Moved.of(weight, spread.rules, size, meet), like=first)
            found.append(changed(firsts[first], weight=weight))
    return tuple(found)


def together(moved: Iterable[Moved], sketch: Sketch) -> list[Moved]:
    """The same with those in stages that go the same ways as if they were one."""
    alike: dict[Any, list[Moved]] = {}
    for one in moved:
        weight, ways = one.weight, (one.gathered, one.copies, one.staged, one.repeats, one.itemsize)
        rests = weight.axes(sketch.rules.rest), weight.axes(sketch.rules.optimizer)
        staged = (*ways, *rests, _is_projection(weight), weight.trained)
        alike.setdefault(staged if sketch.staged(weight) else weight.path, []).append(one)
    return [ones[0] if len(ones) == 1 else _as_one(ones) for ones in alike.values()]


def _as_one(ones: Sequence[Moved]) -> Moved:
    return changed(ones[0], numbers=sum(one.numbers for one in ones), rests=sum(one.rests for one in ones), like=None)


def _is_projection(weight: Weight) -> bool:
    return not {"experts", "router", "rank"} & set(weight.names)


def _weights(sketch: Sketch, weights: Iterable[Moved]) -> Iterator[Sent]:
    """Those that differ in their layer alone send the same, for reasons with other names."""
    made: dict[int, tuple[int, list[Sent]]] = {}
    for moved in weights:
        path = moved.weight.path
        if moved.like in made:
            length, found = made[moved.like]
            yield from (changed(sent, why=path + sent.why[length:]) for sent in found)
            continue
        found = [sent for sent in _of(sketch, moved) if sent.nbytes and sent.axes]
        if moved.like is not None:
            made[moved.like] = len(path), found
        yield from found


def _of(sketch: Sketch, moved: Moved) -> Iterator[Sent]:
    """Of one weight; the names of all reasons begin with its path."""
    weight = moved.weight
    if sketch.staged(weight):
        found = _staged(sketch, moved)
    elif sketch.schedule.both_ways and sketch.mesh.pipeline > 1:
        found = _of_some_stages(sketch, moved)
    else:
        found = _of_all(sketch, moved)
    if weight.trained and not weight.unasked:
        yield from found
    else:  # it has no gradient
        yield from (sent for sent in found if sent.kind == GATHER or sent.why.endswith("to its stage"))
    if weight.trained:
        yield from _updated(sketch, moved)


def _further(sketch: Sketch) -> int:
    """Modules that predict further tokens."""
    return sketch.shape.mtp.depth if sketch.shape.mtp else 0


def _updated(sketch: Sketch, moved: Moved) -> Iterator[Sent]:
    """Where the optimizer rests apart from the weights, what it updated comes back."""
    rules, weight = sketch.rules, moved.weight
    axes = ordered(sketch.mesh, set(weight.axes(rules.optimizer)) - set(weight.axes(rules.rest)))
    held = moved.rests * MASTER
    sent = moved.sent(axes, "updated", held * share(sketch.mesh.size(*axes)), GATHER)
    yield changed(sent, beside=False, update=True)


def _of_all(sketch: Sketch, moved: Moved) -> Iterator[Sent]:
    """Outside stages: every device uses it, for its own rows. `pipeline` splits the batch there, and all microbatches
    are one."""
    mesh, weight = sketch.mesh, moved.weight
    passes = 1 if mesh.pipeline > 1 else sketch.passes
    axes = ordered(mesh, {*moved.gathered, "pipeline"} if moved.staged else set(moved.gathered))
    if not moved.staged:
        moved = changed(moved, copies=ordered(mesh, {*moved.copies, "pipeline"}))
    size, use = mesh.size(*axes), moved.numbers * moved.itemsize
    times = passes * (2 if weight.stacked else 1)  # layers' weights in the backward pass again
    if weight.path == "embedding":  # also for the head, and for each module that predicts further tokens
        times = passes * (1 + sketch.shape.tie_embeddings + _further(sketch))
    yield moved.sent(axes, "gathers", use * share(size) * times, GATHER, moved.repeats * times)
    if weight.path in ("head", "embedding"):
        yield from _ends(sketch, moved, axes, passes)
        return
    yield _gradient(sketch, moved, axes, moved.copies, use / moved.repeats, passes * moved.repeats)


def _gradient(sketch: Sketch, moved: Moved, axes, others, nbytes: float, times: float, **how) -> Sent:
    """Of `nbytes`, summed over devices that see other tokens: scattered, or where only some of these axes split it, as
    a whole over all of them."""
    if not others:
        return moved.sent(axes, "scatters", nbytes * share(sketch.mesh.size(*axes)) * times, SCATTER, times, **how)
    both = ordered(sketch.mesh, {*axes, *others})
    return moved.sent(
        both, "sum of gradients", 2 * nbytes * share(sketch.mesh.size(*both)) * times, REDUCE, times, **how
    )


def _ends(sketch: Sketch, moved: Moved, axes: tuple[str, ...], passes: int) -> Iterator[Sent]:
    """Gradients of embedding and head, in each pass; sums that XLA finds to be sums of sums too, it makes once: of a
    tied head after its scatters, and of whole gradients."""
    mesh, shape, rules = sketch.mesh, sketch.shape, sketch.rules
    size, tied = mesh.size(*axes), shape.tie_embeddings
    once = 1 if rules.preset in ("replicated", "zero1") else passes
    if moved.weight.path == "head" or tied:
        yield moved.sent(axes, "scatters", moved.numbers * MASTER * share(size) * passes, SCATTER, passes)
        rest = moved.numbers * MASTER / size * share(mesh.size(*moved.copies))
        split = set(moved.copies) <= set(moved.weight.axes(rules.optimizer))
        sums = 1 if tied and axes and mesh.tensor == 1 else once
        yield moved.sent(moved.copies, "sum", rest * sums * (1 if split else 2), SCATTER if split else REDUCE, sums)
    if moved.weight.path != "embedding" or apart(sketch.config):
        return  # inside one replica tokens are gathered instead
    use, times = moved.numbers * moved.itemsize, passes * (1 + _further(sketch))
    if axes and (mesh.tensor == 1 or not moved.copies):
        yield moved.sent(axes, "scatters", use * share(size) * times, SCATTER, times)
        if not tied:
            rest = 2 * use / size * share(mesh.size(*moved.copies))
            yield moved.sent(moved.copies, "sum", rest * once, REDUCE, once)
    else:
        both = ordered(mesh, {*axes, *moved.copies})
        yield moved.sent(both, "sum", 2 * use * share(mesh.size(*both)) * once, REDUCE, once)


def _staged(sketch: Sketch, moved: Moved) -> Iterator[Sent]:
    """To its stage and back once a step, and gathered there in every tick."""
    mesh, schedule = sketch.mesh, sketch.schedule
    S, layers = schedule.stages, moved.repeats
    padded = S * schedule.rounds * schedule.slots
    held = moved.numbers / layers * padded / S  # of one stage, empty slots too
    yield from _to_stages(sketch, moved, held / mesh.size(*moved.gathered))
    runs = schedule.ticks * schedule.slots
    one = moved.numbers / layers * moved.itemsize
    idle = schedule.bubble_fraction()
    if moved.gathered:
        part = one * share(mesh.size(*moved.gathered)) * runs
        yield moved.sent(moved.gathered, "gathers", 2 * part, GATHER, 2 * runs, idle=idle)
    replicas = ordered(mesh, set(sketch.rules.replicas()) & set(moved.copies))
    total = 2 * held / mesh.size(*moved.gathered) * MASTER * share(mesh.size(*replicas))
    yield moved.sent(replicas, "sum of gradients", total, REDUCE)
    own = ordered(mesh, summed_once(sketch) & set(moved.copies) if _is_projection(moved.weight) else set())
    yield moved.sent(own, "sum of gradients", 2 * held * MASTER * share(mesh.size(*own)), REDUCE)
    others = ordered(mesh, set(moved.copies) - set(replicas) - set(own))
    yield _gradient(sketch, moved, moved.gathered, others, one, runs, idle=idle)


def _to_stages(sketch: Sketch, moved: Moved, held: float) -> Iterator[Sent]:
    """`held` numbers of each device, there as layers use them and back as float32 gradients. Where the dimension that
    the stages take is split further, places are exchanged first among as many neighbours as there are stages, and then
    all devices permute."""
    mesh, S = sketch.mesh, sketch.mesh.pipeline
    if not moved.staged:  # each has its layers among all, and all get the gradients of all
        yield moved.sent(("pipeline",), "from its stage", S * held * MASTER * share(S), GATHER)
        return
    if not moved.gathered:
        yield moved.sent(("pipeline",), "to its stage", held * moved.itemsize * share(S), EXCHANGE)
        yield moved.sent(("pipeline",), "from its stage", held * MASTER * share(S), EXCHANGE)
        return
    order = ("pipeline", *moved.gathered)
    innermost = next(order[i:] for i in reversed(range(len(order))) if mesh.size(*order[i:]) >= S)
    axes = ordered(mesh, set(innermost))
    yield moved.sent(axes, "to its stage", held * moved.itemsize * share(mesh.size(*axes)), EXCHANGE)
    yield moved.sent(("pipeline",), "from its stage", held * MASTER * share(S), EXCHANGE)
    both = held * (moved.itemsize + MASTER)
    yield moved.sent(ordered(mesh, set(order)), "to its stage and back: order", both, PERMUTE, 2)


def _of_some_stages(sketch: Sketch, moved: Moved) -> Iterator[Sent]:
    """Of 1F1B: what the first or the last stage uses rests on all of them, and is gathered in every tick."""
    mesh, schedule, weight, shape = sketch.mesh, sketch.schedule, moved.weight, sketch.shape
    S, ticks = schedule.stages, schedule.ticks
    held = moved.numbers * MASTER / mesh.size(*moved.gathered)
    replicas = ordered(mesh, set(sketch.rules.replicas()) & set(moved.copies))
    if moved.staged:
        yield moved.sent(("pipeline",), "for all stages", held * share(S), GATHER)
    if moved.gathered and moved.staged:
        order = ordered(mesh, {"pipeline", *moved.gathered})
        yield moved.sent(order, "for all stages and back: order", 2 * held / S, PERMUTE, 2)
    spread = set(weight.axes(sketch.rules.grads)) >= set(replicas)
    if not moved.staged:
        over = ordered(mesh, {"pipeline", *replicas})
        yield moved.sent(over, "of all stages", 2 * held * share(mesh.size(*over)), REDUCE)
    elif replicas and spread:
        over = ordered(mesh, {"pipeline", *replicas})
        yield moved.sent(over, "of all stages", held * share(mesh.size(*over)), SCATTER)
    else:
        yield moved.sent(("pipeline",), "of all stages", held * share(S), SCATTER)
        yield moved.sent(replicas, "sum", 2 * held / S * share(mesh.size(*replicas)), REDUCE)
    once = moved.numbers * moved.itemsize * share(mesh.size(*moved.gathered))
    how = {"idle": 1 - sketch.passes / ticks}
    is_head = weight.path == "head" or (weight.path == "embedding" and shape.tie_embeddings)
    if weight.path == "embedding":
        times = (2 if shape.pipelined_segment() else 1) + _further(sketch)  # for layers ahead of the stages twice
        times *= ticks
        yield moved.sent(moved.gathered, "gathers", once * times, GATHER, times, **how)
    elif weight.path != "head":
        times = ticks * moved.repeats
        ahead = weight.segment is not None and weight.segment < shape.pipelined_segment()
        runs = 3 if ahead else 2
        once /= moved.repeats
        yield moved.sent(moved.gathered, "gathers", once * times * runs, GATHER, times * runs, **how)
        others = ordered(mesh, set(moved.copies) - set(replicas))
        yield _gradient(
            sketch, moved, moved.gathered, others, moved.numbers / moved.repeats * moved.itemsize, times, **how
        )
    if is_head:
        times = ticks
        part = moved.numbers * share(mesh.size(*moved.gathered)) * times
        yield moved.sent(moved.gathered, "gathers", part * moved.itemsize, GATHER, times, **how)
        yield moved.sent(moved.gathered, "scatters", part * MASTER, SCATTER, times, **how)
