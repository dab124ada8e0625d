"""Hardware for a serving target, held against the serving plans themselves; by formulas alone."""

import dataclasses
import json
import math
import random

import pytest
from commands import run
from test_sweep import config

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.hardware_file import hardware_from
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.advice import advise_serving
from shardlm.plan.serving.advice_output import reasons, to_json, to_text
from shardlm.plan.serving.attainment import Trials, without_latencies
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.mix import of_file
from shardlm.plan.serving.search import ServingPlan, search
from shardlm.plan.target import ServingTarget
from shardlm.serve.engine_config import EngineConfig

MODEL = ServedModel.of_config(config("llama3_8b"))


def asked(rate: float, **latencies):
    return lambda cluster: ServingCase(MODEL, cluster, EngineConfig(), 2000, 200, rate, **latencies)


def advised(case_on, names=("l40s", "dgx-h100", "azure-nd-h100-v5", "aws-p5", "gb300-nvl72"), **options):
    return advise_serving(case_on, names=names, **{"fixed": {}} | options)


@pytest.fixture(scope="module")
def advice():
    return advised(asked(300, ttft_seconds=1, itl_seconds=0.05))


def test_an_offer_is_the_fewest_gpus_of_all_replicas(advice):
    offer = next(o for o in advice.offers if o.kind.name == "dgx-h100")
    plans = search(asked(300, ttft_seconds=1, itl_seconds=0.05)(Cluster.of(GPUS["h100"], 8))).plans
    assert offer.num_gpus == min(plan.num_gpus for plan in plans) == offer.plan.replicas * offer.plan.gpus_per_replica
    assert offer.plan.replicas == math.ceil(300 / (0.8 * offer.plan.most.rate))
    assert offer.plan.usual.ttft_seconds <= 1 and offer.plan.usual.itl_seconds <= 0.05
    sizes = [other.gpus_per_replica for other in offer.others]
    assert sizes and len({*sizes, offer.plan.gpus_per_replica}) == len(sizes) + 1
    assert all(other.num_gpus >= offer.num_gpus for other in offer.others)


def test_offers_come_by_dollars_and_say_what_they_cost(advice):
    by_name = {offer.kind.name: offer for offer in advice.offers}
    aws, azure, nvidia = (by_name[name] for name in ("aws-p5", "azure-nd-h100-v5", "dgx-h100"))
    assert azure.plan is nvidia.plan and aws.dollars_per_hour == pytest.approx(aws.num_gpus * 6.88)
    assert aws.dollars_per_million(200) == pytest.approx(aws.dollars_per_hour / (300 * 3600 * 200) * 1e6)
    priced = [offer.dollars_per_hour for offer in advice.offers[:-1]]
    assert priced == sorted(priced) and advice.offers[-1].kind.name == "gb300-nvl72"
    said = " ".join(reasons(aws))
    assert f"take {aws.plan.replicas} of them, {aws.num_gpus} GPUs" in said and "list price of aws" in said
    assert f"where {aws.plan.most.limit} limits it" in said and "Replicas of" in said
    text = to_text(advice)
    assert text.startswith("300 requests/s of 2,000 tokens in and 200 out") and "No price of a gb300 is known" in text
    told = json.loads(json.dumps(to_json(advice, ServingTarget(300, 2000, 200))))
    assert told["offers"][0]["num_gpus"] == advice.offers[0].num_gpus
    assert told["target"] == {"requests_per_second": 300, "prompt_tokens": 2000, "reply_tokens": 200}


def test_more_requests_need_more_gpus_and_tighter_latencies_no_fewer():
    def gpus(rate: float, **latencies) -> int:
        return advised(asked(rate, **latencies), names=["h100"]).offers[0].num_gpus

    counts = [gpus(rate) for rate in (1, 50, 500)]
    assert counts == sorted(counts) and counts[0] == 1 < counts[1]
    assert gpus(500) <= gpus(500, itl_seconds=0.03) <= gpus(500, itl_seconds=0.02)


def test_a_share_in_time_takes_as_many_replicas_and_no_fewer():
    def case_on(cluster):
        return ServingCase(MODEL, cluster, EngineConfig(), 2048, 16, 60.0, ttft_seconds=0.2, attainment=0.95)

    heard = []
    found = advised(case_on, names=("dgx-h100", "aws-p5"), say=heard.append)
    assert [one for one in heard if one.startswith("looking")] == ["looking at dgx-h100 (h100) ..."]
    offer, other = found.offers
    plan, each = offer.plan, offer.plan.gpus_per_replica
    assert other.plan is plan and plan.usual.rate == pytest.approx(60 / plan.replicas)
    assert 0.95 <= offer.times["within_limits"] < 1 and offer.times["requests_per_second"] == plan.usual.rate
    # By means fewer would do; and of this mesh and all others, fewer GPUs do not.
    means = advised(lambda cluster: dataclasses.replace(case_on(cluster), attainment=0.0), names=["h100"]).offers[0]
    assert offer.num_gpus > means.num_gpus
    seen = []
    for one in search(case_on(Cluster.of(GPUS["h100"], 8))).plans:
        trials = Trials(ServingPlan.of(without_latencies(one.case)), one.case)
        assert not trials.fewest(60.0, (offer.num_gpus - 1) // one.gpus_per_replica), one.mesh
        # What is said of replicas of other sizes: what was counted is so, the rest a quarter more at most.
        other = next((o for o in offer.others if o.case.engine.mesh == one.case.engine.mesh), None)
        if other:
            fewest = trials.fewest(60.0)
            exact = other.gpus_per_replica in offer.counted
            assert other.replicas == fewest if exact else fewest <= other.replicas <= math.ceil(1.25 * fewest), one.mesh
            seen.append(other.gpus_per_replica)
    assert sorted(seen) == [1, 4, 8] and each == 2
    text, said = to_text(found), " ".join(reasons(offer))
    assert "The first token within 0.2 s for 0.95 of them" in text and "in time" in text
    assert f"take {plan.replicas} of them, {offer.num_gpus} GPUs: of 1,000 requests that come at random" in said
    assert f"{offer.times['within_limits']:.1%} are in time" in said
    assert "Replicas of 4 (tensor=4) would take 12 GPUs. Replicas of 8 (tensor=8) would take 16 GPUs." in said
    told = json.loads(json.dumps(to_json(found, ServingTarget(60, 2048, 16))))
    assert told["attainment"] == 0.95 and told["offers"][0]["most_requests_per_second"] is None
    assert told["offers"][0]["times_of_requests"]["ttft_seconds"]["p90"] <= 0.2
    assert {one["gpus_per_replica"]: one["num_gpus"] for one in told["offers"][0]["others"]}.items() >= {
        4: 12,
        8: 16,
    }.items()


def test_what_no_replica_does_says_why():

    def in_time(cluster):  # where two come together, one is late
        return ServingCase(MODEL, cluster, EngineConfig(), 2048, 16, 5, ttft_seconds=0.112, attainment=0.9999)

    late = advised(in_time, names=["h100"], fixed={"tensor": 1, "pipeline": 1})
    assert not late.offers and "a replica on one GPU gives 99.2% of requests" in to_text(late)
    none = advised(asked(5, itl_seconds=1e-5), names=["h100"])
    assert not none.offers and "as fast as asked for" in to_text(none)
    large = ServedModel.of_config(config("llama3_70b"))
    single = hardware_from({"clusters": [{"base": "dgx-h100", "name": "one-each", "gpus_per_host": 1}]})

    def case_on(cluster):
        return ServingCase(large, cluster, EngineConfig(), 2000, 200, 5)

    offer = advised(case_on, names=["one-each"], hardware=single).offers[0]
    assert offer.plan.case.cluster.num_gpus == 4  # 132 GiB of weights: two hosts' 158 GiB leave no room for pages
    with pytest.raises(ShardlmError, match="did you mean aws-p5"):
        advised(asked(5), names=["aws-p55"])


@pytest.mark.wide
def test_requests_of_a_file_are_advised_on_as_a_plan_has_them(tmp_path):
    path, rng = tmp_path / "f.jsonl", random.Random(0)
    entries = [
        ([rng.randrange(1000) for _ in range(length)], new) for length, new in ((3000, 10), (200, 90), (700, 30))
    ]
    path.write_text("".join(json.dumps({"prompt": prompt, "max_tokens": new}) + "\n" for prompt, new in entries))
    words = ("--serve", "--config=configs/llama3_8b.py", f"--file={path}", "--format=json")
    done = run("launch.whatif", *words, "--clusters=h100,h200", "--target=40 requests/s", "--ttft_seconds=1")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["target"] == {"requests_per_second": 40, "prompt_tokens": None, "reply_tokens": None}
    assert told["file"] == str(path) and told["requests"]["listed"] == 3
    assert told["requests"]["prompt_tokens"] == {"mean": 1300, "least": 200, "most": 3000}
    offer = next(offer for offer in told["offers"] if offer["gpu"] == "h100")
    sizes = ("--gpu=h100", "--num_gpus=8", "--verify=0", "--request_rate=40", "--ttft_seconds=1")
    done = run("launch.plan", *words, *sizes)
    plan = json.loads(done.stdout)["plans"][0]
    assert (
        offer["num_gpus"] == plan["num_gpus"] and offer["ttft_seconds"] == plan["estimated"]["at_rate"]["ttft_seconds"]
    )
    case = ServingCase(MODEL, Cluster.of(GPUS["h100"], 8), EngineConfig(), 1300, 43, 40, file=str(path))
    mix = of_file(str(path), 9, None, 1000, case.engine.block_size)
    text = to_text(advised(lambda cluster: dataclasses.replace(case, cluster=cluster, listed=mix), names=["h100"]))
    assert text.startswith(f"40 requests/s of {MODEL.name}. 3 requests of {path}: prompts of 200 to 3,000 (on average")


def test_the_command_advises_and_says_what_is_wrong():
    words = ("--serve", "--config=configs/llama3_8b.py", "--clusters=h100", "--format=json")
    done = run("launch.whatif", *words, "--target=serve 8B at 50 requests/s at 2k in, 200 out", "--itl_seconds=0.05")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["offers"][0]["itl_seconds"] <= 0.05
    short = ("--target=5 requests/s at 2k in, 2 out", "--attainment=0.9")
    done = run("launch.whatif", *words, *short, "--ttft_seconds=0.3")
    assert done.returncode == 0 and "requests at random on replicas of one GPU" in done.stderr, done.stderr
    assert json.loads(done.stdout)["offers"][0]["times_of_requests"]["within_limits"] >= 0.9
    done = run("launch.whatif", *words, "--target=serve 70B at 5 requests/s at 2k in, 2 out")
    assert done.returncode == 1 and "says 70B" in done.stderr and "has 8.03B" in done.stderr, done.stderr
    done = run("launch.whatif", *words, *short)
    assert done.returncode == 1 and "attainment=0.9 is the share of requests that must keep" in done.stderr
    done = run("launch.whatif", "--config=configs/llama3_8b.py", "--target=2T tokens in 30 days", "--attainment=0.9")
    assert (done.returncode, done.stderr) == (1, "error: --attainment goes with --serve: add that, or leave it out\n")
    done = run("launch.whatif", "--model=FOLDER", "--target=serve 500 requests/s at 2k in, 200 out")
    assert done.returncode == 1 and "--model=FOLDER goes with --serve: add that" in done.stderr, done.stderr
    done = run("launch.whatif", *words, "--target=5 requests/s at 2k in, 2 out", "--prompt_len=3")
    assert done.returncode == 1 and "--prompt_len is what the target says" in done.stderr, done.stderr
