"""A serving plan is held to what the engine allocates and the scheduler does, on CPU devices that the plan never sees,
and to what must follow when a case changes."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from gpu_programs import on_gpus

from launch import plan_serve_flags
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.opened import load
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving import verify
from shardlm.plan.serving.answer import RankedServing, ServingAnswer, answer_serving
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.load import Replica
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.ops import Pass
from shardlm.plan.serving.prompts import attends
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.search import Found, ServingPlan, fits, search
from shardlm.plan.serving.time import Speed
from shardlm.plan.serving.verify import verify_serving
from shardlm.serve import build
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.few_bits import few_bits_of
from shardlm.serve.layers import apart
from shardlm.serve.pool_size import room_beside, scheduler_of
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.speculation.build import open_draft_model
from shardlm.serve.stages import stages_on
from shardlm.serve.submeshes import of_replica, of_stage, submeshes
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"
SIZES = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, "decode_steps": 4}
DRAFTED = {"num_speculative_tokens": 2}
LLAMA = LlamaConfig()
LLAMA_70B = dataclasses.replace(LLAMA, embed_dim=8192, num_layers=80, num_heads=64, mlp_dim=28_672)


OF_CASE = ("request_rate", "ttft_seconds", "itl_seconds", "acceptance_rate", "draft")
NGRAM, MTP = ({"method": method} | DRAFTED for method in ("ngram", "mtp"))


def served(shape: LlamaConfig, name: str = "llama") -> ServedModel:
    return ServedModel(name, shape.transformer(), "bfloat16", 8192)


def on(gpu: str, count: int, shape: LlamaConfig = LLAMA, lengths=(1024, 256), **options) -> ServingCase:
    asked = {name: options.pop(name) for name in OF_CASE if name in options}
    return ServingCase(served(shape), Cluster.of(GPUS[gpu], count), EngineConfig(**options), *lengths, **asked)


def drafted(rate: float, count: int = 4, longest: int = 8192, shape: LlamaConfig = LLAMA, **changed) -> ServingCase:
    """A smaller model drafts, and this share of its tokens is accepted."""
    small = LlamaConfig(embed_dim=2048, num_layers=16, num_heads=32, mlp_dim=8192)
    small = ServedModel("small", dataclasses.replace(small, **changed).transformer(), "bfloat16", longest)
    wanted = {"model": "small", "num_speculative_tokens": count}
    return on("h100", 1, shape, speculative_config=wanted, acceptance_rate=rate, draft=small)


def bytes_by_device(tree) -> set[int]:
    """Of all arrays of a tree, on each device that has any."""
    found: dict = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return set(found.values())


ROOM = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 4}


@pytest.mark.parametrize(
    ("family", "axes", "options"),
    [
        ("llama", {"tensor": 2}, {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("deepseek_v2", {"tensor": 2, "expert": 2}, {"quantization": "int4", "kv_cache_dtype": "fp8"}),
        ("deepseek_v2", {"tensor": 2, "expert": 2}, {"quantization": "fp8_dynamic"}),
        ("deepseek_v32", {"tensor": 2}, {"kv_cache_dtype": "int8"}),
        ("deepseek_v4", {"tensor": 2}, {"kv_cache_bytes": 2**18}),
        ("gemma3", {"pipeline": 2, "data": 2}, {}),
        ("gemma3", {"pipeline": 2}, ROOM),
        ("deepseek_v2", {"tensor": 2}, {"quantization": "int8"} | ROOM),
        ("gemma3", {"tensor": 2}, {"speculative_config": {"model": str(REFERENCES / "llama")} | DRAFTED}),
        ("llama", {"pipeline": 2}, {"speculative_config": {"model": str(REFERENCES / "qwen3")} | DRAFTED}),
        ("llama", {"data": 2}, {"speculative_config": {"method": "ngram"} | DRAFTED}),
        ("gemma4", {"tensor": 4}, {"kv_cache_bytes": 2**19}),
        ("gemma4_moe", {"pipeline": 2}, {"kv_cache_dtype": "fp8"}),
        ("../mtp_reference", {"tensor": 2}, {"speculative_config": {"method": "mtp"} | DRAFTED}),
        ("../hybrid_mtp_references/qwen3_5_moe", {"expert": 2}, {"speculative_config": {"method": "mtp"} | DRAFTED}),
        ("qwen3_5", {"pipeline": 2}, {"speculative_config": {"model": str(REFERENCES / "qwen3_next")} | DRAFTED}),
        ("lfm2_moe", {"expert": 2}, {}),
        ("falcon_h1", {"tensor": 2}, {}),
        ("gemma3n", {"tensor": 2}, {}),
        ("bailing_hybrid", {"tensor": 2}, {}),
        ("hy_v4", {"tensor": 2}, {}),
        ("mistral_large4", {"tensor": 2}, {}),
    ],
)
def test_weights_pages_and_slots_are_what_the_engine_allocates(family, axes, options, monkeypatch):
    mesh, folder = MeshSpec(**axes), REFERENCES / family
    config = EngineConfig(mesh=mesh, dtype="float32", **({"kv_cache_bytes": 2**17} | SIZES | options))
    drafts = config.speculative_config
    drafting = ServedModel.of_folder(drafts.model, 48) if drafts and drafts.model else None
    asked = {"acceptance_rate": 0.5, "draft": drafting} if drafts else {}
    case = ServingCase(ServedModel.of_folder(folder, 48), Cluster.of(GPUS["h100"], 4), config, 20, 9, **asked)
    plan = serving_memory(case)

    monkeypatch.setattr(build, "compile_all", lambda runners, progress: [runner.allocate() for runner in runners])
    how = {"dtype": "float32", "quantization": config.quantization, "length": 48, "mtp": bool(case.model.mtp)}
    opened = load(folder, mesh=of_replica(mesh), decoding=True, **how)
    shape = case.model.shape
    draft = open_draft_model(drafts, shape, 48, of_stage(of_replica(mesh)), "float32", config.kv_cache_dtype)
    engine = build.assemble(opened, None, [], 48, config, draft=draft)
    runner = engine.runner
    model = runner.model
    on_gpu = {"platform": "gpu", "few_bits": few_bits_of(model.config, model.execution.weights, "pallas")}
    assert dataclasses.replace(runner.config, least_rows=2, **on_gpu) == plan.sizes
    last = plan.stages[-1]
    if drafts:  # weights, pages and what is kept of slots, of layers that draft too
        parts, states = (runner._parts, runner._state) if mesh.pipeline > 1 else ([runner.params], [runner._state])
        held = (*parts[-1:], runner.proposer_params or ()), states[-1]
        assert bytes_by_device(held[0]) == {last.weights} and bytes_by_device(held) == {last.held}
    elif mesh.pipeline == 1:
        assert bytes_by_device(runner.params) == {last.weights}
        assert bytes_by_device(runner._state.pages) == {last.pages + last.memories}
        assert bytes_by_device(runner._state.slots) == {last.slots}
    else:
        for stage, params, state in zip(plan.stages, runner._parts, runner._state, strict=True):
            pages = getattr(state, "pages", state)
            assert (bytes_by_device(params), bytes_by_device(pages)) == ({stage.weights}, {stage.pages})
        assert bytes_by_device(runner._state[-1].slots) == {last.slots}


def test_modules_that_draft_are_in_the_last_stage_with_an_embedding():
    served = ServedModel.of_folder(REFERENCES.parent / "mtp_reference", 48)
    served = dataclasses.replace(served, shape=dataclasses.replace(served.shape, segments=served.shape.segments * 2))
    mesh, whole = MeshSpec(pipeline=2), dataclasses.replace(served.shape, mtp=served.mtp)
    config = EngineConfig(mesh=mesh, dtype="float32", kv_cache_bytes=2**17, speculative_config=MTP, **SIZES)
    plan = serving_memory(ServingCase(served, Cluster.of(GPUS["h100"], 2), config, 20, 9, acceptance_rate=0.5))
    with jax.set_mesh(mesh.build(jax.devices()[:2])):
        model = ModelDef.make(apart(whole), Execution(serving_rules(whole, mesh), jax.numpy.dtype("float32")))
    for stage, own in zip(plan.stages, stages_on(model, submeshes(mesh)[0]), strict=True):
        held = [math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(own.held)]
        assert stage.weights == sum(held)


@pytest.mark.parametrize("name", ["llama.json", "nowhere"])
def test_a_model_that_is_not_there_is_refused_and_not_another_planned(name, tmp_path):
    folder = REFERENCES.parent / "mtp_reference"
    shutil.copy(folder / "config.json", tmp_path)
    assert ServedModel.of_folder(tmp_path / "config.json", 48).shape == ServedModel.of_folder(folder, 48).shape
    if name.endswith("json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ShardlmError, match=f"{name} is neither a folder nor a config.json; give the folder"):
        ServedModel.of_folder(tmp_path / name)


def test_the_pool_of_a_gpu_is_what_its_weights_leave():
    case = on("h100", 2, mesh=MeshSpec(tensor=2), max_num_seqs=1024)
    memory = serving_memory(case)
    (stage,) = memory.stages
    assert stage.page == 2 * 32 * 16 * 8 * 128 * 2 // 2  # keys and values, layers, tokens, heads, width, bytes, devices
    room = room_beside(stage.weights, memory.limit, case.engine)
    assert memory.layout.num_pages == room // stage.page and 0 <= room - stage.pages < stage.page
    # 8,030,261,248 parameters; norms lie whole on each of both devices.
    assert stage.weights == 2 * (8_030_261_248 + (2 * 32 + 1) * 4096) // 2


@pytest.mark.parametrize("windows", [False, True])
def test_the_real_scheduler_reaches_the_concurrency_and_no_more(windows):
    folder = REFERENCES / ("gemma3" if windows else "llama")
    options = SIZES | {"max_num_seqs": 64, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    config = EngineConfig(dtype="float32", kv_cache_bytes=2**17 + 2**16, **options)
    case = ServingCase(ServedModel.of_folder(folder, 48), Cluster.of(GPUS["h100"], 1), config, 20, 9)
    memory = serving_memory(case)
    assert len(memory.layout.windows) > windows
    most = memory.at_once(20, 9)
    assert 4 < most < 64
    assert preemptions(memory, config, most) == (0, most)
    # What a window keeps depends on where in a page it ends, and the count takes the worst for all requests at once.
    more = most + (most // 4 if windows else 1)
    turned_out, running = preemptions(memory, config, more)
    assert turned_out > 0 or running < more


def preemptions(memory, config, count: int) -> tuple[int, int]:
    """(preemptions, the most that ran at once) of so many requests that come together."""
    scheduler, running = scheduler_of(memory.sizes, config), 0
    for number in range(count):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        scheduler.add(Request(str(number), [number * 31 + i for i in range(20)], params, eos_ids=[]))
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        running = max(running, scheduler.num_running)
        scheduler.land(batch, np.full((len(batch.rows), batch.steps), 7))
    return scheduler.preemptions, running


def test_what_must_follow():
    base = ServingPlan.of(on("h100", 1))
    steps = base.decode
    assert [step.batch for step in steps] == [1, 8, 32, 64, 128, 256]
    seconds, rates = [s.seconds for s in steps], [s.tokens_per_second for s in steps]
    assert seconds == sorted(seconds) and rates == sorted(rates) and all(0 < s.of_bound < 1 for s in steps)
    # 16.06 GB of weights, less the embedding's 1.05 of which a row is looked up, at 3.35 TB/s; 1,152 tokens of context.
    assert steps[0].least == pytest.approx((15.01e9 + 1152 * 131_072) / 3.35e12, rel=1e-3)
    small = ServingPlan.of(on("h100", 1, kv_cache_dtype="fp8"))
    assert small.memory.tokens_held == pytest.approx(2 * base.memory.tokens_held, rel=1e-3)
    assert small.decode[-1].seconds < steps[-1].seconds
    assert ServingPlan.of(on("h200", 1)).most.rate > base.most.rate > ServingPlan.of(on("a100", 1)).most.rate
    assert ServingPlan.of(on("h100", 1, lengths=(2048, 256))).prefill > base.prefill
    two = ServingPlan.of(on("h100", 2, mesh=MeshSpec(tensor=2)))
    assert two.decode[0].seconds < steps[0].seconds < 2 * two.decode[0].seconds
    packed = ServingPlan.of(on("h100", 1, quantization="int8"))
    assert packed.memory.fullest.weights < 0.6 * base.memory.fullest.weights
    assert packed.decode[0].seconds < 0.7 * steps[0].seconds  # read as it is held
    assert packed.prefill > base.prefill  # and in many rows made anew in 16 bits
    room = ServingPlan.of(on("h100", 1, enable_lora=True, max_loras=4))
    own = 64 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336))  # of rank 4 x 16, in 32 layers
    assert room.memory.fullest.weights == base.memory.fullest.weights + 2 * own
    assert room.decode[0].least == pytest.approx(steps[0].least + 2 * own / 3.35e12)
    assert 1.02 * steps[0].seconds < room.decode[0].seconds < 1.5 * steps[0].seconds


def test_drafts_bring_tokens_and_cost_what_makes_and_verifies_them():
    plain, plans = ServingPlan.of(on("h100", 1)), [ServingPlan.of(drafted(rate)) for rate in (0.25, 0.5, 1.0)]
    # A step takes as long whatever is accepted, but for the last samples, and a token its share of it.
    steps = [plan.decode[0].seconds * plan.case.tokens_a_step for plan in plans]
    assert steps == sorted(steps) and steps[-1] < 1.1 * steps[0]
    assert [plan.case.tokens_a_step for plan in plans] == [2, 3, 5]
    rates = [plan.most.rate for plan in plans]
    assert rates == sorted(rates) and plans[-1].decode[0].seconds < 0.5 * plain.decode[0].seconds
    # All weights once, the draft model's five times, and neither embedding: what is the least to be read.
    small = plans[0].memory.fullest.draft / 2 - 128_256 * 2048
    read = 15.01e9 + 5 * 2 * small + 1152 * (131_072 + 5 * 16 * 2 * 8 * 128 * 2)
    assert plans[0].decode[0].least == pytest.approx(read / 3.35e12 / 2, rel=2e-3)
    # Without any, drafts are time lost; with many rows too, as verifying them takes products and not reading alone.
    assert ServingPlan.of(drafted(1e-6)).decode[0].seconds > plain.decode[0].seconds
    assert plans[1].decode[-1].seconds / plans[1].decode[0].seconds > plain.decode[-1].seconds / plain.decode[0].seconds
    assert plans[0].prefill > plain.prefill  # it reads prompts too
    looked_up = ServingPlan.of(on("h100", 1, speculative_config=NGRAM, acceptance_rate=0.5))
    assert plain.decode[0].seconds / 2 < looked_up.decode[0].seconds < plain.decode[0].seconds
    told = to_json(ServingAnswer(Found((plans[0],), ()), (RankedServing(plans[0]),)))
    said = "4 tokens drafted for each step by small, 25% of them accepted: a step brings a reply 2 tokens"
    assert (
        said in to_text(told)
        and "of layers that draft" in to_text(told)
        and told["engine"]["drafts"]["model"] == "small"
    )


def test_prompts_attend_as_in_the_engine():
    parts, whole, pages = (serving_memory(on("h100", 1, prefill_attention=how)) for how in ("auto", "whole", "pages"))
    found = [(own.sizes.prefill, own.sizes.in_parts) for own in (parts, whole, pages)]
    assert found == [("cudnn", True), ("cudnn", False), ("pages", False)]
    assert serving_memory(on("h100", 1, kv_cache_dtype="fp8")).sizes.prefill == "pages"  # as it rounds
    # Where activations and not scores are most, the program of whole prompts needs more than the one over pages.
    small = dataclasses.replace(LLAMA, vocab_size=1024)
    how = {"max_num_batched_tokens": 8192}
    whole, pages = (serving_memory(on("h100", 1, small, prefill_attention=w, **how)).fullest for w in ("auto", "pages"))
    assert (whole.prefill_key[0], pages.prefill_key[0]) == ("whole", "chunk")
    assert whole.prefill - pages.prefill == 3 * 8192 * 4096 * 2


@pytest.mark.parametrize(("tokens", "compiled"), [(512, 56.3), (2048, 113.5)])
def test_a_block_of_pages_is_in_the_memory_of_chunks_in_parts(tokens, compiled):
    """Llama 3 8B with an MLP of 512 and a small vocabulary, MiB (compiled for an H100, texts of up to 131,072)."""
    small = dataclasses.replace(LLAMA, mlp_dim=512, vocab_size=1024)
    options = {"max_num_batched_tokens": tokens, "max_num_seqs": 1}
    [stage] = serving_memory(on("h100", 1, small, **options)).stages
    assert stage.prefill_key == ("chunk", (1, tokens))
    assert stage.prefill / 2**20 == pytest.approx(compiled, rel=0.08)


def test_prompts_take_what_their_kernels_do():
    """A chunk of 2,048 tokens of Llama 3 8B after 6,144 on an H200: 1.08 ms a layer over pages (measured)."""
    cases = {how: on("h200", 1, prefill_attention=how) for how in ("auto", "whole", "pages")}
    speeds = {how: Speed.of(case, serving_memory(case)) for how, case in cases.items()}
    late, first, short = (
        {how: speed.chunk(tokens, before) for how, speed in speeds.items()}
        for tokens, before in ((2048, 6144), (2048, 0), (256, 6144))
    )
    assert late["auto"] < late["whole"] == late["pages"]
    assert (late["pages"] - late["auto"]) / 32 == pytest.approx(0.7e-3, rel=0.1)
    assert first["auto"] == first["whole"] < first["pages"]
    assert len(set(short.values())) == 1
    [every] = LLAMA.transformer().attention_kinds
    assert attends("parts", every) == "parts" and attends("parts", dataclasses.replace(every, window=64)) == "pages"


def test_rates_obey_littles_law_and_the_queue():
    case = on("h100", 1)
    replica = Replica.of(case, Speed.of(case, serving_memory(case)))
    most = replica.most()
    for share in (0.2, 0.5, 0.8):
        load = replica.at(share * most.rate)
        assert load.running == pytest.approx(load.rate * 256 * load.itl_seconds, rel=0.01)
        assert replica.alone < load.ttft_seconds < most.ttft_seconds
    assert replica.at(1.01 * most.rate) is None
    wanted = dataclasses.replace(case, request_rate=100.0, ttft_seconds=0.5, itl_seconds=0.03)
    plan = ServingPlan.of(wanted)
    assert plan.most.itl_seconds <= 0.03 and plan.most.ttft_seconds <= 0.5 and plan.most.rate < most.rate
    assert plan.replicas == -(-100 // (0.8 * plan.most.rate)) and plan.usual.rate == pytest.approx(100 / plan.replicas)
    with pytest.raises(
        ShardlmError, match=r"itl_seconds=0\.001 is less than the .* s that an all but idle replica on one"
    ):
        ServingPlan.of(dataclasses.replace(case, itl_seconds=0.001))


def test_the_search_ranks_what_fits_and_says_what_would():
    found = search(on("h100", 8, LLAMA_70B))
    rates = [plan.tokens_per_second_per_gpu for plan in found.plans]
    assert rates == sorted(rates, reverse=True) and {plan.num_gpus for plan in found.plans} == {8}
    assert {plan.mesh.tensor * plan.mesh.pipeline for plan in found.plans} == {4, 8}
    assert any(mesh == MeshSpec(data=8) for mesh, _ in found.refused)
    assert [p.mesh.tensor for p in search(on("h100", 8, LLAMA_70B), {"tensor": 8}).plans] == [8]


def test_what_does_not_fit_is_told_with_what_would():
    one = on("h100", 1, LLAMA_70B)
    with pytest.raises(ShardlmError) as error:
        answer_serving(one)
    said = "it fits with quantization=int4 (estimated); as it is it needs at least num_gpus=3 (estimated)"
    assert said in str(error.value)
    with pytest.raises(ShardlmError, match=r"h100 as asked for.* at least num_gpus=6 \(estimated\)"):
        answer_serving(on("h100", 2, LLAMA_70B), {"data": 2})  # two replicas of four
    with pytest.raises(ShardlmError, match=r"it fits with dtype=bfloat16 \(estimated\)"):
        answer_serving(on("h200", 2, LLAMA_70B, dtype="float32"))  # as a config.json that names no type
    assert fits(one.on(quantization="int4")) and not fits(one.on(quantization="int8"))
    assert fits(on("h100", 4, LLAMA_70B, mesh=MeshSpec(tensor=4)))
    assert not fits(on("h100", 2, LLAMA_70B, mesh=MeshSpec(tensor=2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: on("h100", 1, lengths=(0, 5)),
            "prompt_len=0 and output_len=5: a request has at least 1 token of each",
        ),
        (lambda: on("h100", 1, lengths=(8000, 500)), "8500 tokens, and max_model_len=8192; shorten them, or raise"),
        (lambda: on("h100", 1, max_model_len=9000), "max_model_len=9000 is more than the model's 8192 positions"),
        (lambda: on("a100", 1, quantization="fp8_dynamic"), "its matrix units do not take fp8; choose int8_dynamic"),
        (lambda: on("h100", 1, dtype="fp8"), "dtype='fp8'; choose from float32, bfloat16, float16"),
        (lambda: on("h100", 1, request_rate=-1.0), "request_rate=-1.0 is a number of at least 0"),
        (lambda: on("h100", 1, request_rate=float("nan")), "request_rate=nan is a number of at least 0"),
        (lambda: on("h100", 1, deterministic=True), "does not cover deterministic=True"),
        (lambda: on("h100", 1, speculative_config=NGRAM), "needs acceptance_rate, the share of drafted tokens"),
        (
            lambda: on("h100", 1, speculative_config=NGRAM, acceptance_rate=1.5),
            "above 0 and at most 1, not 1.5: it depends",
        ),
        (lambda: on("h100", 1, acceptance_rate=0.5), "acceptance_rate=0.5 is of drafts"),
        (lambda: on("h100", 1, speculative_config=MTP, acceptance_rate=0.5), "and llama has none; choose method"),
        (lambda: drafted(0.5, vocab_size=1000), "small has a vocabulary of 1000 tokens, and llama one of 128256"),
        (lambda: drafted(0.5, longest=4096), "small was made for 4096 positions, and max_model_len=8192"),
        (lambda: serving_memory(on("h100", 3, mesh=MeshSpec(tensor=3))), "cannot be split over tensor=3"),
        (lambda: serving_memory(on("h100", 64, mesh=MeshSpec(pipeline=64))), "pipeline=64 stages of 32 layers"),
        (lambda: search(on("h100", 8), {"tensor": 3}), "8 GPUs have no mesh with tensor=3.*could be 1, 2, 4, 8 here"),
        (
            lambda: search(on("h100", 6), {"tensor": 3, "pipeline": 2}),
            r"no mesh of 6 h100 with tensor=3 x pipeline=2 can be: .*kv_heads=8 cannot.*; tensor could be 1 here",
        ),
        (
            lambda: serving_memory(on("h100", 1, kv_cache_bytes=2**29)),
            "a request of max_model_len=8192 tokens needs 512",
        ),
        (lambda: ServedModel.of_folder("nowhere"), "nowhere is neither a folder nor a config.json"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ShardlmError, match=message):
        make()


def test_the_command_line_has_the_flags_of_the_server():
    asked = ["x", "--tensor=2", "--kv_cache_dtype=fp8", "--max_model_len=40", "--prompt_len=20", "--output_len=8"]
    with flagsaver.flagsaver():
        flags.FLAGS(asked)
        said, fits = plan_serve_flags.plan_serving(
            REFERENCES / "llama" / "config.json",
            Cluster.of(GPUS["h100"], 4),
            most=3,
            compiled=0,
            as_json=True,
            say=print,
        )
    told = json.loads(said)
    assert fits and told["plans"][0]["mesh"]["tensor"] == 2 and told["engine"]["kv_cache_dtype"] == "fp8"
    assert (told["engine"]["max_model_len"], told["asked"]["prompt_len"]) == (40, 20)


@on_gpus
def test_memory_is_what_the_decode_program_with_a_draft_model_needs(monkeypatch):
    """Of one layer each."""
    largest = verify._largest
    monkeypatch.setattr(verify, "_largest", lambda plan: largest(plan)[:1])
    plan = ServingPlan.of(drafted(0.5, shape=dataclasses.replace(LLAMA, num_layers=1), num_layers=1))
    (decode,) = verify_serving(plan).programs
    assert (decode.what, decode.rows, decode.tokens) == ("decode", 256, 5) and abs(decode.difference) < 0.01
    assert decode.arguments == pytest.approx(plan.memory.fullest.held, rel=1e-3)


@on_gpus
@pytest.mark.parametrize(
    ("shape", "tensor", "held"),
    [(LLAMA, 1, None), (LLAMA_70B, 4, None), (LLAMA, 1, "int8"), (LLAMA_70B, 4, "fp8_dynamic")],
)
def test_memory_is_what_the_programs_for_gpus_need(shape, tensor, held):
    """Two layers, whose temporaries are those of all, and beside them as many pages as they can use: less than all
    layers leave room for, so that temporaries weigh more than they would."""
    mesh = MeshSpec(tensor=tensor)
    plan = ServingPlan.of(on("h100", tensor, dataclasses.replace(shape, num_layers=2), mesh=mesh, quantization=held))
    verified = verify_serving(plan)
    for program in verified.programs:
        assert abs(program.difference) < 0.05, program
    assert verified.fits(plan.memory.limit) and [one.what for one in verified.programs] == ["decode", "prefill"]
    sent = Speed.of(plan.case, plan.memory).sent(0, Pass(256, 256, 1024, 2))
    assert verified.programs[0].sent == sent and set(sent) == ({"tensor"} if tensor > 1 else set())
    answer = ServingAnswer(Found((plan,), ()), (RankedServing(plan, verified),))
    assert "Compiled for h100" in to_text(to_json(answer))
