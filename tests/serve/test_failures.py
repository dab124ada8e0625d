"""Programs that fail, on the host as they are started or on the device until they are read: who alone breaks them hears
of it, the others get what the model says, and an engine ends only where nothing goes any more (test_suspects.py tries
many more arrivals, without a model)."""

import asyncio
import dataclasses
import json
import pathlib
import sys
import time

import jax
import pytest
from engines import CONFIG, END, TOKENIZER, decoding_from
from lazy_programs import all_compiled
from oracle import Oracle, opened_of

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve import replicas as replicas_module
from shardlm.serve.api.metrics import Metrics
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.build import assemble
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.outputs import EngineError, whole
from shardlm.serve.pool_size import scheduler_of
from shardlm.serve.recovery import FAILURES
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs

sys.path.append(str(pathlib.Path(__file__).parent / "api"))
from client import Client, error

SHAPE = dataclasses.replace(CONFIG, num_layers=2).transformer()
LENGTH = 40
SIZES = EngineConfig(mesh=MeshSpec(data=2), max_num_seqs=2, max_num_batched_tokens=8, block_size=4, decode_steps=4)
PROMPTS = [TOKENIZER.encode(text) for text in ('{"name": "ab"', "né日🙂 true", "x" * 20, '{"age": 12', "true", "tags")]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.2, top_k=50, seed=7, max_tokens=12, ignore_eos=True)
PENALISED = dataclasses.replace(RANDOM, frequency_penalty=0.5, repetition_penalty=1.3)
CHOICE = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(choice=["true", "tags"]))
PARAMS = [GREEDY, RANDOM, GREEDY, PENALISED, GREEDY, CHOICE]


@pytest.fixture(scope="module")
def runners():
    """Of two replicas, whose engines each test makes anew."""
    with decoding_from(2), all_compiled():
        group = assemble(opened_of(SHAPE, MeshSpec()), TOKENIZER, [END], LENGTH, SIZES)
    return [engine.runner for engine in group.engines]


@pytest.fixture(scope="module")
def expected():
    oracle = Oracle(opened_of(SHAPE, MeshSpec()))
    return [oracle.reply(prompt, params).tokens for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(autouse=True)
def as_new(runners):
    yield
    for runner in runners:
        runner.reset()


def engines_of(runners) -> list[Engine]:
    return [Engine(runner, scheduler_of(runner.config, SIZES), TOKENIZER, [END]) for runner in runners]


class Faults:
    """Counts a runner's calls, and lets some of them fail, or those with the request `poison`: at once, with the state
    gone as a program that was donated it leaves it, or when they are read."""

    def __init__(self, monkeypatch, runner, calls=(), *, read: bool, poison: str = ""):
        self.calls, self.read, self.poison, self.count = calls, read, poison, 0
        self._runner, self._start = runner, runner.start
        monkeypatch.setattr(runner, "start", self.start)

    def start(self, batch, *rest):
        self.count += 1
        if self.count not in self.calls and all(row.request.id != self.poison for row in batch.rows):
            return self._start(batch, *rest)
        if self.read:
            return _Lost(self._start(batch, *rest))
        self._start(batch, *rest)
        jax.tree.map(lambda a: a.delete(), self._runner._state)
        raise RuntimeError("out of memory")


class _Lost:
    def __init__(self, started):
        self.batch, self.calls = started.batch, started.calls

    def sampled(self):
        raise RuntimeError("an illegal access")


def finished(engine) -> dict:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        for one in engine.engines if isinstance(engine, EngineGroup) else [engine]:
            one.scheduler.pages.check_invariants()
    assert engine.stats().kv_usage == 0
    return done


def add_all(engine, count: int = len(PROMPTS)) -> None:
    for n in range(count):
        engine.add(f"r{n}", PROMPTS[n % 6], PARAMS[n % 6])


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("call", [1, 4, 9])
def test_a_batch_that_fails_once_harms_nobody(runners, expected, monkeypatch, call, read):
    [engine] = engines_of(runners[:1])
    faults = Faults(monkeypatch, engine.runner, {call, call + 12}, read=read)
    compiled = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    add_all(engine)
    done = finished(engine)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert faults.count >= call + 12 and not compiled
    assert [(done[f"r{n}"].error, done[f"r{n}"].outputs[0].token_ids) for n in range(6)] == [
        (None, tokens) for tokens in expected
    ]
    assert engine.stats().failed_batches == 2 and engine.stats().engines_up == 1


@pytest.mark.parametrize("read", [False, True])
def test_a_request_that_breaks_its_batches_is_found(runners, expected, monkeypatch, read):
    for guilty in (0, 3):
        [engine] = engines_of(runners[:1])
        Faults(monkeypatch, engine.runner, read=read, poison=f"r{guilty}")
        add_all(engine)
        done = finished(engine)
        monkeypatch.undo()
        for n, tokens in enumerate(expected):
            output = done[f"r{n}"]
            if n == guilty:
                assert "the batch of this request alone failed with RuntimeError: " in output.error
                assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == []
            else:
                assert not output.error and output.outputs[0].token_ids == tokens
        assert 2 <= engine.stats().failed_batches <= 3 and engine.stats().engines_up == 1
    with pytest.raises(EngineError, match="requests broke: the batch of this request alone failed"):
        whole([*done.values()])


def test_what_always_fails_ends_the_engine(runners, monkeypatch):
    [engine] = engines_of(runners[:1])
    Faults(monkeypatch, engine.runner, range(5, 99), read=True)
    add_all(engine)
    with pytest.raises(EngineError, match=r"ended: 4 batches failed one after another, .* the engine's own with an"):
        finished(engine)
    with pytest.raises(EngineError, match="start it again"):
        engine.add("more", PROMPTS[0], PARAMS[0])
    assert engine.stats().engines_up == 0
    [other] = engines_of(runners[1:])
    Faults(monkeypatch, other.runner, {1}, read=False)
    monkeypatch.setattr(other.runner, "reset", lambda: 1 / 0)
    other.add("r", PROMPTS[0], PARAMS[0])
    with pytest.raises(EngineError, match="what programs keep could not be made anew: division by zero"):
        other.step()


@pytest.mark.parametrize("read", [False, True])
def test_a_replica_that_ends_hands_its_requests_over_and_returns(runners, expected, monkeypatch, read):
    monkeypatch.setattr(replicas_module, "RETRY", (500.0, 2000.0))
    group = EngineGroup(engines_of(runners))
    for n in range(2):  # a grammar that one replica compiled serves the other, and one that has compiled none
        group.add(f"g{n}", PROMPTS[5], CHOICE, form=group.compile_form(CHOICE))
    assert [output.outputs[0].token_ids for output in finished(group).values()] == [expected[5]] * 2
    faults = Faults(monkeypatch, runners[0], range(4, 99), read=read)
    add_all(group, 14)
    done = finished(group)
    assert [engine.stats().engines_up for engine in group.engines] == [0, 1] and group.stats().engines_up == 1
    assert len(done) == 14 and not any(group._weights)
    for n in range(14):
        assert not done[f"r{n}"].error and done[f"r{n}"].outputs[0].token_ids == expected[n % 6]
    assert group.runner is runners[1]
    group.update_weights(group.runner.params)
    assert group.reset_prefix_cache()
    add_all(group)
    group.step()
    assert not group.reset_prefix_cache() and group.reset_prefix_cache(reset_running_requests=True)
    again = finished(group)
    assert [again[f"r{n}"].outputs[0].token_ids for n in range(6)] == expected
    told = Metrics("tiny").text(group.stats()).splitlines()
    assert 'shardlm:engine_up{model_name="tiny",engine="0"} 0' in told
    assert 'shardlm:failed_batches_total{model_name="tiny",engine="0"} 2' in told
    # It is tried again, stays out while it fails, and then returns with the weights that it has missed.
    old = runners[0].params
    runners[0].update_weights(jax.tree.map(lambda a: 2 * a, old))
    group._out[0].at = 0
    add_all(group)
    finished(group)
    assert group._up == [1] and group._out[0].pause == 1000 and group._out[0].at > time.monotonic()
    faults.calls = ()
    group._out[0].at = 0
    assert group.step() == []
    before = faults.count
    add_all(group)
    again = finished(group)
    assert group._up == [0, 1] and not group._out and faults.count > before + 2
    assert [again[f"r{n}"].outputs[0].token_ids for n in range(6)] == expected
    faults.calls = range(9999)
    Faults(monkeypatch, runners[1], range(1, 99), read=read)
    add_all(group)
    with pytest.raises(EngineError, match="the engine ended: 4 batches failed"):
        finished(group)


def test_over_http(runners, expected, monkeypatch):
    """500 in OpenAI's form for who breaks batches, 200 for others, and at the engine's end an unhealthy server."""
    group = EngineGroup(engines_of(runners))
    faults = [Faults(monkeypatch, runner, {3}, read=True) for runner in runners]
    add, ids = group.add, []

    def adding(id, *arguments, **options):
        ids.append(id)
        if len(ids) == 4:
            for one in faults:
                one.poison = id
        return add(id, *arguments, **options)

    monkeypatch.setattr(group, "add", adding)
    llm = AsyncLLM(group, model_name="tiny", template=None)
    client = Client(llm)

    async def ask(n: int):
        body = {"prompt": PROMPTS[n], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return await client.send("POST", "/v1/completions", json.dumps(body))

    async def all_of_it():
        answers = await asyncio.gather(*(ask(n) for n in (0, 2) * 5))
        healthy = await client.send("GET", "/health", None)
        for one in faults:
            one.calls = range(9999)
        ended = await asyncio.gather(*(ask(n) for n in (0, 2) * 5))
        return answers, healthy, ended, await client.send("GET", "/health", None), await ask(0)

    answers, healthy, ended, unhealthy, late = asyncio.run(all_of_it())
    texts = {TOKENIZER.decode(expected[n]) for n in (0, 2)}
    good = [answer for answer in answers if answer.status_code == 200]
    assert len(good) == 9 and {answer.json()["choices"][0]["text"] for answer in good} == texts
    for answer in answers:
        if answer not in good:
            assert "the batch of this request alone failed" in error(answer, 500)["message"]
            assert error(answer, 500)["code"] == "engine_error"
    assert healthy.status_code == 200
    assert all(error(answer, 500)["type"] == "server_error" for answer in ended)
    assert "batches failed one after another" in error(unhealthy, 503)["message"]
    assert "batches failed one after another" in error(late, 500)["message"]
    llm.shutdown()


def test_new_weights_that_break_are_that_request_s(runners, monkeypatch):
    llm = AsyncLLM(engines_of(runners[:1])[0], model_name="tiny", template=None)
    monkeypatch.setattr(llm._engine, "update_weights", lambda *params: 1 / 0)

    async def both():
        with pytest.raises(EngineError, match="division by zero"):
            await llm.update_weights(runners[0].params)
        with pytest.raises(ShardlmError, match="no tree of parameters"):
            await llm.update_weights({})
        outputs = llm.generate(PROMPTS[0], PARAMS[0], request_id="after")
        return [output async for output in outputs][-1]

    assert len(asyncio.run(both()).outputs[0].token_ids) == 12
    llm.shutdown()


def test_new_weights_without_room_reach_no_replica(runners, monkeypatch):
    group, old = EngineGroup(engines_of(runners)), [runner.params for runner in runners]

    def placed(new, at, plain=replicas_module._placed):
        if at is old[1]:
            raise RuntimeError("out of memory")
        return plain(new, at)

    monkeypatch.setattr(replicas_module, "_placed", placed)
    with pytest.raises(RuntimeError, match="out of memory"):
        group.update_weights(old[0])
    assert all(runner.params is params for runner, params in zip(runners, old, strict=True))


def test_the_limit_is_of_failures_without_a_batch_between(runners, monkeypatch):
    [engine] = engines_of(runners[:1])
    Faults(monkeypatch, engine.runner, range(1, 99, 3), read=True)
    add_all(engine, 9)
    done = finished(engine)
    assert engine.stats().failed_batches > FAILURES and len(done) == 9
