"""Texts that structural tags allow and forbid, token by token."""

import json

import pytest

from shardlm.errors import ShardlmError
from shardlm.serve.grammar import GrammarCompiler
from shardlm.tokenizer import train_bpe

CALL = "<|call|>"
TOKENIZER = train_bpe(['<f=a>{"x": 12}</f> and <f=b>true</f>, né日🙂'] * 8, 300, ("<|endoftext|>", CALL))
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [TOKENIZER.end_of_document_id])
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": X, "end": "</f>"},
        {"begin": "<f=b>", "schema": json.dumps({"type": "boolean"}), "end": "</f>"},
    ],
    "triggers": ["<f="],
}
JSON, DIGITS = {"type": "json_schema", "json_schema": X}, {"type": "regex", "pattern": "[0-9]+/[0-9]"}
A = {"type": "tag", "begin": "<f=a>", "content": JSON, "end": "</f>"}
B = {"begin": "<f=b>", "content": DIGITS, "end": ["</f>", ";"]}


def of(kind, **fields):
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


def triggered(**fields):
    return of("triggered_tags", triggers=["<f="], tags=[A, B], **fields)


def told(tag, text):
    """Whether a text may begin so, and may end so."""
    grammar = COMPILER.compile("structural_tag", tag)
    begins = all(grammar.follows(token) for token in TOKENIZER.encode(text))
    return begins, begins and grammar.may_stop


WHOLE, OPEN, WRONG = (True, True), (True, False), (False, False)
CASES = [
    (OLD, "", WHOLE),
    (OLD, "no call, né日🙂", WHOLE),
    (OLD, 'and <f=a>{"x": 1}</f> and\n<f=b>true</f>', WHOLE),
    (json.dumps(OLD), 'and <f=a>{"x":\n 1}</f>', WHOLE),
    (OLD, "and <f", WHOLE),
    (OLD, "and <f=", OPEN),
    (OLD, "and <f=c", WRONG),
    (OLD, 'and <f=a>{"y', WRONG),
    (OLD, 'and <f=a>{"x": 1}</f', OPEN),
    (OLD, f'<f=a>{{"x":{" " * 41}', WRONG),  # white space without an end
    (triggered(), "a <f=b>1/2; b <f=b>3/4</f>", WHOLE),
    (triggered(at_least_one=True), "a", OPEN),
    (triggered(at_least_one=True), "a <f=b>1/2; b", WHOLE),
    (triggered(stop_after_first=True), "a <f=b>1/2;", WHOLE),
    (triggered(stop_after_first=True), "a <f=b>1/2; ", WRONG),
    (triggered(stop_after_first=True), "a", WHOLE),
    (triggered(at_least_one=True, stop_after_first=True), "a", OPEN),
    (of("triggered_tags", triggers=[CALL], tags=[{**A, "begin": f"{CALL}f", "end": ""}]), f'a{CALL}f{{"x":1}}b', WHOLE),
    (of("triggered_tags", triggers=[CALL], tags=[{**A, "begin": f"{CALL}f"}]), f"a{CALL}g", WRONG),
    (of("const_string", value='né"日'), 'né"日', WHOLE),
    (of("const_string", value="né"), "n", OPEN),
    (of("sequence", elements=[{"type": "const_string", "text": "a:"}, JSON]), 'a:{"x":1}', WHOLE),
    (of("sequence", elements=[DIGITS, {"type": "any_text"}]), "1/2 né", WHOLE),
    (of("or", elements=[DIGITS, {"type": "const_string", "value": "no"}]), "no", WHOLE),
    (of("or", elements=[DIGITS, {"type": "const_string", "value": "no"}]), "nu", WRONG),
    (of("tag", begin="<think>", content={"type": "any_text"}, end="</think>"), "<think>a <b</think>", WHOLE),
    (of("tag", begin="<think>", content={"type": "any_text"}, end="</think>"), "<think>a</think>b", WRONG),
    (of("tag", begin=CALL, content={"type": "any_text"}, end=CALL), f"{CALL}a né{CALL}", WHOLE),
    (of("tag", begin="", content=DIGITS, end=""), "1/2", WHOLE),
    (of("tags_with_separator", tags=[A, B], separator=", "), "", WHOLE),
    (of("tags_with_separator", tags=[A, B], separator=", "), '<f=b>1/2;, <f=a>{"x":1}</f>', WHOLE),
    (of("tags_with_separator", tags=[A, B], separator=", "), "<f=b>1/2;, ", OPEN),
    (of("tags_with_separator", tags=[A, B], separator=", ", at_least_one=True), "", OPEN),
    (of("tags_with_separator", tags=[A, B], separator=", ", stop_after_first=True), "<f=b>1/2;,", WRONG),
]


@pytest.mark.parametrize(("tag", "text", "expected"), CASES)
def test_what_may_be_written(tag, text, expected):
    assert told(tag, text) == expected


BAD = [
    ("[]", "it is a JSON list; it must be an object"),
    ("{", "cannot be compiled: Expecting property name"),
    ({}, "structures is None; it must be a list that is not empty"),
    ({**OLD, "triggers": ["<g="]}, "the tag that begins with '<f=a>' has none of the triggers ['<g=']"),
    (
        {"structures": [{"begin": "<f=", "end": ""}], "triggers": ["<f="]},
        "a schema is a NoneType; it must be an object",
    ),
    (of("grammar", grammar="root ::= a"), "a format has the type 'grammar'; there are const_string, json_schema"),
    (
        of("sequence", elements=[{"type": "any_text"}, DIGITS]),
        "a format of type any_text is free to the end; nothing can",
    ),
    (
        of("tag", begin="a", content=triggered()["format"], end="b"),
        "a format of type triggered_tags is free to the end",
    ),
    (of("tag", begin="a", content=DIGITS, end=[1]), "a tag has an end that is no text"),
    (of("tag", begin=1, content=DIGITS, end=""), "begin is 1; it must be a text"),
    (of("or", elements=[]), "elements is []; it must be a list that is not empty"),
    (of("regex", pattern="("), "the structural_tag"),
]


@pytest.mark.parametrize(("tag", "message"), BAD)
def test_what_is_no_structural_tag_is_told(tag, message):
    with pytest.raises(ShardlmError) as error:
        COMPILER.compile("structural_tag", tag)
    assert message in str(error.value)


def test_formats_too_deep_are_refused():
    deep = DIGITS
    for _ in range(40):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(ShardlmError, match="more than 32 deep"):
        COMPILER.compile("structural_tag", {"format": deep})
    with pytest.raises(ShardlmError, match="it is too deep"):
        COMPILER.compile("structural_tag", '{"format":' * 100_000)
