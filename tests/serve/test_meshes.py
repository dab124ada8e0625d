"""Replicas and pipeline stages: whatever the mesh, each reply is what one device says. Programs are started as on GPUs,
on threads of their own."""

import asyncio
import dataclasses
import functools
import types
from array import array

import jax
import pytest
from engines import CONFIG, END, TOKENIZER, decoding_from
from lazy_programs import all_compiled
from oracle import Oracle, opened_of
from small_moe import DEEPSEEK, MOE

from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.mesh import MeshSpec
from shardlm.serve import runner, staged_runner
from shardlm.serve.adapter_table import AdapterTable, Room
from shardlm.serve.api.metrics import Metrics
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.build import assemble
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.launcher import Launcher
from shardlm.serve.layers import taken_apart
from shardlm.serve.live_weights import new_draft, new_weights
from shardlm.serve.outputs import RequestOutput
from shardlm.serve.page_table import PageTable, extend_hashes
from shardlm.serve.pool_size import page_bytes
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.speculation.build import DraftModel
from shardlm.serve.stages import layers_of
from shardlm.serve.submeshes import of_replica, of_stage, submeshes

TEXTS = ('{"name": "ab"', '{"name": "abc", "age": 12', "né日🙂 true", "x" * 30)
PROMPTS = [TOKENIZER.encode(text) for text in TEXTS]
SHAPES = {
    "dense": dataclasses.replace(CONFIG, num_layers=2, tie_embeddings=True).transformer(),
    "latent": dataclasses.replace(DEEPSEEK, num_layers=2, vocab_size=CONFIG.vocab_size).transformer(),  # with experts
    "experts": dataclasses.replace(MOE, num_layers=2, vocab_size=CONFIG.vocab_size).transformer(),
}
CASES = [
    ("dense", {"data": 2, "tensor": 2}),
    ("dense", {"pipeline": 2, "tensor": 2}),
    pytest.param("dense", {"data": 2, "pipeline": 2}, marks=pytest.mark.wide),
    pytest.param("latent", {"data": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.wide),
    ("experts", {"expert": 4, "tensor": 2}),  # 2 kv heads: attention is split over tensor alone
    ("latent", {"pipeline": 2}),
]


@pytest.fixture(scope="module", autouse=True)
def as_on_gpus():
    with pytest.MonkeyPatch.context() as patch, decoding_from(2):
        for module in (runner, staged_runner):
            patch.setattr(module, "launcher_on", lambda platform: Launcher(threaded=True))
        yield


@functools.cache
def oracle(name: str, seed: int = 0) -> Oracle:
    return Oracle(opened_of(SHAPES[name], MeshSpec(), seed))


@functools.cache
def engine_on(name: str, spec: MeshSpec) -> Engine | EngineGroup:
    """15 pages of 4 tokens for each replica: two long requests do not fit; prompts are read in pieces of 8."""
    opened = opened_of(SHAPES[name], of_replica(spec))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "decode_steps": 4}
    layout = PageLayout.whole(2, 16)
    config = EngineConfig(mesh=spec, kv_cache_bytes=16 * page_bytes(opened.model, layout, 4) * spec.data, **sizes)
    with all_compiled():
        return assemble(opened, TOKENIZER, [END], 56, config)


def engines_of(engine: Engine | EngineGroup) -> tuple[Engine, ...]:
    return engine.engines if isinstance(engine, EngineGroup) else (engine,)


def finished(engine: Engine | EngineGroup) -> dict:
    """Steps to the end: the outputs by request; nothing may be left of them."""
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        for one in engines_of(engine):
            one.scheduler.pages.check_invariants()
    assert all(one.scheduler.pages.num_used == 0 for one in engines_of(engine))
    return done


def requests(count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    found = {}
    for n in range(count):
        random = {"temperature": 1.3, "top_k": 40, "seed": n} if n % 3 == 1 else {"temperature": 0}
        found[f"r{n}"] = PROMPTS[n % 4], SamplingParams(max_tokens=12 + 7 * (n % 2), ignore_eos=True, **random)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_every_mesh_says_what_one_device_says(name, sizes):
    spec = MeshSpec(**sizes)
    engine = engine_on(name, spec)
    compiled, wanted = [], requests(10)

    def listen(event: str, seconds: float, **_) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for id, (prompt, params) in wanted.items():
        engine.add(id, prompt, params)
    engine.add("gone", PROMPTS[3], SamplingParams(max_tokens=16))
    moved = engine.step()
    assert engine.abort("gone").outputs[0].finish_reason == "abort" and engine.abort("gone") is None
    done = {output.request_id: output for output in moved if output.finished} | finished(engine)
    assert not compiled
    for id, (prompt, params) in wanted.items():
        assert done[id].outputs[0].token_ids == oracle(name).reply(prompt, params).tokens, (id, sizes)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.kv_usage == 0


@pytest.mark.parametrize("method", ["ngram", pytest.param("draft_model", marks=pytest.mark.wide)])
def test_drafts_go_through_stages(method):
    """Proposed in the last stage and verified through all, by groups in turn: the same tokens, and drafts that stay.
    The draft model is the model itself, so that nearly all of its drafts do."""
    spec = MeshSpec(pipeline=2, tensor=2 if method == "draft_model" else 1)
    shape = dataclasses.replace(SHAPES["dense"], tie_embeddings=False)
    wanted = {"method": method, "num_speculative_tokens": 3}
    wanted |= {"model": "itself"} if method == "draft_model" else {"prompt_lookup_max": 2}
    draft = None
    if method == "draft_model":
        itself = opened_of(SHAPES["dense"], of_stage(spec))
        with jax.set_mesh(itself.mesh):
            draft = DraftModel(*taken_apart(itself.model, itself.params))
        shape = SHAPES["dense"]
    opened = opened_of(shape, of_replica(spec))
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 4, "decode_steps": 2}
    config = EngineConfig(mesh=spec, kv_cache_bytes=2**20, speculative_config=wanted, **sizes)
    engine, plain = assemble(opened, TOKENIZER, [END], 56, config, draft=draft), Oracle(opened_of(shape, MeshSpec()))
    for id, (prompt, params) in requests(8).items():
        engine.add(id, prompt, params)
    done = finished(engine)
    for id, (prompt, params) in requests(8).items():
        assert done[id].outputs[0].token_ids == plain.reply(prompt, params).tokens, id
    stats = engine.stats().speculation
    assert stats.steps and sum(stats.accepted) > (0.9 * stats.drafted if draft else 0)
    if draft:  # new weights of both, which agree again
        new = opened_of(shape, of_replica(spec), seed=1).params
        engine.update_weights(new_weights(new, engine.runner), new_draft(new, engine.runner))
        prompt, params = requests(4)["r3"]
        engine.add("new", prompt, params)
        assert finished(engine)["new"].outputs[0].token_ids == oracle("dense", 1).reply(prompt, params).tokens
        since = engine.stats().speculation.since(stats)
        assert sum(since.accepted) == since.drafted > 0


def test_replicas_are_one_engine_to_clients():
    """Streams, equal beginnings, a request that breaks, new weights, and what Prometheus is told."""
    engine = engine_on("dense", MeshSpec(data=2, tensor=2))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = {n: oracle("dense").reply(PROMPTS[n], params).tokens for n in range(4)}
    for id, n in (("broken", 0), ("whole", 1)):
        engine.add(id, PROMPTS[n], params)
    with pytest.raises(ShardlmError, match="unfinished request with the id 'whole'"):
        engine.add("whole", PROMPTS[0], params)
    of_broken = next(one for one in engine.engines if "broken" in one._replies)
    of_broken._replies["broken"].detokenizer.push = lambda tokens: 1 / 0
    done = finished(engine)
    assert done["broken"].error.startswith("ZeroDivisionError")
    assert done["whole"].outputs[0].token_ids == expected[1] and not any(engine._weights)

    llm = AsyncLLM(engine, model_name="tiny", template=None)

    async def client(number: int) -> RequestOutput:
        stream = llm.generate(PROMPTS[number % 4], params, request_id=f"c{number}")
        return [output async for output in stream][-1]

    async def everybody() -> list[RequestOutput]:
        together = await asyncio.gather(*(client(number) for number in range(8)))
        again = [await client(number) for number in (9, 11)]  # alone: nothing weighs but what is cached
        await llm.drain()
        return [*together, *again]

    outputs = asyncio.run(everybody())
    assert [output.outputs[0].token_ids for output in outputs] == [expected[n % 4] for n in (*range(8), 9, 11)]
    assert all(output.num_cached_tokens > 0 for output in outputs[8:])
    stats = llm.stats()
    assert llm.max_num_seqs == 2 * engine.scheduler.config.max_rows
    assert stats.generation_tokens == sum(one.generation_tokens for one in stats.replicas)
    assert min(one.generation_tokens for one in stats.replicas) > 0
    told = Metrics("tiny").text(stats)
    for number, one in enumerate(stats.replicas):
        line = f'vllm:generation_tokens_total{{model_name="tiny",engine="{number}"}} {one.generation_tokens}'
        assert line in told.splitlines()
    llm.shutdown()


def test_new_weights_reach_every_stage_of_every_replica():
    spec = MeshSpec(data=2, pipeline=2)
    engine = engine_on("dense", spec)
    old = engine.runner.params
    opened = opened_of(SHAPES["dense"], of_replica(spec), seed=1)
    engine.update_weights(new_weights(opened.params, engine.runner))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for n in range(4):
        engine.add(f"new{n}", PROMPTS[0], params)
    done = finished(engine)
    new = oracle("dense", 1).reply(PROMPTS[0], params).tokens
    assert new != oracle("dense").reply(PROMPTS[0], params).tokens
    assert all(output.outputs[0].token_ids == new for output in done.values())
    assert all(one.stats().generation_tokens for one in engine.engines)
    engine.update_weights(old)


def test_layers_of_stages():
    assert layers_of(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    with pytest.raises(ShardlmError, match="pipeline=4 stages of 3 layers; choose at most 3"):
        layers_of(3, 4)
    with pytest.raises(ShardlmError, match="needs 12 devices and there are 8"):
        submeshes(MeshSpec(data=3, tensor=4))


class _Fake:
    """As much of an engine as routes are found by."""

    def __init__(self):
        self.scheduler, self.adapters = types.SimpleNamespace(pages=PageTable(200, 4)), AdapterTable(Room())
        self.ended = self.runner = self.tokenizer = self.stop_ids = self.max_model_len = None
        self.pooling = self.sight = None
        self.ids = []

    def add(self, id, *_, **options):
        self.ids.append(id)

    def remember(self, prompt):
        hashes = []
        extend_hashes(hashes, array("i", prompt), len(prompt), 4)
        pages = self.scheduler.pages
        pages.allocate(len(self.ids), len(prompt))
        pages.register(len(self.ids), hashes, len(prompt))


def test_a_request_goes_where_least_is_to_do():
    group = EngineGroup([_Fake(), _Fake(), _Fake()])
    prompt, params = list(range(300)), SamplingParams()
    group.engines[1].remember(prompt[:100])
    group.engines[2].remember(prompt[:240])
    assert group.route(prompt, params) == (2, 60)
    assert group.route(prompt, SamplingParams(truncate_prompt_tokens=200)) == (0, 200)  # another beginning
    assert group.route(prompt, SamplingParams(prompt_logprobs=0)) == (0, 300)  # all of it is read
    assert group.route(prompt, params, salt="other") == (0, 300)
    for n in range(6):
        group.add(f"r{n}", prompt, params)
    assert [engine.ids for engine in group.engines] == [["r3"], ["r2"], ["r0", "r1", "r4", "r5"]]
