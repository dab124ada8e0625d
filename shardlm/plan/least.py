"""The least time that any way to run on a mesh can have, so that a search for the fastest plan alone begins where there
is most hope, and ends where there is none."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.ops.expert_dispatch import beside_weights
from shardlm.plan.alike import Alike, alike, inner
from shardlm.plan.bound import Bound
from shardlm.plan.changed import changed
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import Constraints
from shardlm.plan.cost import Layers, StepCost, step_cost, without_weights
from shardlm.plan.overlap import Timed, keeping, timed
from shardlm.plan.plan import Plan
from shardlm.plan.program_traffic import moved_of, together, weights_traffic
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import Sent
from shardlm.plan.ways import PRESETS, REMATS, away_in, by_schedule, keeps
from shardlm.train.check import fills_stages, splits_batch
from shardlm.train.config import OffloadConfig, RunConfig
from shardlm.train.settled import check_sizes

NEARLY = 0.99  # of it: the same sums in another order


class Hope:
    """The least that ways to run on one mesh can take: `seconds` of all, and of those that were reckoned by schedule,
    product and what they keep of the forward pass. Infinite where a bound excludes all, and where none runs or fits."""

    def __init__(self, bound: Bound):
        self._bound = bound
        self._costs: dict[tuple, StepCost] = {}
        self.seconds = math.inf

    def add(self, config: RunConfig, cost: StepCost, idle: float) -> None:
        """Of ways like this one, none is busy for less; the least idle of them is so for `idle` of that time."""
        self._costs[_way(config)] = cost
        self.seconds = min(self.seconds, NEARLY * cost.seconds_with(idle))

    def knows(self, config: RunConfig) -> bool:
        return _way(config) in self._costs

    def excludes(self, config: RunConfig) -> bool:
        """Whether all that run so take longer than what was found."""
        cost = self._costs.get(_way(config))
        return cost is not None and NEARLY * cost.seconds_with(self._bound.idle(config)) > self._bound.seconds


class Least:
    """What was found of the meshes of a search, by their inner axes: others differ in how weights are held and moved,
    in how near to each other stages lie, and in the little of layers that goes by where weights rest.

    considered  ways to run whose time was reckoned
    """

    def __init__(
        self,
        known: Alike,
        bound: Bound,
        meshes: Sequence[RunConfig],
        constraints: Constraints,
        offload: Sequence[OffloadConfig],
    ):
        self._known, self._cluster = known, known.cluster
        self._bound, self._constraints, self._offload = bound, constraints, offload
        self._remats = constraints.choices("remat", REMATS)
        train = meshes[0].train if meshes else None
        make = functools.partial(_by_inner, meshes)
        self._alike, self._running = known.once("that run", (train, known.cluster.island), make)
        self._floors: dict[tuple, Hope] = {}
        self._may_fit: dict[tuple, bool] = {}
        self._mesh: tuple | None = None  # that was looked at last
        self._sent: dict[tuple, list[Timed]] = {}
        self.considered = 0

    def floor(self, laid: RunConfig) -> float:
        """On all meshes with this one's inner axes, as if no weights were moved."""
        if (laid.mesh, laid.rules) not in self._running:
            return math.inf
        key = alike(laid)
        if key not in self._floors:
            self._floors[key] = self._hope(_nearest(laid), without_weights)
        return self._floors[key].seconds

    def hope(self, laid: RunConfig) -> Hope:
        """On one mesh, for each schedule of the ways that keep most of the forward pass of those that may fit. The
        fewest microbatches send least and fill kernels best; the most leave stages idle for the least time."""
        return self._hope(laid, self._step_cost, self._floors.get(alike(laid)))

    def further(self, hope: Hope, variants: Sequence[RunConfig], kept: dict[str, Any]) -> None:
        """`hope` knows of these ways too, those of the most microbatches first, which keep that much."""
        self._add(hope, variants, kept, self._step_cost)

    def may_fit(self, variants: Sequence[RunConfig], kept: dict[str, Any]) -> bool:
        """Whether ways that keep that much fit with the most or the fewest microbatches on any mesh with these inner
        axes: of each preset on the one that splits weights most. Where none runs they may."""
        remat, away = kept["remat"], away_in(kept["offload"])
        key = (inner(variants[0]), variants[0].pipeline, variants[0].matmul, remat, away)
        if key not in self._may_fit:
            ends = [changed(one, **kept) for one in (*variants[:1], *variants[1:][-1:]) if self._divides(one)]
            found = list(itertools.islice(self._fitting(inner(variants[0]), ends), 1))
            self._may_fit[key] = found[0] if found else True
        return self._may_fit[key]

    def _divides(self, config: RunConfig) -> bool:
        """Whether layers and microbatches fill the stages, as they then do on all meshes with these inner axes."""
        return fills_stages(self._bound.repeats, config.train, config.pipeline, config.mesh)

    def _fitting(self, own: tuple, ends: Sequence[RunConfig]) -> Iterator[bool]:
        """True for the first preset with which one of these fits; else False where any runs."""
        runs = False
        for preset in PRESETS:
            for laid in (one for one in self._alike[own] if one.rules == preset):
                plans = list(self._plans(laid, ends))
                runs = runs or bool(plans)
                if any(plan.fits for plan in plans):
                    yield True
                if plans:
                    break
            if runs and preset == "zero3":
                break  # no other holds less
        if runs:
            yield False

    def _plans(self, laid: RunConfig, ends: Sequence[RunConfig]) -> Iterator[Plan]:
        for one in ends:
            try:
                yield Plan.of(changed(one, mesh=laid.mesh, rules=laid.rules), self._cluster, self._known)
            except ShardlmError:
                continue

    def _hope(self, laid: RunConfig, cost: Callable[..., StepCost], floor: Hope | None = None) -> Hope:
        """But for what a floor excludes. In stages also of what keeps second most: there remat=none writes and reads
        again what costs more than it saves."""
        hope = Hope(self._bound)
        for variants in by_schedule(laid, self._constraints):
            if self._bound.excludes(variants[0]):  # that of the most microbatches is idle for the least time
                continue
            may = (kept for kept in keeps(variants[0], self._remats, self._offload) if self.may_fit(variants, kept))
            for kept in itertools.islice(may, 2 if laid.mesh.pipeline > 1 else 1):
                if floor is None or not floor.excludes(changed(variants[0], **kept)):
                    self._add(hope, variants, kept, cost)
        return hope

    def _step_cost(self, sketch: Sketch, cluster: Cluster, layers: Layers) -> StepCost:
        """With a layer's weights moved together, which takes no longer than each apart, and as long whatever is kept of
        the forward pass."""
        mesh, config = (sketch.mesh, sketch.config.rules), sketch.config
        if self._mesh != mesh:
            self._mesh, self._sent = mesh, {}
        way = config.pipeline, config.train.accumulation, config.matmul
        if way not in self._sent:
            self._sent[way] = timed(sketch.once(_sent_together), sketch, cluster)
        return step_cost(sketch, cluster, layers, keeping(self._sent[way], config.remat))

    def _add(
        self, hope: Hope, variants: Sequence[RunConfig], kept: dict[str, Any], cost: Callable[..., StepCost]
    ) -> None:
        for variant in filter(self._divides, reversed(variants)):
            candidate = changed(variant, **kept)
            try:
                sketch = self._known.sketch(candidate)
            except ShardlmError:
                continue
            self.considered += 1
            layers = self._known.layers(sketch)
            hope.add(candidate, cost(sketch, self._cluster, layers), min(map(self._bound.idle, variants)))
            return


def _sent_together(sketch: Sketch) -> list[Sent]:
    return weights_traffic(sketch, together(moved_of(sketch), sketch))


def _by_inner(meshes: Sequence[RunConfig]) -> tuple[dict[tuple, list[RunConfig]], set[tuple]]:
    """(those that run by their inner axes, the ones that split weights most first; all of them, as mesh and preset)."""
    found: dict[tuple, list[RunConfig]] = {}
    for laid in sorted(_that_run(meshes), key=lambda one: -one.mesh.fsdp):
        found.setdefault(inner(laid), []).append(laid)
    return found, {(laid.mesh, laid.rules) for those in found.values() for laid in those}


def _that_run(meshes: Sequence[RunConfig]) -> Iterator[RunConfig]:
    """Those that are not refused however they are run, as most over numbers of GPUs with odd factors are."""
    whole = dataclasses.replace(meshes[0].train, accumulation=1) if meshes else None
    for laid in (one for one in meshes if splits_batch(whole, one.mesh)):  # the others are most that are refused
        with contextlib.suppress(ShardlmError):
            check_sizes(changed(laid, train=whole), laid.mesh)
            yield laid


def _nearest(config: RunConfig) -> RunConfig:
    """Of meshes that one floor is under, the one whose layers send and move least, over the fastest links: weights
    rest whole, as layers use them, and between a stage and the next there are no devices of fsdp (mesh.AXES)."""
    if len(alike(config)) > len(inner(config)):
        return config
    if beside_weights(config.mesh):  # by which tokens reach experts as they do
        return changed(config, rules="replicated")
    mesh = dataclasses.replace(config.mesh, data=config.mesh.data * config.mesh.fsdp, fsdp=1)
    return changed(config, mesh=mesh, rules="replicated")


def _way(config: RunConfig) -> tuple:
    return config.pipeline, config.matmul, config.remat, *away_in(config.offload)
