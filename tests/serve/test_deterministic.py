"""The deterministic mode: whatever else runs, however prompts are cut, cached, preempted or read again, a reply and
its log-probabilities are the same bits."""

import dataclasses
import functools
import random

import jax
import numpy as np
import pytest
import small_moe
from engines import CONFIG, END, TOKENIZER, another, finished, of_model
from lazy_programs import all_compiled
from oracle import Oracle, opened_of
from small import init, mesh_of
from small_hybrid import HYBRID

from shardlm.generate import Sampling, generate
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.serve.build import assemble
from shardlm.serve.deterministic import DeterministicRunner
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import taken_apart
from shardlm.serve.pool_size import scheduler_of
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef

# So wide that XLA:CPU cuts products of one row, of few and of many into other sums.
WIDE = dataclasses.replace(CONFIG, embed_dim=512, mlp_dim=768, num_layers=2, head_dim=32)
RECALLING = dataclasses.replace(HYBRID, vocab_size=CONFIG.vocab_size, embed_dim=256, num_layers=2)
MIXED = dataclasses.replace(small_moe.DEEPSEEK, vocab_size=CONFIG.vocab_size, embed_dim=384)
TEXT = "né日🙂 true " * 6
PROMPTS = [TOKENIZER.encode(text) for text in (TEXT[:9], TEXT[:22], TEXT[:40], '{"name": "ab"' * 3)]


def made(config, spec: MeshSpec):
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        shape = config.transformer()
        model = ModelDef.make(shape, Execution(serving_rules(shape, spec)))
        return (*taken_apart(model, init(model)), mesh), model, init(model)


@functools.cache
def engine_of(config, spec: MeshSpec):
    """(an engine, the model, its parameters)."""
    parts, model, params = made(config, spec)
    snapshots = 4 if model.config.memories else 0
    own = of_model(*parts, rows=5, tokens=64, pages=40, runner_of=DeterministicRunner, snapshots=snapshots)
    return own, model, params


def request(number: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(number)
    sampled = {"temperature": 0.9, "top_p": 0.9, "seed": number, "presence_penalty": 0.3} if number % 2 else {}
    params = SamplingParams(
        **({"temperature": 0} | sampled),
        max_tokens=rng.randint(1, 14),
        logprobs=2 * (number % 3 == 0),
        prompt_logprobs=1 if number % 4 == 0 else None,
        ignore_eos=True,
    )
    return rng.choice(PROMPTS), params


def bits(output) -> tuple:
    """All that a client sees."""
    reply = output.outputs[0]
    scores = [entry and [(t.token_id, t.logprob) for t in entry.values()] for entry in output.prompt_logprobs or []]
    chosen = [[(t.token_id, t.logprob) for t in entry.values()] for entry in reply.logprobs or []]
    return reply.text, reply.token_ids, reply.cumulative_logprob, chosen, scores


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        pytest.param(WIDE, MeshSpec(), marks=pytest.mark.wide),
        (WIDE, MeshSpec(tensor=2)),
        pytest.param(MIXED, MeshSpec(expert=2), marks=pytest.mark.wide),
        pytest.param(RECALLING, MeshSpec(), marks=pytest.mark.wide),
        pytest.param(RECALLING, MeshSpec(tensor=2), marks=pytest.mark.wide),
    ],
)
def test_a_reply_is_the_same_bits_whatever_else_runs(config, spec):
    built, model, params = engine_of(config, spec)
    numbers, alone = range(16), {}
    engine = another(built, tokens=64, pages=40, caching=False)
    for number in numbers:
        engine.add(str(number), *request(number))
        alone |= {id: bits(output) for id, output in finished(engine).items()}
    with jax.set_mesh(built.runner.mesh):
        prompt, length = request(0)[0], len(alone["0"][1])
        direct = generate(model, params, prompt, max_new_tokens=length, sampling=Sampling(temperature=0))
        assert list(direct) == alone["0"][1]

    crowded, rng, done = another(built, tokens=7, pages=18), random.Random(1), {}
    for number in [*numbers, *numbers]:  # and again, with what was cached
        id = f"{number}.{len(done)}.{rng.random()}"
        crowded.add(id, *request(number))
        for _ in range(rng.randrange(3)):
            done |= {output.request_id: output for output in crowded.step() if output.finished}
    done |= finished(crowded)
    assert crowded.scheduler.preemptions and crowded.stats().prefix_hits
    assert len(done) == 2 * len(numbers)
    for id, output in done.items():
        assert bits(output) == alone[id.split(".")[0]], id


def test_a_generated_token_has_the_score_it_has_in_a_prompt():
    engine, _, _ = engine_of(WIDE, MeshSpec())
    engine.add("said", PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True))
    said = finished(engine)["said"].outputs[0]
    whole = [*PROMPTS[1], *said.token_ids]
    engine.add("scored", whole, SamplingParams(max_tokens=0, prompt_logprobs=0))
    engine.add("embedded", whole, SamplingParams(max_tokens=0), embed=True)
    engine.add("other", PROMPTS[2], SamplingParams(max_tokens=3))
    done = finished(engine)
    scored = [entry.chosen.logprob for entry in done["scored"].prompt_logprobs[len(PROMPTS[1]) :]]
    assert scored == [entry.chosen.logprob for entry in said.logprobs]
    assert np.isclose(np.linalg.norm(done["embedded"].embedding), 1)


def test_stages_say_the_same_bits_whatever_else_runs():
    """One program of one shape in each stage, and rows dealt into groups."""
    sizes = EngineConfig(mesh=MeshSpec(pipeline=2), deterministic=True, max_num_seqs=5, block_size=4, decode_steps=4)
    opened = opened_of(WIDE.transformer(), sizes.mesh)
    with all_compiled():
        runner = assemble(opened, TOKENIZER, [END], 64, sizes).runner
    assert runner.num_programs == 2 + 2 + 4  # a step of each stage, before and after it, and what sets slots

    def engine(tokens: int, pages: int, caching: bool) -> Engine:
        layout = dataclasses.replace(runner.config.layout, num_pages=pages)
        own = dataclasses.replace(runner.config, max_batch_tokens=tokens, layout=layout)
        config = dataclasses.replace(sizes, enable_prefix_caching=caching)
        return Engine(runner, scheduler_of(own, config), TOKENIZER, [END])

    numbers, alone = range(10), {}
    for number in numbers:
        one = engine(64, 40, False)
        one.add(str(number), *request(number))
        alone |= {id: bits(output) for id, output in finished(one).items()}
    oracle = Oracle(opened_of(WIDE.transformer(), MeshSpec()))
    assert all(alone[str(n)][1] == oracle.reply(*request(n)).tokens for n in (0, 1))
    crowded, rng, done = engine(7, 22, True), random.Random(1), {}
    for number in [*numbers, *numbers]:
        crowded.add(f"{number}.{len(done)}.{rng.random()}", *request(number))
        for _ in range(rng.randrange(3)):
            done |= {output.request_id: output for output in crowded.step() if output.finished}
    done |= finished(crowded)
    assert crowded.scheduler.preemptions and crowded.stats().prefix_hits and len(done) == 2 * len(numbers)
    for id, output in done.items():
        assert bits(output) == alone[id.split(".")[0]], id
