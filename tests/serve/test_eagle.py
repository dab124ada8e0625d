"""Drafts by a head that reads the model's streams: replies are the same as without, drafts are those of the head run
over whole rows wherever chunks end, and as good after shared prefixes and preemption."""

import dataclasses
import functools
import pathlib
import sys

import jax
import numpy as np
import pytest
from engines import CONFIG, END, TOKENIZER, folder_of, of_model
from small import mesh_of
from small_eagle import STREAMS, drafted, folder_of_head, head_for, streams_of, trained
from small_predicting import TEXTS
from test_multi_token import PROMPTS, blurred, replies_to
from test_speculation import check_same, served

import shardlm
from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.opened import Opened
from shardlm.serve.alike import of_files
from shardlm.serve.build import assemble
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import taken_apart
from shardlm.serve.live_weights import new_draft, new_weights
from shardlm.serve.outputs import SpeculationStats
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.speculation.build import DraftModel
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.submeshes import of_replica
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest

COUNT = 3
EAGLE = {"method": "eagle3", "model": "given", "num_speculative_tokens": COUNT}
SHAPE = dataclasses.replace(CONFIG, num_layers=4).transformer()
SPECS = {"one": MeshSpec(), "two": MeshSpec(tensor=2)}


def proposed() -> np.ndarray:
    """The place of each token: of those of the texts and some others, in the order of their numbers."""
    tokens = sorted({token for text in TEXTS for token in TOKENIZER.encode(text * 2)} | set(range(0, 290, 4)))
    place = np.full(SHAPE.vocab_size, -1, np.int32)
    place[tokens] = np.arange(len(tokens))
    return place


def models_on(spec: MeshSpec) -> tuple[ModelDef, ModelDef]:
    """(the model, its layers apart, which hands its streams out, its head); under the mesh."""
    apart, head = SHAPE.apart(), head_for(SHAPE, int(proposed().max()) + 1)
    own = Execution(serving_rules(SHAPE, spec))
    handing = dataclasses.replace(own, handed_out=STREAMS)
    return ModelDef.make(apart, handing), ModelDef.make(head, Execution(serving_rules(head, spec)))


@pytest.fixture(scope="module")
def weights():
    """On the host, of the model and of the head."""
    with jax.set_mesh(mesh_of(MeshSpec())):
        models = models_on(MeshSpec())
    texts = [np.array(TOKENIZER.encode(text * 20), np.int32) for text in TEXTS]
    return trained(*models, proposed(), texts, 32, 40)


def engine_of(weights, spec: MeshSpec, drafts: bool = True):
    """With 12 pages of 4: two requests of 48 tokens do not fit."""
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        models = models_on(spec)
        params = [
            jax.tree.map(lambda a, s: jax.device_put(a, at_rest(s, mesh).sharding), own, model.shapes)
            for own, model in zip(weights, models, strict=True)
        ]
        model, params, head = *taken_apart(models[0], params[0]), DraftModel(*taken_apart(models[1], params[1]))
        model, head = dataclasses.replace(head, streams=STREAMS, shared=("embedding",)).listening(model, params)
    speculative = {"speculative": SpeculativeConfig.parse(EAGLE), "draft": head} if drafts else {}
    return of_model(model, params, mesh, rows=2, tokens=12, length=48, pages=13, **speculative)


@pytest.fixture(scope="module")
def drafting(weights):
    return {name: engine_of(weights, spec) for name, spec in SPECS.items()}


@pytest.mark.wide
def test_replies_are_the_same_with_drafts(weights, drafting):
    wanted = served(engine_of(weights, MeshSpec(), drafts=False), 0)
    for engine in drafting.values():
        assert engine.runner.config.layout == PageLayout.whole(4, 13)
        assert engine.runner.proposer.layout == PageLayout.whole(1, 13)
        check_same(served(engine, 1), wanted)
        stats = engine.stats()
        assert engine.scheduler.preemptions > 0 and stats.prefix_hits > 0
        assert stats.speculation.mean_length > 2.5


def put(engine, own) -> None:
    """New weights for the head; nothing is cached any more."""
    runner = engine.runner
    with jax.set_mesh(runner.mesh):
        head = new_draft(jax.tree.map(jax.numpy.asarray, own), runner)
        engine.update_weights(runner.params, head)


@functools.cache
def by_one_device():
    with jax.set_mesh(mesh_of(MeshSpec())):
        model, head = models_on(MeshSpec())
        streams = jax.jit(functools.partial(streams_of, model))
        return streams, jax.jit(functools.partial(drafted, head, count=COUNT))


def by_hand(weights, prompt: list[int], reply: list[int]) -> SpeculationStats:
    """What comes of drafts on the way to a greedy reply, whose first token comes with the prompt."""
    (streams, drafts_of), (models, own) = by_one_device(), weights
    text = np.zeros((1, 48), np.int32)
    text[0, : len(prompt) + len(reply)] = prompt + reply
    steps, made, tried, accepted = 0, 1, 0, np.zeros(COUNT, int)
    with jax.set_mesh(mesh_of(MeshSpec())):
        read = streams(models, text)
        while made < len(reply):
            last, count = len(prompt) + made - 1, min(COUNT, len(reply) - made - 1)
            _, [drafts] = drafts_of(own, read, text, last)
            right = np.cumprod(np.asarray(drafts)[:count] == text[0, last + 1 : last + 1 + count])
            accepted[:count] += right
            steps, tried, made = steps + (count > 0), tried + count, made + 1 + int(right.sum())
    return SpeculationStats(steps, tried, tuple(accepted.tolist()))


@pytest.mark.wide
def test_drafts_are_those_of_the_head_run_over_the_whole_row(weights, drafting):
    """Of a head that is right now and then: a draft is the one by hand where all places before it are."""
    rng = np.random.default_rng(0)
    rest = {name: part for name, part in weights[1].items() if name not in ("embedding", "eagle")}
    own = weights[1] | jax.tree.map(functools.partial(blurred, rng), rest)
    for engine in drafting.values():
        put(engine, own)
        drafts = right = 0
        for prompt in PROMPTS:
            hits = engine.stats().prefix_hits
            [reply], found = replies_to(engine, [prompt])
            assert found == by_hand((weights[0], own), prompt, reply) and engine.stats().prefix_hits == hits
            # Again: from the cache, where the text goes on as it did.
            assert replies_to(engine, [prompt]) == ([reply], found) and engine.stats().prefix_hits > hits
            drafts, right = drafts + found.drafted, right + sum(found.accepted)
        assert 0.1 < right / drafts < 0.9


@pytest.mark.wide
def test_a_head_of_eagle_3_1(weights, monkeypatch):
    """With norms of each stream, and its own stream goes on after its last norm: over two devices it drafts as by hand,
    and not as one without."""
    prompt, rng = PROMPTS[0], np.random.default_rng(0)
    rest = {name: part for name, part in weights[1].items() if name not in ("embedding", "eagle")}
    own = weights[1] | jax.tree.map(functools.partial(blurred, rng), rest)
    scales = {"scale": rng.uniform(0.5, 1.5, (len(STREAMS), SHAPE.embed_dim)).astype(np.float32)}
    other = own | {"eagle": own["eagle"] | {"fc_norms": scales}}

    def made(*of, plain=head_for):
        head = plain(*of)
        return dataclasses.replace(head, eagle=dataclasses.replace(head.eagle, normed=len(STREAMS), goes_on="normed"))

    [reply], plain = replies_to(engine_of((weights[0], own), MeshSpec()), [prompt])
    by_one_device.cache_clear()
    monkeypatch.setattr(sys.modules[__name__], "head_for", made)
    found = replies_to(engine_of((weights[0], other), SPECS["two"]), [prompt])
    assert found == ([reply], by_hand((weights[0], other), prompt, reply)) and found[1] != plain
    by_one_device.cache_clear()


@pytest.mark.wide
def test_a_trained_head_saves_steps(weights, drafting):
    """Measured: 3.2 to 3.3 tokens a step of 4 at most, 1.0 once the head's numbers are in another order."""
    rng = np.random.default_rng(0)
    for engine in drafting.values():
        put(engine, weights[1])
        (_, alone), hits = replies_to(engine, PROMPTS[1:2]), engine.stats().prefix_hits
        (_, again), preempted = replies_to(engine, PROMPTS[1:2]), engine.scheduler.preemptions
        assert engine.stats().prefix_hits > hits
        _, crowded = replies_to(engine, PROMPTS[:2])
        assert engine.scheduler.preemptions > preempted
        put(engine, weights[1] | {name: jax.tree.map(rng.permuted, weights[1][name]) for name in ("segments", "head")})
        _, shuffled = replies_to(engine, PROMPTS)
        assert min(one.mean_length for one in (alone, again, crowded)) > 2.8 > 1.5 > shuffled.mean_length >= 1


@pytest.mark.wide
def test_over_stages_drafts_are_the_same(weights):
    """The first stage hands out one stream and the last two; what is shared with the model is new with it."""
    spec = MeshSpec(pipeline=2)
    mesh, own = mesh_of(of_replica(spec)), mesh_of(MeshSpec())
    with jax.set_mesh(mesh):
        model = ModelDef.make(SHAPE, Execution(serving_rules(SHAPE, of_replica(spec))))
        params = jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), stacked(weights[0]), model.held_at_rest(mesh))
    with jax.set_mesh(own):
        head = models_on(MeshSpec())[1]
        parts = {name: part for name, part in weights[1].items() if name != "embedding"}
        parts = jax.tree.map(lambda a: jax.device_put(a, jax.NamedSharding(own, jax.P())), parts)
        head = DraftModel(*taken_apart(head, parts), streams=STREAMS, shared=("embedding",))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "block_size": 4, "decode_steps": 4}
    config = EngineConfig(mesh=spec, kv_cache_bytes=2**20, speculative_config=EAGLE, **sizes)
    engine = assemble(Opened(model, params, mesh, None, pathlib.Path()), TOKENIZER, [END], 48, config, draft=head)
    for prompt in PROMPTS:
        [reply], found = replies_to(engine, [prompt])
        assert found == by_hand(weights, prompt, reply) and found.mean_length > 2.5
    together, _ = replies_to(engine, PROMPTS)
    assert together == [replies_to(engine, [prompt])[0][0] for prompt in PROMPTS]
    runner, rng = engine.runner, np.random.default_rng(0)
    other = {**weights[0], "embedding": rng.permuted(weights[0]["embedding"])}
    with jax.set_mesh(runner.mesh):
        engine.update_weights(new_weights(jax.tree.map(jax.numpy.asarray, other), runner))
    runner.settled()
    assert np.array_equal(runner.proposer_params["embedding"], other["embedding"])


def stacked(params) -> dict:
    """Parameters of layers that are apart, as training has them."""
    layers = [params["segments"][i] for i in range(4)]
    return {**params, "segments": {0: jax.tree.map(lambda *a: np.concatenate(a), *layers)}}


@pytest.mark.wide
def test_from_folders_with_all_that_is_quantised_on_two_replicas(weights, tmp_path):
    shape = dataclasses.replace(CONFIG, num_layers=4)
    folder = folder_of(tmp_path / "model", shape=shape, params=stacked(weights[0]))
    head = head_for(SHAPE, int(proposed().max()) + 1)
    path = folder_of_head(tmp_path / "head", head, weights[1])
    options = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 12, "decode_steps": 4}
    options |= {"quantization": "int8", "kv_cache_dtype": "int8", "data_parallel_size": 2}
    llm = shardlm.LLM(folder, speculative_config={**EAGLE, "model": str(path)}, **options)
    greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)

    def length() -> float:
        before = llm.engine.stats().speculation
        llm.generate(PROMPTS, greedy)
        return llm.engine.stats().speculation.since(before).mean_length

    assert length() > 2.5
    for engine in llm.engine.engines:
        [mine] = [a for name, a in engine.runner.proposer_params.items() if name.startswith("embedding")]
        assert mine is engine.runner.params["embedding"]  # on the replica's devices once
    rng = np.random.default_rng(0)
    other = weights[1] | {name: jax.tree.map(rng.permuted, weights[1][name]) for name in ("segments", "head")}
    llm.update_weights(folder, draft=folder_of_head(tmp_path / "other", head, other))
    assert length() < 1.5
    llm.update_weights(folder, draft=path)
    assert length() > 2.5
    narrow = dataclasses.replace(head, norm=dataclasses.replace(head.norm, eps=1e-3))
    with pytest.raises(ShardlmError, match=r"is another head than what is served: .*norm.eps is 0.001, served is"):
        llm.update_weights(folder, draft=folder_of_head(tmp_path / "narrow", narrow, weights[1]))
    assert of_files(path) != of_files(tmp_path / "other")
