"""The memory of a serving plan is held to what the engine allocates and the scheduler does, on CPU devices that the
plan never sees, and to programs that are compiled for GPUs without one."""

import dataclasses
import math
import pathlib

import jax
import numpy as np
import pytest
from gpu_programs import on_gpus
from served_cases import DRAFTED, LLAMA, LLAMA_70B, MTP, drafted, on

from shardlm.hardware import GPUS
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.opened import load
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving import verify
from shardlm.plan.serving.answer import RankedServing, ServingAnswer
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.ops import Pass
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.search import Found, ServingPlan
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
HEADS, EAGLE = REFERENCES.parent / "eagle_references", {"method": "eagle3"} | DRAFTED
SIZES = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, "decode_steps": 4}


def bytes_by_device(tree) -> set[int]:
    """Of all arrays of a tree, each once, on each device that has any."""
    found: dict = {}
    for array in {id(array): array for array in jax.tree.leaves(tree)}.values():
        for shard in array.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return set(found.values())


ROOM = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 4}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("family", "axes", "options"),
    [
        ("llama", {"tensor": 2}, {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("deepseek_v2", {"tensor": 2, "expert": 2}, {"quantization": "int4", "kv_cache_dtype": "fp8"}),
        ("deepseek_v2", {"tensor": 2, "expert": 2}, {"quantization": "fp8_dynamic"}),
        ("deepseek_v2", {"tensor": 2, "expert": 2}, {"decode_context_parallel_size": 4}),
        ("kimi_linear", {"tensor": 2}, {"decode_context_parallel_size": 2, "kv_cache_dtype": "int8"}),
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
        ("../eagle_references/target", {"tensor": 2}, {"speculative_config": EAGLE | {"model": f"{HEADS}/specforge"}}),
        (
            "../eagle_references/target",
            {"pipeline": 2},
            {"speculative_config": EAGLE | {"model": f"{HEADS}/specforge"}},
        ),
        (
            "../eagle_references/target",
            {"data": 2},
            {"speculative_config": EAGLE | {"model": f"{HEADS}/speculators"}, "kv_cache_bytes": 2**18},
        ),
        ("qwen3_5", {"pipeline": 2}, {"speculative_config": {"model": str(REFERENCES / "qwen3_next")} | DRAFTED}),
        ("lfm2_moe", {"expert": 2}, {}),
        ("falcon_h1", {"tensor": 2}, {}),
        ("gemma3n", {"tensor": 2}, {}),
        ("bailing_hybrid", {"tensor": 2}, {}),
        ("hy_v4", {"tensor": 2}, {}),
        ("mistral_large4", {"tensor": 2}, {}),
        ("minimax", {"tensor": 2}, {}),
        ("minimax_m3", {"tensor": 2}, {}),
        ("longcat_flash", {"expert": 2}, {}),
        ("glm5_next", {"tensor": 2}, {}),
    ],
)
def test_weights_pages_and_slots_are_what_the_engine_allocates(family, axes, options, monkeypatch):
    mesh, folder = MeshSpec(**axes), REFERENCES / family
    config = EngineConfig(mesh=mesh, dtype="float32", **({"kv_cache_bytes": 2**17} | SIZES | options))
    drafts = config.speculative_config
    asked = {"acceptance_rate": 0.5, "draft": ServedModel.drafting(drafts, 48)} if drafts else {}
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


@pytest.mark.parametrize(("tokens", "compiled"), [(512, 56.3), (2048, 113.5)])
def test_a_block_of_pages_is_in_the_memory_of_chunks_in_parts(tokens, compiled):
    """Llama 3 8B with an MLP of 512 and a small vocabulary, MiB (compiled for an H100, texts of up to 131,072)."""
    small = dataclasses.replace(LLAMA, mlp_dim=512, vocab_size=1024)
    options = {"max_num_batched_tokens": tokens, "max_num_seqs": 1}
    [stage] = serving_memory(on("h100", 1, small, **options)).stages
    assert stage.prefill_key == ("chunk", (1, tokens))
    assert stage.prefill / 2**20 == pytest.approx(compiled, rel=0.08)


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


@on_gpus
def test_split_pages_are_what_the_programs_for_gpus_need():
    """Of latents, which eight devices had copies of: the bytes of what is exchanged for them are in the program to the
    byte, where tokens are few."""
    shape = dataclasses.replace(DeepseekConfig(), num_layers=3, dense_layers=1, vocab_size=32_768)
    plan = ServingPlan.of(on("h100", 8, shape, mesh=MeshSpec(expert=8), decode_context_parallel_size=8))
    verified = verify_serving(plan)
    for program in verified.programs:
        assert abs(program.difference) < 0.05, program
    speed = Speed.of(plan.case, plan.memory)
    sent = speed.sent(0, Pass(256, 256, 1024, 2))
    assert verified.programs[0].sent == sent and set(sent) == {"expert"} and sent["expert"]["all-to-all"] > 2**25
    alone = serving_memory(plan.case.on(decode_context_parallel_size=1))
    assert 8 * plan.memory.stages[0].page == alone.stages[0].page
