"""Calls of tools, read from what models write: the same however the text was cut into parts."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import DEEPSEEK_CALLS, GLM, KIMI_CALLS, LFM2, MINIMAX, MISTRAL, QWEN, qwen

from shardlm.serve.api.chat import joined
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.tools.choose import TOLD, choose, style_of
from shardlm.serve.api.tools.forced import ArgumentsParser, ListParser, any_schema
from shardlm.serve.api.tools.hermes import HermesParser
from shardlm.serve.api.tools.llama import LlamaParser
from shardlm.serve.api.tools.marked import STYLES, MarkedParser
from shardlm.serve.api.tools.mistral import BEGIN, MistralParser
from shardlm.serve.api.tools.pythonic import PythonParser
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.api.tools.sections import DEEPSEEK, KIMI, SectionParser
from shardlm.serve.api.tools.values import kinds, typed
from shardlm.serve.grammar import GrammarCompiler
from shardlm.tokenizer import train_bpe

NAMES = {"f", "get_weather"}


def read(parser, parts):
    """(contents joined, [(name, arguments)] of its calls)."""
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    calls = joined([piece for piece in pieces if isinstance(piece, CallDelta)])
    assert list(calls) == list(range(parser.calls))
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, [(call["name"], call["arguments"]) for call in calls.values()]


HERMES = {
    "plain text, 1 < 2": ("plain text, 1 < 2", []),
    "": ("", []),
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>': ("", [("f", '{"a": 1}')]),
    'I look.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"arguments": {"x": [1, "}"]}, '
    '"name": "get_weather"}</tool_call> done': ("I look.\n done", [("f", "{}"), ("get_weather", '{"x": [1, "}"]}')]),
    '<tool_call>{"name": "f"}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>': ("", [("f", '{"a": 2}')]),
    '<tool_call>{"name": "f", "arguments": {"html": "a </tool_call> \\" b"}}</tool_call>': (
        "",
        [("f", '{"html": "a </tool_call> \\" b"}')],
    ),
    '<tool_call>{"id": 7, "name": "f", "a:b": true, "arguments": {"é": 1}}</tool_call>': (
        "",
        [("f", '{"é": 1}')],
    ),
    # What is no call, or none yet.
    "<tool_call>not json</tool_call> so": ("<tool_call>not json</tool_call> so", []),
    '<tool_call>{"arguments": {}}</tool_call>': ('<tool_call>{"arguments": {}}</tool_call>', []),
    "<tool_call>[1]": ("<tool_call>[1]", []),
    "so <tool": ("so <tool", []),
    # The end of the length, a brace too few, the end mark left out.
    '<tool_call>{"name": "f", "arguments": {"a": "lo': ("", [("f", '{"a": "lo')]),
    '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> and': (" and", [("f", '{"a": 1}')]),
    '<tool_call>{"name": "f", "arguments": {"a": 1}}': ("", [("f", '{"a": 1}')]),
}
LLAMA = {
    "plain": ("plain", []),
    "  ": ("  ", []),
    '{"name": "f", "parameters": {"a": 1}}': ("", [("f", '{"a": 1}')]),
    '\n<|python_tag|>{"name": "f", "parameters": {"a": "}"}}; {"name": "get_weather", "parameters": {}}': (
        "",
        [("f", '{"a": "}"}'), ("get_weather", "{}")],
    ),
    '{"name": "Bob", "parameters": {"age": 3}} and': ('{"name": "Bob", "parameters": {"age": 3}} and', []),
    '{"a": [1, {"name": "f"}]}': ('{"a": [1, {"name": "f"}]}', []),
    '{"name": "f", "parameters": {"a"': ("", [("f", '{"a"')]),
    '{"nam': ('{"nam', []),
    "<|python": ("<|python", []),
    "<|python_tag|>print(1)": ("<|python_tag|>print(1)", []),
}
SCHEMAS = {
    "f": {"properties": {"n": {"type": "integer"}, "x": {"type": ["number", "null"]}, "o": {"$ref": "#/$defs/o"}}},
    "get_weather": {"properties": {"city": {"type": "string"}, "ok": {"anyOf": [{"type": "boolean"}]}}},
}

PARSERS = {"hermes": (HermesParser, HERMES), "llama": (lambda: LlamaParser(NAMES), LLAMA)}
for name, cases in (("qwen3_coder", QWEN), ("glm45", GLM), ("minimax_m2", MINIMAX)):
    PARSERS[name] = (lambda marks=STYLES[name]: MarkedParser(marks, SCHEMAS), cases)
for name, section, cases in (("deepseek_v3", DEEPSEEK, DEEPSEEK_CALLS), ("kimi_k2", KIMI, KIMI_CALLS)):
    PARSERS[name] = (lambda section=section: SectionParser(section), cases)
PARSERS["lfm2"] = (lambda: PythonParser(SCHEMAS), LFM2)
PARSERS["mistral"] = (MistralParser, MISTRAL)
CASES = [(style, text) for style, (_, cases) in PARSERS.items() for text in cases]


@pytest.mark.parametrize(("style", "text"), CASES)
def test_calls_and_contents_however_they_are_cut(style, text):
    make, cases = PARSERS[style]
    assert read(make(), [text]) == cases[text]
    assert read(make(), list(text)) == cases[text]
    for at in range(1, len(text)):
        assert read(make(), [text[:at], text[at:]]) == cases[text]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@settings(deadline=None, max_examples=60)
@given(
    calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(), JSON, max_size=3)), max_size=3),
    style=st.sampled_from(["hermes", "llama", "list", "mistral"]),
    key_first=st.booleans(),
    indent=st.sampled_from([None, 1]),
    size=st.integers(1, 20),
)
def test_any_arguments_come_back(calls, style, key_first, indent, size):
    key = "parameters" if style == "llama" else "arguments"
    texts = []
    for name, arguments in calls:
        members = {"name": name, key: arguments} if key_first else {key: arguments, "name": name}
        texts.append(json.dumps(members, indent=indent, ensure_ascii=False))
    if style == "hermes":
        text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in texts)
    else:
        text = ";".join(texts) if style == "llama" else f"[{','.join(texts)}]"
        text = f"{BEGIN}{text}" * bool(calls) if style == "mistral" else text
    parser = ListParser() if style == "list" else PARSERS[style][0]()
    content, found = read(parser, [text[i : i + size] for i in range(0, len(text), size)])
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


PIECES = ["\n", " ", "</parameter>", "<parameter=city>", "<", "</function>", "</tool_call>", "a", '"', "é", "null"]


@settings(deadline=None, max_examples=60)
@given(pieces=st.lists(st.sampled_from(PIECES)), size=st.integers(1, 20))
def test_any_text_comes_back(pieces, size):
    """But for one that looks like the end of a call."""
    city = re.sub(r"(</parameter>|</function>)\s*(?=<)", r"\1.", "".join(pieces))
    text = qwen("get_weather", city=city, ok="true")
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    content, [(_, arguments)] = read(MarkedParser(STYLES["qwen3_coder"], SCHEMAS), parts)
    assert content == "" and json.loads(arguments) == {"city": city, "ok": True}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": ["string", "integer"]}, 12),
        ("1.5", {"type": "integer"}, "1.5"),
        ("2.0", {"type": "integer"}, 2.0),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("NaN", {"type": "number"}, "NaN"),
        ("{1, 2}", {"type": "object"}, "{1, 2}"),
        ("[" * 9999, {"type": "array"}, "[" * 9999),
        ("true", {"enum": [True, "auto"]}, True),
        ("auto", {"enum": [True, "auto"]}, "auto"),
        ("1", None, "1"),
        ("1", {"$ref": "#/properties/x"}, "1"),
        ("[1]", {"$ref": "#/$defs/list"}, [1]),
        ("[1]", {"$ref": "#/$defs/loop"}, [1]),
        ("1", {"$ref": "http://x/list"}, "1"),
        ("2", {"const": 2}, 2),
        ("1e999", {"type": "number"}, "1e999"),
        ("3", {"type": [{}], "anyOf": 3, "enum": 4}, 3),
    ],
)
def test_values_by_their_schema(text, schema, value):
    root = {"properties": {"x": schema}, "$defs": {"list": {"items": {}}, "loop": {"$ref": "#/$defs/loop"}}}
    found = typed(text, kinds(root, "x"))
    assert found == value and type(found) is type(value)


def test_a_long_call_takes_no_quadratic_time():
    text = json.dumps({"name": "f", "arguments": {"text": "x" * 200_000}})
    assert len(read(HermesParser(), ["<tool_call>", text, "</tool_call>"])[1][0][1]) > 200_000
    text = qwen("get_weather", city="</parameter> \n" * 9_000, ok="true")
    parts = [text[i : i + 100] for i in range(0, len(text), 100)]
    assert len(read(MarkedParser(STYLES["qwen3_coder"], SCHEMAS), parts)[1][0][1]) > 9_000 * 14


def tool(name="f", parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def test_the_schema_of_forced_calls_allows_what_is_read_back():
    point = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}
    point |= {"required": ["x"], "additionalProperties": False}
    functions = [{"name": "f", "parameters": point}, {"name": "get_weather"}]
    backend = train_bpe(["{}[]"], 260)
    grammars = GrammarCompiler(backend, backend.vocab_size, [backend.end_of_document_id])

    def allowed(text, most=None):
        grammar = grammars.compile("json_schema", any_schema(functions, most))
        try:
            grammar.consume(backend.encode(text, parse_special=False))
        except Exception:
            return False
        return grammar.may_stop

    two = '[{"name": "f", "arguments": {"x": 3}}, {"name": "get_weather", "arguments": {"a": "b"}}]'
    assert allowed(two) and not allowed(two, 1)
    assert read(ListParser(), list(two)) == ("", [("f", '{"x": 3}'), ("get_weather", '{"a": "b"}')])
    for wrong in ("[]", '[{"name": "f", "arguments": {"x": "3"}}]', '[{"name": "g", "arguments": {}}]', "text"):
        assert not allowed(wrong)
    assert read(ArgumentsParser("f"), ['{"x"', "", ": 3}"]) == ("", [("f", '{"x": 3}')])
    # References are each function's own: to definitions of one name, to a whole schema, to another property.
    text = {"$defs": {"n": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/n"}}}
    tree = {"properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}, "additionalProperties": False}
    zod = {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}
    named = zip(("t", "tree", "zod"), (text, tree, zod), strict=True)
    functions += [{"name": name, "parameters": {"type": "object", **schema}} for name, schema in named]
    for arguments, wrong in (
        ('"f", "arguments": {"x": 3}', '"f", "arguments": {"x": "3"}'),
        ('"t", "arguments": {"x": "3"}', '"t", "arguments": {"x": 3}'),
        ('"tree", "arguments": {"kids": [{"kids": []}]}', '"tree", "arguments": {"kids": [{"x": []}]}'),
        ('"zod", "arguments": {"a": 1, "b": 2}', '"zod", "arguments": {"a": 1, "b": "2"}'),
    ):
        assert allowed(f'[{{"name": {arguments}}}]') and not allowed(f'[{{"name": {wrong}}}]')


def test_tool_choice():
    tools = [tool("f"), tool("get_weather")]
    assert choose(None, None, "hermes", None).shown == () and choose(tools, "none", "hermes", None).shown == ()
    assert (
        choose([], "auto", "hermes", None) == choose(None, "auto", "hermes", False) == choose(None, None, "llama", None)
    )
    auto = choose(tools, None, "llama", False)
    assert isinstance(auto.parser(), LlamaParser) and auto.structured is None and auto.most == 1
    assert isinstance(choose(tools, "auto", "hermes", None).parser(), HermesParser)
    assert choose(tools, "required", "hermes", None).structured.json["minItems"] == 1
    assert choose(tools, {"type": "function", "function": {"name": "f"}}, "hermes", None).named
    for wrong, message in {
        "sometimes": "must be none, auto, required or",
        "required": "needs tools",
    }.items():
        with pytest.raises(ApiError, match=message):
            choose(None if wrong == "required" else tools, wrong, "hermes", None)
    with pytest.raises(ApiError, match="names 'h', which is not among the tools f, get_weather"):
        choose(tools, {"type": "function", "function": {"name": "h"}}, "hermes", None)
    for wrong, param in {
        "{}": "tools[0]",
        '{"type": "function", "function": {"name": 3}}': "tools[0].function.name",
        '{"type": "function", "function": {"name": "f", "parameters": [1]}}': "tools[0].function.parameters",
    }.items():
        with pytest.raises(ApiError) as info:
            choose([json.loads(wrong)], "auto", "hermes", None)
        assert info.value.param == param


def test_the_style_that_a_template_tells():
    assert style_of("... <tool_call> ...", "auto") == "hermes" and style_of("", "auto") == "hermes"
    assert style_of('{"name": ..., "parameters": ...}', "auto") == "llama"
    assert style_of("<tool_call>", "llama") == "llama"
    for mark, style in TOLD:
        assert style_of(f"<tool_call> {mark}", "auto") == style and style in PARSERS
