"""A replica under load: the fluid of a serving plan against the scheduler itself, and that against what is known of
queues."""

import dataclasses
import math

import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.models.llama import LlamaConfig
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving import attainment
from shardlm.plan.serving.arrivals import Programs, keep_latencies, times_of_requests
from shardlm.plan.serving.attainment import Trials, search_attained, without_latencies
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.load import Load, Replica
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.search import ServingPlan, search
from shardlm.plan.serving.time import Speed
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.pace import steps_of


def replica_of(prompt_len: int, output_len: int, engine: EngineConfig | None = None, **asked) -> Replica:
    model = ServedModel("llama", LlamaConfig().transformer(), "bfloat16", 8192)
    case = ServingCase(model, Cluster.of(GPUS["h100"], 1), engine or EngineConfig(), prompt_len, output_len, **asked)
    return Replica.of(case, Speed.of(case, serving_memory(case)))


@pytest.mark.parametrize(("prompt_len", "output_len"), [(1024, 128), (4000, 64)])
@pytest.mark.parametrize(("share", "exact", "between"), [(0.01, 0.05, 0.05), (0.5, 0.1, 0.2), (0.8, 0.1, 0.2)])
def test_times_are_those_of_the_scheduler(prompt_len, output_len, share, exact, between):
    replica = replica_of(prompt_len, output_len)
    load = replica.at(share * replica.most().rate)
    found = times_of_requests(Programs(replica), load)
    assert load.ttft_seconds == pytest.approx(found["ttft_seconds"]["mean"], rel=exact)
    assert load.itl_seconds == pytest.approx(found["tpot_seconds"]["mean"], rel=between)
    assert found["preemptions"] == 0 and found["within_limits"] is None


def test_at_the_most_a_load_is_that_of_the_most():
    """Where slots limit it fewer replies are under way on average than there are slots."""
    replica = replica_of(128, 512, EngineConfig(max_num_seqs=64))
    most = replica.most()
    assert most.limit == "max_num_seqs" and most.running < 60
    found = replica.at(0.999 * most.rate)
    for name in ("running", "itl_seconds", "ttft_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(most, name), rel=0.02), name


def test_a_latency_that_an_idle_replica_keeps_is_one_to_plan_by():
    """Hardly any prompt finds a decode program under way."""
    free = replica_of(2048, 200)
    replica = replica_of(2048, 200, ttft_seconds=1.15 * free.alone)
    most = replica.most()
    assert most.limit == "ttft_seconds" and 0 < most.rate < 0.1 * free.most().rate


def test_a_request_that_is_alone_takes_what_its_programs_take():
    replica = replica_of(1024, 128)
    found = times_of_requests(Programs(replica), Load(1e-3, 0.0, 0.0, 0.0, 0.0, ""))
    step, most = replica.speed.step_seconds(1, 1088), replica.speed.memory.sizes.decode_steps
    assert found["ttft_seconds"]["p99"] == pytest.approx(replica.alone)
    assert found["tpot_seconds"]["p50"] == pytest.approx(step, rel=0.01)
    assert found["itl_seconds"]["p50"] == pytest.approx(steps_of(step, most) * step, rel=0.02)
    assert found["e2e_seconds"]["mean"] == pytest.approx(replica.alone + 127 * step, rel=0.01)


def test_prompts_alone_are_a_queue_of_equal_service():
    """M/D/1, waits in units of the service: mean 0.5 at half of the most (load.py), 90 of 100 below 1.52, 99 below 3.34
    (A. K. Erlang's distribution, https://en.wikipedia.org/wiki/M/D/1_queue)."""
    replica = replica_of(2048, 1)  # as long as a step's budget: none shares a program
    rate = 0.5 / replica.alone
    load = Load(rate, 1.0, 0.0, 0.0, 0.0, "")
    runs = [times_of_requests(Programs(replica), load, seed)["ttft_seconds"] for seed in range(4)]
    waits = {name: np.mean([run[name] for run in runs]) / replica.alone - 1 for name in runs[0]}
    assert waits["mean"] == pytest.approx(0.5, rel=0.1)
    assert waits["p90"] == pytest.approx(1.52, rel=0.1) and waits["p99"] == pytest.approx(3.34, rel=0.1)


def test_drafts_that_are_accepted_bring_more_tokens_a_step():
    drafts = EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    replica = replica_of(1024, 256, drafts, acceptance_rate=0.5)
    found = times_of_requests(Programs(replica), Load(1e-3, 0.0, 0.0, 0.0, 0.0, ""))
    assert found["tpot_seconds"]["mean"] == pytest.approx(replica.speed.step_seconds(1, 1152) / 3, rel=0.05)


def test_a_share_keeps_the_latencies_asked_for():
    replica = replica_of(2048, 100)
    load = replica.at(0.7 * replica.most().rate)
    times = times_of_requests(Programs(replica), load)
    replica = dataclasses.replace(
        replica, case=dataclasses.replace(replica.case, ttft_seconds=times["ttft_seconds"]["p90"])
    )
    assert times_of_requests(Programs(replica), load) == times | {"within_limits": pytest.approx(0.9, abs=0.002)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("output_len", "asked"), [(32, {}), (64, {"range_ratio": 0.5, "shared_prefix": 512})])
def test_whether_requests_are_in_time_is_known_sooner_than_their_times(output_len, asked):
    """Decode programs that nobody waits for are run as one: times differ by little, and with the limit as far from the
    percentile the answer by nothing."""
    replica = replica_of(2048, output_len, **asked)
    for share in (0.1, 0.6):
        load = replica.at(share * replica.most().rate)
        times = times_of_requests(Programs(replica), load)
        for name, limit in (("ttft_seconds", "ttft_seconds"), ("tpot_seconds", "itl_seconds")):
            for times_more, kept in ((1.03, True), (0.97, False)):
                wanted = {limit: times_more * times[name]["p90"], "attainment": 0.9}
                programs = Programs(dataclasses.replace(replica, case=dataclasses.replace(replica.case, **wanted)))
                assert keep_latencies(programs, load) == kept, (share, name, times_more)


def test_the_fewest_replicas_are_found_with_few_trials(monkeypatch):
    """Of a rule that is known: requests are in time up to a rate."""
    case = replica_of(2048, 16, ttft_seconds=0.25, request_rate=100.0, attainment=0.9).case
    tried = []

    def kept(_, load: Load) -> bool:
        return tried.append(load) or load.rate <= most

    monkeypatch.setattr(attainment, "keep_latencies", kept)
    monkeypatch.setattr(attainment, "times_of_requests", lambda *asked: {"within_limits": float(kept(*asked))})
    for most in (0.3, 3.0, 9.0, 11.0, 12.1):
        trials = Trials(ServingPlan.of(without_latencies(case)), case)
        assert trials.plan.most.rate > 12.2
        needed = math.ceil(100 / most)
        assert needed <= trials.fewest(100.0) <= 1.03 * needed
        assert trials.fewest(100.0, needed - 1) == 0 and needed <= trials.fewest(100.0, needed + 2) <= needed + 2
        assert most / 1.04 < trials.highest() <= most
    assert len(tried) < 5 * 20


def test_a_plan_by_attainment_has_as_many_requests_as_leave_most_in_time():
    """And where the mean would do, more of them: of 100 requests one is late."""
    by_means = replica_of(2048, 16, ttft_seconds=0.25, request_rate=30.0).case
    case = dataclasses.replace(by_means, attainment=0.99)
    (plan,) = search_attained(case, {}, lambda what: None).plans
    (mean,) = search(by_means).plans
    programs = Programs(Replica.of(case, Speed.of(case, plan.memory)))
    assert 0.99 <= times_of_requests(programs, plan.most)["within_limits"] < 0.995
    more = dataclasses.replace(plan.most, rate=1.1 * plan.most.rate)
    assert times_of_requests(programs, more)["within_limits"] < 0.99
    assert plan.most.limit == "attainment" and plan.most.rate < 0.8 * mean.most.rate
    assert plan.replicas == math.ceil(30 / plan.most.rate) and plan.usual.rate == pytest.approx(30 / plan.replicas)


def test_latencies_that_no_replica_has_are_refused():
    case = replica_of(2048, 16, ttft_seconds=0.01, attainment=0.9).case
    with pytest.raises(ShardlmError, match=r"no mesh of 1 h100 will do: .* 0.0% of requests .* attainment=0.9:"):
        search_attained(case, {}, lambda what: None)
    with pytest.raises(ShardlmError, match=r"attainment=0.9 is the share .* ttft_seconds=0 and itl_seconds=0"):
        dataclasses.replace(case, ttft_seconds=0.0)


def test_fewer_gpus_for_the_rate_come_first():
    """And not those with most tokens a GPU, where their replicas are larger than it needs."""
    asked = {"ttft_seconds": 0.3, "itl_seconds": 0.03, "attainment": 0.99, "request_rate": 5.0}
    case = dataclasses.replace(replica_of(2048, 32, **asked).case, cluster=Cluster.of(GPUS["h100"], 2))
    first, second = search_attained(case, {"pipeline": 1}, lambda what: None).plans
    assert (first.num_gpus, second.num_gpus) == (1, 2)
    assert first.tokens_per_second_per_gpu < second.tokens_per_second_per_gpu
