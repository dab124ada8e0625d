"""Many clients of one engine (serve/async_llm.py), which has no model and waits where a test wants it to: nobody waits
for what never comes, and who goes takes nobody along."""

import asyncio
import dataclasses
import threading

import pytest
from engines import TOKENIZER

from shardlm.errors import ShardlmError
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.outputs import CompletionOutput, EngineError, RequestOutput, Stats
from shardlm.serve.pooling import Pooling
from shardlm.serve.sampling_params import SamplingParams

WAIT = 60  # seconds after which what should end hangs
MANY = 1000  # steps, of which no test takes so many


class Engine:
    """A token for each request and step; a step takes one of `may_go`, and before says so by one of `waits`."""

    tokenizer, max_model_len, runner, stop_ids, pooling, sight = TOKENIZER, 64, None, (), Pooling(4), None

    def __init__(self):
        self.may_go, self.waits, self.error = threading.Semaphore(0), threading.Semaphore(0), None
        self.requests = {}

    def keep_pace(self):
        pass

    @property
    def has_unfinished(self):
        return bool(self.requests)

    def add(self, id, tokens, params, **_):
        if id in self.requests:
            raise ShardlmError(f"there is an unfinished request with the id {id!r}")
        self.requests[id] = RequestOutput(id, None, tokens, None, [CompletionOutput(0, "", [])], False), params

    def abort(self, id):
        if (found := self.requests.pop(id, None)) is None:
            return None
        return dataclasses.replace(found[0], finished=True)

    def step(self):
        self.waits.release()
        assert self.may_go.acquire(timeout=WAIT)
        if self.error:
            raise self.error
        moved = []
        for id, (output, params) in list(self.requests.items()):
            output.outputs[0].token_ids.append(7)
            if len(output.outputs[0].token_ids) == params.max_tokens:
                output.finished = True
                del self.requests[id]
            moved.append(output)
        return moved

    def stats(self):
        return Stats(len(self.requests), 0, 0.0, 0, 0, 0, 0, 0)


@pytest.fixture
def served():
    """(the engine, the AsyncLLM over it)."""
    engine = Engine()
    llm = AsyncLLM(engine, model_name="none", template=None)
    yield engine, llm
    engine.may_go.release(MANY)
    llm.shutdown()


async def reply(llm, id, tokens=3):
    return [one async for one in llm.generate([1], SamplingParams(max_tokens=tokens), id)][-1]


async def in_step(engine):
    """Once a step has begun, which waits for one of `may_go`: what is asked for meanwhile lies in the queue."""
    assert await asyncio.to_thread(engine.waits.acquire, timeout=WAIT)


async def queued(llm, count):
    while llm._commands.qsize() < count:
        await asyncio.sleep(0.001)


def within(work):
    async def bounded():
        async with asyncio.timeout(WAIT):
            return await work

    return asyncio.run(bounded())


def test_who_asks_while_the_engine_ends_hears_of_it(served):
    engine, llm = served
    engine.error = RuntimeError("the device is lost")

    async def scenario():
        asked = [asyncio.create_task(reply(llm, "runs"))]
        await in_step(engine)
        asked += [asyncio.create_task(reply(llm, "waits")), asyncio.create_task(llm.update_weights({}))]
        await queued(llm, 2)
        engine.may_go.release()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [(type(one), str(one)) for one in found] == [(EngineError, "the engine stopped: the device is lost")] * 3
        await llm.drain()
        with pytest.raises(EngineError, match="the device is lost"):
            await reply(llm, "late")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_weights", "new_draft", "new_encoder"):
            patch.setattr(f"shardlm.serve.async_llm.{name}", lambda weights, runner: weights)
        within(scenario())


def test_after_a_shutdown_nobody_waits(served):
    engine, llm = served
    engine.may_go.release(MANY)

    async def scenario():
        assert len((await reply(llm, "one")).outputs[0].token_ids) == 3
        for salt in ({"salt": "a\ud83d"}, {"prompt": {"prompt_token_ids": [1], "cache_salt": "a\ud83d"}}):
            with pytest.raises(ShardlmError, match=r"cache_salt has '.ud83d' at 1, which is half a character"):
                await anext(llm.generate(**{"prompt": [1], **salt}, sampling_params=SamplingParams(), request_id="s"))
        llm.check_health()
        await asyncio.to_thread(llm.shutdown)
        for late in (lambda: reply(llm, "late"), lambda: asyncio.to_thread(llm.check_health)):
            with pytest.raises(EngineError, match="the engine stopped: it was shut down"):
                await late()
        await llm.abort("late")
        await llm.drain()

    within(scenario())


def test_a_name_that_is_taken_ends_only_who_came_second(served):
    engine, llm = served

    async def scenario():
        first = asyncio.create_task(reply(llm, "same"))
        await in_step(engine)
        second = asyncio.create_task(reply(llm, "same"))
        await queued(llm, 1)
        engine.may_go.release()
        with pytest.raises(ShardlmError, match="unfinished request with the id 'same'"):
            await second  # it has left, which the engine's thread hears before the third step
        engine.may_go.release(2)
        return await first

    assert len(within(scenario()).outputs[0].token_ids) == 3


def test_what_is_no_request_ends_nobody_else(served):
    engine, llm = served
    params = SamplingParams(max_tokens=3)

    async def asked(prompt=(1,), params=params, id="x", **options):
        return [one async for one in llm.generate(prompt, params, id, **options)][-1]

    async def scenario():
        first = asyncio.create_task(reply(llm, "first"))
        await in_step(engine)
        for wrong, message in (
            ({"id": [1]}, "request_id is a list; give a text"),  # which no table of requests holds
            ({"params": None}, "sampling_params is a NoneType; give SamplingParams"),
            ({"priority": "high"}, "priority is a str; give an integer"),  # which the scheduler would sort by
            ({"salt": 5}, "salt is a int; give a text"),
            ({"prompt": [10**30] * 64}, "the prompt has 64 tokens; max_model_len=64 must hold it and at least one new"),
        ):
            with pytest.raises(ShardlmError, match=message):
                await asked(**wrong)
        with pytest.raises(ShardlmError, match="request_id is a list"):
            await llm.abort(["first"])
        engine.may_go.release(MANY)
        return await first

    assert len(within(scenario()).outputs[0].token_ids) == 3


def test_an_event_loop_that_is_closed_ends_its_own_requests(served):
    engine, llm = served
    loop, gone = asyncio.new_event_loop(), threading.Event()
    stream = llm.generate([1], SamplingParams(max_tokens=50), "gone")
    abort = engine.abort
    engine.abort = lambda id: (gone.set(), abort(id))[1]
    asked = loop.create_task(anext(stream))
    loop.run_until_complete(in_step(engine))
    asked._log_destroy_pending = False
    loop.close()
    engine.may_go.release(MANY)
    assert gone.wait(WAIT)
    assert len(within(reply(llm, "other")).outputs[0].token_ids) == 3 and not engine.requests
