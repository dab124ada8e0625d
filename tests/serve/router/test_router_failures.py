"""Replicas that refuse, break off, hang, die and come back."""

import asyncio
import json
import socket
import threading

import openai
import pytest
from fake_llm import FakeLLM
from replicas import SSE, Rude, client_of, metrics_of, routing, serving, two, whole
from sockets import until

from shardlm.serve.api.http import NAMED_PING, PING
from shardlm.serve.router import fleet
from shardlm.serve.router.fleet import Replica


async def cut_before(head, body, writer):
    """Nothing at all."""


async def cut_after_head(head, body, writer):
    writer.write(f"HTTP/1.1 200 OK\r\n{SSE}\r\ntransfer-encoding: chunked\r\n\r\n".encode())


async def cut_after_pings(head, body, writer):
    await cut_after_head(head, body, writer)
    for ping in (PING, NAMED_PING, PING + NAMED_PING):
        writer.write(b"%x\r\n%b\r\n" % (len(ping), ping))
        await writer.drain()
        await asyncio.sleep(0.01)


async def full(head, body, writer):
    writer.write(whole(429, b'{"error": {"message": "full"}}', "retry-after: 9", "content-type: application/json"))


async def about_to_end(head, body, writer):
    writer.write(whole(503, b'{"error": {"message": "draining"}}'))


@pytest.mark.parametrize(
    ("behave", "reason"),
    [(cut_before, "lost"), (cut_after_head, "lost"), (full, "429"), (about_to_end, "503")],
)
def test_what_has_produced_nothing_is_asked_of_another(behave, reason):
    rude = Rude(behave)
    with rude.listens() as bad, serving(FakeLLM()) as (_, good), routing(bad, good) as routed:
        with client_of(routed) as client:
            for _ in range(4):
                assert client.completions.create(model="fake", prompt="a").choices[0].text == "the quick brown fox"
        found = metrics_of(routed)
        assert found["retries_total", bad, reason] == len(rude.asked) >= 1
        assert found["requests_total", good, "200"] == 4 and ("requests_total", bad, "200") not in found
    with Rude(behave).listens() as bad, Rude(behave).listens() as worse, routing(bad, worse) as routed:
        with client_of(routed) as client, pytest.raises(openai.APIStatusError) as info:
            client.completions.create(model="fake", prompt="a")
        error = info.value
        if reason == "lost":
            assert error.status_code == 503 and error.response.headers["retry-after"] == "1"
            assert "a replica was lost before it answered" in error.message and error.code == "unavailable"
            assert "127.0.0.1" not in error.message  # where the replicas are is not for clients
        else:
            assert error.status_code == int(reason) and error.response.headers.get("retry-after") == (
                "9" if reason == "429" else None
            )


async def refused(head, body, writer):
    writer.write(whole(400, b'{"error": {"message": "no such thing"}}', "content-type: application/json"))


def test_signs_of_life_are_handed_on_and_another_may_still_be_asked():
    """Where none answers, an event tells it in the form of the path."""
    asked = {"model": "fake", "prompt": "a", "stream": True}
    waiting = Rude(cut_after_pings)
    with waiting.listens() as a, serving(FakeLLM()) as (_, b), routing(a, b) as routed, client_of(routed) as client:
        found = []
        for _ in range(9):
            if waiting.asked:
                break
            with client.completions.with_streaming_response.create(**asked) as response:
                found = list(response.iter_lines())
        assert found[0] == ": ping" and found.count("data: [DONE]") == 1 and found[-2] == "data: [DONE]"
        assert len([line for line in found if line.startswith('data: {"id"')]) > 2
        assert metrics_of(routed)["retries_total", a, "lost"] == 1
    for other, said in ((cut_after_pings, "a replica was lost before it answered"), (refused, "no such thing")):
        for path, start in (("/v1/responses", "event: error"), ("/v1/messages", "event: error"), ("/v1/x", "data: {")):
            waiting = Rude(cut_after_pings)
            with waiting.listens() as a, Rude(other).listens() as b, routing(a, b) as routed:
                text = ""
                for _ in range(9):
                    text = text if waiting.asked else routed.ask(path, {"stream": True})[2].decode()
            assert text.startswith(": ping") and f"\n\n{start}" in text and said in text, text


def test_what_is_no_reason_to_ask_another():
    async def fails(head, body, writer):
        writer.write(whole(500, b'{"error": {"message": "engine"}}'))

    bad, worse = Rude(fails), Rude(fails)
    with bad.listens() as a, worse.listens() as b, routing(a, b) as routed:
        assert routed.ask("/v1/completions", {"prompt": "a"})[0] == 500
        assert len(bad.asked) + len(worse.asked) == 1
    limited = Rude(cut_before)
    with limited.listens() as a, serving(FakeLLM()) as (_, b), routing(a, b, max_retries=0) as routed:
        assert sorted(routed.ask("/v1/completions", {"prompt": "a"})[0] for _ in range(2)) == [200, 503]


def test_an_answer_that_breaks_off():
    async def behave(head, body, writer):
        path = head.split()[1]
        event = b'data: {"choices": [{"text": "one", "index": 0}]}\n\n'
        if path == "/v1/responses":
            event = b'event: x\ndata: {"type": "x"}\n\n'
        if b"half" in body:
            event = event[:20]
        if path == "/v1/embeddings":
            writer.write(whole(200, b'{"data": [1, 2, 3]}')[:-3])
        elif path == "/api/chat":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
            for part in (b" ", b'{"done": false}\n', b" "):
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(0.01)
        else:
            await cut_after_head(head, body, writer)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))

    with Rude(behave).listens() as a, Rude(behave).listens() as b, routing(a, b) as routed:
        with client_of(routed) as client:
            stream = iter(client.completions.create(model="fake", prompt="a", stream=True))
            assert next(stream).choices[0].text == "one"
            with pytest.raises(openai.APIError, match="the replica was lost; ask again"):
                next(stream)
            with pytest.raises(openai.APIConnectionError):
                list(client.completions.create(model="fake", prompt="half", stream=True))
            *_, last = client.responses.create(model="fake", input="hi", stream=True)
            assert (last.type, last.code) == ("error", "replica_lost")
            last = routed.ask("/v1/messages", {})[2].partition(b"event: error\ndata: ")[2]
            assert json.loads(last)["error"] == {"type": "api_error", "message": "the replica was lost; ask again"}
            with pytest.raises(openai.APIConnectionError):
                client.embeddings.create(model="fake", input="a")
        lines = routed.ask("/api/chat", {})[2].splitlines()
        assert [json.loads(line) for line in lines] == [{"done": False}, {"error": "the replica was lost; ask again"}]
        found = metrics_of(routed)
        assert sum(value for (name, *_), value in found.items() if name == "broken_total") == 6
        assert sum(value for (name, *_), value in found.items() if name == "retries_total") == 0


def test_replicas_that_fail_and_come_back():
    llms = FakeLLM(), FakeLLM()
    with two(*llms) as (routed, a, b), client_of(routed) as client:
        llms[0].died = "the device is lost"
        until(lambda: not routed.replica(a).alive)
        assert "/health 503" in routed.replica(a).problem
        for _ in range(3):
            client.completions.create(model="fake", prompt="a")
        assert len(llms[1].seen) == 3
        llms[1].ready = False
        until(lambda: not routed.replica(b).takes)
        assert routed.replica(b).alive
        status, headers, body = routed.ask("/v1/completions", {"prompt": "a"})
        assert status == 503 and headers["retry-after"] == "1"
        assert "of 2, 0 are ready" in json.loads(body)["error"]["message"]
        status, headers, body = routed.ask("/v1/messages", {"messages": []})
        assert status == 529 and headers["request-id"] == json.loads(body)["request_id"]
        assert json.loads(body)["error"]["type"] == "overloaded_error"
        assert routed.ask("/ready")[0] == routed.ask("/v1/models")[0] == 503 and routed.ask("/health")[0] == 200
        found = metrics_of(routed)
        assert [found[name, url] for url in (a, b) for name in ("replica_up", "replica_ready")] == [0, 0, 1, 0]
        llms[0].died, llms[1].ready = "", True
        until(lambda: len(routed.service.fleet.taking()) == 2)
        assert routed.ask("/ready")[0] == 200


def test_a_replica_that_hangs_is_given_up():
    async def hangs(head, body, writer):
        await asyncio.sleep(100)

    rude, llm = Rude(hangs), FakeLLM()
    with rude.listens() as a, serving(llm) as (_, b), routing(a, b, timeout_seconds=2.5) as routed:
        ask = ("/v1/completions", {"prompt": "a"})
        asked = [threading.Thread(target=routed.ask, args=ask, daemon=True) for _ in range(4)]
        for thread in asked:
            thread.start()
        until(lambda: rude.asked and routed.replica(a).in_flight)
        rude.status = None
        for thread in asked:
            thread.join(60)
            assert not thread.is_alive()
        assert len(llm.seen) == 4 and "no answer in 2.5 seconds" in routed.replica(a).problem
    with socket.socket() as nobody:  # an address that nobody listens at
        nobody.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with serving(llm) as (_, b), routing(b, poll_seconds=500) as routed:
            own, replica = routed.service.fleet, Replica(gone, "flag", alive=True, ready=True)
            until(lambda: not own.wake.is_set())  # what is looked at after the start is, and then nothing for long
            own.replicas = {gone: replica, **own.replicas}  # it went after it was looked at
            assert [routed.ask("/v1/completions", {"prompt": "a"})[0] for _ in range(3)] == [200] * 3
            assert not replica.alive and metrics_of(routed)["retries_total", gone, "refused"] == 1


def test_what_a_replica_that_hangs_has_begun_is_given_up(monkeypatch):
    """But not while it comes, whatever looks say."""
    monkeypatch.setattr(fleet, "SILENT", 1.0)
    event, over = b'data: {"choices": [{"text": "one", "index": 0}]}\n\n', threading.Event()

    async def behave(head, body, writer):
        await cut_after_head(head, body, writer)
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            if b"hangs" in body:
                await asyncio.sleep(100)
            await asyncio.sleep(0.02)
            if over.is_set():
                return writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    rude = Rude(behave)
    with rude.listens() as a, routing(a, timeout_seconds=0.5) as routed, client_of(routed) as client:
        hangs, goes_on = (iter(client.completions.create(model="fake", prompt=p, stream=True)) for p in ("hangs", "on"))
        assert next(hangs).choices[0].text == next(goes_on).choices[0].text == "one"
        rude.status = None
        with pytest.raises(openai.APIError, match="the replica was lost; ask again"):
            next(hangs)
        over.set()
        assert {chunk.choices[0].text for chunk in goes_on} == {"one"} and not routed.replica(a).giving
        found = metrics_of(routed)
    assert found["broken_total", a] == 1 and found["in_flight", a] == 0
