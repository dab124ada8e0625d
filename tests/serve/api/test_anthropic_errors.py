"""What /v1/messages refuses, and how it fails, as Anthropic's own client reads it."""

import json

import anthropic
import pytest
from anthropic import types
from client import Client
from fake_llm import FakeLLM
from messages_asks import ASK, FORMAT, PATH, SEARCH, check, serving_messages
from sockets import listens, until


@pytest.fixture(scope="module")
def served():
    with serving_messages() as found:
        yield found


ERRORS = [  # (wishes, status of their client's error, how its message begins)
    ({"model": "other"}, anthropic.NotFoundError, "the model 'other' is not here; here is fake"),
    ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens=-1 must be at least 0"),
    ({"max_tokens": "9"}, anthropic.BadRequestError, "max_tokens: "),
    ({"messages": []}, anthropic.BadRequestError, "messages is empty"),
    ({"messages": "hi"}, anthropic.BadRequestError, "messages: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, anthropic.BadRequestError, "messages[0].role='tool' must be"),
    ({"messages": [{"role": "user"}]}, anthropic.BadRequestError, "messages[0].content is a NoneType; it is a text"),
    ({"messages": [{"role": "user", "content": [3]}]}, anthropic.BadRequestError, "messages[0].content[0]=3 is no"),
    ({"temperature": -1}, anthropic.BadRequestError, "temperature=-1"),
    ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences=[''] has an empty text"),
    ({"system": 3}, anthropic.BadRequestError, "system: "),
    ({"tools": [{"name": "x"}]}, anthropic.BadRequestError, "tools[0].input_schema is no JSON schema"),
    ({"tools": [{"input_schema": {}}]}, anthropic.BadRequestError, "tools[0] has no name"),
    ({"tools": [{"type": 3}]}, anthropic.BadRequestError, "tools[0].type=3"),
    ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice='required' needs tools"),
    ({"tool_choice": {"type": "some"}}, anthropic.BadRequestError, "tool_choice="),
    ({"tool_choice": {"type": "tool", "name": "web_search"}, "tools": [SEARCH]}, anthropic.BadRequestError, "tool_cho"),
    ({"tool_choice": {"type": "any"}, "tools": [SEARCH]}, anthropic.BadRequestError, "tool_choice="),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 3}}, anthropic.BadRequestError, "tool_choice.disab"),
    ({"thinking": {"type": "much"}}, anthropic.BadRequestError, "thinking.type='much'"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, anthropic.BadRequestError, "thinking.budget_tokens=-1"),
    ({"output_config": {"effort": "most"}}, anthropic.BadRequestError, "output_config.effort='most'"),
    ({"output_config": {"format": {"type": "yaml"}}}, anthropic.BadRequestError, "output_config.format.type='yaml'"),
    (
        {"output_config": FORMAT, "output_format": FORMAT["format"]},
        anthropic.BadRequestError,
        "output_config.format and",
    ),
    ({"messages": [{"role": "user", "content": "a " * 1000}]}, anthropic.BadRequestError, "prompt is too long: "),
    ({"messages": [{"role": "user", "content": "a " * 99_000}]}, anthropic.BadRequestError, "prompt is too long: "),
]
BLOCKS = {  # of a user, and what is said of each
    "image": ({"type": "image", "source": {"type": "base64", "data": ""}}, "is of type image of source 'base64'"),
    "pdf": ({"type": "document", "source": {"type": "url", "url": "x"}}, "is of type document of source 'url'"),
    "other": ({"type": "server_tool_use"}, "is of type server_tool_use; this model reads text"),
    "no text": ({"type": "text"}, ".text=None must be a text"),
    "no id": ({"type": "tool_result"}, ".tool_use_id=None must be a text"),
    "inside": ({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}, ".content[0] is of type"),
    "document": ({"type": "document", "source": {"type": "text"}}, ".source.data is a NoneType"),
}
SAID = {  # by the assistant
    "input": ({"type": "tool_use", "id": "x", "name": "f", "input": "{}"}, ".input='{}' must be an object"),
    "name": ({"type": "tool_use", "id": "x", "input": {}}, ".name=None must be a text"),
    "thoughts": ({"type": "thinking"}, ".thinking=None must be a text"),
    "last": ({"type": "tool_use", "id": "x", "name": "f", "input": {}}, "ends with a tool_use"),
}
for role, blocks in (("user", BLOCKS), ("assistant", SAID)):
    for block, said in blocks.values():
        where = "messages[0].content[0]" if said.startswith((".", "is of")) else "messages "
        said = f"{where} {said}" if said.startswith("is") else where + said
        ERRORS.append(({"messages": [{"role": role, "content": [block]}]}, anthropic.BadRequestError, said))


@pytest.mark.parametrize("case", range(len(ERRORS)), ids=lambda i: ERRORS[i][2][:40])
def test_what_is_refused(served, case):
    llm, client, service = served
    wishes, kind, message = ERRORS[case]
    before = len(llm.seen)
    for stream in (False, True):
        with pytest.raises(kind) as info:
            client.post(PATH, body={**ASK, **wishes, "stream": stream}, cast_to=types.Message)
        told = info.value
        assert told.body["error"]["message"].startswith(message), told.body
        assert told.type == {400: "invalid_request_error", 404: "not_found_error"}[told.status_code]
        assert told.request_id == told.body["request_id"] and told.request_id.startswith("req_")
    assert len(llm.seen) == before
    until(lambda: service.unanswered == service.active == 0)


def test_a_prompt_that_is_too_long_tells_its_tokens(served):
    _, client, _ = served
    messages = [{"role": "user", "content": "a " * 1000}]
    count = client.messages.count_tokens(model="fake", messages=messages).input_tokens  # of any length
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > 1000 maximum; .*{count}"):
        client.messages.create(**{**ASK, "messages": messages})


def test_keys_models_and_paths(served):
    _, client, service = served
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY"):
        client.with_options(api_key="other").messages.create(**ASK)
    bearer = anthropic.Anthropic(base_url=str(client.base_url), auth_token="secret", api_key=None, max_retries=0)
    assert [model.id for model in bearer.models.list()] == ["fake"]
    model = bearer.models.retrieve("fake")
    check(types.ModelInfo, json.loads(model.to_json()))
    assert (model.display_name, model.max_input_tokens, model.type) == ("fake", 1000, "model")
    for path in ("/v1/models/other", "/v1/messages/batches"):
        with pytest.raises(anthropic.NotFoundError) as info:
            client.get(path, cast_to=types.Message)
        assert info.value.type == "not_found_error" and info.value.request_id
    with pytest.raises(anthropic.APIStatusError) as info:
        client.get(PATH, cast_to=types.Message)
    assert info.value.status_code == 405 and info.value.type == "invalid_request_error"
    service.draining = True
    with pytest.raises(anthropic.OverloadedError) as info:
        client.messages.create(**ASK)
    service.draining = False
    assert info.value.type == "overloaded_error" and info.value.response.headers["retry-after"] == "1"


def test_servers_that_fail_and_are_full():
    asked = dict(ASK, stream=True)
    odd = {"type": "web_search_1", "name": [], "eager_input_streaming": True}
    assert Client().post(PATH, {**ASK, "tools": [odd]}).status_code == 200
    for llm, status, kind in (
        (FakeLLM(fail_at=0), 500, "api_error"),
        (FakeLLM(max_model_len=4096), 413, "request_too_large"),
    ):
        response = Client(llm, max_body=2000 if status == 500 else 50).post(PATH, asked)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    client = Client(max_queue=1)
    client.service.unanswered = 1
    response = client.post(PATH, asked)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    *_, delta, last, end = Client(FakeLLM(fail_at=2)).post(PATH, asked).text.split("\n\n")
    assert end == "" and delta.startswith("event: content_block_delta") and last.startswith("event: error\ndata: ")
    told = json.loads(last.partition("\ndata: ")[2])
    assert told["error"] == {"type": "api_error", "message": "the device is lost"} and told["request_id"]
    with listens(Client(FakeLLM(fail_at=2)).app) as (_, address):  # which needs no key
        client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="the device is lost"), client.messages.stream(**ASK) as live:
            live.until_done()
