"""Replies that are held to a JSON schema, a regular expression, a list of choices, a grammar (Lark or GBNF), tags.

Each step gives the tokens that may follow as bits, which `ops.batch_sampling` takes as `allowed`. The parsing is
llguidance's (https://github.com/guidance-ai/llguidance); this file owns the tokenizer's part and the errors. No jax.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par

from shardlm.errors import ShardlmError
from shardlm.serve.gbnf import is_gbnf, lark_from_gbnf
from shardlm.serve.structural_tags import lark_of
from shardlm.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]

ANY_OBJECT = '{"type": "object"}'  # the schema of OpenAI's JSON mode
# Between the parts of a JSON text. Without an end, weak models write white space for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_OPTIONS, _LENIENT = "x-guidance", "lenient"  # llguidance's own word in a schema
_TOLD = 32  # lines of the log


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of which a reply is not held to what is not supported: as OpenAI's schemas without `strict`, which
    pydantic's sets (uniqueItems), zod's records (propertyNames) and addresses (look-around) need."""
    own = schema.get(_OPTIONS)
    return {**schema, _OPTIONS: {_LENIENT: True, **own} if isinstance(own, Mapping) else {_LENIENT: True}}


class Grammar:
    """Where one reply stands in its grammar. Made by `GrammarCompiler.compile`."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Nothing can follow but a stop token."""
        return self._matcher.is_stopped()

    @property
    def may_stop(self) -> bool:
        """The text so far satisfies the grammar, so a stop token is allowed."""
        return self._matcher.is_accepting()

    def copy(self) -> "Grammar":
        """The same place, for another reply to the same request."""
        return Grammar(self._matcher.deep_copy())

    def follows(self, token: int) -> bool:
        """Whether the token is allowed next; moves on by it if it is."""
        return self._matcher.try_consume_tokens([token]) == 1

    def consume(self, tokens: Sequence[int]) -> None:
        """Moves on by tokens of the reply; a stop token may be the last.

        Raises: ShardlmError for a token that the grammar does not allow.
        """
        if not self._matcher.consume_tokens(list(tokens)):
            raise ShardlmError(
                f"tokens {list(tokens)} do not continue the reply's grammar: {_problem(self._matcher)}. "
                "Sample under the mask of the same step"
            )


class GrammarCompiler:
    """Compiles grammars over one tokenizer, and fills masks for a batch on several threads without Python's lock."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        """
        Args:
          vocab_size: the model's, V of the logits; ids that the tokenizer does not have are never allowed.
          stop_ids: tokens that may follow a complete text, and only that.

        Raises: ShardlmError for a vocabulary smaller than the tokenizer's and where there is no stop token.
        """
        try:
            self._tokens = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(stop_ids))
        except ValueError as error:
            raise ShardlmError(
                f"grammars need a tokenizer of at most vocab_size={vocab_size} ids (it has {tokenizer.vocab_size}) "
                f"and at least one stop token (stop_ids={list(stop_ids)}): {error}. Use the model's own tokenizer and "
                "stop tokens"
            ) from error
        self._special = tokenizer.special_ids
        self._threads = llguidance.LLExecutor()
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._told: set[str] = set()  # of what schemas ask for and replies are not held to

    def compile(self, kind: Kind, source: str | dict | Sequence[str]) -> Grammar:
        """A grammar at its beginning. Takes 1 ms for a usual schema, up to a second for the largest that are allowed.

        Args:
          source: the schema or structural tag (parsed or as text), expression or grammar; for "choice" the strings.

        Raises: ShardlmError, for the client, if it is malformed, asks for what is not supported, or allows no text.
        """
        try:
            matcher = self._matcher(_lowered(kind, source, self._special))
            if (wrong := _problem(matcher)) and kind == "json_schema" and _is_lenient(source):
                left: list[str] = []
                matcher = self._matcher(_lowered(kind, _without(source, _no_automaton, left), self._special))
                self._tell(f"the {one}" for one in left)
                wrong = _problem(matcher)
            self._tell(matcher.get_grammar_warnings())
        except ValueError as error:
            wrong = str(error)
        if wrong:
            shown = source if isinstance(source, str) else json.dumps(source)
            looser = ", leave out strict=true where a request has it" if kind == "json_schema" else ""
            raise ShardlmError(
                f"the {kind} {shown[:200]!r} cannot be compiled: {wrong}. Correct it{looser} or use what "
                "https://github.com/guidance-ai/llguidance/tree/main/docs says is supported"
            )
        return Grammar(matcher)

    def _matcher(self, form: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokens, form, log_level=0, limits=self._limits)
        matcher.compute_bitmask()  # some limits are met here first, and this step is the slowest
        return matcher

    def _tell(self, left: Iterable[str]) -> None:
        """Each once, up to _TOLD of what any client may make up."""
        for one in left:
            if one not in self._told and len(self._told) < _TOLD:
                self._told.add(one)
                logging.warning("replies are not held to all of a schema without strict=true: %.200s", one)

    def fill(self, masks: np.ndarray, grammars: Iterable[tuple[int, Grammar]]) -> dict[int, str]:
        """Writes the tokens that may come next into rows of masks int32 [B, ceil(vocab_size / 32)].

        A row costs 0.1 ms of one core at 128k tokens. Returns the rows whose grammar has grown too complex to go on,
        and why: their requests have to end, and only stop tokens are allowed to them.
        """
        pairs = [(grammar._matcher, row) for row, grammar in grammars]
        fill_next_token_bitmask_par(self._threads, pairs, masks)
        return {row: _problem(matcher) for matcher, row in pairs if matcher.is_error()}


def _lowered(kind: Kind, source, special: Mapping[str, int]) -> str:
    """llguidance's own form. Raises ValueError for what is no schema, no list of choices or no structural tag."""
    if kind == "structural_tag":
        return llguidance.LLMatcher.grammar_from_lark(lark_of(source, special, _WHITESPACE))
    if kind == "json_schema":
        source = source if isinstance(source, str) else _without(source, _asks_nothing, [])
        return llguidance.LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": _WHITESPACE})
    if kind == "choice":
        if isinstance(source, str) or not source or not all(isinstance(one, str) for one in source):
            raise ValueError("choices are a list of one string or more")
        # An upper-case name is matched as a whole: tens of thousands of choices are one automaton.
        source = "start: ONE\nONE: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in source)
    if not isinstance(source, str):
        raise ValueError(f"a {kind} is a string")
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source)
    return llguidance.LLMatcher.grammar_from_lark(lark_from_gbnf(source) if is_gbnf(source) else source)


def _is_lenient(schema: str | Mapping[str, Any]) -> bool:
    options = schema.get(_OPTIONS) if isinstance(schema, Mapping) else None
    return isinstance(options, Mapping) and options.get(_LENIENT) is True


def _without(schema: Any, drops: Callable[[str, Any], bool], left: list[str]) -> Any:
    """A schema without the members that `drops`, which are added to `left`; as it is where it is nested too deeply, of
    which llguidance tells."""
    try:
        return _stripped(schema, drops, left)
    except RecursionError:
        return schema


def _stripped(schema: Any, drops: Callable[[str, Any], bool], left: list[str]) -> Any:
    if isinstance(schema, list):
        return [_stripped(one, drops, left) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    dropped = {key for key, value in schema.items() if drops(key, value)}
    left += [f"{key} {schema[key]}" for key in schema if key in dropped]
    return {key: _stripped(value, drops, left) for key, value in schema.items() if key not in dropped}


def _asks_nothing(key: str, value: Any) -> bool:
    """Names are texts in any JSON: zod says so of each record, and the AI SDK asks for that strictly. LangChain gives
    it a title."""
    if key != "propertyNames" or not isinstance(value, Mapping):
        return False
    return value.get("type", "string") == "string" and not value.keys() - {"type", "title", "description"}


def _no_automaton(key: str, value: Any) -> bool:
    """Of a pattern that looks around, as zod's of an address does, which no automaton of llguidance's reads."""
    if key != "pattern" or not isinstance(value, str):
        return False
    form = llguidance.LLMatcher.grammar_from_json_schema({"type": "string", "pattern": value})
    return bool(llguidance.LLMatcher.validate_grammar(form))


def _problem(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a matcher, without its inner state; "" if nothing is."""
    return " ".join(matcher.get_error().split("\n<non-verbose")[0].split())
