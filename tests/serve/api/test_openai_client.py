"""OpenAI's own client, over sockets."""

import json
import socket

import openai
import pydantic
import pytest
from fake_llm import FakeLLM
from sockets import post, serving, until

from shardlm.serve.api import endpoint

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = [{"role": "user", "content": "hi"}]


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
