"""A sweep of serving plans: each value is the plan of its own case, and what is wrong is said before anything is
searched."""

import json

import pytest
from absl import flags
from commands import run
from test_sweep import config

from launch import plan_serve_flags
from launch.flags import OF_SERVING
from shardlm.hardware import GPUS
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.attainment import search_attained
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.search import search
from shardlm.plan.serving.sweep import Asked, sweep_serving
from shardlm.plan.serving.sweep_output import to_json, to_text
from shardlm.serve.engine_config import EngineConfig

MODEL = ServedModel.of_config(config("llama3_8b"))


def case(count: int = 2, **asked) -> ServingCase:
    return ServingCase(MODEL, Cluster.of(GPUS["h100"], count), EngineConfig(), 2048, 16, **asked)


def test_each_value_has_the_plan_of_its_case():
    cases = {"0.1": case(ttft_seconds=0.1), "1": case(ttft_seconds=1.0), "1e-6": case(ttft_seconds=1e-6)}
    heard = []
    found = sweep_serving("ttft_seconds", [Asked(value, one, {}) for value, one in cases.items()], heard.append)
    first, second, none = (row.plan for row in found.rows)
    best = [search(one).plans[0] for one in list(cases.values())[:2]]
    assert none is None and [first.most, second.most] == [plan.most for plan in best]
    assert first.tokens_per_second_per_gpu < second.tokens_per_second_per_gpu
    assert heard == [f"ttft_seconds={value} ..." for value in cases] and found.fits
    told = json.loads(json.dumps(to_json(found)))
    assert [row["fits"] for row in told["rows"]] == [True, True, False] and "as fast as" in told["rows"][2]["why"]
    assert told["rows"][1]["most_requests_per_second"] == second.most.rate
    text = " ".join(to_text(found).split())
    assert "prompts of 2,048 tokens, replies of 16, in" in text
    assert "planned with 80% of what limits them" in text and "ttft_seconds=1e-6: no mesh of 2 h100 is as fast" in text


def test_a_share_in_time_is_swept_too():
    asked = case(1, ttft_seconds=0.25, attainment=0.9)
    found = sweep_serving("attainment", [Asked("0.9", asked, {})])
    assert found.rows[0].plan.most == search_attained(asked, {}, lambda what: None).plans[0].most
    assert "as leave 0.9 of them in time" in " ".join(to_text(found).split())


def test_what_does_not_fit_is_told_with_what_would():
    large = ServedModel.of_config(config("llama3_70b"))
    one = ServingCase(large, Cluster.of(GPUS["h100"], 1), EngineConfig(), 2048, 16)
    (row,) = sweep_serving("gpu", [Asked("h100", one, {})]).rows
    assert row.plan is None and "it fits with quantization=int4 (estimated)" in row.why


WORDS = ("--serve", "--config=configs/llama3_8b.py")


def test_the_command_sweeps_hardware_lengths_and_options():
    done = run("launch.whatif", *WORDS, "--num_gpus=1", "--sweep=gpu=a100,h100", "--format=json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["gpu"] for row in rows] == ["a100", "h100"]
    assert rows[0]["most_requests_per_second"] < rows[1]["most_requests_per_second"]
    done = run("launch.whatif", *WORDS, "--gpu=h100", "--num_gpus=1", "--sweep=quantization=none,fp8", "--format=json")
    assert done.returncode == 0, done.stderr
    plain, packed = json.loads(done.stdout)["rows"]
    assert packed["value"] == "fp8" and plain["itl_seconds"] != packed["itl_seconds"]


def test_the_flags_that_need_serve_are_all_known():
    own = flags.FLAGS.flags_by_module_dict()[plan_serve_flags.__name__]
    assert {flag.name for flag in own} == set(OF_SERVING)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sweep=prompt_len=512,x", "--gpu=h100", "--num_gpus=1"), "'x' is no value of --prompt_len"),
        (("--sweep=depth=1,2", "--gpu=h100", "--num_gpus=1"), "sweep of depth: it is one of num_gpus, gpu, cluster, "),
        (
            ("--sweep=prompt_len=512,99999", "--gpu=h100", "--num_gpus=1"),
            "prompt_len=99999 and output_len=256 are 100255 tokens, and max_model_len=8192",
        ),
        (
            ("--sweep=prompt_len=512", "--prompt_len=7", "--gpu=h100", "--num_gpus=1"),
            "--prompt_len=7 is what the sweep varies",
        ),
        (("--sweep=num_gpus=1,x", "--gpu=h100"), "num_gpus=x: a number of GPUs is a whole number"),
        (("--sweep=gpu=h100", "--num_gpus=1", "--dollars_per_gpu_hour=2"), "does not go with a sweep of serving"),
        (("--sweep=gpu=h100", "--num_gpus=1", "--png=a.png"), "--png does not go with --serve"),
    ],
)
def test_the_command_says_what_is_wrong(words, said):
    done = run("launch.whatif", *WORDS, *words)
    assert done.returncode == 1 and said in done.stderr, done.stderr
