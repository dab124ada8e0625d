"""Requests that end without their answer, as their clients leave, read nothing or wait too long, or that there is no
room for: nothing of them stays behind in the engine."""

import asyncio
import contextlib
import json
import time

import numpy as np
import pytest
from client import Client, error
from fake_llm import FakeLLM

PATH = "/v1/completions"


class Late(FakeLLM):
    """An hour goes by at its second token, by the event loop's clock."""

    async def _replies(self, *asked):
        async for outputs in super()._replies(*asked):
            yield outputs
            asyncio.get_running_loop().time = lambda: 3600 + time.monotonic()


def test_requests_that_take_too_long():
    client = Client(Late(), request_seconds=1800)
    assert error(client.post(PATH, {"prompt": "a"}), 504)["code"] == "timeout"
    text = client.post(PATH, {"prompt": "a", "stream": True}).text.split("\n\n")
    assert text[-2:] == ["data: [DONE]", ""] and json.loads(text[-3][6:])["error"]["code"] == "timeout"
    assert len(client.llm.aborted) == 2 and not client.llm.running


def test_a_full_queue():
    async def scenario():
        client = Client(FakeLLM(delay=1000), max_queue=3, max_replies=4)
        body = json.dumps({"prompt": ["a", "b", "c"]})
        first = asyncio.create_task(client.send("POST", PATH, body))
        await come(lambda: client.service.unanswered == 3)
        refused = await client.send("POST", PATH, body)
        told = error(refused, 429)
        assert told["code"] == "rate_limit_exceeded" and refused.headers["retry-after"] == "1"
        assert error(await client.send("POST", "/v1/embeddings", '{"input": "a"}'), 429)
        client.llm.delay = 0
        assert (await first).status_code == 200
        assert (await client.send("POST", PATH, body)).status_code == 200
        assert error(await client.send("POST", PATH, '{"prompt": "a", "n": 5}'), 400)["param"] == "n"
        over, seen = asyncio.Event(), []

        async def pool(token_ids, *adapter, **options):
            seen.append(client.service.unanswered)
            await over.wait()
            return np.ones(4)

        client.llm.pool = pool
        vectors = asyncio.create_task(client.send("POST", "/v1/embeddings", '{"input": ["a", "b", "c"]}'))
        await come(lambda: len(seen) == 3)
        assert seen == [3, 3, 3]
        assert error(await client.send("POST", "/v1/embeddings", '{"input": "a"}'), 429)
        over.set()
        assert (await vectors).status_code == 200 and client.service.unanswered == 0

    asyncio.run(scenario())


async def come(condition):
    """Returns once it holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def exchange(client, body, *, sends=10**9, stall=0.0):
    """The application under an HTTP server whose client goes away after `sends` messages, or takes the next one only
    after `stall` seconds. Returns the messages."""
    gone, messages = asyncio.Event(), []
    asked = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive():
        for message in asked:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if len(messages) >= sends:
            if stall:
                await asyncio.sleep(stall)
            else:
                gone.set()
        messages.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", "root_path": ""}

    async def go():
        await come(lambda: client.llm.running)
        gone.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        if sends == 0 and not stall:
            tasks.create_task(go())
        await client.app(scope, receive, send)
    return messages


@pytest.mark.parametrize("prompts", [["a"], ["a", "b", "c"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(prompts, stream):
    async def scenario():
        client = Client(FakeLLM(reply="word " * 500, delay=0.02 if not stream else 0.005))
        body = {"prompt": prompts, "stream": stream, "max_tokens": 500}
        messages = await exchange(client, body, sends=4 if stream else 0)
        assert len(client.llm.aborted) == len(prompts) and not client.llm.running
        assert client.service.unanswered == client.service.active == 0
        assert stream or not messages
        assert client.service.metrics.finished == {"abort": len(prompts)}

    asyncio.run(scenario())


def test_a_client_that_stops_reading():
    async def scenario():
        client = Client(FakeLLM(reply="word " * 500, delay=0.001), write_seconds=0.1)
        messages = await exchange(client, {"prompt": "a", "stream": True, "max_tokens": 500}, sends=3, stall=3)
        assert len(messages) == 3 and len(client.llm.aborted) == 1 and not client.llm.running

    asyncio.run(scenario())


def test_a_handler_that_is_cancelled_leaves_nothing():
    async def scenario():
        client = Client(FakeLLM(reply="word " * 500, delay=0.01))
        task = asyncio.create_task(client.send("POST", PATH, '{"prompt": ["a", "b"], "max_tokens": 500}'))
        await come(lambda: len(client.llm.running) == 2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not client.llm.running and client.service.active == client.service.unanswered == 0

    asyncio.run(scenario())
