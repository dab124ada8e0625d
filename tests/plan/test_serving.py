"""What must follow when a serving case changes; what is searched, refused and told."""

import dataclasses
import json
import pathlib
import shutil

import pytest
from absl import flags
from absl.testing import flagsaver
from served_cases import LLAMA, LLAMA_70B, MTP, NGRAM, drafted, on
from small_eagle import head_for

from launch import plan_serve_flags
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.eagle import Streams
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.answer import RankedServing, ServingAnswer, answer_serving
from shardlm.plan.serving.attainment import search_attained
from shardlm.plan.serving.case import ServedModel
from shardlm.plan.serving.load import Replica
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.prompts import attends
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.search import Found, ServingPlan, fits, search
from shardlm.plan.serving.time import Speed
from shardlm.serve.speculation.eagle_files import Head

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"


@pytest.mark.parametrize("name", ["llama.json", "nowhere"])
def test_a_model_that_is_not_there_is_refused_and_not_another_planned(name, tmp_path):
    folder = REFERENCES.parent / "mtp_reference"
    shutil.copy(folder / "config.json", tmp_path)
    assert ServedModel.of_folder(tmp_path / "config.json", 48).shape == ServedModel.of_folder(folder, 48).shape
    if name.endswith("json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ShardlmError, match=f"{name} is neither a folder nor a config.json; give the folder"):
        ServedModel.of_folder(tmp_path / name)


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


def test_a_head_s_passes_read_its_layer_and_its_logits(monkeypatch):
    """Three passes for three drafts, and one of what was verified, through `fc`; the embedding is the model's."""
    monkeypatch.setattr("shardlm.plan.serving.case.check_head", lambda head, *_: head.streams.of(32))
    head = Head(None, Streams(), ("embedding",))
    own = ServedModel("head", head_for(LLAMA.transformer(), 32_000), "bfloat16", 0, head=head)
    wanted = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    plan = ServingPlan.of(on("h100", 1, speculative_config=wanted, acceptance_rate=0.7, draft=own))
    layer = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    logits, fc = 4096 * 32_000, 3 * 4096 * 4096
    norms, places = 4 * 4096, 4 * 128_256
    assert plan.memory.fullest.draft == 2 * (layer + logits + fc + norms) + places
    read = 15.01e9 + 2 * (4 * layer + 3 * logits + fc) + 1152 * (131_072 + 4 * 4096)
    assert plan.decode[0].least == pytest.approx(read / 3.35e12 / plan.case.tokens_a_step, rel=2e-3)


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


def test_pages_that_limit_a_plan_are_split_where_nobody_says():
    """Eight devices hold DeepSeek V3's latents once and not eight times, and serve more; but not where that is said."""
    config = dataclasses.replace(DeepseekConfig(), num_layers=45)
    options = {"lengths": (2048, 1024), "quantization": "fp8", "block_size": 16, "max_num_seqs": 1024}
    case = dataclasses.replace(on("h100", 8, config, **options), splits=True)
    [plan] = search(case, {"expert": 8}).plans
    [asked] = search(dataclasses.replace(case, splits=False), {"expert": 8}).plans
    assert asked.most.limit == "pages" and asked.case.engine.decode_context_parallel_size == 1
    assert plan.case.engine.decode_context_parallel_size == 8 and plan.most.rate > 1.2 * asked.most.rate
    assert plan.memory.tokens_held == pytest.approx(8 * asked.memory.tokens_held, rel=0.01)
    said = " ".join(to_text(to_json(ServingAnswer(Found((plan,), ()), (RankedServing(plan),)))).split())
    assert "expert=8, pages over 8" in said and "--decode_context_parallel_size=8" in said
    [llama] = search(dataclasses.replace(on("h100", 8, LLAMA_70B), splits=True), {"tensor": 8}).plans
    assert llama.case.engine.decode_context_parallel_size == 1  # each device has a kv head of its own


@pytest.mark.wide  # 11 s of a core
def test_split_pages_are_planned_where_latencies_are_asked_for_and_told_as_what_fits():
    """An attainment has the plan it was found for; and 8 GPUs that hold a request in split pages alone are enough."""
    config = dataclasses.replace(DeepseekConfig(), num_layers=45)
    options = {"lengths": (2048, 1024), "quantization": "fp8", "block_size": 16, "max_num_seqs": 1024}
    case = dataclasses.replace(on("h100", 8, config, **options), splits=True)
    asked = dataclasses.replace(case, ttft_seconds=60.0, attainment=0.5)
    [plan] = search_attained(asked, {"expert": 8}, lambda what: None).plans
    assert plan.case == dataclasses.replace(asked, engine=plan.case.engine)
    assert plan.case.engine.decode_context_parallel_size == 8 and plan.case.engine.mesh.expert == 8
    model = dataclasses.replace(case.model, longest=2**21)
    alone = serving_memory(case.on(mesh=MeshSpec(expert=8))).tokens_held
    long = dataclasses.replace(case, model=model).on(mesh=MeshSpec(expert=8), max_model_len=2 * alone)
    assert fits(long) and not fits(dataclasses.replace(long, splits=False))
