"""Whatever is sent, the answer has the right status and OpenAI's shape."""

import asyncio
import json

import pytest
from client import Client, error
from fake_llm import FakeLLM
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm import __version__

PATH = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}

BODIES = {
    b"": "not JSON",
    b"{": "not JSON",
    b'{"prompt": "a"} x': "not JSON",
    b'{"prompt": "\xff"}': "not JSON in UTF-8",
    b'{"prompt": "\\ud800"}': r"\ud800 is half a character",
    b'{"prompt": "\\ud83d\\ude00 \\udc00 a"}': r"\udc00 is half a character",
    b'{"temperature": 1e999, "prompt": "a"}': "not JSON",
    b'{"temperature": NaN, "prompt": "a"}': "not JSON",
    b"[" * 100_000: "not JSON",
    b"[]": "must be an object",
    b"3": "must be an object",
}


@pytest.mark.parametrize("raw", BODIES, ids=lambda raw: repr(raw[:20]))
def test_bodies_that_are_no_requests(raw):
    told = error(Client().post(PATH, raw=raw), 400)
    assert BODIES[raw] in told["message"] and told["type"] == "invalid_request_error"


FIELDS = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
    ({"prompt": [10**9]}, None),
    ({"prompt": [-1]}, None),
    ({"prompt": [10**30]}, None),
    ({"prompt": "a " * 5000}, None),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"logprobs": 99}, "logprobs"),
    ({"seed": 2**63}, "seed"),
    ({"priority": 10**20}, "priority"),
    ({"stop": [""]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"stop_token_ids": [-5]}, "stop_token_ids"),
    ({"min_tokens": 10**30, "max_tokens": 3}, "min_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"stream": "yes"}, "stream"),
    ({"guided_json": "{"}, None),
    ({"stop": [f"a{i}" for i in range(10_000)]}, "stop"),
    ({"bad_words": ["a" * 10**6]}, "bad_words"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"guided_json": {"type": "nonsense"}}, None),
]


@pytest.mark.parametrize("case", range(len(FIELDS)), ids=lambda i: str(FIELDS[i][0])[:40])
def test_values_that_are_refused(case):
    wishes, param = FIELDS[case]
    body = {"prompt": "a", **wishes} if wishes else {}
    client = Client()
    for stream in ({}, {"stream": True}) if "stream" not in wishes else ({},):
        told = error(client.post(PATH, {**body, **stream}), 400)
        assert told["param"] == param and told["type"] == "invalid_request_error"
    assert client.service.unanswered == client.service.active == 0 and not client.llm.running


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3),
    max_leaves=6,
)
NAMES = ["prompt", "messages", "input", "tools", "tool_choice", "response_format", "n", "stop", "logit_bias", "stream"]
NAMES += ["tokens", "text", "max_tokens", "echo", "logprobs", "structured_outputs", "chat_template_kwargs", "role"]
NAMES += ["system", "thinking", "output_config", "stop_sequences", "content"]
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]
PATHS += ["/v1/messages", "/v1/messages/count_tokens"]


@settings(deadline=None, max_examples=60)
@given(body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), path=st.sampled_from(PATHS))
def test_no_body_breaks_the_server(body, path):
    client = Client(FakeLLM(reply=""), max_replies=8)
    defaults = {"messages": CHAT["messages"], "prompt": "a", "input": "a", "tokens": [65], "max_tokens": 9}
    response = client.post(path, {**defaults, **body})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400 and path not in PATHS[-2:]:
        error(response, 400)
    assert client.service.unanswered == client.service.active == 0 and not client.llm.running


def test_what_is_asked_for_and_would_be_left_out():
    client = Client()
    told = error(client.post(PATH, {"prompt": "a", "stream_options": {"include_usage": True}}), 400)
    assert told["param"] == "stream_options"
    for name, value in (
        *(("chat_template", "x"), ("functions", []), ("function_call", "auto"), ("modalities", ["text", "audio"])),
        ("continue_final_message", True),
    ):
        wish = {name: value, **({"add_generation_prompt": True} if name == "continue_final_message" else {})}
        assert error(client.post("/v1/chat/completions", {**CHAT, **wish}), 400)["param"] == name
    assert error(client.post("/v1/responses", {"input": "a", "prompt": {"id": "x"}}), 400)["param"] == "prompt"
    assert not client.llm.seen


def test_prompts_that_are_too_long():
    client = Client(FakeLLM(max_model_len=8))
    long = {"prompt": [65] * 20}
    told = error(client.post(PATH, long), 400)
    assert told["code"] == "context_length_exceeded"
    assert "is longer than the model's context length: the prompt has 20 tokens" in told["message"]
    for wish, kept in (({"max_tokens": 3}, 5), ({}, 7), ({"max_tokens": 0}, 8), ({"max_tokens": 99}, 7)):
        body = client.post(PATH, {**long, **wish, "truncate_prompt_tokens": -1}).json()
        assert body["usage"]["prompt_tokens"] == kept
    bounded = client.post(PATH, {"prompt": [65] * 6, "max_tokens": 99}).json()  # as many as there is room for
    assert bounded["choices"][0]["finish_reason"] == "length" and bounded["usage"]["completion_tokens"] == 2
    vectors = client.post("/v1/embeddings", {"input": [[65] * 20, [65]], "truncate_prompt_tokens": -1}).json()
    assert vectors["usage"]["prompt_tokens"] == 9
    refused = client.post("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -5})
    assert error(refused, 400)["param"] == "truncate_prompt_tokens"


def test_paths_models_methods_and_keys():
    client = Client(FakeLLM(), api_keys=("secret", "other"), model_names=("a", "b"))
    told = error(client.post(PATH, {"prompt": "x"}), 401)
    assert told["code"] == "invalid_api_key" and "Authorization: Bearer" in told["message"]
    for wrong in ("Bearer", "Bearer secret2", "secret", "Basic secret"):
        assert error(client.post(PATH, {"prompt": "x"}, headers={"authorization": wrong}), 401)
    key = {"authorization": "bearer other"}
    assert client.post(PATH, {"prompt": "x", "model": "b"}, headers=key).json()["model"] == "b"
    told = error(client.post(PATH, {"prompt": "x", "model": "fake"}, headers=key), 404)
    assert told["code"] == "model_not_found" and told["param"] == "model" and "here is a, b" in told["message"]
    assert [one["id"] for one in client.get("/v1/models", key).json()["data"]] == ["a", "b"]
    assert client.get("/v1/models/b", key).json()["root"] == "fake"
    assert error(client.get("/v1/models/c", key), 404)["code"] == "model_not_found"
    assert "Not Found" in error(client.get("/v2", key), 404)["message"]
    assert "Method Not Allowed" in error(client.get(PATH, key), 405)["message"]
    for open_path in ("/", "/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json"):
        assert client.get(open_path).status_code == 200
    assert client.post("/ping", raw=b"").text == "ok" and client.get("/version").json() == {"version": __version__}


def test_what_the_server_says_of_itself():
    client = Client()
    page = client.get("/")
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert "http://" not in page.text and "https://" not in page.text and "src=" not in page.text
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0" and set(PATHS) < document["paths"].keys()
    assert document["paths"]["/ping"].keys() == {"get", "post"} and "/version" in document["paths"]
    assert not [path for path in document["paths"] if path.startswith(("/v1/files", "/v1/batches"))]  # by --batch_dir
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "messages" in fields and "top_k" in fields
    used = {one.split('"')[0] for one in json.dumps(document).split("#/components/schemas/")[1:]}
    assert used <= document["components"]["schemas"].keys()
    assert client.get("/ready").status_code == 200
    client.llm.ready = False
    assert error(client.get("/ready"), 503)["message"] == "the model is being made ready"
    client.llm.ready, client.llm.died = True, "the device is lost"
    assert error(client.get("/health"), 503)["message"] == "the device is lost" and error(client.get("/ready"), 503)
    assert error(client.post("/ping"), 503)["message"] == "the device is lost"
    client.llm.died, client.service.draining = "", True
    assert error(client.get("/ready"), 503) and client.get("/health").status_code == 200
    response = client.post(PATH, {"prompt": "a"})
    assert error(response, 503)["code"] == "unavailable" and response.headers["retry-after"] == "1"


def test_origins():
    client = Client(FakeLLM(), cors_origins=("http://page",), api_keys=("k",))
    ask = {"origin": "http://page", "access-control-request-method": "POST"}
    ask["access-control-request-headers"] = "authorization"
    response = asyncio.run(client.send("OPTIONS", PATH, None, ask))
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "http://page"
    refused = client.post(PATH, {"prompt": "a"}, headers={"origin": "http://page"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page"
    assert "access-control-allow-origin" not in Client().get("/health", {"origin": "http://page"}).headers


def test_bodies_too_long_or_too_slow():
    client = Client(FakeLLM(), max_body=1000, read_seconds=0.05)
    told = error(client.post(PATH, {"prompt": "a" * 2000}), 413)
    assert told["code"] == "request_too_large" and "1000 bytes" in told["message"]
    assert client.post(PATH, {"prompt": "a"}).status_code == 200

    for coding, status in (("gzip", 415), ("identity", 200)):
        assert client.post(PATH, {"prompt": "a"}, headers={"content-encoding": coding}).status_code == status
    assert client.post(PATH, raw=b'\xef\xbb\xbf{"prompt": "a"}').status_code == 200  # with a byte order mark
    told = error(client.get("/v1/models/" + "a" * 9999), 404)
    assert len(told["message"]) < 300 and len(error(client.get("/" + "a" * 9999), 404)["message"]) < 300

    async def unannounced():
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * 100

    assert error(asyncio.run(client.send("POST", PATH, unannounced())), 413)

    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    assert error(asyncio.run(client.send("POST", PATH, slow())), 408)["code"] == "timeout"


def test_engines_that_fail():
    dead = Client(FakeLLM(fail_at=0))
    told = error(dead.post(PATH, {"prompt": "a"}), 500)
    assert told == {"message": "the device is lost", "type": "server_error", "param": None, "code": "engine_error"}
    assert error(dead.post(PATH, {"prompt": "a", "stream": True}), 500) == told  # nothing was sent yet
    dying = Client(FakeLLM(fail_at=2))
    text = dying.post(PATH, {"prompt": "a", "stream": True}).text.split("\n\n")
    assert text[-2:] == ["data: [DONE]", ""] and json.loads(text[-3][6:])["error"] == told and len(text) == 5
    text = dying.post("/v1/responses", {"input": "a", "stream": True}).text.split("\n\n")
    assert text[-2].startswith(
        'event: error\ndata: {"type":"error","code":"engine_error","message":"the device is lost"'
    )
    assert error(Client(FakeLLM(fail_at=1)).post(PATH, {"prompt": ["a", "b"]}), 500) == told

    class Broken(FakeLLM):
        async def generate(self, *args, **kwargs):
            raise KeyError("secret")
            yield

    told = error(Client(Broken()).post(PATH, {"prompt": "a"}), 500)
    assert "secret" not in told["message"] and told["type"] == "server_error"


def test_a_text_that_is_far_too_long_is_refused_before_it_is_counted(monkeypatch):
    """Counting these 4 million characters would take seconds."""
    client, text, encoded = Client(), "the quick " * 400_000, []
    kind = type(client.llm.tokenizer)
    plain = kind.encode_batch
    monkeypatch.setattr(
        kind, "encode_batch", lambda self, texts, **how: encoded.extend(texts) or plain(self, texts, **how)
    )
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"input": text}),
        ("/v1/completions", {"prompt": ["a", text], "add_special_tokens": False}),
        ("/v1/embeddings", {"input": text}),
    ):
        told = error(client.post(path, body), 400)
        assert told["code"] == "context_length_exceeded" and "at least" in told["message"], path
    assert all(len(one) < 100 for one in encoded)
    short = {"messages": [{"role": "user", "content": text[:60_000]}], "truncate_prompt_tokens": 5, "max_tokens": 1}
    assert client.post("/v1/chat/completions", short).status_code == 200
