"""Chat templates against transformers (chats.json, made by make_chats.py), and what the assistant wrote."""

import datetime
import json
import pathlib
import runpy

import pytest

from shardlm.chat import ChatTemplate, assistant_tokens
from shardlm.errors import ShardlmError
from shardlm.tokenizer import train_bpe

HERE = pathlib.Path(__file__).parent
CHATS = json.loads((HERE / "chats.json").read_text())
SPECIAL = CHATS["special"]
TEMPLATES = {file.stem: ChatTemplate(file.read_text(), SPECIAL) for file in (HERE / "chat_templates").glob("*.jinja")}
CASES = list(enumerate(CHATS["cases"]))
BYTES = train_bpe([], 257)
CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day 🙂."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
TAIL_ONLY = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"


def test_every_template_has_cases():
    assert {case["template"] for _, case in CASES} == set(TEMPLATES)
    assert sum("wrote" in case for _, case in CASES) == 4


@pytest.mark.parametrize("case", [c for _, c in CASES], ids=[f"{c['template']}-{i}" for i, c in CASES])
def test_text_and_tokens_are_those_of_transformers(case):
    case = dict(case)
    template, text, wrote = TEMPLATES[case.pop("template")], case.pop("text"), case.pop("wrote", None)
    messages = case.pop("messages")
    before = json.dumps(messages)
    assert template.render(messages, **case) == text
    assert json.dumps(messages) == before
    if wrote is not None and not case.pop("add_generation_prompt"):
        marked, spans = template.spans(messages, **case)
        ids, own = assistant_tokens(BYTES, marked, spans)
        assert marked == text and ids == BYTES.encode(text)
        assert "".join(str(int(one)) for one in own) == wrote


PREFIXES = ("chatml", "llama3", "llama31", "mistral", "mistral_tools", "gemma", "gemma3", "hermes", "phi3", "qwen25")


@pytest.mark.parametrize("name", [*PREFIXES, "marked", "gpt_oss"])
def test_what_the_assistant_wrote_is_found_with_and_without_marks(name):
    text, spans = TEMPLATES[name].spans(CHAT)
    parts = [text[start:end] for start, end in spans]
    assert len(parts) == 2 and parts[0].startswith(("Good day 🙂.", " Good")) and "See you" in parts[1]
    assert not any(word in part for part in parts for word in ("Hello", "Bye", "user", "INST"))


def test_the_answer_alone_is_found_where_the_past_is_rewritten():
    text, spans = TEMPLATES["qwen3"].spans(CHAT[:2])
    assert [text[start:end] for start, end in spans] == ["<think>\n\n</think>\n\nGood day 🙂.<|im_end|>\n"]


@pytest.mark.parametrize(
    "template,messages,which",
    [
        (ChatTemplate(TAIL_ONLY), CHAT, "1"),
        (TEMPLATES["qwen3"], CHAT, "1"),  # only the last answer has (empty) thoughts
        (TEMPLATES["deepseek"], CHAT, "1"),  # the generation prompt begins thoughts that the past is without
        (TEMPLATES["mistral_tools"], [{"role": "system", "content": "s"}, *CHAT], "2"),  # said to the last user only
    ],
)
def test_a_template_that_rewrites_the_past_is_refused(template, messages, which):
    with pytest.raises(ShardlmError, match=rf"rewrites the conversation around message {which} \(assistant\).*mark it"):
        template.spans(messages)


def test_marks_that_cannot_be_followed_are_refused():
    with pytest.raises(ShardlmError, match=r"changes what is inside {% generation %} afterwards"):
        source = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
        ChatTemplate(source).spans(CHAT)
    odd = [CHAT[0], {"role": "assistant", "content": "a\ufdd0b"}]
    assert "a\ufdd0b" in TEMPLATES["marked"].render(odd)
    with pytest.raises(ShardlmError, match=r"holds U\+FDD0 or U\+FDD1, which are no characters"):
        TEMPLATES["marked"].spans(odd)


def test_tokens_of_the_assistant():
    tokenizer = train_bpe(["Good day, hello, bye, see you"] * 9, 280)
    text, spans = TEMPLATES["chatml"].spans(CHAT)
    ids, wrote = assistant_tokens(tokenizer, text, spans)
    assert ids == tokenizer.encode(text) and len(wrote) == len(ids)
    kept = tokenizer.decode([token for token, own in zip(ids, wrote, strict=True) if own])
    assert kept == "".join(text[start:end] for start, end in spans)
    assert assistant_tokens(tokenizer, "", []) == ([], [])


def test_the_day_is_todays():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(CHAT) == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    "source,message",
    [
        (
            "a\n{{ raise_exception('only users') }}",
            r"f/chat_template\.jinja, line 2, refuses these messages: only users",
        ),
        ("line\n{% for x %}", "jinja, line 2: "),
        ("\n\n{{ messages[9].content.x }}", "line 3, refuses these messages: .*has no element 9"),
        ("{{ 1 / 0 }}", "line 1, refuses these messages: ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "line 1, refuses these messages: TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages: RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses these messages: OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ dict.__class__.__mro__ }}", "refuses these messages"),
        ("{% set n = namespace(_x=1) %}", "a namespace has no attribute '_x'"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "a namespace has no attribute '__class__'"),
    ],
)
def test_errors_name_the_template_and_its_line(source, message):
    with pytest.raises(ShardlmError, match=message):
        ChatTemplate(source, where="f/chat_template.jinja").render(CHAT)


@pytest.mark.parametrize(
    "messages,message",
    [
        ([], "a conversation without messages"),
        (["hello"], "a message is 'hello'; it is an object with a role and content"),
        ([{"content": "a"}], "a message is .* with a role and content"),
        ([{"role": "user", "content": {1, 2}}], "messages, tools and options of a chat are JSON"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, message):
    with pytest.raises(ShardlmError, match=message):
        TEMPLATES["chatml"].render(messages)


def test_where_templates_are_found(tmp_path):
    with pytest.raises(ShardlmError, match=r"has no chat template.*a base model continues plain text"):
        ChatTemplate.load(tmp_path)
    tokens = {"bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    named = [{"name": "default", "template": "{{ bos_token }}d"}, {"name": "tool_use", "template": "t{{ eos_token }}"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(tokens | {"chat_template": named}))
    both = ChatTemplate.load(tmp_path)
    assert (both.render(CHAT), both.render(CHAT, [])) == ("<b>d", "t<e>")
    assert ChatTemplate.load(tmp_path, "tool_use").render(CHAT) == "t<e>"
    with pytest.raises(ShardlmError, match="has chat templates default, tool_use, and none is named 'rag'"):
        ChatTemplate.load(tmp_path, "rag")
    (tmp_path / "copy").mkdir()
    both.save(tmp_path / "copy")
    copy = ChatTemplate.load(tmp_path / "copy")
    assert (copy.source, copy.tool_source) == (both.source, both.tool_source)
    (tmp_path / "chat_template.jinja").write_text("j{{ eos_token }}")
    one = ChatTemplate.load(tmp_path)  # files of their own take the place of all others
    assert one.render(CHAT) == one.render(CHAT, []) == "j<e>"
    config.write_text("{")
    with pytest.raises(ShardlmError, match=r"tokenizer_config\.json is not JSON"):
        ChatTemplate.load(tmp_path)
    config.write_text("[]")
    with pytest.raises(ShardlmError, match=r"tokenizer_config\.json holds a list and not an object"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ShardlmError, match=r"chat_template\.jinja is not UTF-8"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("template", [["x"], [{"name": "default"}], 5])
def test_a_malformed_list_of_templates_is_refused(tmp_path, template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ShardlmError, match="neither a template nor a list of objects with name and template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("listed,expected", [(False, "<map>"), (True, "<config>")])
def test_special_tokens_are_found_where_transformers_finds_them(tmp_path, listed, expected):
    config = {"bos_token": "<config>", "eos_token": None, "image_token": "<i>", "extra_special_tokens": {"x": "<x>"}}
    config |= {"added_tokens_decoder": {}} if listed else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<map>", "lstrip": false}}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ image_token }}{{ x }}")
    template = ChatTemplate.load(tmp_path)
    assert template.render(CHAT) == f"{expected}<i><x>"
    assert template.render(CHAT, bos_token="<o>") == "<o><i><x>"


def test_the_answers_of_the_example_end_in_what_stops_its_model():
    """Otherwise a model that is tuned on them goes on with further answers."""
    example = runpy.run_path(str(HERE.parent / "examples" / "docstring_chats.py"))
    text, spans = ChatTemplate(example["TEMPLATE"]).spans(CHAT)
    ids, wrote = assistant_tokens(BYTES, text, spans)
    ends = [one for i, one in zip(ids, wrote, strict=True) if i == BYTES.end_of_document_id]
    assert ends == [True, True] and ids[-1] == BYTES.end_of_document_id
