"""The fluid of a serving plan against the real scheduler: requests arrive at random, and each batch takes as long as
the plan says that its programs do."""

import collections
import random

import numpy as np
import pytest

from shardlm.hardware import GPUS
from shardlm.models.llama import LlamaConfig
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.load import Replica
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.time import Speed
from shardlm.serve.build import EngineConfig, scheduler_of
from shardlm.serve.engine import AHEAD
from shardlm.serve.pace import steps_of
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams


def simulated(replica: Replica, rate: float, count: int) -> tuple[float, float]:
    """(mean seconds to the first token, between two tokens) of the requests in the middle of so many."""
    case, speed, rng = replica.case, replica.speed, random.Random(0)
    scheduler = scheduler_of(speed.memory.sizes, case.engine)
    params = SamplingParams(max_tokens=case.output_len, ignore_eos=True)
    came = dict(enumerate(np.cumsum([rng.expovariate(rate) for _ in range(count)])))
    waiting, flying = collections.deque(came.items()), collections.deque()
    first, last, now, free = {}, {}, 0.0, 0.0
    context = case.prompt_len + case.output_len / 2
    pace = lambda rows: steps_of(speed.step_seconds(rows, context), speed.memory.sizes.decode_steps)  # noqa: E731
    while waiting or scheduler.has_unfinished:
        while waiting and waiting[0][1] <= now:
            number, _ = waiting.popleft()
            prompt = [rng.randrange(10**6) for _ in range(case.prompt_len)]
            scheduler.add(Request(str(number), prompt, params, eos_ids=[]))
        while len(flying) < AHEAD and (batch := scheduler.schedule(pace)) is not None:
            free = max(now, free) + seconds_of(batch, speed)
            flying.append((batch, free))
        if not flying:
            now = waiting[0][1]
            continue
        batch, now = flying.popleft()
        for row in batch.rows:
            if row.samples:
                last[int(row.request.id)] = now
                first.setdefault(int(row.request.id), now)
        scheduler.land(batch, np.full((len(batch.rows), batch.steps), 7))
    some = range(count // 5, count * 4 // 5)
    between = [(last[i] - first[i]) / (case.output_len - 1) for i in some]
    return float(np.mean([first[i] - came[i] for i in some])), float(np.mean(between))


def seconds_of(batch, speed: Speed) -> float:
    decodes = [row.start for row in batch.rows if row.tokens is None]
    chunks = [(speed.padded(len(row.tokens)), row.start) for row in batch.rows if row.tokens is not None]
    step = speed.step_seconds(len(decodes), sum(decodes) / len(decodes)) if decodes else 0.0
    return step * batch.steps + sum(speed.chunk(*chunk) for chunk in chunks)


@pytest.mark.parametrize(("prompt_len", "output_len"), [(1024, 128), (4000, 64)])
def test_times_are_those_of_the_scheduler(prompt_len, output_len):
    model = ServedModel("llama", LlamaConfig().transformer(), "bfloat16", 8192)
    case = ServingCase(model, Cluster.of(GPUS["h100"], 1), EngineConfig(), prompt_len, output_len)
    replica = Replica.of(case, Speed.of(case, serving_memory(case)))
    load = replica.at(0.5 * replica.most().rate)
    ttft, between = simulated(replica, load.rate, 300)
    assert load.ttft_seconds == pytest.approx(ttft, rel=0.25)
    assert load.itl_seconds == pytest.approx(between, rel=0.2)
