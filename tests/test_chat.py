"""Chat templates against transformers (chats.json, made by make_chats.py), and what the assistant wrote."""

import json
import pathlib

import pytest

from shardlm.chat import ChatTemplate, assistant_tokens
from shardlm.errors import ShardlmError
from shardlm.tokenizer import train_bpe

CHATS = json.loads((pathlib.Path(__file__).parent / "chats.json").read_text())
SPECIAL, TEMPLATES = CHATS["special"], CHATS["templates"]
CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day 🙂."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


@pytest.mark.parametrize("case", CHATS["cases"], ids=lambda case: case["template"])
def test_text_is_that_of_transformers(case):
    case = dict(case)
    name, text, spans = case.pop("template"), case.pop("text"), case.pop("spans", None)
    template, messages = ChatTemplate(TEMPLATES[name], SPECIAL), case.pop("messages")
    assert template.render(messages, **case) == text
    if spans is not None and not case["add_generation_prompt"]:
        assert template.spans(messages) == (text, [tuple(span) for span in spans])


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "gemma", "tools", "marked"])
def test_what_the_assistant_wrote_is_found_with_and_without_marks(name):
    text, spans = ChatTemplate(TEMPLATES[name], SPECIAL).spans(CHAT)
    parts = [text[start:end] for start, end in spans]
    assert len(parts) == 2 and parts[0].startswith(("Good day 🙂.", " Good")) and "See you" in parts[1]
    assert not any(word in part for part in parts for word in ("Hello", "Bye", "user"))


def test_tokens_of_the_assistant():
    tokenizer = train_bpe(["Good day, hello, bye, see you"] * 9, 280)
    text, spans = ChatTemplate(TEMPLATES["chatml"]).spans(CHAT)
    ids, wrote = assistant_tokens(tokenizer, text, spans)
    assert ids == tokenizer.encode(text) and len(wrote) == len(ids)
    kept = tokenizer.decode([token for token, own in zip(ids, wrote, strict=True) if own])
    assert kept == "".join(text[start:end] for start, end in spans)


def test_a_template_that_rewrites_the_past_is_refused():
    source = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
    with pytest.raises(ShardlmError, match=r"rewrites the conversation around message 1 \(assistant\)"):
        ChatTemplate(source).spans(CHAT)


@pytest.mark.parametrize(
    "source,message",
    [
        ("{{ raise_exception('only users') }}", "refuses these messages: only users"),
        ("line\n{% for x %}", "line 2: "),
        ("{{ messages[9].content.x }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "refuses these messages"),
    ],
)
def test_errors_name_the_template(source, message):
    with pytest.raises(ShardlmError, match=message):
        ChatTemplate(source, where="f/chat_template.jinja").render(CHAT)


def test_where_templates_are_found(tmp_path):
    with pytest.raises(ShardlmError, match=r"has no chat template.*a base model continues plain text"):
        ChatTemplate.load(tmp_path)
    tokens = {"bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    named = [{"name": "default", "template": "{{ bos_token }}d"}, {"name": "tool_use", "template": "t{{ eos_token }}"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(tokens | {"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(CHAT) == "<b>d"
    assert ChatTemplate.load(tmp_path, "tool_use").render(CHAT) == "t<e>"
    with pytest.raises(ShardlmError, match="has chat templates default, tool_use, and none is named 'rag'"):
        ChatTemplate.load(tmp_path, "rag")
    (tmp_path / "chat_template.jinja").write_text("j{{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render(CHAT) == "j<e>"
    config.write_text("{")
    with pytest.raises(ShardlmError, match=r"tokenizer_config\.json is not JSON"):
        ChatTemplate.load(tmp_path)
