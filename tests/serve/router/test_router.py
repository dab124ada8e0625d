"""The router over sockets, in front of servers over a fake engine and of replicas that misbehave."""

import asyncio
import dataclasses
import io
import json
import shutil
import signal
import socket
import ssl
import threading
import urllib.request

import anthropic
import numpy as np
import openai
import pytest
from fake_llm import FakeLLM
from PIL import Image
from replicas import SSE, Rude, client_of, metrics_of, routing, serving, two
from seeing_llm import SeeingLLM, data_url
from sockets import made_certificate, until

from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.server import Listen
from shardlm.serve.router.app import make_app
from shardlm.serve.router.fleet import Fleet, address
from shardlm.serve.router.policy import Policy
from shardlm.serve.router.prompt import Hints
from shardlm.serve.router.settings import RouterSettings
from shardlm.serve.router.watch import Watch

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def pair():
    llms = FakeLLM(), FakeLLM()
    with two(*llms) as (routed, *_):
        yield routed, llms


def test_openais_client(pair):
    routed, _ = pair
    with client_of(routed) as client:
        assert [model.id for model in client.models.list()] == ["fake"] and client.models.retrieve("fake").id == "fake"
        whole = client.chat.completions.create(model="fake", messages=USER)
        assert whole.choices[0].message.content == "the quick brown fox"
        stream = client.chat.completions.create(model="fake", messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "the quick brown fox"
        for name in ("fake", "fake:latest"):  # the second is what Ollama's clients ask OpenAI's paths for
            assert client.completions.create(model=name, prompt="a", max_tokens=2).choices[0].text == "the quick"
        assert client.responses.create(model="fake", input="hi").output_text == "the quick brown fox"
        vector = client.embeddings.create(model="fake", input=["the lazy dog"]).data[0].embedding
        assert list(vector) == pytest.approx([0.6, 0, -0.8, 0])
        with pytest.raises(openai.BadRequestError, match="temperature=-1") as info:
            client.chat.completions.create(model="fake", messages=USER, temperature=-1)
        assert info.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="the model 'other' is not here; here is fake"):
            client.chat.completions.create(model="other", messages=USER)
        with pytest.raises(openai.NotFoundError, match="'other' is not here"):
            client.models.retrieve("other")
    assert json.loads(routed.ask("/tokenize", {"prompt": "the"})[2])["count"] == 1
    for path in ("/v1/completions/", "/tokenize/"):  # no redirect, which would name the replica's own address
        assert routed.ask(path, {"prompt": "a", "max_tokens": 2})[0] == 200
    assert json.loads(routed.ask("/tokenizer_info")[2])["eos_token"]  # that the LM Evaluation Harness asks for
    status, _, body = routed.ask("/nowhere")
    assert status == 404 and "/nowhere" in json.loads(body)["error"]["message"]
    assert routed.ask("/v1/nowhere")[0] == 404 and routed.ask("/v1/completions")[0] == 405


def test_anthropics_client(pair):
    routed, _ = pair
    with anthropic.Anthropic(base_url=routed.address, api_key="none", max_retries=0) as client:
        assert [model.display_name for model in client.models.list()] == ["fake"]
        ask = {"model": "fake", "messages": USER}
        with client.messages.stream(max_tokens=9, **ask) as stream:
            assert stream.get_final_text() == "the quick brown fox"
        assert client.messages.count_tokens(**ask).input_tokens > 9
        with pytest.raises(anthropic.NotFoundError, match="the model 'other' is not here; here is fake") as info:
            client.messages.create(max_tokens=9, **{**ask, "model": "other"})
        assert info.value.type == "not_found_error" and info.value.request_id == info.value.body["request_id"]


def test_ollamas_client(pair):
    ollama = pytest.importorskip("ollama", reason="needs ollama, of the extra test")
    routed, _ = pair
    client = ollama.Client(routed.address)
    assert [model.model for model in client.list().models] == ["fake:latest"] == [m.name for m in client.ps().models]
    stream = client.chat("Fake:latest", USER, stream=True)
    assert "".join(part.message.content for part in stream) == "the quick brown fox"
    assert client.generate("fake", "hi").response == "the quick brown fox" and client.show("fake").modelinfo
    with pytest.raises(ollama.ResponseError, match="model 'other' not found; here is fake") as info:
        client.chat("other", USER)
    assert info.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature=-1"):
        client.chat("fake", USER, options={"temperature": -1})
    assert routed.ask("/", method="HEAD")[0] == routed.ask("/")[0] == 200  # which `ollama` asks first
    assert json.loads(routed.ask("/api/nowhere")[2])["error"]


def test_a_conversation_stays_where_its_beginning_is(pair):
    routed, llms = pair
    with client_of(routed) as client:
        for talk in range(4):
            before = [len(llm.seen) for llm in llms]
            messages = [{"role": "system", "content": f"{talk}" + "the lazy dog " * 100}]
            for turn in range(4):
                messages.append({"role": "user", "content": f"{turn}"})
                reply = client.chat.completions.create(model="fake", messages=messages)
                messages.append(reply.choices[0].message)
            added = [len(llm.seen) - old for llm, old in zip(llms, before, strict=True)]
            assert sorted(added) == [0, 4]
    found = metrics_of(routed)
    assert found["prefix_blocks_total",] >= 16 * 5 and found["prefix_hits_total",] >= 12 * 5
    assert found["prefix_hit_ratio",] == found["prefix_hits_total",] / found["prefix_blocks_total",] > 0.7


def test_bytes_and_headers_pass_unchanged_and_at_once():
    seen = threading.Event()
    parts = [b": ping\r\n\r\n", b'data: {"a":', b'"\xc3', b'\xa9"}\n\n', b"data: [DONE]\n\n"]

    async def behave(head, body, writer):
        writer.write(f"HTTP/1.1 200 OK\r\n{SSE}\r\nX-Request-Id: 7\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for part in parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            assert await asyncio.to_thread(seen.wait, 60)  # the client has it before there is more
            seen.clear()
        writer.write(b"0\r\n\r\n")

    rude = Rude(behave)
    with rude.listens() as url, routing(url) as routed, socket.socket() as sock:
        sock.settimeout(60)
        sock.connect(("127.0.0.1", int(routed.address.rsplit(":", 1)[1])))
        sock.sendall(
            b"POST /v1/any%2Fthing?a=%20b&c HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer k\r\nX-Mine: 1\r\n"
            b"x-mine: 2\r\nx-mine: \xc3\xa9\r\nAccept-Encoding: gzip\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
            b"Content-Length: 3\r\n\r\n\x00{\xff"
        )
        got = b""
        for part in parts:
            while not got.endswith(part + b"\r\n"):
                got += sock.recv(4096)
            seen.set()
        while not got.endswith(b"0\r\n\r\n"):
            got += sock.recv(4096)
        head, _, chunks = got.partition(b"\r\n\r\n")
        assert chunks == b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        assert b"x-request-id: 7" in head.lower() and SSE.encode() in head and head.lower().count(b"\r\ndate:") == 1
    (head, body), *more = rude.asked
    lines = head.lower().split("\r\n")
    assert head.startswith("POST /v1/any%2Fthing?a=%20b&c HTTP/1.1") and body == b"\x00{\xff" and not more
    mine = {"x-mine: 1", "x-mine: 2", b"x-mine: \xc3\xa9".decode("latin-1").lower()}
    assert {"authorization: bearer k", "accept-encoding: gzip"} | mine <= set(lines)
    assert not [
        line for line in lines if line.startswith(("x-hop", "user-agent", "accept:", "connection: keep-alive, x"))
    ]


def test_a_client_that_leaves_ends_its_request_at_the_replica():
    llm = FakeLLM(reply="word " * 1000, delay=0.05)  # most of a minute
    silent = FakeLLM(delay=1000)
    with serving(llm) as (_, a), routing(a) as routed, client_of(routed) as client:
        stream = client.completions.create(model="fake", prompt="a", max_tokens=1000, stream=True)
        next(iter(stream))
        assert llm.running and routed.service.active == 1
        stream.close()
        until(lambda: not llm.running and not routed.service.active)
    with serving(silent) as (_, a), routing(a) as routed:
        body = b'{"prompt": "a"}'
        with socket.create_connection(("127.0.0.1", int(routed.address.rsplit(":", 1)[1]))) as leaves:
            leaves.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            until(lambda: silent.running)  # and goes, before there is any of an answer
        until(lambda: not silent.running and not routed.service.active and not routed.replica(a).in_flight)
    assert len(llm.aborted) == len(silent.aborted) == 1


def test_models_are_merged_and_decide_the_way():
    llms = FakeLLM(), FakeLLM(reply="lazy dog")
    with (
        serving(llms[0], model_names=("one", "both")) as (_, a),
        serving(llms[1], model_names=("two", "both")) as (_, b),
        routing(a, b) as routed,
        client_of(routed) as client,
    ):
        assert [model.id for model in client.models.list()] == ["both", "one", "two"]
        assert client.models.retrieve("two").id == "two"
        for name, text in (("one", "the quick brown fox"), ("two", "lazy dog")) * 2:
            assert client.completions.create(model=name, prompt="a").choices[0].text == text
        llms[1].ready = False
        until(lambda: not routed.replica(b).takes)
        with pytest.raises(openai.InternalServerError, match="of 1, 0 are ready"):  # not: no such model
            client.completions.create(model="two", prompt="a")
        with pytest.raises(openai.NotFoundError, match="here is both, one, two"):
            client.completions.create(model="three", prompt="a")
        assert client.completions.create(model="both", prompt="a").choices[0].text == "the quick brown fox"


def test_keys_limits_and_other_origins():
    llm = FakeLLM()
    keys = {"api_keys": ("secret",), "admin_keys": ("root",)}
    with (
        serving(llm, api_keys=("secret",)) as (_, a),
        routing(a, cors_origins=("http://page",), max_body=999, **keys) as r,
    ):
        with client_of(r, "secret") as client:
            assert r.replica(a).models == {"fake"} and [model.id for model in client.models.list()] == ["fake"]
            with pytest.raises(openai.AuthenticationError, match="asks for a key"):
                client.with_options(api_key="wrong").completions.create(model="fake", prompt="a")
            with pytest.raises(openai.APIStatusError, match="above 999 bytes"):
                client.completions.create(model="fake", prompt="a" * 999)
            raw = client.completions.with_raw_response.create(
                model="fake", prompt="a", extra_headers={"origin": "http://page"}
            )
        assert raw.headers.get_list("access-control-allow-origin") == ["http://page"]
        assert r.ask("/admin/replicas", key="secret")[0] == 401 and r.ask("/admin/replicas", key="root")[0] == 200
        open_paths = ("/health", "/ping", "/ready", "/version", "/metrics")
        assert [r.ask(path)[0] for path in (*open_paths, "/v1/models")] == [200] * 5 + [401]
    # Only the replicas have keys: theirs decide, and without one for the router any model may be anywhere.
    with serving(llm, api_keys=("secret",)) as (_, a), routing(a) as r:
        assert r.replica(a).models is None and r.ask("/v1/models")[0] == r.ask("/v1/models/fake")[0] == 401
        assert r.ask("/v1/models", key="secret")[0] == r.ask("/v1/models/fake", key="secret")[0] == 200
        assert r.ask("/admin/replicas", key="secret")[0] == 403


def test_an_administrator_drains_adds_and_removes():
    llms = FakeLLM(reply="word " * 100, delay=0.5), FakeLLM()

    def admin(what, url, method="POST"):
        status, _, body = routed.ask(f"/admin/{what}", {"url": url}, "root", method)
        return status, json.loads(body)

    with two(*llms, admin_keys=("root",)) as (routed, a, b), client_of(routed) as client:
        stream = client.completions.create(model="fake", prompt="a", max_tokens=100, stream=True)
        next(iter(stream))
        status, body = admin("drain", a)
        assert (status, body["data"][0]["drained"], body["data"][0]["in_flight"]) == (200, True, 1)
        for _ in range(3):
            client.completions.create(model="fake", prompt="a")
        assert len(llms[1].seen) == 3
        llms[0].delay = 0  # until here there was more to come
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert admin("remove", a)[0] == 404 and admin("replicas", a, "DELETE")[0] == 200
        assert [one["url"] for one in json.loads(routed.ask("/admin/replicas", key="root")[2])["data"]] == [b]
        assert not [key for key in metrics_of(routed) if a in key]
        assert admin("drain", a)[0] == 404 and admin("replicas", b)[0] == 400
        assert "must be like http://HOST:PORT" in admin("replicas", "ftp://a")[1]["error"]["message"]
        assert routed.ask("/admin/drain", {"uri": a}, "root")[0] == 400
        assert admin("replicas", a)[0] == 200
        until(lambda: routed.replica(a).takes)
        assert admin("drain", b)[1]["data"][0]["models"] == ["fake"]
        client.completions.create(model="fake", prompt="a", max_tokens=1)
        assert len(llms[0].seen) == 2
        assert admin("undrain", b)[1]["data"][0]["drained"] is False and len(routed.service.fleet.taking()) == 2


def test_what_is_under_way_is_finished_before_the_end():
    llm = FakeLLM(reply="word " * 30, delay=0.5)
    with serving(llm) as (_, a), routing(a) as routed, client_of(routed) as client:
        stream = client.completions.create(model="fake", prompt="a", max_tokens=30, stream=True)
        next(iter(stream))
        routed.server.handle_exit(signal.SIGTERM, None)
        assert routed.ask("/ready")[0] == 503 and routed.ask("/health")[0] == 200
        with pytest.raises(openai.InternalServerError, match="takes no new requests"):
            client.completions.create(model="fake", prompt="a")
        llm.delay = 0  # until here there was more to come
        assert list(stream)[-1].choices[0].finish_reason == "length"
        until(lambda: routed.server.should_exit)


def test_sequences_of_others_count_as_load():
    class Busy(FakeLLM):
        def stats(self):
            return dataclasses.replace(super().stats(), num_waiting=7)

    llms = Busy(), FakeLLM()
    with two(*llms) as (routed, a, b):
        until(lambda: routed.replica(a).load == 7)
        for _ in range(3):
            assert routed.ask("/v1/completions", {"prompt": "a"})[0] == 200
        assert len(llms[1].seen) == 3
        until(lambda: metrics_of(routed)["load", b] == 0)  # a look may have come while one was under way


def test_names_are_looked_up():
    llm = FakeLLM()
    with serving(llm) as (_, a):
        port = a.rsplit(":", 1)[1]
        with routing(replica_dns=(f"localhost:{port}",), admin_keys=("root",)) as routed:
            until(lambda: routed.service.fleet.taking())
            assert routed.ask("/v1/completions", {"prompt": "a"})[0] == 200
            assert routed.ask("/admin/replicas", {"url": a}, "root", "DELETE")[0] == 409
        with routing(replica_dns=(f"localhost:{port}",), poll_seconds=500) as routed:
            until(lambda: routed.service.fleet.taking())
            where = routed.service.fleet.taking()[0].url
            assert routed.ask("/v1/completions", {"prompt": "a"})[0] == 200
            assert metrics_of(routed)["requests_total", where, "200"] == 1
            routed.service.fleet.remove(where)  # as where the name has it no more, such as a pod's that ended
            assert not [key for key in metrics_of(routed) if where in key]

    async def resolved(monkeypatch, *answers):
        fleet = Fleet(Policy())
        watch = Watch(fleet, RouterSettings(replica_dns=("pods:80",)), None)
        fleet.add("http://1.1.1.1:80", "admin")
        for answer in answers:

            async def looked_up(host, port, type, answer=answer):
                if answer is None:
                    raise socket.gaierror("no such name")
                return [(None, None, None, "", (where, port)) for where in answer]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
            await watch.resolve("pods:80")
            yield sorted(fleet.replicas)

    async def collected():
        with pytest.MonkeyPatch.context() as patch:
            return [here async for here in resolved(patch, ["2.2.2.2", "::1"], None, ["1.1.1.1", "2.2.2.2"])]

    kept = ["http://1.1.1.1:80", "http://2.2.2.2:80"]
    assert asyncio.run(collected()) == [[*kept, "http://[::1]:80"]] * 2 + [kept]


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate with openssl")
def test_https_on_both_sides(tmp_path):
    certificate, key = made_certificate(tmp_path)
    listen = Listen(port=0, certificate=certificate, private_key=key)
    with serving(FakeLLM(), listen=listen) as (_, plain):
        a = plain.replace("http:", "https:")
        with routing(a, replica_ca=certificate, listen=listen) as routed:
            trusted = ssl.create_default_context(cafile=certificate)
            address = routed.address.replace("http:", "https:")
            with urllib.request.urlopen(f"{address}/v1/models", context=trusted, timeout=60) as response:
                assert json.load(response)["data"][0]["id"] == "fake"
        with routing(a, ready=0) as routed:  # of an authority that nobody knows
            until(lambda: "certificate verify failed" in routed.replica(a).problem)
    with pytest.raises(ShardlmError, match="is no file of certificates in PEM"):
        make_app(RouterSettings(replicas=(a,), replica_ca=key))


def test_settings_and_addresses_that_make_no_sense():
    for wrong in ("ftp://a", "http://", "a:80", "http://a:x", "http://a?b", "http://u@a", "http://[::1", "http://[a]"):
        with pytest.raises(ShardlmError, match="must be like http://HOST:PORT"):
            address(wrong)
    for words, match in (
        ({}, "the router has no replicas"),
        ({"replica_dns": ("pods",)}, "replica_dns=pods must be NAME:PORT"),
        ({"replicas": ("http://a",), "least_match": 2.0}, "between 0 and 1"),
        ({"replicas": ("http://a",), "max_retries": -1}, "max_retries=-1"),
        ({"replicas": ("http://a",), "poll_seconds": 0}, "poll_seconds=0 must be above 0"),
    ):
        with pytest.raises(ShardlmError, match=match):
            RouterSettings(**words)
    fleet = Fleet(Policy())
    with pytest.raises(ApiError, match="there is none"):
        fleet.choose(Hints("any"))
    fleet.add("http://a/", "flag")
    with pytest.raises(ShardlmError, match="http://a is there already"):
        fleet.add("http://a", "flag")


def test_a_replica_that_never_answered_is_said_once(caplog):
    """Its address may be wrong; with /v1, as clients are given it, it is the server's all the same."""
    fleet = Fleet(Policy())
    replica = fleet.add("http://a:1/v1/", "flag")
    assert replica.url == "http://a:1" and fleet.find("http://a:1/v1") is replica
    for _ in range(3):
        fleet.said(replica, alive=False, ready=False, problem="/health 404, /ready 404: Not Found")
    fleet.said(replica, alive=True, ready=True)
    assert caplog.messages == [
        "replica http://a:1 takes no requests yet: /health 404, /ready 404: Not Found",
        "replica http://a:1 takes requests",
    ]


def test_images_of_ten_megabytes():
    """Through both limits of bodies, to the replica that has the conversation."""
    pixels = np.random.default_rng(0).integers(0, 256, (1750, 1900, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    assert 9.9e6 < file.tell() < 10e6
    image = {"type": "image_url", "image_url": {"url": data_url(file.getvalue())}}
    llms = SeeingLLM(max_model_len=40_000), SeeingLLM(max_model_len=40_000)
    with two(*llms) as (routed, *_), client_of(routed) as client:
        messages = [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]
        for count in (1, 2, 3):
            whole = client.chat.completions.create(model="fake", messages=messages)
            messages += [{"role": "assistant", "content": whole.choices[0].message.content}, *USER]
            assert whole.usage.prompt_tokens > 109 * 118 and max(len(llm.seen) for llm in llms) == count
        assert sorted(len(llm.prepared) for llm in llms) == [0, 1]
        assert client.models.retrieve("fake").capabilities["vision"]
