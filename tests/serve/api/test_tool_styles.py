"""An agent's round with models that write calls in their own ways: Anthropic's client, OpenAI's types, and calls back
in the prompt as the model wrote them. Templates are as short as they can be; calls in them are as in published ones."""

import dataclasses
import functools
import json

import anthropic
import pydantic
import pytest
from client import Client
from fake_llm import FakeLLM
from openai.types import chat, responses
from sockets import listens

from shardlm.chat import ChatTemplate
from shardlm.serve.api.tools.choose import TOLD
from shardlm.tokenizer import END_OF_DOCUMENT, train_bpe

ASK = [{"role": "user", "content": "hi"}]
PROPERTIES = {"path": {"type": "string"}, "lines": {"type": "integer"}, "edits": {"type": "array"}}
FUNCTION = {"name": "edit", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["path"]}}
GIVEN = {"path": 'a "é" <b>\n', "lines": 12, "edits": [{"x": None}]}
TEXT = json.dumps(GIVEN, ensure_ascii=False)


@dataclasses.dataclass(frozen=True)
class Style:
    """How a template writes calls. call: of the function f. argument: of each of its arguments, where they stand apart.
    written: the call of edit(**GIVEN)."""

    call: str
    written: str
    begin: str = ""
    end: str = ""
    argument: str = ""

    @property
    def template(self) -> str:
        value = self.argument.replace("VALUE", "{{ value if value is string else value | tojson }}")
        call = self.call.replace("ARGUMENTS", f"{{% for key, value in f.arguments.items() %}}{value}{{% endfor %}}")
        calls = f"{{% for call in m.tool_calls %}}{{% set f = call.function %}}{call}{{% endfor %}}"
        return (
            "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>"
            "{{ m.reasoning_content }}</think>{% endif %}{% if m.tool_calls %}{{ m.content + '"
            f"{self.begin}' }}}}{calls}{self.end}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )


STYLES = {
    "qwen3_coder": Style(
        call="<tool_call>{{ '\n' }}<function={{ f.name }}>{{ '\n' }}ARGUMENTS</function>\n</tool_call>",
        argument="<parameter={{ key }}>{{ '\n' }}VALUE{{ '\n' }}</parameter>{{ '\n' }}",
        written=f"<tool_call>\n<function=edit>\n<parameter=path>\n{GIVEN['path']}\n</parameter>\n<parameter=lines>\n"
        '12\n</parameter>\n<parameter=edits>\n[{"x": null}]\n</parameter>\n</function>\n</tool_call>',
    ),
    "glm45": Style(
        call="<tool_call>{{ f.name }}ARGUMENTS</tool_call>",
        argument="<arg_key>{{ key }}</arg_key><arg_value>VALUE</arg_value>",
        written=f"<tool_call>edit<arg_key>path</arg_key><arg_value>{GIVEN['path']}</arg_value><arg_key>lines</arg_key>"
        '<arg_value>12</arg_value><arg_key>edits</arg_key><arg_value>[{"x": null}]</arg_value></tool_call>',
    ),
    "minimax_m2": Style(
        begin="<minimax:tool_call>",
        call='<invoke name="{{ f.name }}">ARGUMENTS</invoke>',
        argument='<parameter name="{{ key }}">VALUE</parameter>',
        end="</minimax:tool_call>",
        written=f'<minimax:tool_call><invoke name="edit"><parameter name="path">{GIVEN["path"]}</parameter><parameter '
        'name="lines">12</parameter><parameter name="edits">[{"x": null}]</parameter></invoke></minimax:tool_call>',
    ),
    "mistral": Style(
        call="[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", written=f"[TOOL_CALLS]edit[ARGS]{TEXT}"
    ),
    "deepseek_v3": Style(
        begin="<｜tool▁calls▁begin｜>",
        call="{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}",
        end="<｜tool▁calls▁end｜>",
        written=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "lfm2": Style(
        begin="<|tool_call_start|>[",
        call="{{ f.name }}({% for key, value in f.arguments.items() %}{{ ', ' if not loop.first }}{{ key }}="
        "{{ value | tojson }}{% endfor %})",
        end="]<|tool_call_end|>",
        written='<|tool_call_start|>[edit(path="a \\"é\\" <b>\\n", lines=12, edits=[{"x": null}])]<|tool_call_end|>',
    ),
    "kimi_k2": Style(
        begin="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        written="<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
        f"{TEXT}<|tool_call_end|><|tool_calls_section_end|>",
    ),
}


def made(style):
    llm = FakeLLM(template_name="", chunk=3)
    llm.template = ChatTemplate(STYLES[style].template)
    llm.reply = f"<think>so</think>I look.{STYLES[style].written}"
    return Client(llm)


@functools.cache
def _adapter(kind):
    return pydantic.TypeAdapter(kind)


def check(kind, value):
    _adapter(kind).validate_json(json.dumps(value), strict=True)


@pytest.fixture(scope="module")
def theirs():
    with anthropic.Anthropic(api_key="x", max_retries=0) as client:
        yield client


def test_every_style_that_a_template_tells_is_here():
    assert {style for _, style in TOLD} == STYLES.keys()


@pytest.mark.parametrize("style", STYLES)
def test_messages_of_an_agents_round(theirs, style):
    client = made(style)
    ask = {"model": "fake", "max_tokens": 900, "tools": [{"name": "edit", "input_schema": FUNCTION["parameters"]}]}
    with listens(client.app) as (_, address):
        own = theirs.with_options(base_url=address)
        with own.messages.stream(**ask, messages=ASK) as stream:
            reply = stream.get_final_message()
        thought, said, used = reply.content
        assert (thought.thinking, said.text, reply.stop_reason) == ("so", "I look.", "tool_use")
        assert (used.name, used.input) == ("edit", GIVEN)
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "done"}
        turns = [*ASK, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        own.messages.create(**ask, messages=turns)
    again = f"<|assistant|><think>so</think>I look.{STYLES[style].written}<|tool|>done<|assistant|>"
    assert client.llm.seen[-1][0].endswith(again)


@pytest.mark.parametrize("style", STYLES)
def test_chats(style):
    client, body = made(style), {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]}
    whole = client.post("/v1/chat/completions", body).json()
    check(chat.ChatCompletion, whole)
    [choice] = whole["choices"]
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == GIVEN and call["function"]["name"] == "edit"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    events = client.events("/v1/chat/completions", body)
    for event in events:
        check(chat.ChatCompletionChunk, event)
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    parts = [delta["function"]["arguments"] for delta in deltas]
    assert "".join(parts) == call["function"]["arguments"]
    assert len(parts) > 6 or style == "lfm2"  # whose calls come when they are whole


@pytest.mark.parametrize("style", STYLES)
def test_a_forced_call_is_json_and_comes_back_in_the_models_own_way(style):
    client = made(style)
    client.llm.reply = f'<think>so</think>[{{"name": "edit", "arguments": {TEXT}}}]'
    ask = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
    told = client.post("/v1/responses", {"input": ASK, **ask}).json()
    check(responses.Response, told)
    *_, call = items = told["output"]
    assert json.loads(call["arguments"]) == GIVEN
    client.llm.reply = "so"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    assert client.post("/v1/responses", {"input": [*ASK, *items, result]}).status_code == 200
    assert client.llm.seen[-1][0].endswith(f"<think>so</think>{STYLES[style].written}<|tool|>done<|assistant|>")


def test_marks_that_are_special_tokens_are_in_the_text_that_is_read():
    client, body = made("mistral"), {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]}
    client.post("/v1/chat/completions", body)
    assert client.llm.seen[-1][1].skip_special_tokens
    client.llm.tokenizer = train_bpe(["a"], 300, (END_OF_DOCUMENT, "[TOOL_CALLS]"))
    client.post("/v1/chat/completions", body)
    assert not client.llm.seen[-1][1].skip_special_tokens
    client.post("/v1/chat/completions", {**body, "tool_choice": "none"})
    assert client.llm.seen[-1][1].skip_special_tokens
