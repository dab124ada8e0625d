"""Grammars as llama.cpp, xgrammar and vLLM's users write them (GBNF, `root ::= "yes" | "no"`:
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md), in the Lark that llguidance compiles. This file
owns the reader: how such a text is told from Lark, its rules, and the bounds of what a client may have converted; which
rules are matched as wholes is gbnf_lexemes.py's. llguidance's own converter was not kept: of classes it made Rust's
sets (`[a&&b]` was nothing, `[a--b]` no b), it lost zeros of \\u0041, and parentheses of ("a"*)+. No jax."""

import json
import re
from collections.abc import Mapping

from shardlm.serve.gbnf_lexemes import Chars, Node, Pick, Ref, Repeat, Row, wholes

# Rules are gone over once for each that changes what is known of another, in Python.
MAX_RULES, MAX_CHARS = 512, 16_384
# Of a line and not of white space: over many empty lines that would be tried from each of them.
_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))")
_SPACE = re.compile(r"(?:\s+|#[^\n]*)*+")
_HEAD = re.compile(r"([\w-]+)\s*+::=")
_NAME = re.compile(r"[\w-]+")
_TIMES = re.compile(r"[*+?]|\{\s*+(\d{1,9})\s*+(,)?\s*+(\d{1,9})?\s*+\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_LAST = 0x10FFFF


def is_gbnf(source: str) -> bool:
    """Whether a grammar is no Lark."""
    return bool(_RULE.search(source)) and not _LARK.search(source)


def lark_from_gbnf(source: str) -> str:
    """The same language. Raises ValueError for what is malformed, refers to no rule, or is above the bounds."""
    rules = len(_RULE.findall(source))
    if rules > MAX_RULES or len(source) > MAX_CHARS:
        raise ValueError(
            f"{rules} rules and {len(source)} characters of GBNF; at most {MAX_RULES} rules and {MAX_CHARS} characters "
            "are possible; write it in Lark"
        )
    try:
        return _printed(_Reader(source).rules())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Reader:
    """Goes over a text once. A rule ends where another begins, and not with its line, as xgrammar has it."""

    def __init__(self, source: str):
        self._source, self._at = source, 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._next():
            if not (head := _HEAD.match(self._source, self._at)):
                raise self._wrong("a rule begins with name ::=")
            if head[1] in rules:
                raise self._wrong(f"Rule {head[1]!r} is there twice")
            self._at = head.end()
            rules[head[1]] = self._alternatives()
        if "root" not in rules:
            raise ValueError("No 'root' rule found")
        return rules

    def _next(self) -> str:
        """The character that is not white space, nor of a comment; "" at the end."""
        self._at = _SPACE.match(self._source, self._at).end()
        return self._source[self._at : self._at + 1]

    def _alternatives(self) -> Node:
        found = [self._row()]
        while self._next() == "|":
            self._at += 1
            found.append(self._row())
        return Pick(tuple(found)) if len(found) > 1 else found[0]

    def _row(self) -> Node:
        found: list[Node] = []
        while (now := self._next()) and now not in "|)" and not _HEAD.match(self._source, self._at):
            one = self._one(now)
            if self._next() in ("*", "+", "?", "{"):
                one = self._repeated(one)
            found.append(one)
        return found[0] if len(found) == 1 else Row(tuple(found))

    def _one(self, now: str) -> Node:
        if name := _NAME.match(self._source, self._at):
            self._at = name.end()
            return Ref(name[0])
        if now not in '"[(.':
            raise self._wrong(f"{now!r} is none of a name, a text, a class, a group and .")
        self._at += 1
        if now == "(":
            inner = self._alternatives()
            if self._next() != ")":
                raise self._wrong("Expected ')'")
            self._at += 1
            return inner
        return _any() if now == "." else self._text() if now == '"' else self._class()

    def _text(self) -> Node:
        found = []
        while not self._ends('"'):
            point = self._point()
            found.append(Chars.of([(point, point)], _shown(chr(point))))
        return Row(tuple(found))

    def _class(self) -> Node:
        negated, ranges = self._ends("^"), []
        while not self._ends("]"):
            first = last = self._point()
            if self._source[self._at : self._at + 1] == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._point()
            if last < first:
                raise self._wrong(f"the range {chr(first)!r} to {chr(last)!r} is turned round")
            ranges.append((first, last))
        if not ranges:
            if negated:
                return _any()
            raise self._wrong("an empty class")
        inner = "".join("-".join(f"\\x{{{point:x}}}" for point in sorted({*ends})) for ends in ranges)
        return Chars.of(ranges, f"/[{'^' if negated else ''}{inner}]/", negated)

    def _ends(self, mark: str) -> bool:
        found = self._source.startswith(mark, self._at)
        self._at += found
        return found

    def _point(self) -> int:
        """One character, by its number."""
        if code := _CODE.match(self._source, self._at):
            self._at, found = code.end(), int(code[1] or code[2] or code[3], 16)
        else:
            one = self._source[self._at : self._at + 1]
            if one == "\\":
                self._at += 1
                one = self._source[self._at : self._at + 1]
                if one.isalnum() and one not in _NAMED:
                    raise self._wrong(f"Invalid escape sequence \\{one}")
                one = _NAMED.get(one, one)
            if not one:
                raise self._wrong("Unexpected end of input")
            self._at, found = self._at + 1, ord(one)
        if found > _LAST or 0xD800 <= found < 0xE000:
            raise self._wrong(f"{found:#x} is no character")
        return found

    def _repeated(self, one: Node) -> Node:
        found = _TIMES.match(self._source, self._at)
        if not found:
            raise self._wrong("Expected {m}, {m,} or {m,n}")
        self._at = found.end()
        if not found[1]:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
        else:
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
        if most is not None and most < least:
            raise self._wrong(f"from {least} to {most} times")
        return Row(()) if most == 0 else Repeat(one, least, most)

    def _wrong(self, problem: str) -> ValueError:
        before, behind = self._source[max(0, self._at - 20) : self._at], self._source[self._at : self._at + 20]
        return ValueError(f"{problem} at line {self._source.count(chr(10), 0, self._at) + 1}, {before!r} ^ {behind!r}")


def _any() -> Chars:
    """A line's end too, which Lark's /./ is not."""
    return Chars.of([(0, _LAST)], r"/[\x{0}-\x{10ffff}]/")


def _shown(char: str) -> str:
    return json.dumps(char, ensure_ascii=False) if char.isprintable() else f"/\\x{{{ord(char):x}}}/"


def _printed(rules: Mapping[str, Node]) -> str:
    """In Lark, whose names in capitals are of what is matched as a whole."""
    whole, acyclic = wholes(rules)
    own = {name: f"r{place}_{re.sub('[^a-z0-9]', '_', name.lower())}" for place, name in enumerate(rules)}

    def called(name: str, within: bool) -> str:
        return own[name].upper() if within or name in whole else own[name]

    lines = ["%llguidance {}", "", f"start: {called('root', False)}"]
    for name, node in rules.items():
        lines.append(f"{own[name]}: {_text_of(node, lambda one: called(one, False))}")
        if name in acyclic:
            lines.append(f"{own[name].upper()}: {_text_of(node, lambda one: called(one, True))}")
    return "\n".join(lines) + "\n"


def _text_of(node: Node, called) -> str:
    match node:
        case Chars():
            return node.text
        case Ref():
            return called(node.name)
        case Repeat():
            few = {(0, None): "*", (1, None): "+", (0, 1): "?"}
            most = "" if node.most is None else node.most
            return f"({_text_of(node.one, called)}){few.get((node.least, node.most), f'{{{node.least},{most}}}')}"
        case Row():
            return " ".join(_text_of(one, called) for one in node.each) or '""'
        case Pick():
            return f"({' | '.join(_text_of(one, called) for one in node.each)})"
