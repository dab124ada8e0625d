"""A server that listens: connections, heads and bodies as clients send them, its end, https, and its address."""

import contextlib
import itertools
import json
import logging
import shutil
import signal
import socket
import ssl
import urllib.request

import openai
import pytest
from fake_llm import FakeLLM
from sockets import made_certificate, post, serving, until

from shardlm.errors import ShardlmError
from shardlm.serve.api import connection
from shardlm.serve.api.server import Listen, hold, listening, run
from shardlm.serve.api.settings import Settings


def said_after(sock, begun):
    """What comes until the server closes the connection, which may be before all was sent."""
    found = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(begun)
        while more := sock.recv(4096):
            found += more
    return found


def test_a_client_that_reads_nothing_ends_its_request():
    llm = FakeLLM(reply="word " * 50, delay=0.001)
    with serving(llm, write_seconds=0.3) as (_, address), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(address.rsplit(":", 1)[1])))
        post(sock, {"prompt": [65] * 4000, "prompt_logprobs": 20, "n": 3, "stream": True})  # some megabytes
        until(lambda: llm.aborted and not llm.running)
        assert len(llm.aborted) == 1


def test_a_client_that_sends_no_whole_head(monkeypatch):
    """Whose head is whole may wait for an answer as long as that takes."""
    llm = FakeLLM(reply="word " * 40, delay=1000)
    with serving(llm) as (server, address):
        there = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        with socket.create_connection(there, timeout=60) as later:
            post(later, {"prompt": "a", "max_tokens": 40})
            until(lambda: llm.running)
            assert [one._late for one in server.server_state.connections] == [None]
            with monkeypatch.context() as patch:
                patch.setattr(connection, "HEAD_SECONDS", 0.05)
                for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
                    with socket.create_connection(there, timeout=60) as other:
                        assert said_after(other, begun) == b""
                llm.delay = 0
                assert later.recv(12) == b"HTTP/1.1 200"
                until(lambda: not llm.running)
                said_after(later, b"POST /v1")  # half of a second request
            until(lambda: not server.server_state.connections)
        with socket.create_connection(there, timeout=60) as other:
            other.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            head, _, body = other.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_heads_without_end_and_several_requests_at_once(monkeypatch):
    """The first are refused, the others end with their client, though none but the first has begun."""
    monkeypatch.setattr(connection, "HEAD_BYTES", 1000)
    llm = FakeLLM(reply="word " * 1000, delay=0.05)
    with serving(llm) as (server, address):
        there = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        with socket.create_connection(there, timeout=60) as sock:
            said = said_after(sock, b"POST /v1/completions HTTP/1.1\r\n" + b"x: y\r\n" * 200)
            assert said.startswith(b"HTTP/1.1 431 ") and b"head is above 1000 bytes" in said
        with socket.create_connection(there, timeout=60) as sock:
            for part in (b"GET /ping HTTP/1.1\r\nx: ", b"y" * 900, b"\r\nconnection: close\r\n\r\n"):
                sock.sendall(part)
            assert sock.makefile("rb").read().endswith(b"ok")
        with socket.create_connection(there, timeout=60) as sock:
            for _ in range(3):
                post(sock, {"prompt": "a", "max_tokens": 1000})
            until(lambda: llm.running)
        until(lambda: not llm.running and not server.server_state.connections)
        assert len(llm.seen) == len(llm.aborted) == 1


JAVA = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c"


def test_an_offer_of_http_2_takes_no_body_away():
    """As Java's HttpClient makes it, unless it is told to stay with HTTP/1.1."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    length = b"content-length: %d" % len(body)
    with serving(FakeLLM()) as (_, address):
        there = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        for lines in ([length, JAVA], [JAVA, length], [length]):
            head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"host: x", *lines, b"\r\n"])
            for cut in (len(head), len(head) + 9):  # the body comes with the head, or later
                with socket.create_connection(there, timeout=60) as sock:
                    sock.sendall(head[:cut] + body[: cut - len(head)])
                    sock.sendall(body[cut - len(head) :] + b"GET /ping HTTP/1.1\r\nconnection: close\r\n\r\n")
                    said = sock.makefile("rb").read()
                assert said.startswith(b"HTTP/1.1 200") and b'"completion_tokens":1' in said and said.endswith(b"ok")


def test_clients_of_http_1_0_and_those_that_send_no_more(monkeypatch):
    """Bodies without chunks, ended by the connection; what was asked by who sends no more is answered."""
    monkeypatch.setattr(connection, "ASK_SECONDS", (0.02, 1.0))
    llm = FakeLLM(reply="word " * 3, delay=0.05)  # until the second question, and a third
    with serving(llm) as (_, address):
        there = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        for version, stream, half in itertools.product((b"1.0", b"1.1"), (False, True), (False, True)):
            if (version, stream, half) == (b"1.0", False, True):
                continue  # taken for gone
            with socket.create_connection(there, timeout=60) as sock:
                wishes = {"prompt": "a", "max_tokens": 2, "stream": stream}
                post(sock, wishes, version=version, more=b"connection: close\r\n")
                said = b""
                if half and version == b"1.0":
                    said = sock.recv(1)  # an answer has begun
                if half:
                    sock.shutdown(socket.SHUT_WR)
                said = (said + sock.makefile("rb").read()).replace(connection.CONTINUE, b"")
            head, _, body = said.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head
            assert (b"transfer-encoding: chunked" in head) == (stream and version == b"1.1")
            if stream and version == b"1.0":
                assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")
            assert b'"finish_reason":"length"' in body
        for version, stream in ((b"1.0", False), (b"1.1", False), (b"1.1", True)):
            llm.reply = "word " * 1000
            with socket.create_connection(there, timeout=60) as sock:
                post(sock, {"prompt": "a", "max_tokens": 1000, "stream": stream}, version=version)
                until(lambda: llm.running)
            until(lambda: not llm.running)
        assert len(llm.aborted) == 3


def test_what_is_under_way_is_finished_before_the_end():
    llm = FakeLLM(reply="word " * 30, delay=0.5)
    with serving(llm) as (server, address):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(model="fake", prompt="a", max_tokens=30, stream=True)
            next(iter(stream))
            server.handle_exit(signal.SIGTERM, None)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{address}/ready")
            with pytest.raises(openai.InternalServerError, match="takes no new requests"):
                client.completions.create(model="fake", prompt="a")
            llm.delay = 0.0  # until here there was more to come, on a busy machine too
            assert list(stream)[-1].choices[0].finish_reason == "length"
        until(lambda: not server.server_state.connections and server.should_exit)
    assert not llm.aborted


@pytest.mark.parametrize("seconds", [0.1, None])
def test_a_limit_to_what_is_finished(caplog, monkeypatch, seconds):
    """A time, or a second signal."""
    llm = FakeLLM(reply="word " * 1000, delay=0.01)
    with serving(llm, listen=Listen(port=0, drain_seconds=seconds)) as (server, address), socket.socket() as sock:
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        sock.settimeout(60)
        sock.connect(("127.0.0.1", int(address.rsplit(":", 1)[1])))
        post(sock, {"prompt": "a", "max_tokens": 1000})
        until(lambda: llm.running)
        server.handle_exit(signal.SIGTERM, None)
        if seconds is None:
            until(lambda: server._draining)
            server.handle_exit(signal.SIGTERM, None)
        while sock.recv(4096):  # until the server closes it
            pass
    assert len(llm.aborted) == 1 and "Traceback" not in caplog.text
    assert ("Cancel 1 running task" in caplog.text) == bool(seconds)


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate with openssl")
def test_https(tmp_path):
    certificate, key = made_certificate(tmp_path)
    listen = Listen(port=0, certificate=certificate, private_key=key)
    with serving(FakeLLM(), listen=listen) as (_, address):
        trusted = ssl.create_default_context(cafile=certificate)
        url = address.replace("http", "https") + "/health"
        assert urllib.request.urlopen(url, context=trusted).read() == b"ok"
    with pytest.raises(ShardlmError, match=r"https with .* does not work: .* Give a certificate chain"):
        run(FakeLLM(), Settings(), Listen(port=0, certificate=key, private_key=key))
    with pytest.raises(ShardlmError, match="give both or none"):
        Listen(certificate=certificate)


def test_addresses_that_are_taken_and_settings_that_make_no_sense():
    taken = pytest.raises(ShardlmError, match=r"cannot listen at 127.0.0.1 port \d+: .* Take another port")
    with listening(Listen(port=0), 1) as sock, taken:
        listening(Listen(port=sock.getsockname()[1]), 1)
    with hold(Listen(port=0), Settings()) as held:
        there = held.getsockname()
        for again in (lambda: listening(Listen(port=there[1]), 1), lambda: hold(Listen(port=there[1]), Settings())):
            with pytest.raises(ShardlmError, match=r"cannot listen at 127.0.0.1 port \d+: .* Take another port"):
                again()
        with pytest.raises(ConnectionRefusedError):  # as of a server that is not ready
            socket.create_connection(there, timeout=60)
    with pytest.raises(ShardlmError, match="cannot listen"):
        listening(Listen(port=10**6), 1)
    with pytest.raises(ShardlmError, match=r"cannot listen at 192.0.2.1 .* Give --host an address of this machine"):
        listening(Listen(host="192.0.2.1", port=0), 1)
    with pytest.raises(ShardlmError, match="max_queue=0 must be above 0"):
        Settings(max_queue=0)
    with pytest.raises(ShardlmError, match="no empty text"):
        Settings(api_keys=("",))
