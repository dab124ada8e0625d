"""Which rules of a GBNF grammar (gbnf.py) are matched as wholes. llguidance goes over a text in lexemes, each as long
as it can be, as Lark does: of `w "z"` with `w ::= [a-z]*` no text would ever be complete, as w takes every z. Without
such wholes each character is a lexeme, which is right always, and slow in texts of any character: 0.8 ms of a core for
a row's mask of 19 thousand tokens, 0.006 with (a JSON grammar; llguidance, two cores).

A rule is a whole where it refers to nothing that refers to itself, what may follow it can't go on with it, and nothing
else begins as it does. All is told of 128 characters, and of all others as one. No jax."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

OTHERS = 1 << 128  # the bit of all characters that are not ASCII
EVERY = 2 * OTHERS - 1
ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Chars:
    """One of some characters: their bits, and its `text` in Lark."""

    bits: int
    text: str

    @staticmethod
    def of(ranges: Sequence[tuple[int, int]], text: str, negated: bool = False) -> "Chars":
        bits = 0
        for first, last in ranges:
            if first < 128:
                bits |= (1 << (min(last, 127) + 1)) - (1 << first)
            bits |= OTHERS if last > 127 else 0
        return Chars((EVERY & ~bits) | OTHERS if negated else bits, text)


@dataclasses.dataclass(frozen=True)
class Ref:
    name: str


@dataclasses.dataclass(frozen=True)
class Repeat:
    """most: None: any number."""

    one: "Node"
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One after the other; of none, the empty text."""

    each: tuple["Node", ...]


@dataclasses.dataclass(frozen=True)
class Pick:
    """One of several."""

    each: tuple["Node", ...]


Node = Chars | Ref | Repeat | Row | Pick


class Facts(NamedTuple):
    """empty   whether the empty text is one
    first   what texts begin with
    longer  what may come behind a whole text so that the two begin a longer one
    all     what is in texts
    """

    empty: bool = False
    first: int = 0
    longer: int = 0
    all: int = 0


def wholes(rules: Mapping[str, Node]) -> tuple[frozenset[str], frozenset[str]]:
    """(rules that are matched as wholes where a rule refers to them that is none, those that refer to nothing that
    refers to itself). Raises ValueError where there is no such rule."""
    refs = {name: frozenset(_refs(node)) for name, node in rules.items()}
    if missing := sorted(set().union(*refs.values()) - rules.keys()):
        raise ValueError(f"Rule {missing[0]!r} not found")
    order = _order(refs)
    facts = _all_facts(rules, refs, order)
    behind = _behind(rules, refs, facts)
    whole = frozenset(name for name in order if not facts[name].longer & behind[name])
    for _ in range(ROUNDS):
        unlike = frozenset(_unlike(rules, facts, whole))
        if unlike == whole:
            return whole, frozenset(order)
        whole = unlike
    return frozenset(), frozenset(order)


def _refs(node: Node) -> Iterator[str]:
    match node:
        case Ref():
            yield node.name
        case Repeat():
            yield from _refs(node.one)
        case Row() | Pick():
            for one in node.each:
                yield from _refs(one)


def _order(refs: Mapping[str, Collection[str]]) -> list[str]:
    """Rules that refer to nothing that refers to itself, each behind those that it refers to."""
    left = {name: len(own) for name, own in refs.items()}
    by = _users(refs)
    order = [name for name, count in left.items() if not count]
    for name in order:
        for user in by[name]:
            left[user] -= 1
            if not left[user]:
                order.append(user)
    return order


def _users(refs: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    by: dict[str, list[str]] = {name: [] for name in refs}
    for name, own in refs.items():
        for one in own:
            by[one].append(name)
    return by


def _all_facts(rules: Mapping[str, Node], refs, order: Sequence[str]) -> dict[str, Facts]:
    known, by = dict.fromkeys(rules, Facts()), _users(refs)
    waiting = dict.fromkeys([*order, *rules])
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        found = _facts(rules[name], known)
        if found != known[name]:
            known[name] = found
            waiting |= dict.fromkeys(by[name])
    return known


def _facts(node: Node, known: Mapping[str, Facts]) -> Facts:
    match node:
        case Chars():
            return Facts(False, node.bits, 0, node.bits)
        case Ref():
            return known[node.name]
        case Repeat():
            one = _facts(node.one, known)
            found = one if node.least else _either(Facts(True), one)
            unsure = one.longer & one.first
            if node.most == 1 or (node.most == node.least and not one.empty and not unsure):
                return found  # of which there are as many in any text
            return found._replace(longer=one.longer | one.first | (one.all if unsure else 0))
        case Row():
            found = Facts(True)
            for one in node.each:
                found = _joined(found, _facts(one, known))
            return found
        case Pick():
            found = Facts()
            for one in node.each:
                found = _either(found, _facts(one, known))
            return found


def _joined(a: Facts, b: Facts) -> Facts:
    """One behind the other. Where it is not told by one character whether the first is over, both may go on."""
    unsure = a.longer & b.first or (a.empty and a.first & b.first)
    longer = b.longer | (a.longer | b.first if b.empty else 0) | (a.all | b.all if unsure else 0)
    return Facts(a.empty and b.empty, a.first | (b.first if a.empty else 0), longer, a.all | b.all)


def _either(a: Facts, b: Facts) -> Facts:
    longer = a.longer | b.longer | (a.all | b.all if a.first & b.first else 0)
    longer |= (b.first if a.empty else 0) | (a.first if b.empty else 0)
    return Facts(a.empty or b.empty, a.first | b.first, longer, a.all | b.all)


def _behind(rules: Mapping[str, Node], refs, facts: Mapping[str, Facts]) -> dict[str, int]:
    """What may follow each rule."""
    found = dict.fromkeys(rules, 0)
    waiting = dict.fromkeys(rules)

    def go(node: Node, after: int) -> None:
        match node:
            case Ref():
                if after & ~found[node.name]:
                    found[node.name] |= after
                    waiting[node.name] = None
            case Repeat():
                go(node.one, after | (facts_of(node.one).first if node.most != 1 else 0))
            case Row():
                for one in reversed(node.each):
                    go(one, after)
                    of = facts_of(one)
                    after = of.first | (after if of.empty else 0)
            case Pick():
                for one in node.each:
                    go(one, after)

    def facts_of(node: Node) -> Facts:
        return _facts(node, facts)

    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        if refs[name]:
            go(rules[name], found[name])
    return found


def _unlike(rules: Mapping[str, Node], facts: Mapping[str, Facts], whole: Collection[str]) -> Iterator[str]:
    """Those of `whole` that nothing else begins as, of what a text is gone over in."""
    lexemes, seen, waiting = dict[str, int](), set[str](), ["root"]

    def go(node: Node) -> None:
        match node:
            case Chars():
                lexemes[node.text] = node.bits
            case Ref():
                refer(node.name)
            case Repeat():
                go(node.one)
            case Row() | Pick():
                for one in node.each:
                    go(one)

    def refer(name: str) -> None:
        if name in whole:
            lexemes[name] = facts[name].first
        elif name not in seen:
            seen.add(name)
            waiting.append(name)

    refer(waiting.pop())
    while waiting:
        go(rules[waiting.pop()])
    once = twice = 0
    for first in lexemes.values():
        once, twice = once | first, twice | (once & first)
    for name in whole:
        if not (name in lexemes and lexemes[name] & twice):
            yield name
