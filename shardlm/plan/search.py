"""Which mesh: every way to lay a run over a number of GPUs at its global batch, by formulas, the fastest first."""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.plan.alike import Alike, Shared
from shardlm.plan.bound import Bound
from shardlm.plan.changed import changed
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import FREE, Constraints
from shardlm.plan.least import Hope, Least
from shardlm.plan.no_mesh import NothingRuns, no_mesh
from shardlm.plan.plan import Plan
from shardlm.plan.training_images import RowImages
from shardlm.plan.ways import (
    REMATS,
    by_schedule,
    choices_of,
    keeping,
    keeps,
    laid_out,
    layers_in_stages,
    moments_allowed,
    places,
    variants_of,
)
from shardlm.rules import BATCH_AXES
from shardlm.train.check import check_pipeline
from shardlm.train.config import OffloadConfig, PipelineConfig, RunConfig, TrainConfig
from shardlm.train.replicas import apart
from shardlm.train.settled import check_sizes

BEAM = 64  # meshes on which everything is looked at
ROOM = 0.05  # of a GPU's memory: how far a program may be from the formulas (memory.py)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search gives.

    plans       the best of each mesh that fits, the fastest first
    considered  configurations that were looked at
    too_large   of them, those that do not fit
    refused     reason -> how many configurations it ruled out
    smallest    of those that do not fit, the one that needs least; None where any fits, or none can run at all
    """

    plans: tuple[Plan, ...]
    considered: int
    too_large: int
    refused: dict[str, int]
    smallest: Plan | None


def search(
    config: RunConfig,
    cluster: Cluster,
    constraints: Constraints = FREE,
    *,
    every: bool = True,
    shared: Shared | None = None,
    images: RowImages | None = None,
) -> Found:
    """Looks at every mesh over the cluster's GPUs, with the presets, schedules, microbatches and remat policies that go
    with it, where the constraints leave the choice. State goes to host memory where nothing fits otherwise.

    every   False, for who wants the fastest alone: on each mesh leaves out what will be slower than one that was seen
    shared  with further such searches under the same constraints (alike.py), on other clusters
    images  of each row

    Raises ShardlmError where no mesh of that size can run the configuration, with the reasons.
    """
    find = functools.partial(_search if every else _fastest, known=Alike(cluster, shared, images))
    unrolls = dict.fromkeys([config.unroll, 1, 0, *constraints.numbers("unroll")])
    config = changed(config, unroll=constraints.choices("unroll", list(unrolls))[0])
    tried: list[Found] = []
    for away in places(config, constraints):
        tried += [find(held, constraints, [away]) for held in moments_allowed(config, constraints)]
        if any(one.plans for one in tried):
            break
    found = min(tried, key=lambda one: (not one.plans, one.smallest.memory.total if one.smallest else math.inf))
    sums = {name: sum(getattr(one, name) for one in tried) for name in ("considered", "too_large")}
    plans = sorted((plan for one in tried for plan in one.plans), key=lambda plan: plan.step_seconds)
    found = dataclasses.replace(found, plans=tuple(plans), **sums)
    if not found.plans and found.smallest is None:
        raise NothingRuns(functools.partial(_nothing_runs, config, cluster, constraints, found.refused))
    return dataclasses.replace(found, smallest=_smaller(found.smallest, constraints)) if found.smallest else found


def _smaller(plan: Plan, constraints: Constraints) -> Plan:
    """What needs least memory on the plan's mesh: where the state alone is too large, the search does not go on to
    remat policies that keep less."""
    known = Alike(plan.cluster, images=plan.sketch.images)
    least = _thrifty(plan.config, known, constraints, [plan.config.offload])
    return min([plan, *(one for one in least if isinstance(one, Plan))], key=lambda one: one.memory.total)


def first_fit(
    config: RunConfig, cluster: Cluster, constraints: Constraints = FREE, images: RowImages | None = None
) -> Plan | None:
    """Any plan that fits, of those that need least memory on their mesh: the first with ROOM to spare, else the one
    with most. None where none fits or none can run."""
    config = moments_allowed(config, constraints)[-1]
    away, known = places(config, constraints), Alike(cluster, images=images)
    tightest: Plan | None = None
    for laid in laid_out(config, cluster, constraints):
        for plan in _thrifty(laid, known, constraints, away):
            if isinstance(plan, ShardlmError) or not plan.fits:
                continue
            if plan.memory.total <= (1 - ROOM) * cluster.gpu.hbm_bytes:
                return plan
            tightest = min(filter(None, (tightest, plan)), key=lambda p: p.memory.total)
    return tightest


def _search(
    config: RunConfig, constraints: Constraints, offload: Sequence[OffloadConfig], known: Alike, beam: int = BEAM
) -> Found:
    """Where there are more meshes than `beam`, first the fewest microbatches on each that fit where least is kept, and
    then everything on the fastest of them: DeepSeek V3 on 1,024 GPUs has 2,602 meshes with 41,600 ways to run on
    them."""
    tally = _Tally()
    meshes = list(laid_out(config, known.cluster, constraints))
    if len(meshes) > beam:
        for laid in meshes:
            tally.add(_fewest(laid, known, constraints, offload))
        meshes = [dataclasses.replace(config, mesh=p.config.mesh, rules=p.config.rules) for p in tally.plans[:beam]]
    for laid in meshes:
        tally.add(_all(laid, known, constraints, offload))
    return tally.found()


def _fastest(config: RunConfig, constraints: Constraints, offload: Sequence[OffloadConfig], known: Alike) -> Found:
    """Of each mesh, what may be faster than all that was seen before: first the meshes without stages, then those with,
    from the one with the least time that any way to run on it can have, on to where that is more than a plan takes."""
    tally, bound, cluster = _Tally(), Bound(config.model.transformer()), known.cluster
    where = config.train, config.offload, config.optim, cluster.island
    meshes = known.once("laid out", where, lambda: list(laid_out(config, cluster, constraints)))
    least = Least(known, bound, meshes, constraints, offload)
    seen: dict[int, list[Plan | ShardlmError]] = {}
    for staged in (False, True):
        numbers = [i for i, laid in enumerate(meshes) if (laid.mesh.pipeline > 1) == staged]
        # What a mesh can take at least: first as if it moved no weights, and of the most hopeful in full.
        queue: list[tuple[float, int, Hope | None]] = [(least.floor(meshes[i]), i, None) for i in numbers]
        heapq.heapify(queue)
        while queue and queue[0][0] <= bound.seconds:
            seconds, i, hope = heapq.heappop(queue)
            if hope is None and math.isfinite(seconds):
                hope = least.hope(meshes[i])
                heapq.heappush(queue, (hope.seconds, i, hope))
                continue
            if math.isfinite(seconds):
                plans = _hopeful(meshes[i], known, constraints, offload, bound, least, hope)
            else:  # nothing fits so far: what stands in the way is asked for
                plans = _all(meshes[i], known, constraints, offload)
            seen[i] = []
            for plan in plans:
                seen[i].append(plan)
                if isinstance(plan, Plan) and plan.fits:
                    bound.add(plan)
    for i in sorted(seen):  # as they were laid out: of equals the first is taken
        tally.add(seen[i])
    tally.considered += least.considered
    return tally.found()


class _Tally:
    """What a search has seen: the best plan of each mesh and preset, and what could not be."""

    def __init__(self):
        self.best: dict[tuple, Plan] = {}
        self.refused: collections.Counter[str] = collections.Counter()
        self.smallest: Plan | None = None
        self.considered = self.too_large = 0

    def add(self, plans: Iterable[Plan | ShardlmError]) -> None:
        """Of one mesh and preset."""
        fitting: list[Plan] = []
        for plan in plans:
            self.considered += 1
            if isinstance(plan, ShardlmError):
                self.refused[str(plan)] += 1
            elif plan.fits:
                fitting.append(plan)
            else:
                self.too_large += 1
                if not self.best and not fitting:  # as soon as one fits, nobody asks how large the others are
                    self.smallest = min(filter(None, (self.smallest, plan)), key=lambda p: p.memory.total)
        if fitting:
            key = (fitting[0].config.mesh, fitting[0].config.rules)
            self.best[key] = fastest([*filter(None, [self.best.get(key)]), *fitting])

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(sorted(self.best.values(), key=lambda p: (p.step_seconds, p.memory.total)))

    def found(self) -> Found:
        smallest = None if self.best else self.smallest
        return Found(self.plans, self.considered, self.too_large, dict(self.refused.most_common()), smallest)


def fastest(plans: Sequence[Plan]) -> Plan:
    """The first of those whose step takes least. The most hopeful are reckoned first, and none in full that takes
    longer at least than what was found: of LFM2 8B-A1B on 16 GPUs 607 of the 1,348 ways that fit."""
    best, *others = sorted(range(len(plans)), key=lambda i: plans[i].least_seconds) if len(plans) > 1 else [0]
    for i in others:
        if plans[i].least_seconds > plans[best].step_seconds:
            break
        best = min(best, i, key=lambda j: (plans[j].step_seconds, j))
    return plans[best]


def _all(
    laid: RunConfig, known: Alike, constraints: Constraints, offload: Sequence[OffloadConfig]
) -> Iterator[Plan | ShardlmError]:
    """Everything on one mesh: a plan, or why there is none. What keeps less of the forward pass is looked at only where
    what keeps more does not fit, as it runs longer."""
    remats = constraints.choices("remat", REMATS)
    schedules, trains, matmuls = choices_of(laid, constraints)
    refused = known.once("refused", (laid.train, laid.mesh, laid.rules), lambda: _refusals(laid, trains))
    if all(refused.values()):
        yield from (refused[train.accumulation] for _, train, _ in itertools.product(schedules, trains, matmuls))
        return
    alone = not (laid.train.shares or apart(laid))  # else replicas are asked before stages
    repeats = layers_in_stages(laid.model) if laid.mesh.pipeline > 1 and alone else 0
    for variant in variants_of(laid, constraints):
        error = refused[variant.train.accumulation]
        if repeats and error is None:
            error = _unfilled(repeats, variant.train, variant.pipeline, variant.mesh.pipeline)
        if error:
            yield error
            continue
        for candidate in keeping(variant, remats, offload):
            plan = _plan(candidate, known)
            yield plan
            if isinstance(plan, ShardlmError) or plan.fits or plan.state_too_large:
                break


def _refusals(laid: RunConfig, trains: Iterable[TrainConfig]) -> dict[int, ShardlmError | None]:
    """By microbatches, in which alone they differ: hashing them whole takes longer."""
    return {train.accumulation: _refused(changed(laid, train=train)) for train in trains}


def _refused(laid: RunConfig) -> ShardlmError | None:
    """With all schedules, products and remat policies."""
    try:
        check_sizes(laid, laid.mesh)
    except ShardlmError as error:
        return error
    return None


@functools.lru_cache(maxsize=4096)
def _unfilled(repeats: int, train: TrainConfig, pipeline: PipelineConfig, stages: int) -> ShardlmError | None:
    """That layers or microbatches do not fill so many stages: most of what refuses meshes that their sizes do not."""
    try:
        check_pipeline(repeats, train, pipeline, MeshSpec(pipeline=stages))
    except ShardlmError as error:
        return error
    return None


def _hopeful(
    laid: RunConfig,
    known: Alike,
    constraints: Constraints,
    offload: Sequence[OffloadConfig],
    bound: Bound,
    least: Least,
    hope: Hope,
) -> Iterator[Plan | ShardlmError]:
    """The same of what may be faster than all that was seen before."""
    remats = constraints.choices("remat", REMATS)
    for variants in by_schedule(laid, constraints):
        for variant in (one for one in variants if not bound.excludes(one)):
            for kept in keeps(variant, remats, offload):
                if not least.may_fit(variants, kept):
                    continue
                candidate = changed(variant, **kept)
                if not hope.knows(candidate) and len(variants) > 1:
                    least.further(hope, variants, kept)
                slow = hope.excludes(candidate)
                if slow and laid.mesh.pipeline == 1:
                    break
                plan = _plan(candidate, known)
                if not slow:
                    yield plan
                # In stages what keeps less may be faster, and is looked at where what keeps more does not fit.
                if isinstance(plan, ShardlmError) or plan.fits or plan.state_too_large:
                    break


def _thrifty(
    laid: RunConfig, known: Alike, constraints: Constraints, offload: Sequence[OffloadConfig]
) -> Iterator[Plan | ShardlmError]:
    """Of one mesh, what needs least memory: the remat policy that keeps least, with the most and the fewest
    microbatches of each schedule."""
    remat = constraints.choices("remat", REMATS)[-1:]
    for variants in by_schedule(laid, constraints):
        for variant in variants if len(variants) == 1 else (variants[0], variants[-1]):
            yield from (_plan(candidate, known) for candidate in keeping(variant, remat, offload))


def _fewest(
    laid: RunConfig, known: Alike, constraints: Constraints, offload: Sequence[OffloadConfig]
) -> Iterator[Plan | ShardlmError]:
    """Of one mesh with the remat policy that keeps least and each schedule: the most microbatches, and where those fit,
    from the fewest on to the first that fit."""
    remat = constraints.choices("remat", REMATS)[-1:]
    for most, *fewer in by_schedule(laid, constraints):
        plans = [_plan(candidate, known) for candidate in keeping(most, remat, offload)]
        yield from plans
        for variant in reversed(fewer if any(map(_fits, plans)) else []):
            plans = [_plan(candidate, known) for candidate in keeping(variant, remat, offload)]
            yield from plans
            if any(map(_fits, plans)):
                break


def _fits(plan: Plan | ShardlmError) -> bool:
    return isinstance(plan, Plan) and plan.fits


def _plan(config: RunConfig, known: Alike) -> Plan | ShardlmError:
    try:
        return Plan.of(config, known.cluster, known)
    except ShardlmError as error:
        return error


def _nothing_runs(config: RunConfig, cluster: Cluster, constraints: Constraints, refused: dict[str, int]) -> str:
    said = constraints.of(*(one.field for one in constraints.items))
    asked = f" with {said}" if said else ""
    head = f"no mesh over {cluster.num_gpus} {cluster.device}s can run this configuration{asked}"
    if not refused:
        return f"{head}: {no_mesh(config, cluster, constraints)}"
    reasons = "\n".join(f"  {count} times: {reason}" for reason, count in list(refused.items())[:3])
    batch = _batch_that_runs(config, cluster, constraints)
    remedy = (
        f"\nA mesh can with train.global_batch={batch}, which {cluster.num_gpus} {cluster.device}s can share."
        if batch
        else ""
    )
    return f"{head}. The reasons, the most frequent first:\n{reasons}{remedy}"


def _batch_that_runs(config: RunConfig, cluster: Cluster, constraints: Constraints) -> int | None:
    """The next larger number of rows that the odd part of the GPUs divides, where some mesh can run that."""
    odd, rows = cluster.num_gpus, config.train.global_batch
    while odd % 2 == 0:
        odd //= 2
    for batch in (
        -(-rows // odd) * odd,
        -(-rows // (2 * odd)) * 2 * odd,
        -(-rows // cluster.num_gpus) * cluster.num_gpus,
    ):
        larger = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch))
        tried = (
            plan
            for laid in laid_out(larger, cluster, constraints)
            if batch % laid.mesh.size(*BATCH_AXES) == 0
            for plan in _thrifty(laid, Alike(cluster), constraints, [OffloadConfig()])
        )
        if batch > rows and any(isinstance(plan, Plan) for plan in tried):
            return batch
    return None


def settings(config: RunConfig) -> dict[str, Any]:
    """What the search has chosen, as overrides of a configuration."""
    chosen: dict[str, Any] = {f"mesh.{axis}": size for axis, size in config.mesh.sizes().items()}
    chosen |= {"rules": config.rules, "remat": config.remat, "train.accumulation": config.train.accumulation}
    if config.mesh.pipeline > 1:
        chosen["pipeline.schedule"] = config.pipeline.schedule
        if config.pipeline.schedule == "circular":
            chosen["pipeline.rounds"] = config.pipeline.rounds
    if config.matmul != "dtype":
        chosen["matmul"] = config.matmul
    if config.optim.moments != "float32":
        chosen["optim.moments"] = config.optim.moments
    away = {f"offload.{name}": True for name, there in dataclasses.asdict(config.offload).items() if there}
    return chosen | away
