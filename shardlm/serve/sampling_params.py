"""How the tokens of one request are chosen and when they end: the names and defaults that users of vLLM know.

Owns the values and their checks. Leaves what they do to the sampler on the device, the scheduler and the detokenizer.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.other_names import SAMPLING, STRUCTURES, knows_others
from shardlm.serve.thoughts import Thoughts

MAX_LOGPROBS = 20  # alternatives a token: the programs have fixed shapes, so somebody pays for the largest
# Each text is followed by the engine's one thread, character by character, while all others wait: 10,000 stop texts of
# 128 replies held them for a minute.
MAX_TEXTS, MAX_CHARS = 64, 16_384  # of stop; characters of all stop texts, or bad words, together
MAX_STOP_IDS = 4096
FORMS = ("json", "regex", "choice", "grammar", "structural_tag")
MAX_BIASES = 300  # OpenAI's limit, and what the device has room for


@knows_others("StructuredOutputs", STRUCTURES)
@dataclasses.dataclass(frozen=True)
class StructuredOutputs:
    """What the text must be; exactly one is given. `json` is a schema, `grammar` in llguidance's Lark syntax
    or as GBNF (`root ::= ...`), `structural_tag` as vLLM has it (structural_tags.py).

    after: the text is free until these have come, one after the other, and held to it from there. opening: it is only
    free where it begins so, after space. instead: what is held may begin with one of these, as calls of tools do, and
    is free to its end then.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    after: str | Sequence[str] = ()
    opening: str = ""
    instead: str | Sequence[str] = ()

    def __post_init__(self):
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ShardlmError(
                f"structured outputs need exactly one of {', '.join(FORMS)}; given: {', '.join(given) or 'none'}"
            )
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise _wrong("json", self.json, "a JSON schema, as text or as a mapping")
        if self.structural_tag is not None and not isinstance(self.structural_tag, str | Mapping):
            raise _wrong("structural_tag", self.structural_tag, "a structural tag, as text or as a mapping")
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None and not (isinstance(text, str) and text):
                raise _wrong(name, text, "a text that is not empty")
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts("choice", self.choice, "give the texts to choose from"))
            if not self.choice:
                raise _wrong("choice", [], "a list of at least one text")
        after = (self.after,) if isinstance(self.after, str) else self.after
        object.__setattr__(self, "after", _texts("after", after, "it is everywhere; leave it out"))
        instead = (self.instead,) if isinstance(self.instead, str) and self.instead else self.instead or ()
        object.__setattr__(self, "instead", _texts("instead", instead, "nothing would be held; leave it out"))
        if not isinstance(self.opening, str) or (self.opening and not self.after):
            raise _wrong("opening", self.opening, "a text, beside `after`, which says where the free part ends")


@knows_others("SamplingParams", SAMPLING)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The wishes of one request.

    n: replies to the prompt. temperature: 0 is greedy. top_k: 0 or -1 keeps every token. min_p: tokens below this share
    of the likeliest one's probability are left out. Penalties: repetition multiplies (of prompt and reply), presence
    and frequency subtract (of the reply). logit_bias: token id -> what is added. allowed_token_ids: no others are
    written. bad_words: never written. seed: None or, as vLLM has it, -1 for another text every time. stop: texts that
    end the reply, left out of it as stop tokens are, unless include_stop_str_in_output. detokenize: False for no text.
    max_tokens: None to the end of the model's length; 0 only reads the prompt. min_tokens: no stop text, stop token or
    end of text counts among so many. logprobs, prompt_logprobs: alternatives to report for each token beside the one
    that is there, None for no report. truncate_prompt_tokens: of a longer prompt, only these last tokens.
    thinking_token_budget: tokens of thought at most, then the mark that ends them is written; None, -1 for any number.
    thoughts: what those marks are, which LLM and the server fill in. best_of: n, vLLM's older versions having it;
    spaces_between_special_tokens: there are none.

    Raises: ShardlmError for a value of a wrong type or out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    thoughts: Thoughts | None = None
    best_of: dataclasses.InitVar[int | None] = None
    spaces_between_special_tokens: dataclasses.InitVar[bool] = True

    def __post_init__(self, best_of: int | None, spaces_between_special_tokens: bool):
        if best_of is not None and best_of != self.n:
            raise ShardlmError(f"best_of={best_of!r} must be n={self.n!r}; ask for n replies and choose")
        for name, limits in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), *limits))
        for name, limits in _INTEGERS.items():
            self._set(name, _integer(name, getattr(self, name), *limits))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) == -1:  # vLLM's word for the vocabulary, which it refuses too unless max_logprobs=-1
                raise _wrong(name, -1, _NOT_ALL)
        for name, (low, high, meaning) in _OPTIONAL_INTEGERS.items():
            if (value := getattr(self, name)) is not None:
                self._set(name, _integer(name, value, low, high, f"{meaning}, or None"))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        if self.repetition_penalty == 0:
            raise _wrong("repetition_penalty", self.repetition_penalty, "above 0 (1 for none)")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _few_texts("stop", stop, "it would end every reply at once; leave it out", MAX_TEXTS))
        if self.stop and not self.detokenize:
            raise ShardlmError("detokenize=False leaves no text in which to look for stop; give stop_token_ids")
        if self.seed == -1 and not isinstance(self.seed, bool):
            self._set("seed", None)
        words = _few_texts("bad_words", self.bad_words, "it is no word; leave it out", MAX_BIASES)
        self._set("bad_words", words)
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            count = len(self.stop_token_ids)
            raise ShardlmError(f"stop_token_ids has {count} token ids; at most {MAX_STOP_IDS} are possible")
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _wrong("allowed_token_ids", [], "a list of at least one token id, or None")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ShardlmError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower the one or raise the other"
            )
        if isinstance(self.structured_outputs, Mapping):
            self._set("structured_outputs", _structured(self.structured_outputs))
        if self.thinking_token_budget == -1:  # vLLM's word for any number
            self._set("thinking_token_budget", None)
        if not isinstance(self.thoughts, Thoughts | None):
            raise _wrong("thoughts", self.thoughts, "a Thoughts or None")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise _wrong("structured_outputs", self.structured_outputs, "a StructuredOutputs or None")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def clone(self) -> "SamplingParams":
        """As vLLM's; nothing can change here, so that it is the same."""
        return self

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ShardlmError where a token id is outside a vocabulary of `vocab_size`."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids = getattr(self, name) or ()
            if bad := [token for token in ids if token >= vocab_size]:
                raise ShardlmError(
                    f"{name} has token {bad[0]}, outside the vocabulary of {vocab_size}; use the model's tokenizer"
                )


# name -> (least, most, what it must be)
_NUMBERS = {
    "temperature": (0, math.inf, "at least 0 (0: greedy)"),
    "top_p": (0, 1, "from 0 (the likeliest token) to 1 (every token)"),
    "min_p": (0, 1, "from 0 to 1 (0: every token)"),
    "repetition_penalty": (0, math.inf, "above 0 (1 for none)"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
}
_INTEGERS = {
    "n": (1, math.inf, "at least 1"),
    "top_k": (-1, math.inf, "at least 1, or 0 or -1 for every token"),
    "min_tokens": (0, math.inf, "at least 0"),
}
_NOT_ALL = (
    f"from 0 to {MAX_LOGPROBS}: programs have room for the likeliest tokens, not for the whole vocabulary; LLM.score "
    "has those of any text that is given, and the model that shardlm.load opens all logits"
)
_OPTIONAL_INTEGERS = {
    "seed": (-(2**63), 2**63 - 1, "an integer of 64 bits"),
    "max_tokens": (0, math.inf, "at least 0"),
    "logprobs": (0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    "truncate_prompt_tokens": (1, math.inf, "at least 1"),
    "thinking_token_budget": (-1, math.inf, "at least 0, or -1 for any number"),
}


def _structured(wish: Mapping[str, Any]) -> StructuredOutputs:
    try:
        return StructuredOutputs(**wish)
    except TypeError:
        raise _wrong("structured_outputs", dict(wish), f"a mapping with one of {', '.join(FORMS)}") from None


def _wrong(name: str, value: Any, requirement: str) -> ShardlmError:
    return ShardlmError(f"{name}={value!r} must be {requirement}")


def _number(name: str, value: Any, low: float, high: float, meaning: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong(name, value, f"a number, {meaning}")
    if not (low <= value <= high and abs(value) <= 1e30):  # nan and inf fail here; float32 holds what passes
        raise _wrong(name, value, meaning)
    return float(value)


def _integer(name: str, value: Any, low: float, high: float, meaning: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _wrong(name, value, f"an integer, {meaning}")
    if not low <= value <= high:
        raise _wrong(name, value, meaning)
    return int(value)


def _sequence(name: str, value: Any, meaning: str) -> tuple:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _wrong(name, value, meaning)
    return tuple(value)


def _texts(name: str, value: Any, why: str) -> tuple[str, ...]:
    texts = _sequence(name, value, "a list of texts")
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(name, list(texts), "a list of texts")
    if "" in texts:
        raise ShardlmError(f"{name}={list(texts)!r} has an empty text: {why}")
    return texts


def _few_texts(name: str, value: Any, why: str, most: int) -> tuple[str, ...]:
    """Each of them once. Raises ShardlmError for more than `most`, or MAX_CHARS characters."""
    texts = tuple(dict.fromkeys(_texts(name, value, why)))
    if len(texts) > most or sum(map(len, texts)) > MAX_CHARS:
        raise ShardlmError(
            f"{name} has {len(texts)} texts of {sum(map(len, texts))} characters together; at most {most} texts and "
            f"{MAX_CHARS} characters are possible"
        )
    return texts


def _is_token_id(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 0


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _sequence(name, value, "a list of token ids")
    if not all(map(_is_token_id, ids)):
        raise _wrong(name, list(ids), "a list of token ids, integers from 0")
    return tuple(map(int, ids))


def _logit_bias(value: Any) -> dict[int, float] | None:
    """Keys may be texts, as JSON has them."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", value, "a mapping from token id to what is added to its logit")
    if len(value) > MAX_BIASES:
        raise ShardlmError(f"logit_bias has {len(value)} tokens; at most {MAX_BIASES} are possible")
    bias = {}
    for key, added in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if not _is_token_id(token):
            raise ShardlmError(f"logit_bias has the key {key!r}; its keys must be token ids, integers from 0")
        bias[int(token)] = _number(f"logit_bias[{token}]", added, -100, 100, "from -100 to 100")
    return bias
