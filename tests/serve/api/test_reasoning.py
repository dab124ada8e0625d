"""Thoughts apart from answers: every parser whole and streamed, with tools, forms, log-probabilities, several replies,
and as OpenAI's client reads them."""

import itertools
import json
import re

import openai
import pytest
from client import Client, error
from fake_llm import FakeLLM
from hypothesis import given, settings
from hypothesis import strategies as st
from sockets import listens

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.api.reasoning.choose import choose
from shardlm.serve.api.reasoning.harmony import HarmonyThoughts
from shardlm.serve.api.reasoning.marks import MarkedThoughts, Thought
from shardlm.serve.api.reasoning.tokens import ThoughtTokens
from shardlm.serve.api.tools.reader import CallDelta

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "é日"}}\n</tool_call>'
THINK = (("<think>",), ("</think>",))
HARMONY = (
    "<|channel|>analysis<|message|>Hm < 3<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "é日"}<|call|>'
)
FINAL = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"


def read(splitter, parts):
    """(thoughts, contents, calls) of a reply in parts."""
    pieces = [piece for part in parts for piece in splitter.push(part)] + splitter.finish()
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    calls = "".join(f"{piece.name or ''}{piece.arguments}" for piece in pieces if isinstance(piece, CallDelta))
    return thoughts, "".join(piece for piece in pieces if isinstance(piece, str)), calls


MARKED = [  # (how it begins, the reply, thoughts, contents)
    (None, "<think>a < b</think>\n\nc", "a < b", "\n\nc"),
    (None, "\n <think>a", "a", ""),
    (None, " <thinking> no", "", " <thinking> no"),
    (None, "c <think>d</think>", "", "c <think>d</think>"),
    (None, "", "", ""),
    (None, "<thi", "", "<thi"),
    (True, "a</thin</think>c</think>", "a</thin", "c</think>"),
    (True, "<think>\na</think>c", "\na", "c"),
    (True, " a<think>b", " a<think>b", ""),
    (True, "</think>c", "", "c"),
    (True, "a</thi", "a</thi", ""),
    (False, "<think>a</think>c", "", "<think>a</think>c"),
]


@settings(deadline=None, max_examples=150)
@given(case=st.sampled_from(MARKED), cuts=st.lists(st.integers(0, 30), max_size=8))
def test_marks_may_be_cut_anywhere(case, cuts):
    thinking, text, *told = case
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    assert read(MarkedThoughts(*THINK, thinking), parts) == (*told, "")


CHANNELS = [  # (how the prompt begins the message, the reply, thoughts, contents, calls)
    ("assistant", HARMONY, "Hm < 3", "I look.", 'get_weather{"city": "é日"}'),
    ("assistant", FINAL + "Yes <b>", "Hm.", "Yes <b>", ""),
    ("assistant", FINAL.replace("final<", "final <|constrain|>json<") + "{}", "Hm.", "{}", ""),
    ("assistant<|channel|>final<|message|>The", " end<|return|>", "", " end", ""),
    ("assistant<|channel|>analysis", "<|message|>a", "a", "", ""),
    ("assistant", "no head at all", "", "no head at all", ""),
    ("assistant", "<|channel|>final", "", "", ""),
    ("assistant", "<|channel|>analysis<|message|>a<|end|><|start|>assist", "a", "", ""),
    ("assistant", "<|channel|>commentary to=functions.rm<|message|>{}<|call|>", "{}", "", ""),
    ("assistant", " to=functions.get_weather<|channel|>commentary<|message|><|call|>", "", "", "get_weather{}"),
    ("assistant", "<|channel|>analysis to=python<|message|>1+1<|end|>", "1+1", "", ""),
]


@settings(deadline=None, max_examples=150)
@given(case=st.sampled_from(CHANNELS), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_channels_may_be_cut_anywhere(case, cuts):
    begun, text, *told = case
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    assert read(HarmonyThoughts({"get_weather"}, begun), parts) == tuple(told)


def joined(events):
    """{index: (reasoning, content, calls, reason, scores, token ids)} of a stream."""
    found = {}
    for event in events:
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], ["", "", "", None, [], []])
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            one[0] += delta.get("reasoning") or ""
            one[1] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                one[2] += call["function"].get("name", "") + call["function"]["arguments"]
            one[3] = choice["finish_reason"]
            one[4] += (choice["logprobs"] or {"content": []})["content"]
            one[5] += choice.get("token_ids", [])
    return found


def whole(body):
    found = {}
    for choice in body["choices"]:
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"]
        calls = "".join(c["function"]["name"] + c["function"]["arguments"] for c in message.get("tool_calls", ()))
        scores = (choice["logprobs"] or {"content": []})["content"]
        texts = [message["reasoning"] or "", message["content"] or "", calls]
        found[choice["index"]] = [*texts, choice["finish_reason"], scores, choice.get("token_ids", [])]
    return found


CALLED = 'get_weather{"city": "é日"}'
JSON = {"response_format": {"type": "json_object"}}
FORM_OR_CALL = {**JSON, "tools": [TOOL]}
NAMED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
REQUIRED = {"tools": [TOOL], "tool_choice": "required"}
THOUGHT = "<think>\nHm, é日🙂.\n</think>\n\n"
CASES = {  # name: (template, reply, wishes, reasoning, content, calls, finish reason)
    "hybrid": ("qwen3", f"{THOUGHT}Yes.", {}, "\nHm, é日🙂.\n", "\n\nYes.", "", "stop"),
    "does not think": ("qwen3", "Yes.", {}, "", "Yes.", "", "stop"),
    "may not think": (
        "qwen3",
        "<think>x",
        {"chat_template_kwargs": {"enable_thinking": False}},
        "",
        "<think>x",
        "",
        "stop",
    ),
    "opened by the template": ("deepseek", "Hm.\n</think>\nYes.", {}, "Hm.\n", "\nYes.", "", "stop"),
    "only thinks": ("deepseek", "Hm.", {"max_tokens": 2}, "Hm", "", "", "length"),
    "stop text": ("qwen3", f"{THOUGHT}Yes. No.", {"stop": [" No"]}, "\nHm, é日🙂.\n", "\n\nYes.", "", "stop"),
    "calls": ("qwen3", THOUGHT + CALL, {"tools": [TOOL]}, "\nHm, é日🙂.\n", "", CALLED, "tool_calls"),
    "thinks of calls": ("qwen3", f"<think>{CALL}</think>No.", {"tools": [TOOL]}, CALL, "No.", "", "stop"),
    "form": ("qwen3", '<think>{no</think>{"a": 1}', JSON, "{no", '{"a": 1}', "", "stop"),
    "form without thought": ("qwen3", '{"a": 1}', JSON, "", '{"a": 1}', "", "stop"),
    "calls and no form": ("qwen3", THOUGHT + CALL, FORM_OR_CALL, "\nHm, é日🙂.\n", "", CALLED, "tool_calls"),
    "calls without thought": ("qwen3", CALL, FORM_OR_CALL, "", "", CALLED, "tool_calls"),
    "form and no calls": ("qwen3", '<think>{no</think>{"a": 1}', FORM_OR_CALL, "{no", '{"a": 1}', "", "stop"),
    "form in an opened one": ("deepseek", 'Hm</think>{"a": 1}', JSON, "Hm", '{"a": 1}', "", "stop"),
    "named": ("qwen3", '<think>x</think>{"city": "A"}', NAMED, "x", "", 'get_weather{"city": "A"}', "stop"),
    "required": (
        "qwen3",
        '<think>x</think>[{"name": "get_weather", "arguments": {"city": "A"}}]',
        REQUIRED,
        "x",
        "",
        'get_weather{"city": "A"}',
        "tool_calls",
    ),
    "goes on": (
        "qwen3",
        " more</think>Yes.",
        {"messages": [*USER, {"role": "assistant", "content": "<think>\nHm"}], "continue_final_message": True},
        " more",
        "Yes.",
        "",
        "stop",
    ),
    "goes on with the answer": (
        "deepseek",
        " <think>x",
        {"messages": [*USER, {"role": "assistant", "content": "Yes"}], "continue_final_message": True, "echo": True},
        "",
        "Yes <think>x",
        "",
        "stop",
    ),
    "harmony": ("gpt_oss", f"{FINAL}Yes.", {}, "Hm.", "Yes.", "", "stop"),
    "harmony calls": ("gpt_oss", HARMONY, {"tools": [TOOL]}, "Hm < 3", "I look.", CALLED, "tool_calls"),
    "harmony form": ("gpt_oss", FINAL.replace("final", "final json") + '{"a": 1}', JSON, "Hm.", '{"a": 1}', "", "stop"),
    "harmony named": ("gpt_oss", FINAL + '{"city": "A"}', NAMED, "Hm.", "", 'get_weather{"city": "A"}', "stop"),
}  # fmt: skip


@pytest.mark.parametrize("chunk", (1, 3))
@pytest.mark.parametrize("name", CASES)
def test_chats_whole_and_streamed(name, chunk):
    """The fake engine holds what it writes to the form that it is given, and cuts marks into tokens."""
    template, reply, wishes, *told = CASES[name]
    client = Client(FakeLLM(reply=reply, chunk=chunk, template_name=template))
    body = {"messages": USER, "n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, **wishes}
    answer = client.post(PATH, body)
    assert answer.status_code == 200, answer.text
    found = whole(answer.json())
    assert found[0][:4] == told and found[0] == found[1]
    *events, last = client.events(PATH, {**body, "stream_options": {"include_usage": True}})
    streamed = joined(events)
    if told[2]:
        streamed = {index: [*one[:1], one[1].strip(), *one[2:]] for index, one in streamed.items()}
    assert streamed == found and last["usage"] == answer.json()["usage"]
    ids, scores = found[0][5], found[0][4]
    assert len(ids) == len(scores) == last["usage"]["completion_tokens"] / 2
    assert client.llm.tokenizer.decode(ids, skip_special=False).startswith(reply[:2])
    thoughts = last["usage"]["completion_tokens_details"]["reasoning_tokens"]
    kept = whole(client.post(PATH, {**body, "include_reasoning": False}).json())[0]
    assert kept[0] == "" and kept[1:4] == told[1:] and 2 * len(kept[5]) == last["usage"]["completion_tokens"] - thoughts
    assert len(kept[4]) == len(kept[5]) and (thoughts > 0) == bool(told[0] or "<|" in reply)
    said = client.llm.tokenizer.decode(kept[5], skip_special=False)
    assert said == reply[len(reply) - len(said) :] or name in ("only thinks", "stop text", "harmony calls")


def test_counts_of_thought_are_of_whole_tokens():
    client = Client(FakeLLM(reply="<think>the quick</think>brown fox", template_name="qwen3"))
    usage = client.post(PATH, {"messages": USER}).json()["usage"]
    encode = client.llm.tokenizer.encode
    thought = len(encode("<think>the quick</think>"))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert usage["completion_tokens"] == thought + len(encode("brown fox"))
    plain = Client(FakeLLM(reply="<think>the</think>quick", template_name="qwen3"), reasoning_parser="none")
    body = plain.post(PATH, {"messages": USER}).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "<think>the</think>quick",
        "refusal": None,
    }
    assert "completion_tokens_details" not in body["usage"]


def test_special_tokens_that_texts_leave_out_decide_nothing():
    tokenizer = FakeLLM().tokenizer
    own, answer = tokenizer.encode("<think>a</think>"), tokenizer.encode("b")
    ids = [tokenizer.end_of_document_id, *own, *answer]
    for skip, thoughts in ((True, 1 + len(own)), (False, 0)):
        tokens = ThoughtTokens(MarkedThoughts(*THINK, None), tokenizer, skip)
        told = [token for i in range(len(ids)) for token in tokens.push(ids[i : i + 1], [], i + 1 == len(ids))]
        assert [token.id for token in told] == ids and tokens.thoughts == thoughts
        assert [token.thought for token in told] == [True] * thoughts + [False] * (len(ids) - thoughts)


STYLES = {"qwen3": "qwen3", "deepseek": "qwen3", "hermes": "qwen3", "gpt_oss": "openai_gptoss"}
STYLES |= dict.fromkeys(("qwen25", "llama3", "llama31", "gemma3", "mistral", "phi3", "chatml"), "none")


def test_the_parser_is_the_templates_where_it_has_the_marks():
    own = FakeLLM()
    for name, style in STYLES.items():
        template = FakeLLM(template_name=name).template
        assert choose("auto", template, own.tokenizer) == choose(style, template, own.tokenizer), name
    assert choose("auto", None, own.tokenizer) is None
    found = choose("auto", ChatTemplate("[THINK] [/THINK]"), own.tokenizer)
    assert found == choose("mistral", None, own.tokenizer) and not found.special
    with pytest.raises(ShardlmError, match="reasoning_parser='r1' must be one of auto, none, deepseek_r1"):
        choose("r1", None, own.tokenizer)


def test_a_parser_that_was_asked_for():
    for parser, reply in (
        ("deepseek_r1", "Hm.</think>Yes."),
        ("mistral", "[THINK]Hm.[/THINK]Yes."),
        ("granite", "Here is my thought process:Hm.Here's my response:Yes."),
    ):
        client = Client(FakeLLM(reply=reply), reasoning_parser=parser)
        message = client.post(PATH, {"messages": USER}).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes."), parser
        for text, thought in ((reply, "Hm."), ("Yes.", None)):  # the fake engine holds it to the choice
            if parser == "deepseek_r1" and thought is None:
                continue  # which thinks from the first text on
            client.llm.reply = text
            body = {"messages": USER, "structured_outputs": {"choice": ["Yes.", "No."]}}
            message = client.post(PATH, body).json()["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == (thought, "Yes."), parser


RESPONSES = {
    "text": ("qwen3", f"{THOUGHT}Yes.", {}, ["reasoning", "message"]),
    "calls": (
        "qwen3",
        THOUGHT + CALL,
        {"tools": [{**TOOL["function"], "type": "function"}]},
        ["reasoning", "function_call"],
    ),
    "preamble": (
        "gpt_oss",
        HARMONY,
        {"tools": [{**TOOL["function"], "type": "function"}]},
        ["reasoning", "message", "function_call"],
    ),
    "incomplete": ("qwen3", f"{THOUGHT}Yes.", {"max_output_tokens": 9}, ["reasoning"]),
    "not": ("qwen3", "Yes.", {"chat_template_kwargs": {"enable_thinking": False}}, ["message"]),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_have_an_item_of_thought(name):
    template, reply, wishes, kinds = RESPONSES[name]
    logprobs = {"include": ["message.output_text.logprobs"]}
    client = Client(FakeLLM(reply=reply, chunk=2, template_name=template))
    body = client.post("/v1/responses", {"input": "hi", **logprobs, **wishes}).json()
    assert [item["type"] for item in body["output"]] == kinds
    raw = client.post("/v1/responses", {"input": "hi", **logprobs, **wishes, "stream": True}).text
    events = [json.loads(line) for line in re.findall(r"^data: (.*)$", raw, re.MULTILINE)]
    streamed = events[-1]["response"]
    strip = lambda text: re.sub(r'"(id|call_id)":"[^"]*"', "", text)  # noqa: E731
    plain = [strip(json.dumps(one["output"], separators=(",", ":"))) for one in (streamed, body)]
    assert plain[0] == plain[1] and streamed["usage"] == body["usage"]
    grown = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in body["output"]]
    assert [grown[i] for i in range(len(texts))] == texts
    thoughts = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert (thoughts > 0) == ("reasoning" in kinds)
    if name == "text":
        assert texts == ["\nHm, é日🙂.\n", "\n\nYes."]
        assert len(body["output"][1]["content"][0]["logprobs"]) == body["usage"]["output_tokens"] - thoughts


def test_thoughts_that_come_back_are_the_assistants():
    client = Client(FakeLLM(template_name="qwen3"))
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I must look."}]}
    items = [
        {"role": "user", "content": "weather?"},
        thought,
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        thought,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Rain."}]},
    ]
    assert client.post("/v1/responses", {"input": items}).status_code == 200
    prompt = client.llm.seen[-1][0]
    assert prompt.count("assistant\n<think>\nI must look.\n</think>\n\n") == 2 and "</think>\n\nRain." in prompt
    for content in ("x", [1], [{"type": "reasoning_text"}]):
        bad = {"input": [{"type": "reasoning", "content": content}]}
        assert error(client.post("/v1/responses", bad), 400)["param"] == "input[0].content"


def test_openais_client_reads_them():
    llm = FakeLLM(reply=f"{THOUGHT}Yes.", chunk=2, template_name="qwen3")
    with listens(Client(llm).app) as (_, address), openai.OpenAI(base_url=f"{address}/v1", api_key="-") as client:
        asked = {"model": "fake", "messages": USER}
        message = client.chat.completions.create(**asked).choices[0].message
        assert (message.reasoning_content, message.reasoning) == ("\nHm, é日🙂.\n",) * 2
        parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == message.reasoning_content
        assert "".join(part.content or "" for part in parts) == message.content == "\n\nYes."
        with client.responses.stream(model="fake", input="hi") as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.reasoning_text.delta" in kinds and final.output_text == "\n\nYes."
        assert final.output[0].type == "reasoning" and final.output[0].content[0].text == message.reasoning_content
        assert final.usage.output_tokens_details.reasoning_tokens > 0
