"""Every answer and every event of a stream is what OpenAI's own types say, without what their client would forgive."""

import functools
import json

import pydantic
import pytest
from client import Client
from fake_llm import FakeLLM
from openai import types
from openai.types import chat, responses

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
CALLS = "So. " + 2 * '<tool_call>\n{"name": "weather", "arguments": {"city": "A"}}\n</tool_call>\n'
CHATS = {
    "text": ("the quick fox", {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["ick"]}),
    "calls": (CALLS, {"tools": [{"type": "function", "function": FUNCTION}], "logprobs": True}),
    "cut": (CALLS, {"tools": [{"type": "function", "function": FUNCTION}], "max_completion_tokens": 30}),
    "nothing": ("", {}),
}
RESPONSES = {
    "text": ("the quick fox", {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"}}),
    "calls": (CALLS, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto"}),
    "cut": (CALLS, {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 30}),
    "form": ('{"city": "A"}', {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    "thought": ("<think>hm</think>the fox", {"reasoning": {"effort": "low"}}),
    "nothing": ("", {}),
}


@functools.cache
def _adapter(kind):
    return pydantic.TypeAdapter(kind)


def check(kind, value):
    _adapter(kind).validate_json(json.dumps(value), strict=True)


@pytest.mark.parametrize("name", CHATS)
def test_chats(name):
    reply, wishes = CHATS[name]
    client, body = Client(FakeLLM(reply=reply, chunk=2)), {"messages": [{"role": "user", "content": "hi"}], **wishes}
    check(chat.ChatCompletion, client.post("/v1/chat/completions", body).json())
    for event in client.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}):
        check(chat.ChatCompletionChunk, event)


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name):
    reply, wishes = RESPONSES[name]
    client = Client(FakeLLM(reply=reply, chunk=2, template_name="qwen3" if name == "thought" else "qwen25"))
    check(responses.Response, client.post("/v1/responses", {"input": "hi", **wishes}).json())
    events = client.post("/v1/responses", {"input": "hi", "stream": True, **wishes}).text.strip().split("\n\n")
    for number, event in enumerate(events):
        named, _, value = event.partition("\ndata: ")
        told = json.loads(value)
        assert named == f"event: {told['type']}" and told["sequence_number"] == number
        check(responses.ResponseStreamEvent, told)


def test_completions_embeddings_and_models():
    client = Client()
    for wishes in ({"logprobs": 2, "n": 2}, {"prompt": ["a", "b"], "echo": True}):
        check(types.Completion, client.post("/v1/completions", {"prompt": "a", **wishes}).json())
    check(types.CreateEmbeddingResponse, client.post("/v1/embeddings", {"input": ["a", "b"]}).json())
    check(types.Model, client.get("/v1/models").json()["data"][0])
