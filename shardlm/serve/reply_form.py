"""What a reply is held to, and from where on: a grammar or none, after a part that is free, as thoughts before an
answer are.

The free part ends with given texts, which tokens need not respect: a token that would end it and go on is forbidden, so
that the grammar begins with a token. Nor does a reply end in it, before what is asked for: a model that stopped in its
thoughts would have called no tool that it must call. Where only a reply with a certain beginning is free, its first
tokens may be that beginning or what the grammar allows. No jax.

Free parts may have a limit: so many tokens, after which those of the text that ends them are the only ones allowed.

Behind it, or with no such part before, a reply may begin with something else than what the grammar allows, a call of a
tool, and is free to its end then. That is another free part, which has a beginning and no end.

A form says how long the same rule holds: tokens that are free alike may be sampled several at a time, and are dropped
from the one on that is not (scheduler.py). In its free part a form seldom changes the rule before its end.
"""

import copy
import dataclasses
import functools
import sys
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.grammar import Grammar, GrammarCompiler, Kind
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.text_progress import TextProgress
from shardlm.serve.thoughts import Thoughts
from shardlm.tokenizer import DecodeStream, Tokenizer

SPACE = 4  # characters at most before a beginning, where a grammar may follow instead
FREE = 0  # the rule that forbids nothing
FREE_PARTS = 16  # that are remembered; a server has three
NEVER = "\uffff"  # ends a free part that has no end: no character (https://www.unicode.org/faq/private_use.html)


class FreePart:
    """What all replies with the same free part share: which tokens begin it, and which end it and go on.

    Place is where a reply stands in it: the number of the text in `after` that comes next, and how many of its
    characters are there.
    """

    def __init__(
        self,
        token_texts: Sequence[str],
        after: Sequence[str],
        openings: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
    ):
        """Without texts of tokens nothing is forbidden: for what no grammar follows. `stop_ids`: that do not end it."""
        self.after, self.openings = tuple(after), tuple(openings)
        self._texts, self._stops = token_texts, set(stop_ids)
        self._space = SPACE if token_texts else sys.maxsize
        last = self.after[-1]
        self._ending = [id for id, text in enumerate(token_texts) if last[-1] in text[:-1]]  # that may end it and go on
        self._whole = [id for id in self._ending if last in token_texts[id][:-1]]
        self._first = "".join({opening[0] for opening in self.openings})
        self._beyond: dict[tuple[int, int], np.ndarray] = {}
        self._rules: dict[tuple[int, int], int] = {}
        self._numbers: dict[bytes, int] = {b"": FREE}
        self._openers: dict[tuple[int, str], np.ndarray] = {}
        self.beyond((0, 0))  # now, and not while others wait for the engine's thread
        if self.openings:
            self.openers("")

    def follow(self, place: tuple[int, int], text: str) -> tuple[tuple[int, int], int | None]:
        """(the place after the text, the characters of it up to the end; None where that has not come)."""
        number, matched = place
        progress = TextProgress(self.after[number], matched)
        for count, char in enumerate(text, 1):
            if progress.advance(char):
                number += 1
                if number == len(self.after):
                    return (number, 0), count
                progress = TextProgress(self.after[number])
        return (number, progress.matched), None

    def beyond(self, place: tuple[int, int]) -> np.ndarray:
        """Tokens that would end it with their first characters, and go on, and those that end a reply."""
        if place not in self._beyond:
            near = {*self._whole, *self._finishing(*place)}  # following all that may end it takes 0.1 s
            found = {id for id in near if self.follow(place, self._texts[id][:-1])[1] is not None}
            self._beyond[place] = np.array(sorted(found | self._stops), np.int64)
        return self._beyond[place]

    def rule(self, place: tuple[int, int]) -> int:
        """A number for what is forbidden here, equal where the same is."""
        if place not in self._rules:
            self._rules[place] = self._numbers.setdefault(self.beyond(place).tobytes(), len(self._numbers))
        return self._rules[place]

    def _finishing(self, number: int, matched: int) -> list[int]:
        """Tokens that go on from here to the end of the last text."""
        if number + 1 < len(self.after):
            return []
        last = self.after[-1]
        begun = [n for n in range(1, matched + 1) if last[:matched].endswith(last[:n])]
        rests = tuple(last[n:] for n in begun)
        return [id for id in self._ending if self._texts[id].startswith(rests)]

    def opens(self, said: str) -> bool | None:
        """Whether a reply that has said this is free; None where that is open."""
        words = said.lstrip()
        if words.startswith(self.openings):
            return True
        near = any(opening.startswith(words) for opening in self.openings)
        return None if near and len(said) - len(words) <= self._space else False

    def openers(self, said: str) -> np.ndarray:
        """Tokens after which that is so or open."""
        words = said.lstrip()
        space = 0 if words else len(said)  # which one it is does not matter: few keys
        if (space, words) not in self._openers:
            if words:
                rests = {opening[len(words)] for opening in self.openings if opening.startswith(words)}
                near = [id for id, text in enumerate(self._texts) if text[:1] in rests]
            else:
                near = [id for id, text in enumerate(self._texts) if not text.lstrip()[:1].strip(self._first)]
            # Of a token that ends inside a character the reply's text says nothing yet.
            whole = [id for id in near if self._texts[id] and "\ufffd" not in self._texts[id]]
            found = [id for id in whole if self.opens(said + self._texts[id]) is not False]
            self._openers[space, words] = np.array(found, np.int64)
        return self._openers[space, words]


@dataclasses.dataclass(frozen=True)
class Limit:
    """Tokens that a free part has at most, after its beginning, and those that end it."""

    count: int
    end: tuple[int, ...]


class ReplyForm:
    """Where one reply stands. Made by `FormCompiler.wanted`."""

    def __init__(self, grammar: Grammar | None, free: Sequence[FreePart] = (), limit: Limit | None = None):
        """`free`: parts in their order, all but the first with openings. `limit`: of the first."""
        self._grammar, self._later = grammar, tuple(free)  # parts that may come
        self._limit, self._left = limit, limit.count if limit else None
        self._ending = 0  # tokens of the limit's end that were said
        self._begin()

    def _begin(self) -> None:
        """Where the next free part may begin, or what is held does."""
        self._free: FreePart | None = next(iter(self._later), None)
        self._place: tuple[int, int] | None = (0, 0) if self._free else None  # in it; None: it is over, or none
        opens = self._free is not None and bool(self._free.openings)
        self._later = self._later if opens else self._later[1:]
        self._said: str | None = "" if opens else None  # while it may be one of those that are free
        self._instead: Grammar | None = self._grammar and self._grammar.copy() if opens else None  # if it is none

    @property
    def rule(self) -> Hashable | None:
        """What the next token is held to, equal where it is the same; None: another one for each token."""
        if self._place is None or self._said is not None:
            return None if self._grammar else FREE
        return None if self._must is not None else self._free.rule(self._place)

    @property
    def ahead(self) -> int | None:
        """So many tokens can be held to the same rule, as far as a limit is known; None: any number."""
        return self._left if self._place is not None and self._said is None else None

    @property
    def _must(self) -> int | None:
        """The only token that may come next, where the limit says so."""
        return self._limit.end[self._ending] if self.ahead == 0 else None

    @property
    def grammar(self) -> Grammar | None:
        """That the next token is held to; None: to none."""
        return self._grammar if self._place is None else self._instead

    @property
    def reads_text(self) -> bool:
        """Whether it follows the reply's text, up to the end of the free part."""
        return self._place is not None

    @property
    def marks(self) -> tuple[str, ...]:
        """What it looks for in the reply's text."""
        parts = dict.fromkeys((*([self._free] if self._free else []), *self._later))
        return tuple(mark for part in parts for mark in (*part.after, *part.openings))

    @property
    def complete(self) -> bool:
        """Nothing can follow but a stop token."""
        return self._place is None and self._grammar is not None and self._grammar.complete

    def copy(self) -> "ReplyForm":
        """The same place, for another reply to the same request."""
        own = copy.copy(self)
        own._grammar, own._instead = (one and one.copy() for one in (self._grammar, self._instead))
        return own

    def adjust(self, mask: np.ndarray) -> None:
        """Of what the grammar allows, or of everything, int32 [ceil(V / 32)], what may come next here."""
        if self._place is None:
            return
        bits = mask.view(np.uint32)
        if (token := self._must) is not None:
            bits[:] = _bits(np.array([token]), bits)
            return
        if self._said is None:
            bits &= ~_bits(self._free.beyond(self._place), bits)
            return
        if self._grammar is None:
            return
        if self._instead is None:
            bits[:] = 0
        for part in self._later:
            bits |= _bits(part.openers(self._said), bits)

    def read(self, tokens: Iterable[int], texts: Iterable[str]) -> int:
        """Moves on by tokens of the reply that were sampled under one rule, and the text that each completed; a stop
        token may be the last. Returns how many count: up to the one after which another rule holds. No text after that
        one's is taken. Raises ShardlmError for a token that is not allowed."""
        before, count = self.rule, 0
        for token, text in zip(tokens, texts, strict=False):
            count += 1
            if self._place is None:
                if self._grammar:
                    self._grammar.consume([token])
            elif self._said is None:
                self._go_on(text)
            else:
                self._open(token, text)
            if before is None or self.rule != before:
                break
        return count

    def _open(self, token: int, text: str) -> None:
        said = self._said + text
        opens = [part.opens(said) if text or not self._grammar else False for part in self._later]
        if True in opens:
            which = opens.index(True)
            if which:  # which is not the first: the limit is of that one
                self._limit = self._left = None
            self._free, self._later = self._later[which], self._later[which + 1 :]
            self._said = self._instead = None
            self._follow(said)
        elif None in opens:
            self._said = said
            if self._instead and not self._instead.follows(token):
                self._instead = None
        else:
            self._place = self._said = None
            self._later = ()
            self._grammar, self._instead = self._instead or self._grammar, None
            if self._grammar:
                self._grammar.consume([token])

    def _go_on(self, text: str) -> None:
        limit, must = self._limit, self._must
        if self._follow(text):
            return
        if must is not None:
            self._ending += 1
            if self._ending == len(limit.end):
                self._end_part()
        elif self._left:
            self._left -= 1

    def _follow(self, text: str) -> bool:
        """Whether the free part ends with the text."""
        self._place, end = self._free.follow(self._place, text)
        if end is not None:
            self._end_part()
        return end is not None

    def _end_part(self) -> None:
        self._limit = self._left = None
        self._begin()


def _bits(tokens: np.ndarray, like: np.ndarray) -> np.ndarray:
    found = np.zeros_like(like)
    np.bitwise_or.at(found, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
    return found


class FormCompiler:
    """Makes forms over one tokenizer, and fills masks for a batch; arguments and errors as GrammarCompiler's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        self._tokenizer, self._sizes = tokenizer, (vocab_size, stop_ids)
        self._free_parts: dict[tuple, FreePart] = {}

    def of(self, params: SamplingParams) -> ReplyForm | None:
        """As `wanted`, of params.structured_outputs and thinking_token_budget; None without either."""
        wish, budget = params.structured_outputs, params.thinking_token_budget
        if budget is not None and params.thoughts is None:
            raise ShardlmError(
                f"thinking_token_budget={budget}, and it is not known how this model marks its thoughts; give "
                "SamplingParams(thoughts=Thoughts(...)) too, as LLM(reasoning_parser=...) does"
            )
        if budget is None:
            return None if wish is None else self.wanted(wish, ends=not params.ignore_eos)
        return self.wanted(wish, params.thoughts, budget, ends=not params.ignore_eos)

    def wanted(
        self, wish: StructuredOutputs | None, thoughts: Thoughts | None = None, budget: int = 0, *, ends: bool = True
    ) -> ReplyForm:
        """What a request asks for; `budget` of `thoughts` where those are given. `ends`: stop tokens end its reply.
        Raises ShardlmError, for the client, for what cannot be compiled."""
        grammar = self._grammar(wish) if wish else None
        after, openings = (wish.after, (wish.opening,) if wish.opening else ()) if wish else ((), ())
        limit = None
        if thoughts:
            if not after:
                after, openings = (thoughts.over,), thoughts.begins if thoughts.said is None else ()
            said = self._tokenizer.encode(thoughts.said or "")
            end = tuple(self._tokenizer.encode(thoughts.end))
            if not end:
                raise ShardlmError(f"the tokenizer has no token for {thoughts.end!r}, with which thoughts are to end")
            limit = Limit(max(0, budget - len(said)), end)
        held = grammar is not None
        free = [self._free_part(after, openings, held, self._sizes[1] if held and ends else ())] if after else []
        if wish and wish.instead:
            free.append(self._free_part((NEVER,), wish.instead, True, ()))
        return ReplyForm(grammar, free, limit)

    def _grammar(self, wish: StructuredOutputs) -> Grammar:
        kinds: dict[str, Kind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
        kinds["structural_tag"] = "structural_tag"
        name = next(name for name in kinds if getattr(wish, name) is not None)
        return self._grammars.compile(kinds[name], getattr(wish, name))

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, *self._sizes)

    def stream(self, form: ReplyForm, params: SamplingParams) -> DecodeStream | None:
        """What the form reads the text of its reply from; None where it reads none."""
        if not form.marks:
            return None
        skips = params.skip_special_tokens and not any(map(self._tokenizer.is_special, form.marks))
        return self._tokenizer.stream(skip_special=skips)

    def fill(self, masks: np.ndarray, forms: Sequence[tuple[int, ReplyForm]]) -> None:
        """Writes what may come next into rows of masks int32 [B, ceil(V / 32)]."""
        if held := [(row, form.grammar) for row, form in forms if form.grammar]:
            self._grammars.fill(masks, held)
        for row, form in forms:
            form.adjust(masks[row])

    def _free_part(
        self, after: Sequence[str], openings: Sequence[str], held: bool, stop_ids: Sequence[int]
    ) -> FreePart:
        """`held`: a grammar follows."""
        key = (tuple(after), tuple(openings), held, tuple(stop_ids))
        found = self._free_parts.get(key)
        if found is None:
            found = FreePart(self._token_texts if held else (), after, openings, stop_ids)
            if len(self._free_parts) >= FREE_PARTS:
                self._free_parts.clear()  # by any of the threads that compile
            self._free_parts[key] = found
        return found

    @functools.cached_property
    def _token_texts(self) -> list[str]:
        return self._tokenizer.token_texts()
