"""Serving rates that others published: the file, what is predicted of it, and the loop and the rules behind that."""

import dataclasses
import json
import pathlib
import statistics

import msgspec
import pytest

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.plan.cluster import Cluster
from shardlm.plan.op import Op
from shardlm.plan.published_models import transformer
from shardlm.plan.published_serving import load_serving
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.closed import Part, Requests, Step, closed_loop
from shardlm.plan.serving.load import Replica
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.mixed import Mixed
from shardlm.plan.serving.ops import SAMPLER_PASSES, SAMPLING_KERNELS
from shardlm.plan.serving.time import Speed
from shardlm.plan.systems_serving import Held, as_run, limits, shares_keys
from shardlm.plan.validate_serving import TABLES, format_serving, predict, served_json, validate_serving
from shardlm.serve.engine_config import EngineConfig


@pytest.fixture(scope="module")
def served(published):
    return load_serving(TABLES, published.models)


def settings_of(served, name):
    return [setting for setting in served.settings() if setting.table.name == name]


def test_the_file_has_figures_of_several_systems(served):
    engines = {table.engine for table in served.tables.values()}
    assert {"TensorRT-LLM", "NIM", "LMDeploy", "vLLM", "SGLang"} == engines
    measures = [measure for setting in served.settings() for measure in setting.measured]
    assert len(measures) > 600 and min(map(measures.count, ("tokens_per_s", "ttft_ms", "itl_ms"))) > 50


def test_rates_on_hopper_are_within_a_tenth(published):
    """TensorRT-LLM 1.0's, dense models in 8 bits on H100 and H200, all requests at once; and batches of 0.5 and 0.9."""
    rows = validate_serving(asked=lambda table: table.version == "1.0" and table.weights == "fp8")
    errors = [row.error for row in rows]
    assert len(errors) == 60 and statistics.median(map(abs, errors)) < 0.10 and max(map(abs, errors)) < 0.30
    static = validate_serving(asked=lambda table: table.load == "static" and table.model == "llama2-70b")
    assert len(static) > 50 and statistics.median(abs(row.error) for row in static) < 0.15
    said = format_serving(rows)
    assert "served, TensorRT-LLM 1.0: 60 figures, median error" in said and "replies, prompts" in said
    first = served_json(rows)[0]
    assert first["measured"] == 27911 and first["error"] == rows[0].error and json.dumps(first)


def test_steps_of_a_loop_follow_by_hand():
    """Three requests of 10 + 3 tokens, two slots; a step of at most 11 tokens takes 1 s and 0.1 s for each it reads."""
    seen: list[tuple[int, int]] = []

    def seconds(step: Step) -> float:
        seen.append((step.decoding, sum(part.rows for part in step.parts)))
        return 1.0 + 0.1 * sum(part.rows * part.tokens for part in step.parts)

    done = closed_loop(Requests(3, 3, 10, 3, 2, 11, chunked=False), seconds)
    # A is read; B beside A; both decode, A ends; C is read beside B, which ends; C's two others at once.
    assert seen == [(0, 1), (1, 1), (2, 0), (1, 1), (1, 0)]
    assert done.seconds == pytest.approx(2 + 2 + 1 + 2 + 2 * 1)
    assert done.ttft == pytest.approx((2 + 4 + 7) / 3)
    assert done.itl == pytest.approx((1.5 + 1.5 + 1.0) / 3)
    assert (done.running, done.reading) == pytest.approx((8 / 9, 6 / 9))


def test_a_request_follows_the_one_that_ends():
    """One at a time: none waits, and all begin as the first did."""
    done = closed_loop(Requests(5, 1, 4, 3, 8, 100, chunked=True), lambda step: 1.0)
    assert (done.seconds, done.ttft, done.itl) == pytest.approx((15.0, 1.0, 1.0))


def test_long_prompts_are_read_in_parts_or_whole():
    """10 tokens in steps of 4; whole where the engine cuts none, though a step then has more."""
    seen: list[tuple[Part, ...]] = []
    closed_loop(Requests(1, 1, 10, 1, 1, 4, chunked=True), lambda step: seen.append(step.parts) or 1.0)
    assert seen == [(Part(1, 4, 0, False),), (Part(1, 4, 4, False),), (Part(1, 2, 8, True),)]
    seen.clear()
    closed_loop(Requests(1, 1, 10, 1, 1, 4, chunked=False), lambda step: seen.append(step.parts) or 1.0)
    assert seen == [(Part(1, 10, 0, True),)]


def test_limits_are_those_that_the_bench_finds(served):
    """trtllm-bench's rounding, upward: 300 requests that pages hold are 384 slots, of which 300 run, and 300 times
    (1 + 1000 / 2000) tokens are 2,048, the least."""
    setting = next(
        one
        for one in settings_of(served, "trtllm-1.0-llama3.1-8b-fp8-h100x1")
        if (one.prompt, one.output) == (1000, 2000)
    )
    model, gpu = served.models["llama3.1-8b"], GPUS["h100"]
    weights = 9e9
    free = 0.95 * (gpu.hbm_bytes - weights - 2.5e9 - (2 * 8192 * (3 * 4096 + 2 * 14336) + 4 * 1024 * 128256))
    found = limits(setting, gpu, model, Held(weights, free / 3000 / 300.5))
    assert (found.slots, found.room, found.chunked) == (300, 2048, False)
    long = dataclasses.replace(setting, prompt=20000, output=2000)
    assert limits(long, gpu, model, Held(weights, free / 22000 / 300.5)).room == 3328  # of 3,305.5


def test_heads_that_share_keys_did_not_read_them_together_before_08(served):
    old, new = (settings_of(served, f"trtllm-{v}-llama2-70b-fp8-h100x4")[1] for v in ("0.5", "0.9"))
    assert not shares_keys(old.table) and shares_keys(new.table)
    later = dataclasses.replace(old, table=dataclasses.replace(old.table, version="0.9"))
    apart, together = (predict(one, served, {})[0].predicted for one in (old, later))
    assert 0.3 < apart / together < 0.8


def test_few_bits_are_multiplied_and_cast(served):
    table = settings_of(served, "trtllm-1.0-llama3.1-70b-fp4-b200x1")[0].table
    product = Op("mlp", "up", "matmul", 2.0 * 100 * 64 * 32, 5000.0, 1, dims=(100, 64, 32))
    cast, run = as_run(table)(product)
    assert (cast.unit, cast.hbm_bytes) == ("memory", 100 * 32 * (2 + 0.5625))
    assert run.dtype == "fp4" and run.hbm_bytes == 5000 - 100 * 32 * (2 - 0.5625)
    head = dataclasses.replace(product, layer="head")
    assert list(as_run(table)(head)) == [head]
    sampling = Op("head", "sampling", "memory", 0, SAMPLER_PASSES * 4 * 7 * 100 / SAMPLING_KERNELS, SAMPLING_KERNELS)
    (greedy,) = as_run(table)(sampling)
    assert (greedy.count, greedy.hbm_bytes * greedy.count) == (2, 4 * 7 * 100)  # float32 logits, once


def test_what_a_plan_says_is_most_is_a_little_less_than_such_a_loop_does(published):
    """The plan's fluid against the loop that the tables are predicted with: our engine reads prompts in programs of
    their own, which are not always full."""
    model, gpu = published.models["llama3.1-8b"], GPUS["h100"]
    shape, cluster, mesh = transformer(model, 4096), Cluster.of(gpu, 1), MeshSpec()
    mixed = Mixed.of(shape, cluster, mesh, "auto", 1.0, lambda op: [op])
    for prompt, output in ((2048, 200), (128, 1024)):
        engine = EngineConfig(mesh=mesh, max_model_len=prompt + output)
        case = ServingCase(ServedModel("8b", shape, "bfloat16", 4096), cluster, engine, prompt, output)
        replica = Replica.of(case, Speed.of(case, serving_memory(case)))
        count = 20 * replica.slots
        done = closed_loop(Requests(count, count, prompt, output, replica.slots, 2048, chunked=True), mixed.seconds)
        assert 0.85 < replica.most().rate * done.seconds / count < 1.0


def refused(tmp_path, published, **changes):
    data = msgspec.json.decode(TABLES.read_bytes())
    table = {**data["tables"][0], **changes}
    path = pathlib.Path(tmp_path) / "served.json"
    path.write_text(json.dumps({**data, "tables": [table]}))
    with pytest.raises(ShardlmError) as caught:
        load_serving(path, published.models)
    return str(caught.value)


def test_tables_that_contradict_themselves_are_refused(tmp_path, published):
    rows = [[128, 128, 10, 5.0]]
    assert "there is no model 'llama9'" in refused(tmp_path, published, model="llama9")
    assert "there is no GPU 'h300'" in refused(tmp_path, published, gpu="h300")
    assert "load='static' has these" in refused(tmp_path, published, load="static")
    assert "is there twice" in refused(tmp_path, published, rows=rows * 2)
    assert "numbers must be positive" in refused(tmp_path, published, rows=[[128, 128, 10, -5.0]])
    assert "nothing was measured" in refused(tmp_path, published, rows=[[128, 128, 10, None]])
    assert "has not one number" in refused(tmp_path, published, rows=[[128, 128, 10]])
    assert "must say where" in refused(tmp_path, published, at=" ")


@pytest.mark.parametrize(
    ("text", "said"), [(None, "does not exist"), ("{", "is not JSON"), ('{"points": []}', "an object with tables")]
)
def test_files_of_another_form_are_refused(tmp_path, text, said):
    path = tmp_path / "served.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ShardlmError, match=said):
        load_serving(path, {})
