"""The bill of a compiled step with its times: every collective and every copy to the host or from it, over which link,
how long, how much of that kernels cover as the program is scheduled, and what causes it. Read from the optimised
program; rates are kernels.py's and links.py's, so that this and the estimate from formulas differ by the program and
not by the GPU."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping

from shardlm.hlo.bill import source_of, where_of
from shardlm.hlo.collectives import KINDS, Collective, moved_by
from shardlm.hlo.groups import spanned_axes
from shardlm.hlo.host import HostCopy, host_copy
from shardlm.hlo.kernels import Kernel, kernel, noted_seconds
from shardlm.hlo.origin import argument, phase
from shardlm.hlo.origin import cause as cause_of
from shardlm.hlo.text import Computation, Instruction, Module, parse
from shardlm.hlo.trips import trip_count
from shardlm.hlo.walk import Visit, branches, collect
from shardlm.mesh import MeshSpec
from shardlm.plan.cluster import Cluster
from shardlm.plan.measured import kernels_of, route_of
from shardlm.plan.op import Op


@dataclasses.dataclass(frozen=True)
class Charge:
    """What one device sends in a step for one cause, by one kind of collective, or copies to its host's memory or from
    it ("copy" over ("host",)).

    dtype, phase  as hlo/collectives.py has them
    link          "NVLink", "PCIe" or "network": the slowest that it crosses
    cause         the weight that is moved, or the functions that ask for it, innermost first
    where         lines in the source
    count         arrays moved in a step, loops included
    nbytes        sent in a step
    exposed_seconds  of `seconds`, those that no kernel covers
    guess         why the count is not certain; "" if it is
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    phase: str
    link: str
    cause: str
    where: str
    count: int
    nbytes: float
    seconds: float
    exposed_seconds: float
    guess: str = ""

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)  # sums of parts round


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """One step of one device, in seconds, as its program is scheduled: kernels by the roofline of kernels.py.

    rows         the bill, the longest exposed first
    xla_compute_seconds  the same kernels by XLA's own estimate, for comparison; None where the program was compiled
                 without xla_gpu_collect_cost_model_stats
    unknown      custom calls whose operations are not known, which are counted by the memory they touch -> executions
    contention_seconds  by how much collectives beside them, which take some of the cores, slow the kernels down
    """

    compute_seconds: float
    rows: tuple[Charge, ...]
    xla_compute_seconds: float | None
    unknown: Mapping[str, int]
    contention_seconds: float = 0.0

    @property
    def exposed(self) -> dict[str, float]:
        """Axes joined by "+" -> seconds that nothing covers."""
        found: dict[str, float] = collections.defaultdict(float)
        for row in self.rows:
            found["+".join(row.axes)] += row.exposed_seconds
        return dict(found)

    @property
    def exposed_seconds(self) -> float:
        return math.fsum(row.exposed_seconds for row in self.rows)

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.contention_seconds + self.exposed_seconds


def compiled_step(text: str, cluster: Cluster, mesh: MeshSpec, filled: float = 1.0) -> CompiledStep:
    """text is `Compiled.as_text()` of a step on `mesh`. `filled` is the share of the experts' buffers that holds tokens
    (program_layers.buffers_filled): a program shows the buffers alone. Raises ShardlmError for text that is not an
    optimised module.

    Kernels follow each other as they are scheduled; collectives run beside them in the order in which they start, each
    from its start or the end of the one before: XLA has one stream for all of them, whichever link they take
    (https://github.com/openxla/xla/pull/17749). One that is written without start and end runs among the kernels, when
    its link is free (https://github.com/openxla/xla/pull/46463, from jaxlib 0.11 on). Copies to the host's memory and
    from it have a stream each. A kernel behind a collective's end waits for it, and one beside it has fewer cores. A
    synchronous one has its end at its start. Of a conditional, the branch that takes longest; of a loop of unknown
    length, one iteration.
    """
    schedule = _Schedule(parse(text), cluster, mesh, filled)
    found = collect(schedule.module, schedule.items, lambda items: math.fsum(item.total for item in items))
    noted = [item.noted_seconds for item in found if item.kernel_seconds]
    unknown: collections.Counter = collections.Counter()
    for item in found:
        unknown[item.unknown] += item.count if item.unknown else 0
    return CompiledStep(
        math.fsum(item.kernel_seconds for item in found),
        _rows([item.charge for item in found if item.charge]),
        None if not any(noted) else math.fsum(filter(None, noted)),
        {name: count for name, count in unknown.items() if count},
        math.fsum(item.slowed_seconds for item in found),
    )


@dataclasses.dataclass(frozen=True)
class _Item:
    """A kernel or an array that is sent, over all its executions."""

    count: int
    kernel_seconds: float = 0.0
    slowed_seconds: float = 0.0
    noted_seconds: float | None = None
    unknown: str = ""
    charge: Charge | None = None

    @property
    def total(self) -> float:
        return self.kernel_seconds + self.slowed_seconds + (self.charge.exposed_seconds if self.charge else 0.0)


@dataclasses.dataclass(frozen=True)
class _Span:
    """One run of a computation: its seconds; of its collectives by the instruction that issues them (seconds, seconds
    that kernels wait); and of its kernels by how much collectives beside them slow each down."""

    seconds: float
    waits: Mapping[str, tuple[float, float]]
    slowed: Mapping[str, float]


class _Schedule:
    """The module's computations as they run on one device; spans are computed once a computation."""

    def __init__(self, module: Module, cluster: Cluster, mesh: MeshSpec, filled: float):
        self.module, self.cluster, self.mesh, self.filled = module, cluster, mesh, filled
        self.kernels = kernels_of(cluster)
        self.span = functools.cache(self._span)

    def items(self, visit: Visit) -> list[_Item]:
        at = visit.instruction
        arrays = moved_by(self.module, visit, self.mesh.sizes())
        if arrays:
            issuer = _issuer(visit)
            seconds, waited = self.span(issuer.computation.name).waits[issuer.instruction.name]
            return [_Item(visit.count, charge=self._charge(one, arrays, seconds, waited)) for one in arrays]
        if _inside_another(visit) or self._collective(visit.computation, at):
            return []
        if copy := host_copy(self.module, visit.computation, at):
            return [_Item(visit.count, charge=self._copied(visit, copy))]
        seconds, own = self._kernel_seconds(visit.computation, at)
        if not own:
            return []
        noted = noted_seconds(at)
        unknown = _target(at) if at.opcode == "custom-call" and own.unit == "memory" else ""
        slowed = self.span(visit.computation.name).slowed.get(at.name, 0.0)
        times = visit.count
        return [_Item(times, seconds * times, slowed * times, noted * times if noted else None, unknown)]

    def _charge(self, one: Collective, arrays: list[Collective], seconds: float, waited: float) -> Charge:
        share = self._sent(one) / max(math.fsum(map(self._sent, arrays)), 1e-30) * one.count
        return Charge(
            kind=one.kind,
            axes=one.axes,
            dtype=one.dtype,
            phase=one.phase,
            link=link(self.cluster, self.mesh, one.axes),
            cause=source_of(one),
            where=where_of(one),
            count=one.count,
            nbytes=self._sent(one) * one.count,
            seconds=seconds * share,
            exposed_seconds=waited * share,
            guess=one.guess,
        )

    def _copied(self, visit: Visit, copy: HostCopy) -> Charge:
        """Of a copy to the host's memory or from it, which stands in the bill as a profile names it (hlo/rows.py)."""
        rests = visit.instruction.operands[0]
        op_name, frames = cause_of(self.module, visit, rests)
        seconds, waited = self.span(visit.computation.name).waits[visit.instruction.name]
        return Charge(
            kind="copy",
            axes=("host",),
            dtype=visit.instruction.arrays[0].dtype,
            phase=phase(op_name),
            link="PCIe",
            cause=f"{argument(self.module, visit, rests) or op_name}, {copy.direction}",
            where=str(frames[0]) if frames else "",
            count=visit.count,
            nbytes=copy.nbytes * visit.count,
            seconds=seconds * visit.count,
            exposed_seconds=waited * visit.count,
            guess=visit.guess,
        )

    def _sent(self, one: Collective) -> float:
        return one.wire_bytes * (self.filled if one.kind == "ragged-all-to-all" else 1.0)

    def _span(self, name: str) -> _Span:
        """The clock of the kernels and the times until which the streams are busy; every wait is shared out among the
        collectives that its stream is busy with meanwhile."""
        computation = self.module.computations[name]
        clock, busy, links = 0.0, collections.defaultdict(float), collections.defaultdict(float)
        moved: dict[str, tuple[str, float, float]] = {}  # instruction -> (stream, from, until)
        taken: list[tuple[float, float, float]] = []  # (from, until, share of the cores), of what is not over yet
        slowed: dict[str, float] = {}
        waited: dict[str, float] = collections.defaultdict(float)

        def wait(stream: str, until: float) -> float:
            for other, (its, begin, end) in moved.items():
                overlap = min(end, until) - max(begin, clock)
                if its == stream and overlap > 0:
                    waited[other] += overlap
            return max(clock, until)

        for at in computation.instructions:
            moving = self._moving(computation, at)
            if moving:
                stream, way, seconds, cores = moving
                if not at.opcode.endswith("-start"):  # among the kernels: beside what other links move
                    clock, stream = wait(stream, links[way]), at.name
                begin = max(clock, busy[stream])
                busy[stream] = links[way] = begin + seconds
                moved[at.name] = (stream, begin, busy[stream])
                taken.append((begin, busy[stream], cores))
                if _synchronous(at):
                    clock = wait(stream, busy[stream])
            elif at.opcode.endswith(("-done", "-update")):
                started = _start(computation, at)
                if started in moved and at.opcode.endswith("-done"):
                    stream, _, until = moved[started]
                    clock = wait(stream, until)
            else:
                seconds, alone = self._seconds(computation, at), at.opcode in _RUN_OTHERS
                taken = [one for one in taken if one[1] > clock]
                until = clock + seconds if alone else _ends(clock, seconds, taken)
                slowed[at.name] = until - clock - seconds
                clock = until
        for stream, until in sorted(busy.items(), key=lambda item: item[1]):
            clock = wait(stream, until)  # what is never waited for ends with the computation
        waits = {name: (end - begin, waited[name]) for name, (_, begin, end) in moved.items()}
        return _Span(clock, waits, slowed)

    def _seconds(self, computation: Computation, at: Instruction) -> float:
        if at.opcode == "while":
            (body,) = at.called("body")
            trips = trip_count(self.module, computation, at)
            return self.span(body).seconds * (1 if trips is None else trips)
        if at.opcode == "conditional":
            return max(self.span(name).seconds for name in branches(self.module, at))
        if at.opcode == "call":
            return math.fsum(self.span(name).seconds for name in at.called("to_apply"))
        if at.opcode in ("async-start", "call-start"):
            return math.fsum(self.span(name).seconds for name in at.called("calls"))
        return self._kernel_seconds(computation, at)[0]

    def _kernel_seconds(self, computation: Computation, at: Instruction) -> tuple[float, Kernel | None]:
        if at.opcode in ("async-start", "call-start"):
            return 0.0, None
        found = kernel(self.module, computation, at)
        if found is None or not (found.nbytes or found.flops):
            return 0.0, None
        share = self.filled if found.grouped else 1.0
        flops, nbytes, rows = found.flops * share, found.nbytes * share, found.dims[0] * share
        op = Op("other", at.name, found.unit, flops, nbytes, 1, dims=(rows, *found.dims[1:]), dtype=found.dtype)
        return self.kernels.one_seconds(op, "Backward" in _target(at)), found

    def _collective(self, computation: Computation, at: Instruction) -> tuple[Computation, Instruction] | None:
        """The collective between devices that `at` is, or issues."""
        if at.opcode.removesuffix("-start") in KINDS:
            return (computation, at) if spanned_axes(at, self.mesh.sizes()) else None
        if at.opcode not in ("async-start", "fusion"):
            return None
        inner = [self.module.computations[name] for name in at.called("calls")]
        found = (self._collective(c, other) for c in inner for other in c.instructions)
        return next(filter(None, found), None)

    def _moving(self, computation: Computation, at: Instruction) -> tuple[str, str, float, float] | None:
        """(stream, link, seconds, share of the cores) of a collective or a copy that `at` is, or issues."""
        if inner := self._collective(computation, at):
            axes = spanned_axes(inner[1], self.mesh.sizes())
            arrays = moved_by(self.module, Visit(inner[1], inner[0], 1, 0, "", None), self.mesh.sizes())
            route = route_of(self.cluster.group(self.mesh, axes), self.cluster)
            seconds = route.seconds(arrays[0].kind, math.fsum(map(self._sent, arrays)), 1)
            return _COLLECTIVES, link(self.cluster, self.mesh, axes), seconds, route.cores
        if copy := host_copy(self.module, computation, at):  # both ways at once, by engines of their own
            seconds = copy.nbytes / self.cluster.host_bytes_per_second + self.kernels.gap
            return copy.direction, copy.direction, seconds, 0.0
        return None


_COLLECTIVES = "collectives"  # the stream of all of them
_RUN_OTHERS = ("while", "conditional", "call", "async-start", "call-start")


def _ends(clock: float, seconds: float, taken: list[tuple[float, float, float]]) -> float:
    """When a kernel of so many seconds ends that begins now, beside collectives (from, until, share of the cores)."""
    while seconds > 0:
        held = sum(cores for begin, end, cores in taken if begin <= clock < end)
        change = min((at for one in taken for at in one[:2] if at > clock), default=math.inf)
        work = (change - clock) * (1 - held)
        if work >= seconds:
            return clock + seconds / (1 - held)
        clock, seconds = change, seconds - work
    return clock


def link(cluster: Cluster, mesh: MeshSpec, axes: tuple[str, ...]) -> str:
    """The slowest link that a collective over these axes crosses."""
    if cluster.group(mesh, axes).outside > 1:
        return "network"
    return "NVLink" if cluster.inside_bytes_per_second == cluster.gpu.nvlink_bytes_per_second else "PCIe"


def _issuer(visit: Visit) -> Visit:
    """The instruction of the schedule that stands for a collective: itself, or what wraps it."""
    while visit.caller and visit.caller.instruction.opcode in ("async-start", "fusion"):
        visit = visit.caller
    return visit


def _inside_another(visit: Visit) -> bool:
    """Whether it is part of a kernel, or of a loop's condition, which the host knows beforehand."""
    caller = visit.caller
    if caller is None:
        return False
    if caller.instruction.opcode == "while":
        return visit.computation.name in caller.instruction.called("condition")
    return caller.instruction.opcode in ("fusion", "custom-call") or (
        caller.instruction.opcode not in ("conditional", "call", "async-start", "call-start")
    )


def _synchronous(at: Instruction) -> bool:
    return not at.opcode.endswith("-start") or '"is_sync":true' in at.attributes


def _start(computation: Computation, done: Instruction) -> str:
    """The name of what a -done ends."""
    at = computation.named[done.operands[0]]
    while at.opcode.endswith("-update"):
        at = computation.named[at.operands[0]]
    return at.name


def _target(at: Instruction) -> str:
    return at.attributes.partition('custom_call_target="')[2].partition('"')[0]


def _rows(charges: list[Charge]) -> tuple[Charge, ...]:
    """Equal causes together, the longest exposed first."""
    groups: dict[tuple, list[Charge]] = {}
    for one in charges:
        groups.setdefault((one.kind, one.axes, one.dtype, one.phase, one.cause), []).append(one)
    rows = []
    for group in groups.values():
        totals = {name: sum(getattr(one, name) for one in group) for name in ("count", "nbytes", "seconds")}
        totals["exposed_seconds"] = math.fsum(one.exposed_seconds for one in group)
        guess = next((one.guess for one in group if one.guess), "")
        rows.append(dataclasses.replace(group[0], **totals, guess=guess))
    return tuple(sorted(rows, key=lambda row: (-row.exposed_seconds, -row.seconds, row.cause)))
