"""What is sampled under a grammar's masks satisfies the grammar."""

import json
import re

import jax
import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.ops.batch_sampling import RowSettings, sample_rows
from shardlm.serve.grammar import ANY_OBJECT, GrammarCompiler, lenient
from shardlm.tokenizer import train_bpe

TOKENIZER = train_bpe(['{"name": "ab", "age": 12, "tags": ["x", "y"]}\n true né日🙂'] * 8, 300)
STOP = TOKENIZER.end_of_document_id
VOCAB = TOKENIZER.vocab_size + 30  # a model's embedding is often larger
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, [STOP])

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 7, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["x", "né", None]}, "minItems": 1, "maxItems": 3},
        "ok": {"$ref": "#/$defs/flag"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
CHOICES = ["né🙂", 'b\n"\\', "ab", "abc"]
# As vLLM's users write it; alternatives that begin a line, as xgrammar reads them, and comments with what is none.
GBNF = 'root ::= sum # "a | b\nsum ::= term ("+" term)*\nterm ::= [0-9]{1,3} # [x]\n  | "(" sum ")"'
LARK = 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"'


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        {"name", "age", "tags"} <= set(value) <= {"name", "age", "tags", "ok"}
        and (isinstance(value["name"], str) and 1 <= len(value["name"]) <= 6)
        and (type(value["age"]) is int and 7 <= value["age"] <= 130)
        and (1 <= len(value["tags"]) <= 3 and all(tag in ("x", "né", None) for tag in value["tags"]))
        and isinstance(value.get("ok", True), bool)
    )


def is_sum(text: str) -> bool:
    while (shorter := re.sub(r"\((\d{1,3}\+?)+(?<!\+)\)", "1", text)) != text:
        text = shorter
    return bool(re.fullmatch(r"\d{1,3}(\+\d{1,3})*", text))


CASES = [
    ("json_schema", PERSON, is_person),
    ("json_schema", json.dumps(PERSON), is_person),
    ("json_schema", ANY_OBJECT, lambda text: isinstance(json.loads(text), dict)),
    ("regex", "[a-c]{2,5}(日|🙂)x?", lambda text: bool(re.fullmatch("[a-c]{2,5}(日|🙂)x?", text))),
    ("choice", CHOICES, lambda text: text in CHOICES),
    ("grammar", LARK, is_sum),
    ("grammar", GBNF, is_sum),
]


def everything(rows: int) -> np.ndarray:
    """Masks that allow every token."""
    return np.full((rows, -(-VOCAB // 32)), -1, np.int32)


def test_random_tokens_under_the_masks_make_texts_that_satisfy_their_grammars():
    rows, rng = 8 * len(CASES), np.random.default_rng(0)
    grammars = [COMPILER.compile(*CASES[row % len(CASES)][:2]) for row in range(rows)]
    grammars[: len(CASES)] = [grammar.copy() for grammar in grammars[: len(CASES)]]
    replies: list[list[int]] = [[] for _ in range(rows)]
    settings, masks, sample = RowSettings.defaults(rows), everything(rows), jax.jit(sample_rows)
    settings.temperature[:] = 1
    logits = rng.normal(0, 1, (rows, VOCAB)).astype(np.float32)
    logits[:, [TOKENIZER.encode(end)[0] for end in '"}])']] += 3  # or texts become long
    logits[:, STOP] += 3
    running = set(range(rows))
    for step in range(600):
        assert COMPILER.fill(masks, [(row, grammars[row]) for row in running]) == {}
        settings.position[:] = step
        token = np.asarray(sample(logits, settings, allowed=masks).token)
        for row in list(running):
            assert (token[row] == STOP) <= grammars[row].may_stop
            grammars[row].consume([token[row]])
            if token[row] == STOP or grammars[row].complete:
                running.remove(row)
            if token[row] != STOP:
                replies[row].append(int(token[row]))
        if not running:
            break
    assert len(running) < rows / 8  # a few nest deeper and deeper
    texts = {row: TOKENIZER.decode(replies[row]) for row in set(range(rows)) - running}
    for row, text in texts.items():
        assert CASES[row % len(CASES)][2](text), (CASES[row % len(CASES)][0], text)
    assert len(set(texts.values())) > rows / 2


def test_masks_allow_what_continues_the_text_and_nothing_else():
    grammar, other = COMPILER.compile("regex", "ab?"), COMPILER.compile("choice", ["x"])
    masks = everything(3)
    COMPILER.fill(masks, [(2, grammar), (0, other)])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert bits[1].all()
    allowed = [{TOKENIZER.decode([token], skip_special=False) for token in np.flatnonzero(bits[row])} for row in (0, 2)]
    assert allowed == [{"x"}, {"a", "ab"}]
    grammar.consume(TOKENIZER.encode("a"))
    assert grammar.may_stop and not grammar.complete
    again = grammar.copy()
    grammar.consume(TOKENIZER.encode("b"))
    assert grammar.complete and not again.complete
    COMPILER.fill(masks, [(0, grammar)])
    bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [STOP]
    again.consume([STOP])


def test_white_space_in_json_ends():
    grammar = COMPILER.compile("json_schema", ANY_OBJECT)
    space = TOKENIZER.encode(" ")
    grammar.consume([*TOKENIZER.encode("{"), *space * 40])
    with pytest.raises(ShardlmError, match=r"tokens \[.*\] do not continue the reply's grammar: .*Sample under"):
        grammar.consume(space)


def test_a_grammar_that_grows_too_complex_ends_its_row_alone():
    monster, other = COMPILER.compile("regex", "(?:(?:(?:x{0,999}){0,999}){0,999})"), COMPILER.compile("regex", "x+")
    masks, letter = everything(2), TOKENIZER.encode("x")
    for _ in range(30):
        if failed := COMPILER.fill(masks, [(0, monster), (1, other)]):
            break
        for grammar in (monster, other):
            grammar.consume(letter)
    assert list(failed) == [0] and "too many" in failed[0]
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert np.flatnonzero(bits[0]).tolist() == [STOP] and bits[1, letter[0]]


def test_many_choices_are_one_automaton():
    grammar = COMPILER.compile("choice", [f"x{i}" for i in range(20_000)])
    grammar.consume(TOKENIZER.encode("x19999"))
    assert grammar.complete


@pytest.mark.parametrize(
    "kind,source,problem",
    [
        ("json_schema", '{"type": "object"', "EOF while parsing"),
        ("json_schema", {"type": "objec"}, "Invalid type: objec"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"$ref": "#/$defs/none"}, "does not exist"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ("json_schema", [], "Expecting object"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", [], "one string or more"),
        ("choice", ["a", 1], "one string or more"),
        ("choice", "ab", "one string or more"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", {"start": "x"}, "a grammar is a string"),
        ("grammar", "root ::= x", "Rule 'x' not found"),
        ("grammar", 'statement ::= "x"', "No 'root' rule"),
        ("grammar", "root ::= [a-z", "Unexpected end of input"),
        ("grammar", f"root ::= {'(' * 3000}x{')' * 3000}\nx ::= 'a'", "nested too deeply"),
        ("grammar", 'root ::= "a"\n' + 'x ::= "a"\n' * 512, "513 rules and .* at most 512 rules"),
        ("grammar", f'root ::= "{"a" * 16_384}"', "16395 characters of GBNF"),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind, source, problem):
    with pytest.raises(ShardlmError, match=rf"the {kind} .*cannot be compiled: .*{problem}.*Correct it") as refused:
        COMPILER.compile(kind, source)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize("vocab,stop_ids", [(100, [STOP]), (VOCAB, [])])
def test_a_tokenizer_that_does_not_fit_is_refused(vocab, stop_ids):
    with pytest.raises(ShardlmError, match=rf"at most vocab_size={vocab} ids.*at least one stop token.*own tokenizer"):
        GrammarCompiler(TOKENIZER, vocab, stop_ids)


def test_schemas_that_are_not_strict_are_held_to_what_is_supported(caplog):
    """pydantic's sets, zod's records and addresses, formats of one's own, in one schema."""
    address = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z]+$"}
    members = {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "counts": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        "data": {"type": "string", "format": "binary"},
        "to": {"anyOf": [address, {"type": "null"}]},
        "pattern": {"type": "string", "pattern": "^a+$"},
    }
    schema = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    grammars = GrammarCompiler(TOKENIZER, VOCAB, [STOP])
    with pytest.raises(ShardlmError, match=r"cannot be compiled: .*(uniqueItems|propertyNames|binary)"):
        grammars.compile("json_schema", schema)
    for _ in range(2):
        grammar = grammars.compile("json_schema", lenient(schema))
    said = '{"tags":["x","x"],"counts":{"x":1},"data":"x","to":"..@x","pattern":"aa"}'
    grammar.consume(TOKENIZER.encode(said))
    assert grammar.may_stop
    with pytest.raises(ShardlmError, match="do not continue"):
        grammars.compile("json_schema", lenient(schema)).consume(TOKENIZER.encode(said.replace('"aa"', '"b"')))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) == 3 and all("without strict=true" in line for line in lines)
    assert any(r"the pattern ^(?!\.)[a-z.]+@[a-z]+$" in line for line in lines)
    own = {**schema, "x-guidance": {"lenient": False}}
    with pytest.raises(ShardlmError, match="cannot be compiled"):
        grammars.compile("json_schema", lenient(own))


def test_names_that_must_be_texts_are_nothing_that_is_asked_for():
    """zod says so of records, which the AI SDK asks for with strict=true."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": {"anyOf": [record, {"type": "null"}]}}, "required": ["a"]}
    grammar = COMPILER.compile("json_schema", schema)
    grammar.consume(TOKENIZER.encode('{"a": {"x": 1}}'))
    assert grammar.may_stop
    record["propertyNames"]["title"] = "LangChain's"
    COMPILER.compile("json_schema", schema)
    record["propertyNames"]["pattern"] = "x"
    with pytest.raises(ShardlmError, match=r"propertyNames.* leave out strict=true where a request has it or use what"):
        COMPILER.compile("json_schema", schema)


def test_schemas_that_are_nested_too_deeply_are_refused():
    schema = {"type": "integer"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    for one in (schema, lenient(schema)):
        with pytest.raises(ShardlmError, match="cannot be compiled: recursion limit exceeded"):
            COMPILER.compile("json_schema", one)
