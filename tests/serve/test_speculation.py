"""Replies are the same with drafts as without, whatever proposes them and whatever else runs; right drafts save
steps."""

import dataclasses
import json
import random
import re

import jax
import numpy as np
import pytest
from engines import CONFIG, END, TOKENIZER, decoding_from, finished, folder_of, of_model
from lazy_programs import all_compiled
from small import init, mesh_of
from small_hybrid import HYBRID

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules
from shardlm.serve.bench.engine import offline
from shardlm.serve.engine import AHEAD
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import taken_apart
from shardlm.serve.live_weights import new_draft, new_weights
from shardlm.serve.outputs import SpeculationStats
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.scheduler import SchedulerConfig
from shardlm.serve.speculation.build import DraftModel, layouts_of, open_draft_model
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.speculation.draft_model import DraftModelProposer
from shardlm.serve.speculation.ngram import look_up
from shardlm.state import ModelDef

NGRAM = SpeculativeConfig.parse(
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
)
DRAFT = SpeculativeConfig.parse({"model": "given", "num_speculative_tokens": 3})
# The same vocabulary, other layers, heads and widths: pages of another shape.
SMALLER = dataclasses.replace(CONFIG, num_layers=1, embed_dim=16, num_kv_heads=4, head_dim=4, mlp_dim=16)
TEXTS = ('{"name": "ab"', '{"name": "abc", "age": 12', "né日🙂 true", '["x", "y"], ["x", "y"], ["x"')
PROMPTS = [TOKENIZER.encode(text) for text in TEXTS]


def part(config, spec: MeshSpec, seed: int) -> DraftModel:
    """A random model, its layers apart."""
    with jax.set_mesh(mesh_of(spec)):
        model = ModelDef.make(config.transformer(), Execution(Rules.make("zero3", spec).for_decoding()))
        return DraftModel(*taken_apart(model, init(model, seed)))


def engine_of(spec: MeshSpec, speculative=None, draft=None, least=2):
    """With 12 pages of 4: two requests of 48 tokens do not fit."""
    own = part(CONFIG, spec, 0)
    sizes = {"rows": 2, "length": 48, "pages": 13, "least": least}
    return of_model(own.model, own.params, mesh_of(spec), **sizes, speculative=speculative, draft=draft)


@pytest.fixture(scope="module")
def plain():
    return engine_of(MeshSpec())


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """The same model with drafts, from three proposers."""
    two, path = MeshSpec(tensor=2), tmp_path_factory.mktemp("folders")
    folders = folder_of(path / "model"), folder_of(path / "draft", seed=1, shape=SMALLER)
    with all_compiled():
        return {
            "ngram": engine_of(MeshSpec(), NGRAM, least=1),
            "other model": from_folders(*folders),
            "itself, on two devices": engine_of(two, DRAFT, part(CONFIG, two, 0)),
        }


def from_folders(model, draft):
    """As `engine_of`, the way users ask for it."""
    layers = 4 * 2 * (CONFIG.num_layers * 2 * 8 + SMALLER.num_layers * 4 * 4)  # float32, keys and values
    options = {"max_model_len": 48, "block_size": 4, "kv_cache_bytes": 13 * 4 * layers, "decode_steps": 4}
    speculative = {"model": str(draft), "num_speculative_tokens": 3}
    with decoding_from(2):
        llm = LLM(model, max_num_seqs=2, max_num_batched_tokens=32, speculative_config=speculative, **options)
    assert llm.engine.runner.config == RunnerConfig(
        PageLayout.whole(3, 13), 4, 2, 32, 48, 4, least_rows=2, platform="cpu"
    )
    return llm.engine


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Of each kind of sampling, the lengths at random."""
    kinds = {
        "greedy": {"temperature": 0, "ignore_eos": True},
        "seeded": {"temperature": 0.8, "seed": 3, "logprobs": 2},
        "penalties": {
            "temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6,
        },
        "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5, "ignore_eos": True, "logprobs": 3},
        "nucleus": {"temperature": 1.2, "seed": 5, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
        "min_tokens": {"seed": 6, "min_tokens": 9, "max_tokens": 20, "logit_bias": {END: 9.0, 7: 2.0}},
        "stop": {"temperature": 0, "stop": ["x", "a", "e"], "ignore_eos": True},
        "several": {"temperature": 0.8, "seed": 7, "n": 2, "logprobs": 0},
        "scored": {"temperature": 0, "prompt_logprobs": 1, "ignore_eos": True},
        "choice": {"seed": 8, "structured_outputs": StructuredOutputs(choice=["né日", "true", "x, y"])},
    }  # fmt: skip
    rng = random.Random(0)
    return {
        f"{kind} {place}": (prompt, SamplingParams(**{"max_tokens": rng.randint(1, 26)} | options))
        for place, prompt in enumerate(PROMPTS)
        for kind, options in kinds.items()
    }


def served(engine, seed: int) -> dict:
    """The outputs of all requests, which arrive in some order and at some times; a few more are aborted."""
    rng, done = random.Random(seed), {}
    work = list(requests().items())
    rng.shuffle(work)
    for number, (id, (prompt, params)) in enumerate(work):
        engine.add(id, prompt, params)
        if number % 5 == 0:
            engine.add("gone", prompt, SamplingParams(temperature=0, max_tokens=26, ignore_eos=True))
        for _ in range(rng.randrange(3)):
            done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.abort("gone")
    done |= finished(engine)
    done.pop("gone", None)
    return done


def logprobs_of(reply) -> list[tuple[int, float]]:
    return [(one.token_id, one.logprob) for place in reply.logprobs or () for one in place.values()]


def check_same(found: dict, wanted: dict, close: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for id, output in wanted.items():
        for own, reply in zip(found[id].outputs, output.outputs, strict=True):
            assert (own.token_ids, own.text) == (reply.token_ids, reply.text), id
            assert (own.finish_reason, own.stop_reason) == (reply.finish_reason, reply.stop_reason), id
            [ids, values], [wanted_ids, wanted_values] = (
                list(zip(*logprobs_of(one), strict=True)) or [(), ()] for one in (own, reply)
            )
            assert ids == wanted_ids, id
            np.testing.assert_allclose(values, wanted_values, atol=close)
            assert abs(own.cumulative_logprob - reply.cumulative_logprob) < 10 * close
        assert len(found[id].prompt_logprobs or ()) == len(output.prompt_logprobs or ())
        for own, place in zip(found[id].prompt_logprobs or (), output.prompt_logprobs or (), strict=True):
            for one, other in zip((own or {}).values(), (place or {}).values(), strict=True):
                assert one.token_id == other.token_id and abs(one.logprob - other.logprob) < close


def test_replies_are_the_same_with_drafts(plain, drafting, compilations):
    wanted = served(plain, 0)
    assert {"length", "stop"} == {reply.finish_reason for output in wanted.values() for reply in output.outputs}
    compilations.clear()
    for name, engine in drafting.items():
        check_same(served(engine, 1), wanted)
        stats = engine.stats()
        assert engine.scheduler.preemptions > 0 and stats.prefix_hits > 0, name
        assert stats.speculation.steps > 0 and stats.speculation.drafted >= sum(stats.speculation.accepted) > 0
        if name == "itself, on two devices":  # its pages too survive shared prefixes and preemption
            assert stats.speculation.drafted == sum(stats.speculation.accepted)
    assert not compilations


def test_right_drafts_save_steps(drafting):
    """A draft model that is the model itself is always right: it samples with the same noise."""
    engine = drafting["itself, on two devices"]
    for options in ({"temperature": 0}, {"seed": 3, "temperature": 1.3, "top_p": 0.9, "frequency_penalty": 1.0}):
        found = measured(engine, PROMPTS[0], SamplingParams(max_tokens=25, ignore_eos=True, **options))
        # The first token comes with the prompt, then 6 steps of 3 drafts and the model's own.
        assert found == SpeculationStats(6, 18, (6, 6, 6)) and found.mean_length == 4
    engine = drafting["ngram"]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = ('["x", "y"], ' * 3 + '["x"', '{"name": "ab"}' * 3)
    found = [measured(engine, TOKENIZER.encode(text), greedy) for text in texts]
    # Measured: 2.4 and 2.1 tokens a step, of a model of random weights.
    assert all(sum(one.accepted) > one.steps > 0 and one.mean_length > 2 for one in found)
    report = offline(engine, 1, 9, 20)
    assert 0 <= report["draft_acceptance_rate"] <= 1 <= report["mean_acceptance_length"] <= 5


def test_new_weights_for_the_draft_model_too(drafting, compilations, tmp_path):
    """The draft model stays as it is without them, and a reply is the model's own with any."""
    engine, greedy = drafting["itself, on two devices"], SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    runner, two = engine.runner, MeshSpec(tensor=2)
    old, drafts = runner.params, runner.proposer_params
    found = []
    for seed, draft_seed in ((0, None), (0, 5), (5, None), (0, 0)):
        draft = None if draft_seed is None else new_draft(part(CONFIG, two, draft_seed).params, runner)
        engine.update_weights(new_weights(part(CONFIG, two, seed).params, runner), draft)
        compilations.clear()
        engine.add("reply", PROMPTS[0], greedy)
        before = engine.stats().speculation
        found.append((finished(engine)["reply"].outputs[0].token_ids, engine.stats().speculation.since(before)))
        assert not compilations
    (first, right), (same, wrong), (other, also_right), (again, right_again) = found
    assert first == same == again != other
    assert right.mean_length == also_right.mean_length == right_again.mean_length == 4 > 2 > wrong.mean_length
    engine.update_weights(old, drafts)
    folder = folder_of(tmp_path / "draft", seed=6, shape=SMALLER)
    other = drafting["other model"].runner
    assert jax.tree.structure(new_draft(folder, other)) == jax.tree.structure(other.proposer_params)
    with pytest.raises(ShardlmError, match="another architecture than what is served: embed_dim is 16, served is 32"):
        new_draft(folder, runner)
    with pytest.raises(ShardlmError, match="draft: no draft model is served whose weights could be replaced"):
        new_draft(folder, drafting["ngram"].runner)


def measured(engine, prompt, params) -> SpeculationStats:
    before = engine.stats().speculation
    engine.add("measured", prompt, params)
    engine.dispatch()
    assert engine.scheduler.num_in_flight == AHEAD  # the prompt, and drafts after a token that nobody has seen
    assert len(finished(engine)["measured"].outputs[0].token_ids) == params.max_tokens
    return engine.stats().speculation.since(before)


def test_what_stood_there_before_is_found():
    """Against a search by hand, on texts of few tokens."""
    rng = np.random.default_rng(0)
    text, length = rng.integers(0, 3, (200, 24)), rng.integers(1, 25, 200)
    drafts, found = jax.jit(look_up, static_argnums=(2, 3, 4))(text, length, 5, 4, 2)
    for row, count, own, there in zip(text.tolist(), length.tolist(), drafts.tolist(), found.tolist(), strict=True):
        known = row[:count]
        wanted = searched(known, 5, 4, 2)
        assert there == (wanted is not None) and wanted in (None, own), known
    assert 20 < found.sum() < 190


def searched(known: list[int], count: int, most: int, least: int) -> list[int] | None:
    for size in range(most, least - 1, -1):
        for place in range(len(known) - 1, size - 1, -1):
            if known[place - size : place] == known[-size:]:
                text = list(known)
                while len(text) < len(known) + count:
                    text.append(text[place + len(text) - len(known)])
                return text[len(known) :]
    return None


def test_what_cannot_draft_is_refused(tmp_path):
    for options, message in (
        ({"method": "ngram"}, "num_speculative_tokens=None must be a whole number of at least 1"),
        ({"method": "medusa", "num_speculative_tokens": 1}, "choose from ngram, draft_model"),
        ({"num_speculative_tokens": 2}, "method=None; choose from"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs model, a folder"),
        ({"method": "ngram", "model": "a", "num_speculative_tokens": 2}, "has no model"),
        ({"model": "a", "prompt_lookup_max": 2, "num_speculative_tokens": 2}, "is for method 'ngram'"),
        ({"method": "ngram", "tokens": 2}, "has 'tokens', which is none of num_speculative_tokens"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "prompt_lookup_min=3 is above prompt_lookup_max=2",
        ),
        ([4], "must be a mapping"),
    ):
        with pytest.raises(ShardlmError, match=re.escape(message)):
            EngineConfig(speculative_config=options)
    with pytest.raises(ShardlmError, match="deterministic=True computes each token alone"):
        EngineConfig(speculative_config=NGRAM, deterministic=True)
    with pytest.raises(ShardlmError, match="is no JSON"):
        SpeculativeConfig.from_json("{method: ngram}")
    parsed = SpeculativeConfig.from_json('{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}')
    assert parsed == SpeculativeConfig(2, "ngram", None, 3, 3)
    with pytest.raises(ShardlmError, match="max_batch_tokens=10 must be above max_rows=2 times 5: each"):
        SchedulerConfig(2, 10, 48, (1, 4), 4)
    folder = folder_of(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"vocab_size": 64}, f"has a vocabulary of 64 tokens, and the model one of {CONFIG.vocab_size}"),
        ({"max_position_embeddings": 32}, "was made for 32 positions, and max_model_len=64"),
        (
            dataclasses.replace(HYBRID, vocab_size=CONFIG.vocab_size).to_hf(),
            "has 2 layers of linear attention, whose memory is kept where that of the model's is, which has none",
        ),
    ):
        (tmp_path / "draft").mkdir(exist_ok=True)
        (tmp_path / "draft" / "config.json").write_text(json.dumps(config | change))
        speculative = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
        with pytest.raises(ShardlmError, match=message):
            LLM(folder, speculative_config=speculative)


def test_a_draft_model_s_cache_is_held_as_the_model_s(tmp_path):
    folder = folder_of(tmp_path / "model")
    speculative = SpeculativeConfig(2, "draft_model", str(folder))
    draft = open_draft_model(speculative, CONFIG.transformer(), 64, MeshSpec(), None, "int8")
    layout = dataclasses.replace(layouts_of(draft.model, draft, 64, 4, 8)[1], num_pages=3)
    with jax.set_mesh(mesh_of(MeshSpec())):
        pages = jax.eval_shape(DraftModelProposer(2, draft.model, layout, 4).empty)
    assert {name: pool.dtype.name for name, pool in pages.items()} == {
        **dict.fromkeys(("k", "v"), "int16"), **dict.fromkeys(("k_scale", "v_scale"), "float32")
    }  # fmt: skip


@pytest.fixture
def compilations():
    """What is compiled from here on."""
    found = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
