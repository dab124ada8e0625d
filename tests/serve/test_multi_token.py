"""Drafts by the modules that a model was trained with: replies are the same as without, drafts are those of modules run
over whole rows wherever chunks end, and as good after shared prefixes and preemption."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest
from engines import CONFIG, END, TOKENIZER, finished, folder_of, of_model
from small import mesh_of
from small_predicting import TEXTS, TWO, drafted, trained
from test_speculation import check_same, served

import shardlm
from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.opened import Opened
from shardlm.serve.bench.random_engine import random_engine
from shardlm.serve.build import assemble
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import taken_apart
from shardlm.serve.live_weights import new_weights
from shardlm.serve.outputs import SpeculationStats
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.submeshes import of_replica
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest

COUNT = 3
MTP = {"method": "deepseek_mtp", "num_speculative_tokens": COUNT}
MESHES = {2: MeshSpec(), 1: MeshSpec(expert=2, tensor=2)}  # by modules
# Chunks are of 12 tokens at most.
PROMPTS = [
    TOKENIZER.encode(text * 12)[n : n + length] for n, (text, length) in enumerate(zip(TEXTS, (9, 24, 31), strict=True))
]


@pytest.fixture(scope="module")
def weights():
    """{modules: parameters of a model with so many, on the host}."""
    params = jax.tree.map(np.asarray, trained())
    rest = {name: part for name, part in params.items() if name != "mtp"}
    return {0: rest, 1: rest | {"mtp": jax.tree.map(lambda a: a[:1], params["mtp"])}, 2: params}


def model_of(modules: int, spec: MeshSpec) -> ModelDef:
    shape = dataclasses.replace(TWO, mtp=modules).transformer()
    return ModelDef.make(shape, Execution(serving_rules(shape, spec)))


def engine_of(weights, modules: int, spec: MeshSpec):
    """With 12 pages of 4: two requests of 48 tokens do not fit."""
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        model = model_of(modules, spec)
        params = jax.tree.map(lambda a, s: jax.device_put(a, at_rest(s, mesh).sharding), weights[modules], model.shapes)
        apart = taken_apart(model, params)
    speculative = SpeculativeConfig.parse(MTP) if modules else None
    return of_model(*apart, mesh, rows=2, tokens=12, length=48, pages=13, speculative=speculative)


@pytest.fixture(scope="module")
def plain(weights):
    return engine_of(weights, 0, MeshSpec())


@pytest.fixture(scope="module")
def drafting(weights):
    return {modules: engine_of(weights, modules, spec) for modules, spec in MESHES.items()}


@pytest.mark.wide
def test_replies_are_the_same_with_drafts(plain, drafting):
    wanted = served(plain, 0)
    for modules, engine in drafting.items():
        assert engine.runner.config.layout == PageLayout.whole(1, 13)
        assert engine.runner.proposer.layout == PageLayout.whole(modules, 13)
        check_same(served(engine, 1), wanted)
        stats = engine.stats()
        assert engine.scheduler.preemptions > 0 and stats.prefix_hits > 0
        # Measured: 3.5 tokens a step, of 4 at most, on requests of all kinds.
        assert stats.speculation.mean_length > 3


def replies_to(engine, prompts) -> tuple[list[list[int]], SpeculationStats]:
    """The greedy replies to prompts that are there at once, as long as there is room, and what came of drafts."""
    before = engine.stats().speculation
    for id, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=min(26, 48 - len(prompt)), ignore_eos=True)
        engine.add(str(id), prompt, params)
    done = finished(engine)
    replies = [done[str(id)].outputs[0].token_ids for id in range(len(prompts))]
    return replies, engine.stats().speculation.since(before)


@pytest.mark.wide
def test_drafts_are_those_of_modules_run_over_the_whole_row(weights, drafting):
    """Of modules that are right now and then: a draft is the one by hand where all places before it are."""
    rng = np.random.default_rng(0)
    for modules, engine in drafting.items():
        own = weights[modules] | {"mtp": jax.tree.map(functools.partial(blurred, rng), weights[modules]["mtp"])}
        put(engine, own)
        drafts = right = 0
        for prompt in PROMPTS:
            hits = engine.stats().prefix_hits
            [reply], found = replies_to(engine, [prompt])
            assert found == by_hand(modules, own, prompt, reply) and engine.stats().prefix_hits == hits
            # Again: from the cache, where the text goes on as it did.
            assert replies_to(engine, [prompt]) == ([reply], found) and engine.stats().prefix_hits > hits
            drafts, right = drafts + found.drafted, right + sum(found.accepted)
        assert 0.2 < right / drafts < 0.8


def blurred(rng, a: np.ndarray) -> np.ndarray:
    return a + (a.std() * rng.standard_normal(a.shape)).astype(a.dtype)


def put(engine, params) -> None:
    """New weights; nothing is cached any more."""
    with jax.set_mesh(engine.runner.mesh):
        engine.update_weights(new_weights(jax.tree.map(jax.numpy.asarray, params), engine.runner))


@functools.cache
def drafted_by(modules: int):
    with jax.set_mesh(mesh_of(MeshSpec())):
        return jax.jit(functools.partial(drafted, model_of(modules, MeshSpec()), count=COUNT))


def by_hand(modules: int, params, prompt: list[int], reply: list[int]) -> SpeculationStats:
    """What comes of drafts on the way to a greedy reply, whose first token comes with the prompt."""
    text = np.zeros((1, 48), np.int32)
    text[0, : len(prompt) + len(reply)] = prompt + reply
    steps, made, tried, accepted = 0, 1, 0, np.zeros(COUNT, int)
    while made < len(reply):
        last, count = len(prompt) + made - 1, min(COUNT, len(reply) - made - 1)
        with jax.set_mesh(mesh_of(MeshSpec())):
            drafts = np.asarray(drafted_by(modules)(params, text, last))
        right = np.cumprod(drafts[:count] == text[0, last + 1 : last + 1 + count])
        accepted[:count] += right
        steps, tried, made = steps + (count > 0), tried + count, made + 1 + int(right.sum())
    return SpeculationStats(steps, tried, tuple(accepted.tolist()))


@pytest.mark.wide
def test_trained_modules_save_steps(weights, drafting):
    """Measured: 3.4 to 4 tokens a step of 4 at most, 1.0 to 1.1 once the modules' numbers are in another order."""
    rng = np.random.default_rng(0)
    for modules, engine in drafting.items():
        put(engine, weights[modules])
        (_, alone), hits = replies_to(engine, PROMPTS[1:2]), engine.stats().prefix_hits
        (_, again), preempted = replies_to(engine, PROMPTS[1:2]), engine.scheduler.preemptions
        assert engine.stats().prefix_hits > hits
        _, crowded = replies_to(engine, PROMPTS[:2])
        assert engine.scheduler.preemptions > preempted
        put(engine, weights[modules] | {"mtp": jax.tree.map(rng.permuted, weights[modules]["mtp"])})
        _, shuffled = replies_to(engine, PROMPTS)
        assert min(one.mean_length for one in (alone, again, crowded)) > 3 > 1.5 > shuffled.mean_length >= 1


@pytest.mark.wide
def test_over_stages_drafts_are_the_same(weights):
    """In front of the trained layer's stage stands one that adds nothing; weights of modules are replaced there too."""
    spec = MeshSpec(pipeline=2)
    shape = dataclasses.replace(TWO, num_layers=2, mtp=1).transformer()

    def as_two_layers(params):
        segments = jax.tree.map(lambda a: np.concatenate([0 * a, a]), params["segments"])
        return {**params, "segments": segments}

    mesh = mesh_of(of_replica(spec))
    with jax.set_mesh(mesh):
        model = ModelDef.make(shape, Execution(serving_rules(shape, of_replica(spec))))
    two = as_two_layers(weights[1])
    params = jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), two, model.held_at_rest(mesh))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "block_size": 4, "decode_steps": 4}
    config = EngineConfig(mesh=spec, kv_cache_bytes=2**20, speculative_config=MTP, **sizes)
    engine = assemble(Opened(model, params, mesh, None, pathlib.Path()), TOKENIZER, [END], 48, config)
    for prompt in PROMPTS:
        [reply], found = replies_to(engine, [prompt])
        assert found == by_hand(1, weights[1], prompt, reply) and found.mean_length > 3
    together, _ = replies_to(engine, PROMPTS)
    assert together == [replies_to(engine, [prompt])[0][0] for prompt in PROMPTS]
    rng = np.random.default_rng(0)
    shuffled = weights[1] | {"mtp": jax.tree.map(rng.permuted, weights[1]["mtp"])}
    put(engine, as_two_layers(shuffled))
    same, found = replies_to(engine, PROMPTS)
    assert same == together and found.mean_length < 1.5


@pytest.mark.wide
def test_from_a_folder_with_all_that_is_quantised(weights, plain, tmp_path):
    folder = folder_of(tmp_path / "model", shape=dataclasses.replace(TWO, mtp=1), params=weights[1])
    options = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 12, "decode_steps": 4}
    llm = shardlm.LLM(folder, speculative_config=MTP, quantization="int8", kv_cache_dtype="int8", **options)
    _, found = replies_to(llm.engine, PROMPTS)
    assert found.mean_length > 3
    before = llm.engine.runner.params
    llm.update_weights(folder)  # from a path, modules too
    assert llm.engine.runner.params is not before and replies_to(llm.engine, PROMPTS)[1] == found
    assert "mtp" not in new_weights(folder, plain.runner)
    with pytest.raises(ShardlmError, match="mtp is None, served is MtpConfig"):
        llm.update_weights(folder_of(tmp_path / "without", shape=dataclasses.replace(TWO, mtp=0)))


def test_what_has_no_modules_is_refused(tmp_path):
    folder = folder_of(tmp_path / "model")
    with pytest.raises(ShardlmError, match=r"modules that predict further tokens, and .*model has none.*Choose method"):
        shardlm.LLM(folder, speculative_config=MTP)
    config = EngineConfig(speculative_config=MTP, max_model_len=32)
    with pytest.raises(ShardlmError, match="and this configuration has none"):
        random_engine(CONFIG.transformer(), config)
    with pytest.raises(ShardlmError, match="method 'mtp' drafts by the model itself; leave out model"):
        EngineConfig(speculative_config=MTP | {"model": "a"})
