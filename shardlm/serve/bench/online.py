"""A server under load: requests that arrive at a rate, whether or not the server keeps up, or so many at once, the next
when one ends. What comes out are the times that clients see. No jax."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.bench.client import Client, RequestError
from shardlm.serve.bench.seen import Seen, summary
from shardlm.serve.bench.workload import Job

Send = Callable[[Job], AsyncIterator[tuple[bool, int]]]
Jobs = Callable[[int], Sequence[Job]]


async def bench(
    client: Client,
    jobs: Jobs,
    *,
    rates: Sequence[float],
    concurrency: Sequence[int],
    limits: Mapping[str, float],
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """One report for each rate and each concurrency, in turn. `jobs(seed)` makes the requests of one: others each time,
    since a server may keep what it computed of the same. One request before them is not counted. `tell` is called with
    what each of them gave.

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
        reports.append({**named, **summary(seen, seconds := time.perf_counter() - started, limits)})
        name, value = next(iter(named.items()))
        tell(f"{name}={value}: {len(work)} requests in {seconds:.1f} s")
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
    seen, last = Seen(images=job.images), 0.0
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
