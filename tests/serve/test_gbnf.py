"""GBNF has the language that is written, whichever of its rules are matched as wholes."""

import itertools
import random
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from shardlm.serve.gbnf import is_gbnf, lark_from_gbnf
from shardlm.serve.gbnf_lexemes import OTHERS, Chars, Pick, Ref, Repeat, Row, wholes

BYTES = LLTokenizer("byte")
# llama.cpp's grammars/arithmetic.gbnf: a number takes the spaces behind it, of which a line's end is one.
ARITHMETIC = r"""root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*"""
JSON = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}"""


def takes(lark: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        (r'root ::= "\u0041\x42\U0001F642" "\[\]\"\\\n"', ['AB🙂[]"\\\n'], ["AB"]),
        (r"root ::= [\u0041-\u005A\U0001F600-\U0001F64F]", ["A", "Z", "🙂"], ["a", "é"]),
        ("root ::= [a&&b~~c]", list("a&b~c"), ["d"]),
        (r"root ::= [^^\]\\/-]", list("a[\n"), list("^]\\/-")),
        ("root ::= [-a^.$*]", list("-a^.$*"), ["b"]),
        ("root ::= .", ["a", "\n", "🙂"], ["", "aa"]),
        ('root ::= ("a"*)+ | ("b"{2}){2} | "c"{0} "d"', ["", "aa", "bbbb", "d"], ["bb", "c", "cd"]),
        ('root ::= w "z"\nw ::= [a-z]*', ["z", "az", "zz"], ["", "a"]),
        ('root ::= w w | "(" root ")"\nw ::= [a-z]+', ["ab", "(abc)"], ["a", "(a)"]),
        (
            'root ::= start fooBar foo-bar 2nd\nstart ::= "a"\nfooBar ::= "b"\nfoo-bar ::= "c"\n2nd ::= "d"',
            ["abcd"],
            [],
        ),
        ('root ::= "a" # "b\r\n\n  | "b"\n  "c"\r\nx ::= "d"', ["a", "bc"], ["b", "d"]),
        ('root ::= "a" |\n', ["", "a"], ["aa"]),
        (ARITHMETIC, ["1=2\n", "a +(2*b) = 3 \n1=1\n\n"], ["1=2", "=2\n"]),
        (JSON, ['{"a": [1, "b\\n\\u00e9 日", true], "": {}}\n'], ["{", '{"a": "\n"}']),
    ],
)
def test_the_language_that_is_written(source, texts, others):
    assert is_gbnf(source)
    lark = lark_from_gbnf(source)
    assert [text for text in texts if not takes(lark, text)] == [text for text in others if takes(lark, text)] == []


def test_texts_of_any_character_are_matched_as_wholes():
    """Of JSON strings, numbers and white space; of arithmetic nothing, as what follows may go on with it."""
    assert "R4_STRING" in lark_from_gbnf(JSON).split("r4_string:")[0]
    assert ": R" not in lark_from_gbnf(ARITHMETIC).split("R5_WS")[0]


@pytest.mark.parametrize("seed", range(60))
def test_rules_that_are_drawn(seed):
    """Against each text of up to 4 characters, by the definition."""
    rules = _drawn(random.Random(seed))
    lark = lark_from_gbnf("\n".join(f"{name} ::= {_written(node)}" for name, node in rules.items()))
    texts = ["".join(text) for size in range(5) for text in itertools.product("abc", repeat=size)]
    for text in random.Random(seed).sample(texts, 40):
        assert takes(lark, text) == _derives(rules, text), (text, lark)


def test_some_that_are_drawn_have_wholes():
    """Beside the root."""
    found = [wholes(_drawn(random.Random(seed)))[0] for seed in range(60)]
    assert sum(bool(whole) and "root" not in whole for whole in found) > 5


def _drawn(rng: random.Random) -> dict:
    names = [f"x{i}" for i in range(rng.choice([2, 3, 4]))]

    def one(depth: int):
        if depth == 0 or rng.random() < 0.4:
            letters = "".join(rng.sample("abc", rng.choice([1, 1, 2])))
            return rng.choice([Ref(rng.choice(names)), Chars.of([(ord(a),) * 2 for a in letters], letters)])
        if rng.random() < 0.4:
            least, most = rng.choice([(0, None), (1, None), (0, 1), (2, 2), (1, 2)])
            return Repeat(one(depth - 1), least, most)
        kind = rng.choice([Row, Pick])
        return kind(tuple(one(depth - 1) for _ in range(rng.choice([1, 2, 2, 3]))))

    return {name: one(3) for name in ("root", *names)}


def _written(node) -> str:
    match node:
        case Chars():
            return f"[{node.text}]"
        case Ref():
            return node.name
        case Repeat():
            return f"({_written(node.one)}){{{node.least},{'' if node.most is None else node.most}}}"
        case _:
            return f"({(' | ' if isinstance(node, Pick) else ' ').join(map(_written, node.each))})"


def _derives(rules: dict, text: str) -> bool:
    """Whether it is a text of root: where each rule may end, from each place, until nothing more is found."""
    ends = {(name, at): frozenset() for name in rules for at in range(len(text) + 1)}

    def of(node, at: int) -> frozenset[int]:
        match node:
            case Chars():
                there = at < len(text) and node.bits >> ord(text[at]) & 1
                return frozenset({at + 1} if there else ())
            case Ref():
                return ends[node.name, at]
            case Pick():
                return frozenset().union(*(of(one, at) for one in node.each))
        turns = node.each if isinstance(node, Row) else [node.one] * (node.most or len(text) + 2)
        least, found, now = len(turns) if isinstance(node, Row) else node.least, set(), frozenset({at})
        for turn, one in enumerate([*turns, None]):
            found |= now if turn >= least else set()
            now = frozenset().union(*(of(one, place) for place in now)) if one else now
        return frozenset(found)

    while (found := {(name, at): of(rules[name], at) for name, at in ends}) != ends:
        ends = found
    return len(text) in ends["root", 0]


@pytest.mark.parametrize("source", ["\n" * 60_000, " \n" * 30_000, 'root ::= "a"' + "\n" * 16_000, "a" * 60_000])
def test_white_space_takes_no_time(source):
    """Which a client may send much of. Measured: 2 ms; tried from each line anew, 20,000 lines took 5 seconds."""
    begin = time.monotonic()
    if is_gbnf(source):
        lark_from_gbnf(source)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("root ::= [z-a]", "the range 'z' to 'a' is turned round at line 1"),
        ("root ::= []", "an empty class"),
        (r'root ::= "\q"', r"Invalid escape sequence \\q"),
        (r'root ::= "\ud83d"', "0xd83d is no character"),
        (r'root ::= "\U00110000"', "0x110000 is no character"),
        ('root ::= "a"{3,2}', "from 3 to 2 times"),
        ('root ::= "a"{x}', "Expected {m}, {m,} or {m,n}"),
        ('root ::= ("a"', r"Expected '\)'"),
        ('root ::= "a" ? *', "is none of a name, a text.*line 1"),
        ('root ::= "a"\nroot ::= "b"', "'root' is there twice at line 2"),
        ('root := "a"', "a rule begins with name ::= at line 1"),
    ],
)
def test_what_is_malformed(source, problem):
    with pytest.raises(ValueError, match=problem):
        lark_from_gbnf(source)


def test_bits_of_characters():
    assert Chars.of([(97, 98)], "").bits == 3 << 97
    assert Chars.of([(97, 200)], "").bits >> 97 == (OTHERS * 2 - 1) >> 97
    assert Chars.of([(200, 300)], "", negated=True).bits == OTHERS * 2 - 1
