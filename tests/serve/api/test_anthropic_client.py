"""/v1/messages as Anthropic's own client reads it, over sockets and through the types it has: whole, streamed, counted,
and as Claude Code asks."""

import json

import anthropic
import pytest
from anthropic import types
from client import Client
from fake_llm import FakeLLM
from messages_asks import ASK, FORMAT, PATH, SEARCH, TOOL, USER, check, serving_messages
from sockets import listens, until

from shardlm.serve.api import endpoint

ARGUMENTS = '{"city": "é日"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}


def text(words):
    return {"type": "text", "text": words}


def used(**given):
    return {"type": "tool_use", "name": "get_weather", "input": given}


CASES = {  # the reply, further fields, content, stop_reason
    "text": ("the quick é日🙂 fox \n", {}, [text("the quick é日🙂 fox \n")], "end_turn"),
    "nothing": ("", {}, [], "end_turn"),
    "stopped": ("the quick fox", {"stop_sequences": ["ick", "zz"]}, [text("the qu")], "stop_sequence"),
    "cut": ("the quick brown fox", {"max_tokens": 2}, [text("the quick")], "max_tokens"),
    "no room": ("the quick " * 1000, {"max_tokens": 9999}, None, "model_context_window_exceeded"),
    "cache alone": ("the quick brown fox", {"max_tokens": 0}, [], "max_tokens"),
    "thought": ("<think>hm</think>\n\nthe fox", {}, [THOUGHT, text("the fox")], "end_turn"),
    "calls": (
        f"<think>hm</think>\n\nI look. \n{CALL}\n{CALL}",
        {"tools": [TOOL, SEARCH], "thinking": {"type": "adaptive"}},
        [THOUGHT, text("I look."), used(city="é日"), used(city="é日")],
        "tool_use",
    ),
    "one call": (
        CALL + CALL,
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        [used(city="é日")],
        "tool_use",
    ),
    "a call that is cut off": (CALL, {"tools": [TOOL], "max_tokens": 45}, None, "max_tokens"),
    "a call in other words": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": A}}\n</tool_call>',
        {"tools": [TOOL]},
        [used(INVALID_JSON='{"city": A}')],
        "tool_use",
    ),
    "any": (
        f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        {"tools": [TOOL], "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}},
        [used(city="é日")],
        "tool_use",
    ),
    "this tool": (
        ARGUMENTS,
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}, "thinking": {"type": "disabled"}},
        [used(city="é日")],
        "tool_use",
    ),
    "no tool": (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, [text(CALL)], "end_turn"),
    "form": ("<think>hm</think>" + ARGUMENTS, {"output_config": FORMAT}, [THOUGHT, text(ARGUMENTS)], "end_turn"),
    "not shown": (
        "<think>hm</think>the fox",
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}},
        [text("the fox")],
        "end_turn",
    ),
}


@pytest.fixture(scope="module")
def served():
    with serving_messages() as found:
        yield found


@pytest.mark.parametrize("name", CASES)
def test_whole_streamed_and_counted(served, name):
    llm, client, service = served
    llm.reply, wishes, content, reason = CASES[name]
    raw = client.messages.with_raw_response.create(**{**ASK, **wishes})
    check(types.Message, json.loads(raw.http_response.content))
    whole = raw.parse()
    assert whole.id.startswith("msg_") and raw.headers["request-id"] == whole.id.replace("msg_", "req_")
    assert whole.model == "fake" and whole.stop_reason == reason
    assert whole.stop_sequence == ("ick" if reason == "stop_sequence" else None)
    told = [{key: value for key, value in block.to_dict().items() if key != "id"} for block in whole.content]
    assert content is None or told == content
    prompt, params, _ = llm.seen[-1]
    usage = whole.usage
    assert usage.cache_read_input_tokens == 3 and usage.cache_creation_input_tokens == 0
    counted = {key: wishes[key] for key in wishes.keys() - {"max_tokens", "stop_sequences"}}
    count = client.messages.count_tokens(model="fake", messages=USER, **counted).input_tokens
    assert usage.input_tokens + 3 == count == len(llm.tokenizer.encode(prompt))
    assert usage.output_tokens <= min(params.max_tokens, 1000 - count)
    assert (usage.output_tokens_details.thinking_tokens > 0) == ("<think>" in llm.reply)
    with client.messages.stream(**{**ASK, **wishes}) as stream:
        events = [event for event in stream if event.type in ("message_start", "message_delta", "content_block_start")]
        final = stream.get_final_message()
    assert events[0].message.usage.input_tokens == usage.input_tokens and events[0].message.stop_reason is None
    assert (final.stop_reason, final.stop_sequence, final.usage) == (reason, whole.stop_sequence, usage)
    ids = [block.id for block in final.content if block.type == "tool_use"]
    assert len({*ids}) == len(ids) and all(id.startswith("toolu_") for id in ids)
    streamed = [{key: value for key, value in block.to_dict().items() if key != "id"} for block in final.content]
    assert streamed == told
    until(lambda: service.unanswered == service.active == 0)


def test_events_are_what_their_types_say():
    llm = FakeLLM(reply=CASES["calls"][0], template_name="qwen3")
    raw = Client(llm).post(PATH, {**ASK, **CASES["calls"][1], "stream": True}).text
    assert raw.endswith("\n\n") and "[DONE]" not in raw
    kinds = []
    for event in raw.strip().split("\n\n"):
        named, _, value = event.partition("\ndata: ")
        told = json.loads(value)
        assert named == f"event: {told['type']}"
        kinds.append(told["type"].removeprefix("content_block_"))
        if told["type"] != "ping":
            check(types.RawMessageStreamEvent, told)
    assert kinds[:2] == ["message_start", "ping"] and kinds[-3:-1] == ["stop", "message_delta"]
    order = [kind for kind in kinds if kind in ("start", "stop")]
    assert order == ["start", "stop"] * 4 and kinds[-1] == "message_stop"


def test_calls_come_whole_or_as_they_are_written(served):
    """Their client gives up a stream whose arguments are no JSON; eager tools have them as they come all the same."""
    llm, client, _ = served
    llm.reply = CALL
    deltas = {}
    for eager in (False, True):
        with client.messages.stream(**ASK, tools=[{**TOOL, "eager_input_streaming": eager}]) as stream:
            deltas[eager] = [event.partial_json for event in stream if event.type == "input_json"]
            assert stream.get_final_message().content[0].input == {"city": "é日"}
    assert deltas[False] == ['{"city":"é日"}'] and "".join(deltas[True]) == ARGUMENTS and len(deltas[True]) > 2


def test_a_conversation_becomes_the_prompt(served):
    llm, client, _ = served
    llm.reply = "fine"
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text("A") | cached, text("B")]},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": [THOUGHT, {"type": "redacted_thinking", "data": "x"}, text("I look.")]},
        {"role": "assistant", "content": [{**used(city="é"), "id": "t1"}, {**used(INVALID_JSON='{"ci'), "id": "t2"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("rain"), text("wind")]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "no such city"},
                {"type": "document", "title": "T", "source": {"type": "text", "data": "D", "media_type": "text/plain"}},
            ],
        },
        {"role": "system", "content": "LATER"},
    ]
    billing = text("x-anthropic-billing-header: cc_version=2; cch=123;")
    system = [billing, text("Be brief.") | cached, text("Be right.")]
    client.messages.create(**{**ASK, "messages": messages, "system": system, "tools": [TOOL], "max_tokens": 1})
    prompt = llm.seen[-1][0]
    for part in (
        *(
            "system\nBe brief.\nBe right.\n\n# Tools",
            "user\nA\nB\nC<",
            '"arguments": {"city": "é"}',
            '"arguments": {"ci',
        ),
        *(
            "\nrain\nwind\n",
            "\nError: no such city\n",
            "user\nT\nD<",
            "system\nLATER<",
            "assistant\nI look.",
        ),
    ):
        assert part in prompt, part
    assert "cch=" not in prompt and "cache_control" not in prompt and prompt.endswith("<|im_start|>assistant\n")
    del messages[-2]["content"][-1]  # thoughts before calls are shown while their results are the last word
    client.messages.create(**{**ASK, "messages": messages[:-1]})
    assert "<think>\nhm\n</think>\n\nI look." in llm.seen[-1][0]
    begun = client.messages.create(**{**ASK, "messages": [*USER, {"role": "assistant", "content": "The best is ("}]})
    assert llm.seen[-1][0].endswith("The best is (") and begun.content[0].text == "fine"
    client.messages.create(**{**ASK, "messages": [*USER, {"role": "assistant", "content": []}]})
    assert llm.seen[-1][0].endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    for kind, wrote in (("disabled", "<think>\n\n</think>\n\n"), ("adaptive", "assistant\n")):
        client.messages.create(**ASK, thinking={"type": kind})
        assert llm.seen[-1][0].endswith(wrote)
    client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert llm.seen[-1][1].thinking_token_budget == 1024


def test_templates_that_have_no_later_system_message():
    """It is the user's word then, and the first one stays where it is."""
    llm = FakeLLM(template_name="gemma3")
    messages = [*USER, {"role": "assistant", "content": "yes"}, {"role": "system", "content": "LATER"}, *USER]
    response = Client(llm).post(PATH, {**ASK, "system": "FIRST", "messages": messages})
    assert response.status_code == 200, response.text
    shown = llm.seen[-1][0]
    assert shown.index("FIRST\n\nhi") < shown.index("yes") < shown.index("LATER\nhi")


def test_a_model_without_thoughts_takes_wishes_for_them():
    """As agents send them to any model."""
    for template in ("qwen25", "llama31", "gpt_oss"):
        client = Client(FakeLLM(template_name=template))
        for kind in ("enabled", "disabled", "adaptive", "between_tools"):
            wish = {"type": kind, **({"budget_tokens": 31_999} if kind == "enabled" else {})}
            body = {**ASK, "thinking": wish, "output_config": {"effort": "xhigh"}}
            assert client.post(PATH, body).status_code == 200, (template, kind)


def test_what_claude_code_sends():
    llm = FakeLLM(reply=CALL, template_name="qwen25")
    client, cached = Client(llm), {"cache_control": {"type": "ephemeral"}}
    tools = [{**TOOL, **cached, "eager_input_streaming": True}, {"type": "custom", **TOOL, "name": "Bash"}, SEARCH]
    body = {
        **ASK,
        "max_tokens": 32_000,
        "stream": True,
        "temperature": 1,
        "system": [text("x-anthropic-billing-header: cch=1;"), text("You are.") | cached],
        "messages": [{"role": "user", "content": [text("<system-reminder>x</system-reminder>"), text("hi") | cached]}],
        "tools": tools,
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
    }
    response = client.post(f"{PATH}?beta=true", body, headers=headers)
    assert response.status_code == 200 and '"stop_reason":"tool_use"' in response.text
    assert client.service.metrics.ignored_fields == 2  # context_management and the search
    del body["max_tokens"], body["stream"]
    assert client.post(f"{PATH}/count_tokens?beta=true", body, headers=headers).json()["input_tokens"] > 100
    assert 'finished_reason="stop"} 1' in client.get("/metrics").text and client.get("/").status_code == 200
    assert client.get("/openapi.json").json()["paths"][PATH]["post"]["summary"].startswith("As A")


def test_streams_give_signs_of_life_while_they_wait(monkeypatch):
    monkeypatch.setattr(endpoint, "PING_SECONDS", 0.02)
    client = Client(FakeLLM(reply="the fox", delay=0.1))
    events = client.post(PATH, {**ASK, "stream": True}).text.split("\n\n")
    assert events[0] == 'event: ping\ndata: {"type":"ping"}' and events.count(events[0]) > 3
    ask = {"model": "fake", "prompt": "a", "stream": True}  # its events are OpenAI's, whoever asks
    assert client.post("/v1/completions", ask, headers={"anthropic-version": "2023-06-01"}).text.startswith(": ping")
    with listens(client.app) as (_, address):
        own = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        with own.messages.stream(**ASK) as stream:
            assert stream.get_final_text() == "the fox"
        client.llm.fail_at = 0
        with pytest.raises(anthropic.APIStatusError, match="the device is lost"), own.messages.stream(**ASK) as stream:
            stream.until_done()


def test_a_client_that_closes_amid_a_stream():
    llm = FakeLLM(reply="word " * 1000, delay=0.05)  # most of a minute
    app = Client(llm).app
    with listens(app) as (_, address), anthropic.Anthropic(base_url=address, api_key="none") as client:
        with client.messages.stream(**ASK) as stream:
            next(iter(stream.text_stream))
            assert llm.running
        until(lambda: not llm.running and not app.state.service.active)
        assert len(llm.aborted) == 1
