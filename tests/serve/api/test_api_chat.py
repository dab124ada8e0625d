"""/v1/chat/completions and /v1/responses: prompts, calls of tools, forms that the text is held to, streams."""

import json

import pytest
from client import Client, error
from fake_llm import FakeLLM

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CALL = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "é日"}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "B"}}\n</tool_call>'
FORCED = '[{"name": "get_weather", "arguments": {"city": "é日"}}]'


def join(events):
    """The choices that a stream's chunks add up to, in the shape of a whole answer."""
    choices = {}
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for part in event["choices"]:
            index, delta = part["index"], part["delta"]
            if index not in choices:
                assert delta == {"role": "assistant", "content": ""}
                choices[index] = {"content": "", "calls": [], "scores": [], "reason": None}
            choice = choices[index]
            assert choice["reason"] is None
            choice["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(choice["calls"]) and call["type"] == "function"
                    choice["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            choice["scores"] += (part["logprobs"] or {"content": []})["content"]
            choice["reason"] = part["finish_reason"]
    return [choices[i] for i in sorted(choices)]


def whole(body):
    found = []
    for choice in body["choices"]:
        message = choice["message"]
        calls = [{"id": one["id"], **one["function"]} for one in message.get("tool_calls", ())]
        scores = (choice["logprobs"] or {"content": []})["content"]
        found.append(
            {"content": message["content"] or "", "calls": calls, "scores": scores, "reason": choice["finish_reason"]}
        )
    return found


NAMED = {"type": "function", "function": {"name": "get_weather"}}
NOW = {"type": "function", "function": {"name": "now"}}


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


OBJECT = {"response_format": {"type": "json_object"}}
CASES = {
    "plain": ("the quick é日🙂 fox", {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["o"]}, "stop", 0),
    "length": ("the quick brown", {"max_completion_tokens": 2, "max_tokens": 9, "logprobs": True}, "length", 0),
    "auto": (CALL, {"tools": [TOOL]}, "tool_calls", 1),
    "two": (TWO, {"tools": [TOOL], "tool_choice": "auto"}, "tool_calls", 2),
    "one of two": (TWO, {"tools": [TOOL], "parallel_tool_calls": False}, "tool_calls", 1),
    "no call": ("the fox", {"tools": [TOOL]}, "stop", 0),
    "none": (CALL, {"tools": [TOOL], "tool_choice": "none"}, "stop", 0),
    "required": (FORCED, {"tools": [TOOL], "tool_choice": "required"}, "tool_calls", 1),
    "named": (
        '{"city": "A"}',
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        "stop",
        1,
    ),
    "a call and no form": (
        CALL.partition("\n")[2],
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        "tool_calls",
        1,
    ),
    "a form and no call": ('{"a": 1}', {"tools": [TOOL], **OBJECT}, "stop", 0),
    "a form of a text that there is not": (
        FORCED,
        {"tools": [TOOL], "tool_choice": "required", **OBJECT},
        "tool_calls",
        1,
    ),
    "allowed": (FORCED, {"tools": [NOW, TOOL], "tool_choice": allowed("required", NAMED)}, "tool_calls", 1),
    "object": ('{"a": [1]}', OBJECT, "stop", 0),
    "schema": (
        '{"city": "A"}',
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        "stop",
        0,
    ),
    "any object": ('{"a": [1]}', {"structured_outputs": {"json_object": True}}, "stop", 0),
    "regex": ("aab", {"structured_outputs": {"regex": "a+b"}}, "stop", 0),
    "lark": ("ab", {"guided_grammar": 'start: "a" "b"'}, "stop", 0),
    "gbnf": ("ab", {"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= "b" | "c"'}}, "stop", 0),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_whole_and_streamed(name):
    """The fake engine holds what it writes to the grammar that it is given."""
    reply, wishes, reason, calls = CASES[name]
    client = Client(FakeLLM(reply=reply, chunk=2))
    response = client.post(PATH, {"messages": USER, **wishes})
    assert response.status_code == 200, response.text
    body = response.json()
    answers = whole(body)
    assert len(answers) == wishes.get("n", 1) and body["object"] == "chat.completion"
    for answer in answers:
        assert answer["reason"] == reason and len(answer["calls"]) == calls
        for call in answer["calls"]:
            assert call["name"] == "get_weather" and json.loads(call["arguments"]).keys() == {"city"}
    if not calls:
        stopped = {"plain": "the quick é日🙂 f", "length": "the quick"}.get(name, reply)
        assert answers[0]["content"] == stopped
    *events, usage = client.events(PATH, {"messages": USER, **wishes, "stream_options": {"include_usage": True}})
    assert usage["usage"] == body["usage"]
    for streamed, answer in zip(join(events), answers, strict=True):
        for ours, theirs in zip(streamed["calls"], answer["calls"], strict=True):
            assert {**ours, "id": ""} == {**theirs, "id": ""}  # ids are each answer's own
        if calls:
            streamed["content"] = streamed["content"].strip()
        assert {**streamed, "calls": 0} == {**answer, "calls": 0}
    shown = "get_weather" in client.llm.seen[-1][0]
    assert shown == (bool(wishes.get("tools")) and wishes.get("tool_choice") != "none")


def test_a_message_that_goes_on():
    client = Client()
    begun = [*USER, {"role": "assistant", "content": "The quick"}]
    for path, wish in ((PATH, {"max_tokens": 1}), ("/tokenize", {})):
        body = client.post(path, {"messages": begun, "continue_final_message": True, **wish}).json()
        shown = (
            client.llm.seen[-1][0] if path == PATH else client.llm.tokenizer.decode(body["tokens"], skip_special=False)
        )
        assert shown.endswith("assistant\nThe quick")


def test_log_probabilities():
    body = Client().post(PATH, {"messages": USER, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0}).json()
    first, second, *_ = body["choices"][0]["logprobs"]["content"]
    assert first["token"] == "the" and first["logprob"] == -0.5 and bytes(first["bytes"]) == b"the"
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -1.06]  # itself, being the likeliest
    assert second["logprob"] == -4 and [top["logprob"] for top in second["top_logprobs"]] == [-1.06, -1.061]
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


def test_messages_become_the_prompt():
    client = Client()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ]
    client.post(PATH, {"messages": messages, "max_tokens": 1})
    prompt = client.llm.seen[-1][0]
    for part in ("system\nBe brief.<", "user\nA\nB<", '{"name": "f", "arguments": {"x": 1}}', "\nresult\n"):
        assert part in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    unsaid = {"role": "assistant", "content": None, "reasoning_content": "so"}  # a reply that ended within its thoughts
    client.post(PATH, {"messages": [*USER, unsaid, *USER], "max_tokens": 2.0})
    assert "assistant\n<|im_end|>\n" in client.llm.seen[-1][0] and client.llm.seen[-1][1].max_tokens == 2
    client.post(PATH, {"messages": USER, "add_generation_prompt": False})
    assert client.llm.seen[-1][0].endswith("hi<|im_end|>\n")
    thinking = Client(FakeLLM(template_name="qwen3"))
    thinking.post(PATH, {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}})
    assert thinking.llm.seen[-1][0].endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", ["qwen25", "qwen3", "llama31", "deepseek"])
def test_a_call_that_was_cut_off_comes_back(template):
    """As agents send it, who cannot mend what the model wrote."""
    client, cut = Client(FakeLLM(template_name=template)), '{"city": "Par'
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": cut}}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, *USER]
    assert client.post(PATH, {"messages": messages}).status_code == 200
    assert cut in client.llm.seen[-1][0].replace('\\"', '"')
    items = [*USER, {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": cut}, *USER]
    assert client.post("/v1/responses", {"input": items}).status_code == 200
    assert client.llm.seen[-1][0] == client.llm.seen[-2][0]


IMAGE = {"type": "image_url"}
WRONG = {
    "messages is empty": ({"messages": []}, "messages"),
    "must be a text, such as user": ({"messages": [{"content": "x"}]}, "messages[0].role"),
    "this model reads text": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    "it is a text or a list of parts": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    "a list of calls": ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
                        "messages[0].tool_calls"),
    "has tools, which means something": ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    "has self, which means something": ({"chat_template_kwargs": {"self": []}}, "chat_template_kwargs"),
    "needs logprobs=true": ({"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs=21 must be from 0 to 20": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "max_completion_tokens=-1 must": ({"max_completion_tokens": -1}, "max_completion_tokens"),
    "each say what the text must be": ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
    "json_object, json_schema and structural_tag": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "has no schema": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    "cannot be compiled": ({"structured_outputs": {"regex": "("}}, None),
    "exactly one of json, regex, choice, grammar, structural_tag": ({"structured_outputs": {}}, None),
    "needs tools": ({"tool_choice": "required"}, "tool_choice"),
    "names 'now', which is not among": ({"tools": [TOOL], "tool_choice": allowed("auto", NOW)}, "tool_choice"),
    "of type allowed_tools has": ({"tools": [TOOL], "tool_choice": allowed("maybe", NAMED)}, "tool_choice"),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message):
    client = Client()
    wishes, param = WRONG[message]
    told = error(client.post(PATH, {"messages": USER, **wishes}), 400)
    assert message in told["message"] and told["param"] == param and told["type"] == "invalid_request_error"
    assert error(client.post(PATH, {"messages": USER, **wishes, "stream": True}), 400) == told
    assert client.service.unanswered == client.service.active == 0


def test_scores_of_prompts_are_not_streamed():
    told = error(Client().post(PATH, {"messages": USER, "prompt_logprobs": 1, "stream": True}), 400)
    assert told["param"] == "prompt_logprobs" and "ask without stream" in told["message"]


def test_models_without_a_template_or_with_a_strict_one():
    assert "no chat template" in error(Client(FakeLLM(template_name="")).post(PATH, {"messages": USER}), 400)["message"]
    told = error(Client(FakeLLM(template_name="gemma3")).post(PATH, {"messages": [*USER, *USER]}), 400)
    assert told["param"] == "messages" and "refuses these messages" in told["message"]


FLAT = [{**TOOL["function"], "type": "function"}]
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
RESPONSES = {
    "text": ("the quick brown", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}, ["message"]),
    "calls": (TWO, {"tools": FLAT}, ["message", "function_call", "function_call"]),
    "named": (
        '{"city": "A"}',
        {"tools": FLAT, "tool_choice": {"type": "function", "name": "get_weather"}},
        ["function_call"],
    ),
    "allowed": (
        FORCED,
        {
            "tools": [{"type": "function", "name": "now"}, *FLAT],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
        },
        ["function_call"],
    ),
    "schema": ('{"city": "A"}', {"text": FORMAT}, ["message"]),
    "incomplete": ("the quick brown", {"max_output_tokens": 2}, ["message"]),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_whole_and_streamed(name):
    reply, wishes, kinds = RESPONSES[name]
    client = Client(FakeLLM(reply=reply, chunk=2))
    body = client.post("/v1/responses", {"input": "hi", "instructions": "Be brief.", **wishes}).json()
    assert [item["type"] for item in body["output"]] == kinds and "system\nBe brief." in client.llm.seen[-1][0]
    status = "incomplete" if name == "incomplete" else "completed"
    assert body["status"] == status and {item["status"] for item in body["output"][-1:]} == {status}
    assert body["usage"]["output_tokens"] > 0 and (body["incomplete_details"] is None) == (status == "completed")
    if name == "text":
        assert [len(one["top_logprobs"]) for one in body["output"][0]["content"][0]["logprobs"]] == [1, 1, 1]
    if name == "calls":
        assert json.loads(body["output"][1]["arguments"]) == {"city": "é日"}
    raw = client.post("/v1/responses", {"input": "hi", "instructions": "Be brief.", **wishes, "stream": True}).text
    assert raw.endswith("\n\n") and "[DONE]" not in raw
    events = []
    for number, one in enumerate(raw[:-2].split("\n\n")):
        head, data = one.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {events[-1]['type']}" and events[-1]["sequence_number"] == number
    assert events[0]["response"]["status"] == "in_progress" and events[-1]["type"] == f"response.{status}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    grown = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    plain = [item.get("arguments") or item["content"][0]["text"] for item in body["output"]]
    assert [grown[i] for i in range(len(plain))] == plain


def test_truncation_of_responses_drops_the_oldest_turns():
    """Whole, with what was called for in them; instructions stay, and as few go as there is room for."""
    llm = FakeLLM("fine", max_model_len=320)
    client = Client(llm)
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    turns = [
        {"role": "developer", "content": "BRIEF"},
        {"role": "user", "content": "ONE " + "a " * 90},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "12"},
        {"role": "user", "content": "TWO"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "THREE"},
    ]

    def read(**wishes):
        return client.post("/v1/responses", {"input": turns, "instructions": "SYSTEM", **wishes})

    too_long = error(read(max_output_tokens=4), 400)
    assert too_long["code"] == "context_length_exceeded"
    assert error(read(truncation="sometimes"), 400)["param"] == "truncation"
    told = read(truncation="auto", max_output_tokens=4).json()
    text = llm.seen[-1][0]
    assert told["truncation"] == "auto"
    assert told["usage"]["input_tokens"] == len(llm.tokenizer.encode(text)) <= 316
    assert [word in text for word in ("SYSTEM", "BRIEF", "ONE", "12", "TWO", "fine", "THREE")] == [
        *(True, True, False, False, True, True, True)
    ]
    fewer = read(truncation="auto", max_output_tokens=320 - told["usage"]["input_tokens"] + 1)
    assert "TWO" not in llm.seen[-1][0] and "THREE" in llm.seen[-1][0] and fewer.status_code == 200
    none = error(read(truncation="auto", max_output_tokens=319), 400)
    assert "truncation=auto leaves out earlier turns" in none["message"] and none["code"] == too_long["code"]
    turns[1:] = turns[-1:]
    assert read(truncation="auto").json()["truncation"] == "auto" and read().json()["truncation"] == "disabled"


HOSTED = [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}]


def allowed(mode, *tools):
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def test_tools_that_the_server_would_have_to_run(caplog):
    """Clients send them with every request: the model is told of the functions beside them."""
    client, tools = Client(), [*HOSTED, {"type": "function", "name": "get_weather", "parameters": {}}]
    chosen = allowed("auto", HOSTED[0], {"type": "function", "name": "get_weather"})
    for wishes, shown in (
        ({"tools": HOSTED}, False),
        ({"tools": HOSTED, "tool_choice": "auto"}, False),
        ({"tools": tools}, True),
        ({"tools": tools, "tool_choice": chosen}, True),
    ):
        body = client.post("/v1/responses", {"input": "a", **wishes}).json()
        assert body["status"] == "completed" and body["tools"] == tools[2:] * shown
        prompt = client.llm.seen[-1][0]
        assert ("get_weather" in prompt) == shown and "web_search" not in prompt
    assert client.service.metrics.ignored_fields == 8
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["web_search", "code_interpreter"]


def test_items_of_responses():
    client = Client()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "A"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    assert client.post("/v1/responses", {"input": items}).status_code == 200
    prompt = client.llm.seen[-1][0]
    for part in (
        "user\nweather?",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "A"}}',
        "\nrain\n",
    ):
        assert part in prompt
    for wishes, param in [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": HOSTED, "tool_choice": "required"}, "tool_choice"),
        ({"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": HOSTED, "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice"),
        ({"tools": HOSTED, "tool_choice": allowed("required", {"type": "mcp", "server_label": "x"})}, "tool_choice"),
        ({"input": []}, "input"),
        ({"instructions": "x", "input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]}, "input[0]"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ]:
        told = error(client.post("/v1/responses", {"input": "a", **wishes}), 400)
        assert told["param"] == param and told["message"].startswith(param.partition(".")[0])
