"""Texts that take a tokenizer long, beside short ones."""

import asyncio
import json
import threading

from client import Client


def test_long_texts_hold_nobody_up(monkeypatch):
    """More of them than there are threads; a client that leaves the line is not waited for."""
    client, gate, begun = Client(), threading.Event(), []
    kind = type(client.llm.tokenizer)
    long = "the quick " * 30_000
    for name in ("encode", "encode_prompt", "decode"):
        plain = getattr(kind, name)

        def slow(self, what, plain=plain, **how):
            if len(what) > 10**5:
                begun.append(len(what))
                assert gate.wait(60)
            return plain(self, what[:10], **how)

        monkeypatch.setattr(kind, name, slow)
    wishes = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = [("/tokenize", {"prompt": long}), ("/detokenize", {"tokens": [65] * len(long)})]
    bodies += [("/tokenize", {"prompt": long, "add_special_tokens": False})]
    bodies += [("/v1/completions", {"prompt": long, "truncate_prompt_tokens": 5, "add_special_tokens": False})]

    async def scenario():
        send = lambda path, body: client.send("POST", path, json.dumps(body))  # noqa: E731
        line = [asyncio.create_task(send(*bodies[i % len(bodies)])) for i in range(40)]
        while not begun:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            for path, body in (("/v1/chat/completions", wishes), ("/tokenize", {"prompt": "a"}), ("/tokenize", wishes)):
                assert (await send(path, body)).status_code == 200
        for task in line[4:]:
            task.cancel()
        await asyncio.wait(line[4:])
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*line[:4])] == [200] * 4

    try:
        asyncio.run(scenario())
    finally:
        gate.set()
    assert len(begun) == 4
