"""Calls that a model made earlier, in templates that read them as published ones do, each in its own way."""

import pytest

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.messages import rendered

EACH = "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}%s{% else %}{{ m.content }}{% endif %};{% endfor %}"
CALLS = "{% for call in m.tool_calls %}{% set f = call.function %}%s{% endfor %}"
QWEN = (  # Qwen3-Coder, Qwen 3.5
    "<function={{ f.name }}>{% for key, value in f.arguments | items %}<parameter={{ key }}>"
    "{{ value if value is string else value | tojson }}</parameter>{% endfor %}</function>"
)
GLM = (
    "<tool_call>{{ f.name }}{% set given = f.arguments or {} %}{% for key, value in given.items() %}<arg_key>{{ key }}"
    "</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>"
)
DEEPSEEK = "{{ m.content + '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
KIMI = (
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"
)
MISTRAL = (
    "[TOOL_CALLS]{{ f.name }}{% if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}"
)


def conversation(*calls, content=None):
    """[(id, name, arguments)], each with its result."""
    made = [{"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls]
    results = [{"role": "tool", "tool_call_id": call[0], "content": call[0]} for call in calls]
    return [{"role": "assistant", "content": content, "tool_calls": made}, *results]


def shown(form, messages, tail=""):
    template = ChatTemplate(EACH.replace("%s", CALLS.replace("%s", form)) + tail)
    return rendered(template, messages, None)


WHOLE = '{"city": "é", "days": [1, 2]}'
AS_READ = {
    QWEN: ("<function=f><parameter=city>é</parameter><parameter=days>[1, 2]</parameter></function>",
           "<function=f><parameter=INVALID_JSON>{\"ci</parameter></function>"),
    GLM: ("<tool_call>f<arg_key>city</arg_key><arg_value>é</arg_value><arg_key>days</arg_key>"
          "<arg_value>[1, 2]</arg_value></tool_call>",
          "<tool_call>f<arg_key>INVALID_JSON</arg_key><arg_value>{\"ci</arg_value></tool_call>"),
    DEEPSEEK: (f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{WHOLE}<｜tool▁call▁end｜>",
               '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"ci<｜tool▁call▁end｜>'),
}  # fmt: skip


@pytest.mark.parametrize("form", AS_READ)
def test_arguments_as_the_template_reads_them(form):
    whole, cut = AS_READ[form]
    assert shown(form, conversation(("a", "f", WHOLE))) == f"assistant:{whole};tool:a;"
    both = conversation(("a", "f", WHOLE), ("b", "f", '{"ci'))
    assert shown(form, both) == f"assistant:{whole}{cut};tool:a;tool:b;"
    assert shown(form, conversation(("a", "f", ""))).count("INVALID") == 0


def test_what_a_template_refuses_is_told_of_the_usual_form():
    with pytest.raises(ShardlmError, match=r"refuses these messages: never$"):
        shown(QWEN, conversation(("a", "f", WHOLE)), "{% if messages %}{{ raise_exception('never') }}{% endif %}")
    with pytest.raises(ShardlmError, match="can only concatenate str"):
        shown("{{ 'a' + 1 }}", conversation(("a", "f", WHOLE)))


def test_ids_as_the_template_knows_them():
    """Whatever clients call them, who may use one twice."""
    turn = conversation(("toolu_1", "f", "{}"), ("x" * 9, "g", "{}")) + conversation(("toolu_1", "f", "{}"))
    ids = EACH.replace("%s", CALLS).replace("{{ m.content }}", "{{ m.tool_call_id }}")
    kimi = rendered(ChatTemplate(ids.replace("%s", KIMI)), turn, None)
    begin, sep = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    first = f"assistant:{begin}functions.f:0{sep}{{}}{begin}functions.g:1{sep}{{}};tool:functions.f:0;"
    assert kimi == f"{first}tool:functions.g:1;assistant:{begin}functions.f:2{sep}{{}};tool:functions.f:2;"
    mistral = rendered(ChatTemplate(ids.replace("%s", MISTRAL)), turn, None)
    made = mistral.partition("[CALL_ID]")[2][:9]
    assert made.isalnum() and mistral.count(made) == 4 and mistral.count("x" * 9) == 2
    assert "tool:toolu_1;" in rendered(ChatTemplate(ids.replace("%s", GLM)), turn, None)
