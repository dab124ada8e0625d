"""Prompts as the engine's own scheduler deals them to programs, and what those of different lengths cost where many
wait to be read: chunks of different lengths have programs of their own."""

import collections
import itertools
import math
from array import array
from collections.abc import Sequence

import numpy as np

from shardlm.plan.serving.mix import Kind, Mix
from shardlm.plan.serving.time import Speed
from shardlm.serve.batch import Row
from shardlm.serve.chunk_programs import dealt
from shardlm.serve.pool_size import scheduler_of
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams

PROMPTS = 96
TOGETHER = 16  # of them are there at any time: another comes as one is read
TOKEN = 7  # that everyone says


def crowded_seconds(mix: Mix, speed: Speed) -> float:
    """Of a prompt, on average, where many wait."""
    scheduler = scheduler_of(speed.memory.sizes, speed.case.engine)
    coming = collections.deque(enumerate(mix.draw(PROMPTS, 0)))
    seconds, tokens = 0.0, 0
    while coming:
        while coming and scheduler.num_waiting + scheduler.num_running < TOGETHER:
            scheduler.add(request_of(*coming.popleft(), 1, scheduler.pages.page_size))
        batch = scheduler.schedule()
        seconds += sum(chunk_seconds(batch.rows, speed)) / speed.stages
        tokens += sum(len(row.tokens) for row in batch.rows)
        scheduler.land(batch, np.full((len(batch.rows), batch.width), TOKEN))
    return seconds / tokens * (mix.prompt - mix.found)


def request_of(number: int, kind: Kind, output: int, page: int) -> Request:
    """Its pages are known without their tokens: those that others have, and those that are its own."""
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    request = Request(str(number), array("i", [TOKEN]) * kind.prompt, params)
    own = range(len(kind.shared), (kind.prompt + output) // page)
    request.page_hashes = [*kind.shared, *(b"%d %d" % (number, i) for i in own)]
    return request


def chunk_seconds(rows: Sequence[Row], speed: Speed) -> list[float]:
    """Of each program that the runner deals these chunks to."""
    left, sizes, found = iter(rows), speed.memory.sizes, []
    for size, count in dealt([len(row.tokens) for row in rows], sizes.chunk_sizes, sizes.platform):
        before = sum(row.start for row in itertools.islice(left, count)) / count
        found.append(speed.chunk(math.prod(size), rounded(before), size[0]))
    return found


def rounded(tokens: float) -> int:
    """Before a chunk or a step, to what makes no difference that could be seen."""
    return round(tokens / 64) * 64
