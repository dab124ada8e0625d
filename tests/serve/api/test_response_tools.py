"""Tools of namespaces and custom tools in /v1/responses, as Codex sends them: the model is told of functions, and its
calls come back as the client named them."""

import json

import pytest
from client import Client, error
from fake_llm import FakeLLM
from openai.types import responses
from pydantic import TypeAdapter

from shardlm.serve.api.response_tools import arguments_of, input_of

FIND = {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.", "format": GRAMMAR}
NAMESPACE = {"type": "namespace", "name": "mcp__crm", "description": "Of customers.", "tools": [FIND, PATCH]}
TOOLS = [FIND, NAMESPACE, PATCH, {"type": "web_search"}]
TEXT = '*** "é" \\ \n+x'


def called(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = [  # (as the model writes it, as the client reads it)
    (called("find", {"a": 1}), {"type": "function_call", "name": "find", "arguments": '{"a": 1}'}),
    (
        called("mcp__crm__find", {}),
        {"type": "function_call", "name": "find", "namespace": "mcp__crm", "arguments": "{}"},
    ),
    (called("patch", {"input": TEXT}), {"type": "custom_tool_call", "name": "patch", "input": TEXT}),
    (
        called("mcp__crm__patch", {"input": ""}),
        {"type": "custom_tool_call", "name": "patch", "namespace": "mcp__crm", "input": ""},
    ),
    (called("other", {}), {"type": "function_call", "name": "other", "arguments": "{}"}),
]


def test_calls_come_back_as_the_client_named_the_tools():
    client = Client(FakeLLM(reply="\n".join(wrote for wrote, _ in CALLS), chunk=3))
    body = client.post("/v1/responses", {"input": "hi", "tools": TOOLS}).json()
    TypeAdapter(responses.Response).validate_json(json.dumps(body), strict=True)
    assert body["tools"] == TOOLS[:3] and client.service.metrics.ignored_fields == 1
    told = [{key: item[key] for key in item if key not in ("id", "call_id", "status")} for item in body["output"]]
    assert told == [read for _, read in CALLS]
    raw = client.post("/v1/responses", {"input": "hi", "tools": TOOLS, "stream": True}).text
    events = [json.loads(one.partition("\ndata: ")[2]) for one in raw.strip().split("\n\n")]
    for event in events:
        TypeAdapter(responses.ResponseStreamEvent).validate_json(json.dumps(event), strict=True)
    done = {event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    grown = dict.fromkeys(done, "")
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["item_id"]] += event["delta"]
    assert [item.get("input", item.get("arguments")) for item in done.values()] == [*grown.values()]
    assert [item.get("namespace") for item in done.values()] == [read.get("namespace") for _, read in CALLS]


def test_the_model_is_told_of_functions_and_of_earlier_calls():
    client = Client()
    items = [
        {"type": "function_call", "call_id": "a", "name": "find", "namespace": "mcp__crm", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": TEXT},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]},
    ]
    assert client.post("/v1/responses", {"input": items, "tools": TOOLS}).status_code == 200
    prompt = client.llm.seen[-1][0]
    assert all(f'"name": "{name}"' in prompt for name in ("find", "mcp__crm__find", "patch", "mcp__crm__patch"))
    assert prompt.count("mcp__crm__*: Of customers.") == 1 and "start: /x+/" in prompt and "web_search" not in prompt
    assert called("mcp__crm__find", {}) in prompt and "\nrain\n" in prompt and "\ndone\n" in prompt
    assert f'{{"name": "patch", "arguments": {arguments_of(TEXT)}}}' in prompt


def test_tools_that_are_items_of_the_input():
    """As Codex sends them from 0.144 on, those of its own in the namespace that means none."""
    own = {"type": "namespace", "name": "functions", "description": "Default.", "tools": [PATCH, FIND]}
    added = {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [own, NAMESPACE]}
    llm = FakeLLM(reply="\n".join(wrote for wrote, _ in CALLS[:4]), max_model_len=2000)
    turns = [{"role": "user", "content": "ONE " + "a " * 1500}, {"role": "user", "content": "TWO"}]
    for items in ([added, *turns[1:]], [turns[0], added, turns[1]]):
        body = Client(llm).post("/v1/responses", {"input": items, "truncation": "auto", "max_output_tokens": 400})
        body = body.json()
        told = [{key: item[key] for key in item if key not in ("id", "call_id", "status")} for item in body["output"]]
        assert told == [read for _, read in CALLS[:4]] and body["tools"] == []
        assert "TWO" in llm.seen[-1][0] and "ONE" not in llm.seen[-1][0] and "Default" not in llm.seen[-1][0]


def allowed(*tools):
    return {"type": "allowed_tools", "mode": "required", "tools": tools}


FORCED = [  # (tool_choice, the reply, what is called)
    ({"type": "custom", "name": "patch"}, arguments_of(TEXT), TEXT),
    ({"type": "function", "name": "find", "namespace": "mcp__crm"}, '{"a":1}', '{"a":1}'),
    ({"type": "function", "name": "mcp__crm__find"}, '{"a":1}', '{"a":1}'),
    (allowed({"type": "namespace", "name": "mcp__crm"}), '[{"name":"mcp__crm__find","arguments":{}}]', "{}"),
    (allowed({"type": "custom", "name": "patch"}), '[{"name":"patch","arguments":{"input":"x"}}]', "x"),
]


@pytest.mark.parametrize("choice, reply, read", FORCED)
def test_a_tool_that_must_be_called(choice, reply, read):
    body = Client(FakeLLM(reply=reply)).post(
        "/v1/responses", {"input": "hi", "tools": [FIND, PATCH, {**NAMESPACE, "tools": [FIND]}], "tool_choice": choice}
    )
    assert body.status_code == 200, body.text
    (item,) = body.json()["output"]
    assert item.get("input", item.get("arguments")) == read and item["status"] == "completed"


def test_what_is_refused():
    only = {**NAMESPACE, "tools": [FIND]}
    for wishes, param in [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**FIND, "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [FIND, {**NAMESPACE, "tools": {}}]}, "tools[1].tools"),
        ({"tools": [{**NAMESPACE, "name": ""}]}, "tools[0].name"),
        ({"tools": [{**NAMESPACE, "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{**NAMESPACE, "tools": [NAMESPACE]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**PATCH, "format": {"type": "yaml"}}]}, "tools[0].format"),
        ({"tools": [{**FIND, "name": "mcp__crm__find"}, NAMESPACE]}, "tools[1].tools[0]"),
        ({"tools": [only], "tool_choice": {"type": "namespace", "name": "mcp__crm"}}, "tool_choice"),
        ({"tools": [only, {**only, "name": "b"}], "tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
        ({"tools": [only], "tool_choice": {"type": "custom", "name": "patch"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{**CALLS[0][1], "namespace": 3}]}, "input[0].namespace"),
        ({"input": [{"type": "additional_tools", "tools": "all"}]}, "input[0].tools"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]}, "input[0].tools[0].name"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ]:
        told = error(Client().post("/v1/responses", {"input": "a", **wishes}), 400)
        assert told["param"] == param and told["message"].startswith(param.partition(".")[0])


def test_input_that_is_cut_off_anywhere():
    whole = arguments_of(TEXT)
    begun = len('{"input": "')
    parts = [input_of(whole[:end]) for end in range(begun, len(whole) + 1)]
    assert parts[-1] == TEXT and all(TEXT.startswith(part) for part in parts)
    assert {input_of(json.dumps({"input": "é🙂"})[:end]) for end in range(-13, -3)} == {"é"}
    assert input_of('{"other": "x"}') == '{"other": "x"}'
