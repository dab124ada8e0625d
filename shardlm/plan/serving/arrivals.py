"""A replica under random arrivals: the engine's own scheduler, with batches that take as long as is estimated of its
programs. What clients would see of their requests: percentiles, where load.py has means."""

import collections
import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from shardlm.plan.serving.crowd import TOKEN, chunk_seconds, request_of, rounded
from shardlm.plan.serving.load import Load, Replica
from shardlm.plan.serving.mix import Kind
from shardlm.serve.batch import ScheduledBatch
from shardlm.serve.bench.seen import TIMES, Seen, summary
from shardlm.serve.engine import AHEAD
from shardlm.serve.pace import steps_of
from shardlm.serve.pool_size import scheduler_of
from shardlm.serve.scheduler import Scheduler

REQUESTS, TOKENS = 1000, 200_000  # of the replies that are reported: so many, or with so many tokens, at least LEAST
LEAST = 100
JOINED = 64  # steps at most of decode programs that are run as one


@dataclasses.dataclass(frozen=True)
class Programs:
    """What those of a replica take, remembered: for several runs of it."""

    replica: Replica

    def steps(self, rows: int) -> int:
        """Of a decode program."""
        step = self.step_seconds(rows, round(self.replica.context))
        return steps_of(step, self.replica.speed.memory.sizes.decode_steps)

    def seconds(self, batch: ScheduledBatch) -> tuple[float, float]:
        """(that the device is busy with a batch, until it has landed): in stages a chunk follows the one before it."""
        speed = self.replica.speed
        decodes = [row.start for row in batch.rows if row.tokens is None]
        read = [row for row in batch.rows if row.tokens is not None]
        chunks = chunk_seconds(read, speed)
        looks = speed.images_seconds * sum(row.start == 0 for row in read)  # before their prompts' first chunks
        step = self.step_seconds(len(decodes), rounded(sum(decodes) / len(decodes))) if decodes else 0.0
        busy = looks + step * batch.steps + sum(chunks) / speed.stages
        return busy, busy + max(chunks, default=0.0) * (1 - 1 / speed.stages)

    @functools.cached_property
    def step_seconds(self) -> Callable[[int, int], float]:
        return functools.cache(self.replica.speed.step_seconds)


def times_of_requests(programs: Programs, load: Load, seed: int = 0) -> dict[str, Any]:
    """Seconds as `launch.bench serve` reports them (bench/seen.py: mean and percentiles of ttft, tpot, itl, e2e) of
    requests of the case's mix that come at random (a Poisson process of the load's rate); the share that keeps the
    case's latencies, where it has any, that of the prompts' tokens which the prefix cache had, and the preemptions. As
    many as run at once come three times before those that are reported, and more behind them."""
    run = _Run.of(programs, load, seed)
    run.until(lambda: run.ended == len(run.reported))
    seen = [run.seen[i] for i in run.reported]
    found = summary(seen, run.came[run.reported.stop] - run.came[run.reported.start], run.limits)
    kept = {"requests", *(f"{name}_seconds" for name in TIMES)}
    return {
        "requests_per_second": load.rate,
        **{key: value for key, value in found.items() if key in kept},
        "within_limits": found["goodput"]["share"] if "goodput" in found else None,
        "cached_share": sum(run.cached[i] for i in run.reported) / sum(run.kinds[i].prompt for i in run.reported),
        "preemptions": run.scheduler.preemptions,
    }


def keep_latencies(programs: Programs, load: Load, seed: int = 0) -> bool:
    """Whether `times_of_requests` would find the case's attainment; ends as soon as that is known. Streams are not
    looked at: decode programs that end before the next request comes are run as one."""
    run = _Run.of(programs, load, seed, whole_replies=True)
    count = len(run.reported)
    wanted = math.ceil(programs.replica.case.attainment * count)
    run.until(lambda: run.late > count - wanted or run.ended - run.late >= wanted)
    return run.late <= count - wanted


@dataclasses.dataclass
class _Run:
    """came, last: seconds of each request's arrival and of its last token so far; flying: (batch, when it lands);
    ended, late: how many of those that are `reported` have, and of these did not keep the limits; cached: tokens of the
    prompts of those that ended, found in the prefix cache."""

    programs: Programs
    scheduler: Scheduler
    rng: random.Random
    came: list[float]
    kinds: list[Kind]
    reported: range
    limits: dict[str, float]
    seen: list[Seen]
    last: list[float]
    flying: collections.deque[tuple[ScheduledBatch, float]]
    joined: bool  # decode programs that nobody waits for
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    ended: int = 0
    late: int = 0
    now: float = 0.0
    next: float = math.inf  # when a request comes
    free: float = 0.0  # when the device has done all that flies

    @classmethod
    def of(cls, programs: Programs, load: Load, seed: int, whole_replies: bool = False) -> "_Run":
        case = programs.replica.case
        count, before = max(LEAST, min(REQUESTS, int(TOKENS / case.mix.output))), math.ceil(3 * load.running)
        rng, now, came = random.Random(seed), 0.0, []
        for _ in range(before + count + count // 4):
            now += rng.expovariate(load.rate)
            came.append(now)
        # Where no prompt begins as another does, nothing would be found, and pages to keep are much of the time.
        engine = dataclasses.replace(case.engine, enable_prefix_caching=case.mix.shares)
        sizes = programs.replica.speed.memory.sizes
        joined = whole_replies and not case.engine.drafts
        scheduler = scheduler_of(dataclasses.replace(sizes, decode_steps=JOINED) if joined else sizes, engine)
        limits = {k: v for k, v in {"ttft": case.ttft_seconds, "tpot": case.itl_seconds}.items() if v}
        seen, last = [Seen() for _ in came], [math.nan] * len(came)
        reported = range(before, before + count)
        kinds = case.mix.draw(len(came), seed)
        return cls(programs, scheduler, rng, came, kinds, reported, limits, seen, last, collections.deque(), joined)

    def until(self, known: Callable[[], bool]) -> None:
        """Time goes from each arrival or landing to the next; at each the engine starts what it can."""
        waiting = collections.deque(enumerate(self.came))
        pace = self._steps if self.joined else self.programs.steps
        while not known():
            arrives = waiting[0][1] if waiting else math.inf
            lands = self.flying[0][1] if self.flying else math.inf
            self.now = min(arrives, lands)
            if arrives <= lands:
                number, _ = waiting.popleft()
                kind, page = self.kinds[number], self.scheduler.pages.page_size
                self.scheduler.add(request_of(number, kind, kind.output, page))
                self.next = waiting[0][1] if waiting else math.inf
            else:
                self._land(self.flying.popleft()[0])
            while len(self.flying) < AHEAD and (batch := self.scheduler.schedule(pace)) is not None:
                self._start(batch)

    def _steps(self, rows: int) -> int:
        """Of a decode program, or of several that end before any reply does and about two programs before a request
        comes, which finds a program under way wherever it may be."""
        steps = self.programs.steps(rows)
        step = self.programs.step_seconds(rows, rounded(self.programs.replica.context))
        several = (self.next - max(self.now, self.free)) / step - steps * (1 + self.rng.random())
        if several < 2 * steps:
            return steps
        return max(steps, int(min(several, self.scheduler.least_remaining)))

    def _start(self, batch: ScheduledBatch) -> None:
        device, whole = self.programs.seconds(batch)
        begins = max(self.now, self.free)
        self.free = begins + device
        self.flying.append((batch, begins + whole))

    def _land(self, batch: ScheduledBatch) -> None:
        tokens = np.full((len(batch.rows), batch.width), TOKEN)
        for request, _, new in self.scheduler.land(batch, tokens, self._counts(batch)):
            if not new:
                continue
            number = int(request.id)
            seen = self.seen[number]
            if seen.tokens:
                if not self.joined:  # else nobody asks
                    seen.gaps.append(self.now - self.last[number])
            else:
                seen.first = self.now - self.came[number]
            seen.tokens += len(new)
            seen.whole = self.now - self.came[number]
            self.last[number] = self.now
            if request.finished and number in self.reported:
                self.cached[number] = request.cached_tokens
                self.ended += 1
                self.late += not seen.keeps(self.limits)

    def _counts(self, batch: ScheduledBatch) -> np.ndarray | None:
        """Tokens of each row, where each draft of a step is right with the same chance; None: all that they sample."""
        case = self.programs.replica.case
        drafts = case.engine.drafts
        if not drafts:
            return None
        found = []
        for row in batch.rows:
            count = row.samples
            if row.tokens is None:
                right = (self.rng.random() < case.acceptance_rate for _ in range(batch.steps * drafts))
                count = min(count, batch.steps + sum(right))
            found.append(count)
        return np.array(found)
