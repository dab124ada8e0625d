"""A server that listens, and OpenAI's own client."""

import contextlib
import itertools
import json
import logging
import shutil
import signal
import socket
import ssl
import time
import urllib.request

import openai
import pydantic
import pytest
from client import Client
from fake_llm import FakeLLM
from prometheus_client.parser import text_string_to_metric_families
from sockets import listens, made_certificate, until

from shardlm.errors import ShardlmError
from shardlm.serve.api import connection, endpoint
from shardlm.serve.api.app import make_app
from shardlm.serve.api.metrics import Metrics
from shardlm.serve.api.server import Listen, hold, listening, run
from shardlm.serve.api.settings import Settings
from shardlm.serve.outputs import SpeculationStats, Stats

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = [{"role": "user", "content": "hi"}]


def serving(llm, *, listen=None, **settings):
    """(the server, its address), in a thread."""
    settings = Settings(**settings)
    return listens(make_app(llm, settings), listen=listen, write_seconds=settings.write_seconds)


@pytest.fixture(scope="module")
def server():
    llm = FakeLLM()
    with serving(llm, api_keys=("secret",), max_body=20_000) as (_, address):
        yield llm, address


@pytest.fixture
def client(server):
    """Of the fake engine, whose reply a test writes."""
    llm, address = server
    llm.reply, llm.delay, llm.fail_at = "the quick brown fox", 0, None
    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=60) as made:
        yield made


def post(sock, body, key="-", version=b"1.1", more=b""):
    """A request without a client that would read its answer."""
    body = json.dumps(body).encode()
    head = f"host: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n".encode()
    sock.sendall(b"POST /v1/completions HTTP/" + version + b"\r\n" + head + more + b"\r\n" + body)


def said_after(sock, begun):
    """What comes until the server closes the connection, which may be before all was sent."""
    found = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(begun)
        while more := sock.recv(4096):
            found += more
    return found


def test_models_and_chat(client):
    assert [model.id for model in client.models.list()] == ["fake"] and client.models.retrieve("fake").id == "fake"
    whole = client.chat.completions.create(model="fake", messages=USER, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in whole.choices] == ["the quick brown fox"] * 2
    assert whole.choices[0].logprobs.content[1].token == " quick" and whole.usage.completion_tokens == 8
    assert whole._request_id in whole.id
    stream = client.chat.completions.create(
        model="fake", messages=USER, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 3}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the quick brown fox"
    assert chunks[-1].choices[0].finish_reason == "stop" and last.usage.completion_tokens == 4 and not last.choices


def test_tools(server, client):
    llm, _ = server
    llm.reply = 'So.\n<tool_call>\n{"name": "weather", "arguments": {"city": "A"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
    with client.chat.completions.stream(model="fake", messages=USER, tools=tools) as stream:
        events = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "A"}
    messages = [
        *USER,
        choice.message,
        {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"},
    ]
    llm.reply = '[{"name": "weather", "arguments": {"city": "B"}}]'
    forced = client.chat.completions.create(model="fake", messages=messages, tools=tools, tool_choice="required")
    assert forced.choices[0].message.tool_calls[0].function.arguments == '{"city": "B"}'
    assert "<tool_response>\nrain\n</tool_response>" in llm.seen[-1][0]


class City(pydantic.BaseModel):
    city: str


def test_a_schema_is_parsed(server, client):
    server[0].reply = '{"city":"A"}'
    parsed = client.chat.completions.parse(model="fake", messages=USER, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="A")
    assert client.responses.parse(model="fake", input="hi", text_format=City).output_parsed == City(city="A")


def test_completions_and_embeddings(client):
    whole = client.completions.create(model="fake", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=2)
    assert [choice.text for choice in whole.choices] == ["athe quick", "bthe quick"]
    assert whole.choices[1].logprobs.text_offset == [0, 1, 4]
    stream = client.completions.create(model="fake", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "the quick brown fox"
    found = client.embeddings.create(model="fake", input=["the lazy dog"])  # it asks for base64
    assert list(found.data[0].embedding) == pytest.approx([0.6, 0, -0.8, 0])


def test_responses(server, client):
    llm, _ = server
    whole = client.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert whole.output_text == "the quick" and whole.status == "incomplete"
    llm.reply = 'So.\n<tool_call>{"name": "weather", "arguments": {"city": "A"}}</tool_call>'
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    with client.responses.stream(model="fake", input="hi", tools=tools) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == "So.\n" and [item.type for item in final.output] == ["message", "function_call"]
    items = [{"role": "user", "content": "hi"}, *final.output[1:]]
    items.append({"type": "function_call_output", "call_id": final.output[1].call_id, "output": "rain"})
    llm.reply = "Take a coat."
    assert client.responses.create(model="fake", input=items).output_text == "Take a coat."


def test_errors_are_of_the_clients_classes(server, client):
    llm, _ = server
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as info:
        ask(model="fake", messages=USER, temperature=-1)
    assert info.value.param == "temperature" and info.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not here"):
        ask(model="other", messages=USER)
    with pytest.raises(openai.AuthenticationError, match="asks for a key"):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.APIStatusError, match="20000 bytes") as info:
        ask(model="fake", messages=[{"role": "user", "content": "a" * 10**6}])
    assert info.value.status_code == 413
    llm.fail_at = 0
    with pytest.raises(openai.InternalServerError, match="the device is lost"):
        ask(model="fake", messages=USER)
    llm.fail_at = 2
    with pytest.raises(openai.APIError, match="the device is lost"):
        list(ask(model="fake", messages=USER, stream=True))
    *_, last = client.responses.create(model="fake", input="hi", stream=True)
    assert (last.type, last.code, last.message) == ("error", "engine_error", "the device is lost")
    llm.died = ""


def test_a_client_that_leaves_ends_its_request(server, client):
    llm, _ = server
    llm.reply, llm.delay = "word " * 1000, 0.05  # most of a minute
    before = len(llm.aborted)
    stream = client.chat.completions.create(model="fake", messages=USER, stream=True)
    for _, _ in zip(range(4), stream, strict=False):
        pass
    assert llm.running
    stream.close()
    until(lambda: not llm.running)
    with socket.create_connection(("127.0.0.1", int(server[1].rsplit(":", 1)[1]))) as leaves:
        post(leaves, {"prompt": "a", "max_tokens": 1000}, key="secret")
        until(lambda: llm.running)  # and goes, before there is any of an answer
    until(lambda: not llm.running)
    assert len(llm.aborted) == before + 2


def test_streams_give_signs_of_life_while_they_wait(monkeypatch):
    monkeypatch.setattr(endpoint, "PING_SECONDS", 0.02)
    llm = FakeLLM(reply="the fox", delay=0.1)
    with serving(llm) as (_, address), openai.OpenAI(base_url=f"{address}/v1", api_key="-", timeout=60) as client:
        with client.completions.with_streaming_response.create(model="fake", prompt="a", stream=True) as response:
            lines = list(response.iter_lines())
        assert lines[0] == ": ping" and lines.count(": ping") > 3 and lines[-2] == "data: [DONE]"
        chunks = client.completions.create(model="fake", prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "the fox"
        events = client.responses.create(model="fake", input="hi", stream=True)
        assert [event.text for event in events if event.type == "response.output_text.done"] == ["the fox"]
        llm.fail_at = 0  # after the first signs of life, and the status with them
        with pytest.raises(openai.APIError, match="the device is lost"):
            list(client.completions.create(model="fake", prompt="a", stream=True))
        [told] = client.responses.create(model="fake", input="hi", stream=True)
        assert (told.type, told.message) == ("error", "the device is lost")


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


def test_metrics_as_prometheus_reads_them():
    client, started = Client(FakeLLM(delay=0.002, model_name='a "b" \\ c\n')), time.perf_counter()
    client.post("/v1/completions", {"prompt": ["the lazy dog", "the"], "n": 2, "max_tokens": 3, "unknown": 1})
    client.post("/v1/completions", {"prompt": "a", "max_tokens": 100, "stream": True})
    taken = 3 * (time.perf_counter() - started)  # at most, of three prompts
    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == 'a "b" \\ c\n'
            found[sample.name, sample.labels.get("finished_reason") or sample.labels.get("le")] = sample.value

    def value(name, label=None):
        return found[f"vllm:{name}", label]

    assert value("prompt_tokens_total") == 5 and value("generation_tokens_total") == 16
    assert value("prefix_cache_queries_total") == 40 and value("prefix_cache_hits_total") == 10
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    assert [value(name) for name in gauges] == [0] * 4
    assert [value("request_success_total", reason) for reason in ("length", "stop", "abort")] == [4, 1, 0]
    counts = {"time_to_first_token_seconds": 3, "inter_token_latency_seconds": 7, "time_per_output_token_seconds": 7}
    counts |= {"e2e_request_latency_seconds": 3, "request_time_per_output_token_seconds": 3}
    counts |= {"request_prompt_tokens": 3, "request_generation_tokens": 3, "request_max_num_generation_tokens": 3}
    counts |= {f"request_{phase}_time_seconds": 3 for phase in ("queue", "prefill", "decode", "inference")}
    counts |= {"request_params_n": 3, "request_params_max_tokens": 3}
    for name, count in counts.items():
        assert value(f"{name}_count") == count == value(f"{name}_bucket", "+Inf")
        buckets = [number for (key, _), number in found.items() if key == f"vllm:{name}_bucket"]
        assert buckets == sorted(buckets)
    assert value("request_generation_tokens_sum") == 16 and value("request_generation_tokens_bucket", "5.0") == 1
    assert value("request_max_num_generation_tokens_sum") == 10 and value("request_params_n_sum") == 5
    assert value("request_params_max_tokens_sum") == 106
    read, written = value("request_prefill_time_seconds_sum"), value("request_decode_time_seconds_sum")
    assert 3 * 0.002 <= read < taken and written >= 7 * 0.002
    assert read + written == pytest.approx(value("request_inference_time_seconds_sum"))
    assert 3 * 0.002 <= value("time_to_first_token_seconds_sum") < taken
    assert 7 * 0.002 <= value("inter_token_latency_seconds_sum") < value("e2e_request_latency_seconds_sum")
    assert found["shardlm:ignored_fields_total", None] == 1 and value("cache_config_info") == 1
    assert 'engine="0",block_size="16",num_gpu_blocks="64"} 1' in response.text


def test_metrics_of_drafts():
    stats = Stats(0, 0, 0.0, 0, 0, 0, 0, 0, SpeculationStats(4, 9, (3, 2, 0)))
    families = {family.name: family for family in text_string_to_metric_families(Metrics("tiny").text(stats))}
    each = [
        families[f"vllm:spec_decode_num_{name}"].samples[0].value
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    places = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert each == [4, 9, 5] and [(one.labels["position"], one.value) for one in places] == [
        ("0", 3),
        ("1", 2),
        ("2", 0),
    ]
