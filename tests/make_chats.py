"""Writes tests/chats.json: templates in the style of published ones, conversations, and what transformers renders and
marks as the assistant's. Needs transformers:

    python tests/make_chats.py tests/chats.json
"""

import json
import sys

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
        " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    "mistral": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}
{{ message['content'] + eos_token }}
{% endif %}
{% endfor %}""",
    "gemma": """{{ bos_token }}{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}""",
    "tools": """{%- if tools %}
{{- '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}
{{- tool | tojson }}{{- "\n" }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' + (call.function | tojson(indent=2)) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- if message.role == 'tool' and not loop.last %}{%- continue %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "marked": """{% for message in messages %}
{% if message.role == 'assistant' %}
<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}

{% else %}
<|{{ message.role }}|>{{ message.content }}<|end|>
{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
}
CHAT = [
    {"role": "user", "content": "What is 2 < 3 & 'é'?"},
    {"role": "assistant", "content": "  True, 日本 🙂. "},
    {"role": "user", "content": "And\nthen?"},
    {"role": "assistant", "content": "Nothing."},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
WITH_TOOLS = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3"},
    CHAT[3],
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def cases():
    for name in TEMPLATES:
        for messages in (CHAT[:1], CHAT, [{"role": "system", "content": "Be brief."}, *CHAT]):
            if name == "mistral" and messages[0]["role"] == "system":
                continue
            for prompt in (False, True):
                yield {"template": name, "messages": messages, "add_generation_prompt": prompt}
    for prompt in (False, True):
        yield {"template": "tools", "messages": WITH_TOOLS, "tools": [TOOL], "add_generation_prompt": prompt}
    yield {"template": "tools", "messages": CHAT[:1], "add_generation_prompt": True, "enable_thinking": False}


def expected(case):
    given = {key: value for key, value in case.items() if key not in ("template", "messages")}
    source = TEMPLATES[case["template"]]
    marks = "{% generation" in source
    text, spans = render_jinja_template(
        [case["messages"]], chat_template=source, return_assistant_tokens_mask=marks, **SPECIAL, **given
    )
    return case | {"text": text[0]} | ({"spans": spans[0]} if marks else {})


if __name__ == "__main__":
    found = {"templates": TEMPLATES, "special": SPECIAL, "cases": [expected(case) for case in cases()]}
    with open(sys.argv[1], "w") as file:
        json.dump(found, file, indent=1, ensure_ascii=False)
        file.write("\n")
