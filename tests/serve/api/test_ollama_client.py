"""Ollama's interface as its own Python client reads it, over sockets."""

import pytest
from client import Client
from fake_llm import FakeLLM
from sockets import listens, until

from shardlm.serve.adapter_table import Adapter, LoRARequest
from shardlm.serve.api import endpoint
from shardlm.serve.pooling import Pooling

ollama = pytest.importorskip("ollama", reason="needs ollama, of the extra test")

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city": "é日"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXT = "the quick brown fox"


def get_weather(city: str) -> str:
    """Of a city.

    Args:
      city: which one
    """
    return city


CASES = {  # the reply, further fields, content, thinking, names and arguments of calls, done_reason
    "text": ("the quick é日🙂 fox \n", {}, "the quick é日🙂 fox \n", None, [], "stop"),
    "nothing": ("", {}, "", None, [], "stop"),
    "stopped": ("the quick fox", {"options": {"stop": ["ick", "zz"]}}, "the qu", None, [], "stop"),
    "cut": (TEXT, {"options": {"num_predict": 2}}, "the quick", None, [], "length"),
    "thought": ("<think>hm</think>\n\nthe fox", {"think": True}, "the fox", "hm", [], "stop"),
    "no thoughts": ("the fox", {"think": False}, "the fox", None, [], "stop"),
    "json": (ARGUMENTS, {"format": "json", "think": False}, ARGUMENTS, None, [], "stop"),
    "schema": (f"<think>hm</think>{ARGUMENTS}", {"format": SCHEMA}, ARGUMENTS, "hm", [], "stop"),
    "calls": (
        f"<think>hm</think>\n\nI look. \n{CALL}\n{CALL}",
        {"tools": [get_weather], "think": "low"},
        "I look. \n",
        "hm",
        [("get_weather", {"city": "é日"})] * 2,
        "stop",
    ),
    "a call in other words": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": A}}\n</tool_call>',
        {"tools": [get_weather]},
        "",
        None,
        [("get_weather", {"INVALID_JSON": '{"city": A}'})],
        "stop",
    ),
}


@pytest.fixture(scope="module")
def served():
    llm = FakeLLM(template_name="qwen3", chunk=2, max_model_len=1000, adapters=(Adapter("poet", "folder", 1, 1),))
    made = Client(llm, api_keys=("secret",), sampling={"top_k": 7, "repetition_penalty": 1.5})
    with listens(made.app) as (_, address):
        yield llm, ollama.Client(address, headers={"authorization": "Bearer secret"}), made.service, made


def joined(parts, read):
    return "".join(read(part) or "" for part in parts)


@pytest.mark.parametrize("name", CASES)
def test_chats_whole_and_streamed(served, name):
    llm, client, *_ = served
    llm.reply, wishes, content, thinking, calls, reason = CASES[name]
    whole = client.chat("fake", USER, **wishes)
    message = whole.message
    assert (message.role, message.content, message.thinking) == ("assistant", content, thinking)
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or ()] == calls
    assert whole.done and whole.done_reason == reason and whole.model == "fake" and whole.created_at.endswith("Z")
    counts = whole.prompt_eval_count, whole.eval_count
    assert counts == (len(llm.tokenizer.encode(llm.seen[-1][0])), whole.eval_count)
    assert min(whole.total_duration, whole.prompt_eval_duration, whole.eval_duration) > 0 == whole.load_duration
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration
    parts = list(client.chat("fake", USER, stream=True, **wishes))
    assert joined(parts, lambda part: part.message.content) == content
    assert (joined(parts, lambda part: part.message.thinking) or None) == thinking
    assert [(c.function.name, c.function.arguments) for p in parts for c in p.message.tool_calls or ()] == calls
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1].done_reason == reason
    assert (parts[-1].prompt_eval_count, parts[-1].eval_count) == counts and parts[-1].message.content == ""
    assert name != "text" or len(parts) > 4


def test_a_conversation_with_tools_and_a_beginning(served):
    llm, client, *_ = served
    llm.reply = CALL
    talk = [*USER, client.chat("fake:latest", USER, tools=[get_weather]).message]
    talk += [{"role": "tool", "tool_name": "get_weather", "content": "rain"}]
    llm.reply = TEXT
    assert client.chat("fake", talk, tools=[get_weather]).message.content == TEXT
    told = llm.seen[-1][0]
    assert told.count(CALL) == 1 and "<tool_response>\nrain\n</tool_response>" in told
    client.chat("fake", [*USER, {"role": "assistant", "content": "I say "}])
    assert llm.seen[-1][0].endswith("I say ")


def test_options_are_sampling_params_and_others_are_told(served, caplog):
    llm, client, service, _ = served
    llm.reply = TEXT
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 5, "num_predict": 9.0}
    given |= {"stop": ["zz"], "repeat_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    before = service.metrics.ignored_fields
    client.chat("fake", USER, options={**given, "num_ctx": 8192, "mirostat": 1, "not_so": 1}, keep_alive="5m")
    params = llm.seen[-1][1]
    said = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
    for name, value in given.items():
        assert getattr(params, said.get(name, name)) == (("zz",) if name == "stop" else value)
    assert service.metrics.ignored_fields == before + 4
    assert "Ollama's 'num_ctx' decides nothing here: a request has as much as --max_model_len gives it" in caplog.text
    assert "'keep_alive'" in caplog.text and "not_so" not in caplog.text
    for endless in (-2, -1, 0):
        client.generate("fake", "hi", options={"num_predict": endless})
        params = llm.seen[-1][1]
        assert (params.max_tokens, params.top_k, params.repetition_penalty, params.temperature) == (None, 7, 1.5, 1)


def test_generate(served):
    llm, client, *_ = served
    llm.reply = "<think>hm</think>\n\nthe fox"
    whole = client.generate("fake", "hi", system="Be short.", logprobs=True, top_logprobs=2)
    assert (whole.response, whole.thinking, whole.done_reason) == ("the fox", "hm", "stop")
    prompt = llm.seen[-1][0]
    assert "Be short." in prompt and whole.context == llm.tokenizer.encode(prompt + llm.reply)
    assert len(whole.logprobs) == whole.eval_count and len(whole.logprobs[0].top_logprobs) == 2
    parts = list(client.generate("fake", "and then?", context=whole.context, stream=True, logprobs=True))
    assert joined(parts, lambda part: part.response) == "the fox" and parts[-1].context[:-1]
    assert llm.seen[-1][0].startswith(prompt + llm.reply) and "and then?" in llm.seen[-1][0]
    told = [one for part in parts for one in part.logprobs or ()]
    assert "".join(one.token for one in told) == llm.reply
    raw = client.generate("fake", "the lazy", raw=True)
    assert (raw.response, raw.thinking, raw.context) == (llm.reply, None, None) and llm.seen[-1][0] == "the lazy"
    loaded = client.generate("fake")
    assert (loaded.response, loaded.done_reason) == ("", "load") == ("", client.chat("fake").done_reason)
    for wish, words in (
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"suffix": "end"}, '"fake" does not support insert'),
        ({"images": [b"\x89PNG"]}, "images are not supported"),
        ({"raw": True, "system": "s"}, "raw mode does not support template, system, or context"),
        ({"context": [10**9]}, "outside the vocabulary|vocabulary"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as info:
            client.generate("fake", "hi", **wish)
        assert info.value.status_code == 400


def test_too_long_is_refused_unless_it_is_to_be_cut(served):
    llm, client, _, made = served
    llm.reply = TEXT
    long = [{"role": "system", "content": "Be short."}]
    for turn in range(6):
        long += [{"role": "user", "content": f"{turn} " + "a quiz " * 100}, {"role": "assistant", "content": "yes"}]
    for ask, words in (
        (
            lambda: client.chat("fake", [*long, *USER]),
            "context length: the prompt has .* tokens, above the model's 1000",
        ),
        (lambda: client.generate("fake", "a quiz " * 20_000), "max_model_len=1000 must hold it.*ask for truncate,"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as info:
            ask()
        assert info.value.status_code == 400
    ask = {"model": "fake", "stream": False, "truncate": True}
    headers = {"authorization": "Bearer secret"}
    said = made.post("/api/chat", {**ask, "messages": [*long, *USER]}, headers=headers).json()
    assert said["message"]["content"] == TEXT
    prompt = llm.seen[-1][0]
    assert "Be short." in prompt and "5 a quiz" in prompt and "0 a quiz" not in prompt
    said = made.post("/api/generate", {**ask, "prompt": "a quiz " * 1000}, headers=headers).json()
    assert said["prompt_eval_count"] == 999 and said["eval_count"] == 1
    refused = made.post(
        "/api/chat", {**ask, "messages": [{"role": "user", "content": "a quiz " * 1000}]}, headers=headers
    )
    assert refused.status_code == 400 and "the last one has more than 999 tokens" in refused.json()["error"]


def test_embeddings(served):
    llm, client, _, made = served
    found = client.embed("fake", ["the lazy", "the"])
    unit = pytest.approx([0.6, 0, -0.8, 0])
    assert list(found.embeddings) == [unit, unit] and found.prompt_eval_count == 3
    llm.pooling = Pooling(4, ())
    assert client.embed("fake", "the", dimensions=2).embeddings == [[1, 0]]
    llm.pooling = Pooling(4)
    assert client.embed("fake", "").embeddings == [] == client.embeddings("fake", "").embedding
    assert client.embeddings("poet", "the lazy").embedding == unit
    assert client.embed("fake", "a quiz " * 1000, truncate=True).prompt_eval_count == 1000
    for wish in ({"input": ["a", ""]}, {"input": "a", "dimensions": 2}, {"input": ["a", 3]}):
        response = made.post("/api/embed", {"model": "fake", **wish}, headers={"authorization": "Bearer secret"})
        assert response.status_code == 400 and isinstance(response.json()["error"], str)


def test_what_is_told_of_models(served):
    llm, client, *_ = served
    first, second = client.list().models
    assert (first.model, second.model, second.details.parent_model) == ("fake:latest", "poet:latest", "fake:latest")
    assert first.size == llm.facts.nbytes and len(first.digest) == 64 != second.digest and first.modified_at
    assert (first.details.parameter_size, first.details.quantization_level) == ("494.03M", "BF16")
    running = client.ps().models[0]
    assert running.size_vram == running.size and running.context_length == 1000 and running.expires_at.year == 9999
    shown = client.show("FAKE")
    assert shown.capabilities == ["completion", "tools", "thinking"] and shown.template == llm.template.source
    assert shown.modelinfo["qwen2.context_length"] == 1000 and shown.modelinfo["general.architecture"] == "qwen2"
    assert [line.split() for line in shown.parameters.splitlines()][1:] == [["top_k", "7"], ["repeat_penalty", "1.5"]]
    assert client.pull("fake").status == "success" == list(client.pull("fake", stream=True))[-1].status
    llm.reply = TEXT
    client.chat("Poet:latest", USER)
    assert llm.adapted[-1] == LoRARequest("poet")
    for ask in (client.show, client.pull, lambda name: client.chat(name, USER)):
        with pytest.raises(ollama.ResponseError, match="model 'other' not found; here is fake, poet") as info:
            ask("other")
        assert info.value.status_code == 404
    for ask in (
        lambda: client.delete("fake"),
        lambda: client.copy("fake", "b"),
        lambda: client.create("b", from_="fake"),
    ):
        with pytest.raises(ollama.ResponseError, match="this server has the models that it was started with") as info:
            ask()
        assert info.value.status_code == 403


def test_limits_errors_and_ends_are_those_of_all(served, monkeypatch):
    llm, client, service, made = served
    with pytest.raises(ollama.ResponseError, match="asks for a key") as info:
        ollama.Client(client._client.base_url.__str__()).chat("fake", USER)
    assert info.value.status_code == 401
    monkeypatch.setattr(endpoint, "PING_SECONDS", 0.05)
    monkeypatch.setattr(llm, "delay", 0.3)
    monkeypatch.setattr(llm, "reply", TEXT)
    monkeypatch.setattr(llm, "fail_at", 4)
    stream = client.chat("fake", USER, stream=True)
    assert next(stream).message.content == "the quick"  # after signs of life
    with pytest.raises(ollama.ResponseError, match="the device is lost"):
        list(stream)
    llm.died, llm.fail_at = "", None
    before = len(llm.aborted)
    stream = client.generate("fake", "hi", stream=True)
    next(stream)
    stream.close()
    until(lambda: len(llm.aborted) == before + 1 and not llm.running)
    monkeypatch.setattr(service, "unanswered", service.settings.max_queue)
    with pytest.raises(ollama.ResponseError, match="wait for their first token") as info:
        client.chat("fake", USER)
    assert info.value.status_code == 429
    monkeypatch.setattr(service, "draining", True)
    assert made.post("/api/chat", {}, headers={"authorization": "Bearer secret"}).status_code == 503
