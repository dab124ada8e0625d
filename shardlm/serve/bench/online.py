"""A server under load: requests that arrive at a rate, whether or not the server keeps up, or so many at once, the next
when one ends. What comes out are the times that clients see. No jax."""

import asyncio
import contextlib
import dataclasses
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.bench.client import Client, RequestError
from shardlm.serve.bench.workload import Job

PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "itl", "e2e")
Send = Callable[[Job], AsyncIterator[tuple[bool, int]]]
Jobs = Callable[[int], Sequence[Job]]


@dataclasses.dataclass
class Seen:
    """Of one request, in seconds: to its first text, between events that brought text (which may hold several tokens),
    to its end; `error` where it failed."""

    first: float = math.nan
    gaps: list[float] = dataclasses.field(default_factory=list)
    whole: float = math.nan
    tokens: int = 0
    error: str = ""

    @property
    def per_token(self) -> float:
        """After the first."""
        return (self.whole - self.first) / (self.tokens - 1) if self.tokens > 1 else math.nan

    def times(self) -> dict[str, float]:
        """What a limit can be set for: of ITL the worst."""
        return {"ttft": self.first, "tpot": self.per_token, "itl": max(self.gaps, default=0.0), "e2e": self.whole}

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """A time that there is not, as of one token, breaks no limit."""
        times = self.times()
        return not self.error and not any(times[name] > limit for name, limit in limits.items())


def limits_of(words: Sequence[str]) -> dict[str, float]:
    """{"ttft": seconds, ...} of `ttft:0.5` and the like. Raises ShardlmError for what is none."""
    found = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in TIMES or not found[name] > 0:
            raise ShardlmError(f"goodput={word!r}: a limit is NAME:SECONDS, of {', '.join(TIMES)}")
    return found


async def bench(
    client: Client, jobs: Jobs, *, rates: Sequence[float], concurrency: Sequence[int], limits: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One report for each rate and each concurrency, in turn. `jobs(seed)` makes the requests of one: others each time,
    since a server may keep what it computed of the same. One request before them is not counted.

    Raises ShardlmError where that one fails.
    """
    if not client.model:
        await client.find_model()
    warm = await _one(client.stream, jobs(0)[0])
    if warm.error:
        raise ShardlmError(f"the first request failed: {warm.error}")
    reports = []
    for number, load in enumerate([*({"request_rate": r} for r in rates), *({"concurrency": c} for c in concurrency)]):
        work = jobs(number + 1)
        started = time.perf_counter()
        if "request_rate" in load:
            seen = await at_rate(client.stream, work, load["request_rate"], seed=number)
        else:
            seen = await at_once(client.stream, work, load["concurrency"])
        named = {name: "inf" if value == math.inf else value for name, value in load.items()}  # JSON has no infinity
        reports.append({**named, **summary(seen, time.perf_counter() - started, limits)})
    return reports


async def at_rate(send: Send, work: Sequence[Job], rate: float, seed: int) -> list[Seen]:
    """A Poisson process of `rate` requests a second; inf: all now."""
    rng, tasks = random.Random(seed), []
    due = started = time.perf_counter()
    for job in work:
        due += 0 if math.isinf(rate) else rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_one(send, job, max(due, started))))
    return list(await asyncio.gather(*tasks))


async def at_once(send: Send, work: Sequence[Job], count: int) -> list[Seen]:
    """`count` clients, each of which sends its next request when the last has ended."""
    left = iter(work)

    async def client() -> list[Seen]:
        return [await _one(send, job) for job in left]

    return [seen for found in await asyncio.gather(*(client() for _ in range(count))) for seen in found]


async def _one(send: Send, job: Job, due: float | None = None) -> Seen:
    """Times count from when the request was due."""
    seen, last = Seen(), 0.0
    begun = time.perf_counter() if due is None else due
    try:
        async with contextlib.aclosing(send(job)) as events:
            async for text, seen.tokens in events:
                now = time.perf_counter()
                if text and last:
                    seen.gaps.append(now - last)
                elif text:
                    seen.first = now - begun
                last = now if text else last
    except (RequestError, OSError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.whole = time.perf_counter() - begun
    return seen


def summary(seen: Sequence[Seen], seconds: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Percentiles in seconds of the requests that succeeded, rates, and where there are limits the goodput: requests a
    second, and their share, that keep all of them."""
    done = [one for one in seen if not one.error]
    tokens = sum(one.tokens for one in done)
    found = {
        "requests": len(seen),
        "failed": len(seen) - len(done),
        "first_error": next((one.error for one in seen if one.error), None),
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        "ttft_seconds": _percentiles([one.first for one in done]),
        "tpot_seconds": _percentiles([one.per_token for one in done]),
        "itl_seconds": _percentiles([gap for one in done for gap in one.gaps]),
        "e2e_seconds": _percentiles([one.whole for one in done]),
    }
    if limits:
        good = sum(one.keeps(limits) for one in done)
        found["goodput"] = {
            "limits_seconds": dict(limits),
            "share": good / len(seen),
            "requests_per_second": good / seconds,
        }
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    there = [value for value in values if not math.isnan(value)]
    if not there:
        return {}
    return {"mean": float(np.mean(there)), **{f"p{p}": float(np.percentile(there, p)) for p in PERCENTILES}}
