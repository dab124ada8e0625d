"""A replica under random arrivals: the engine's own scheduler, with batches that take as long as is estimated of its
programs. What clients would see of their requests: percentiles, where load.py has means."""

import collections
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardlm.plan.serving.load import Load, Replica
from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.bench.seen import TIMES, Seen, summary
from shardlm.serve.build import scheduler_of
from shardlm.serve.chunk_programs import dealt
from shardlm.serve.engine import AHEAD
from shardlm.serve.pace import steps_of
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.scheduler import Scheduler

REQUESTS, TOKENS = 1000, 200_000  # of the replies that are reported: so many, or with so many tokens, at least LEAST
LEAST = 100
TOKEN = 7  # that everyone says


@dataclasses.dataclass(frozen=True)
class Programs:
    """What those of a replica take, remembered: for several runs of it."""

    replica: Replica

    def steps(self, rows: int) -> int:
        """Of a decode program."""
        step = self._step_seconds(rows, round(self.replica.context))
        return steps_of(step, self.replica.speed.memory.sizes.decode_steps)

    def seconds(self, batch: ScheduledBatch) -> tuple[float, float]:
        """(that the device is busy with a batch, until it has landed): in stages a chunk follows the one before it."""
        speed = self.replica.speed
        decodes = [row.start for row in batch.rows if row.tokens is None]
        chunks = self._chunks([row for row in batch.rows if row.tokens is not None])
        step = self._step_seconds(len(decodes), _rounded(sum(decodes) / len(decodes))) if decodes else 0.0
        busy = step * batch.steps + sum(chunks) / speed.stages
        return busy, busy + max(chunks, default=0.0) * (1 - 1 / speed.stages)

    def _chunks(self, rows: Sequence[Row]) -> list[float]:
        """Of each program that the runner deals these rows to."""
        left = iter(rows)
        found = []
        for size, count in dealt([len(row.tokens) for row in rows], self.replica.speed.memory.sizes.chunk_sizes, "gpu"):
            before = sum(row.start for row in itertools.islice(left, count)) / count
            found.append(self.replica.speed.chunk(math.prod(size), _rounded(before), size[0]))
        return found

    @functools.cached_property
    def _step_seconds(self) -> Callable[[int, int], float]:
        return functools.cache(self.replica.speed.step_seconds)


def times_of_requests(programs: Programs, load: Load, seed: int = 0) -> dict[str, Any]:
    """Seconds as `launch.bench serve` reports them (bench/seen.py: mean and percentiles of ttft, tpot, itl, e2e) of
    requests of the case's lengths that come at random (a Poisson process of the load's rate); the share that keeps the
    case's latencies, where it has any, and the preemptions. As many as run at once come three times before those that
    are reported, and more behind them."""
    case = programs.replica.case
    count = max(LEAST, min(REQUESTS, TOKENS // case.output_len))
    before = math.ceil(3 * load.running)
    run = _Run.of(programs, load.rate, before + count + count // 4, seed)
    run.until_all_ended()
    seen = run.seen[before : before + count]
    limits = {"ttft": case.ttft_seconds, "tpot": case.itl_seconds}
    found = summary(seen, run.came[before + count] - run.came[before], {k: v for k, v in limits.items() if v})
    kept = {"requests", *(f"{name}_seconds" for name in TIMES)}
    return {
        "requests_per_second": load.rate,
        **{key: value for key, value in found.items() if key in kept},
        "within_limits": found["goodput"]["share"] if "goodput" in found else None,
        "preemptions": run.scheduler.preemptions,
    }


@dataclasses.dataclass
class _Run:
    """came, ended: seconds of each request's arrival and last token; flying: (batch, when it lands)."""

    programs: Programs
    scheduler: Scheduler
    rng: random.Random
    came: list[float]
    seen: list[Seen]
    ended: list[float]
    flying: collections.deque[tuple[ScheduledBatch, float]]
    now: float = 0.0
    free: float = 0.0  # when the device has done all that flies

    @classmethod
    def of(cls, programs: Programs, rate: float, count: int, seed: int) -> "_Run":
        rng, now, came = random.Random(seed), 0.0, []
        for _ in range(count):
            now += rng.expovariate(rate)
            came.append(now)
        # No prompt here begins as another does: nothing would be found, and hashes of pages are most of the time.
        engine = dataclasses.replace(programs.replica.case.engine, enable_prefix_caching=False)
        scheduler = scheduler_of(programs.replica.speed.memory.sizes, engine)
        seen = [Seen() for _ in came]
        return cls(programs, scheduler, rng, came, seen, [math.nan] * count, collections.deque())

    def until_all_ended(self) -> None:
        """Time goes from each arrival or landing to the next; at each the engine starts what it can."""
        waiting = collections.deque(enumerate(self.came))
        case = self.programs.replica.case
        params = SamplingParams(max_tokens=case.output_len, ignore_eos=True)
        prompt = [TOKEN] * case.prompt_len
        while waiting or self.scheduler.has_unfinished:
            arrives = waiting[0][1] if waiting else math.inf
            lands = self.flying[0][1] if self.flying else math.inf
            self.now = min(arrives, lands)
            if arrives <= lands:
                self.scheduler.add(Request(str(waiting.popleft()[0]), prompt, params))
            else:
                self._land(self.flying.popleft()[0])
            while len(self.flying) < AHEAD and (batch := self.scheduler.schedule(self.programs.steps)) is not None:
                self._start(batch)

    def _start(self, batch: ScheduledBatch) -> None:
        device, whole = self.programs.seconds(batch)
        begins = max(self.now, self.free)
        self.free = begins + device
        self.flying.append((batch, begins + whole))

    def _land(self, batch: ScheduledBatch) -> None:
        tokens = np.full((len(batch.rows), batch.width), TOKEN)
        for request, _, new in self.scheduler.land(batch, tokens, self._counts(batch)):
            number, seen = int(request.id), self.seen[int(request.id)]
            if not new:
                continue
            if seen.tokens:
                seen.gaps.append(self.now - self.ended[number])
            else:
                seen.first = self.now - self.came[number]
            seen.tokens += len(new)
            seen.whole = self.now - self.came[number]
            self.ended[number] = self.now

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


def _rounded(tokens: float) -> int:
    """Before a chunk or a step, to what makes no difference that could be seen."""
    return round(tokens / 64) * 64
