"""Log-probabilities in the three shapes that clients know: chat, legacy completions, and vLLM's for prompts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardlm.serve.outputs import Place, TokenLogprob
from shardlm.tokenizer import DecodeStream

_LEAST = -9999.0  # JSON has no -inf


def _value(token: TokenLogprob) -> float:
    return max(token.logprob, _LEAST)


Named = Callable[[TokenLogprob], str]


def _text(token: TokenLogprob) -> str:
    return token.decoded_token


def named(as_ids: bool | None) -> Named:
    """What a token is called: its text, or vLLM's token_id:ID, as several tokens may have one text."""
    return (lambda token: f"token_id:{token.token_id}") if as_ids else _text


def _entry(token: TokenLogprob, name: Named) -> dict[str, Any]:
    text = name(token)
    return {"token": text, "logprob": _value(token), "bytes": list(text.encode())}


def chat(places: Sequence[Place], top: int, name: Named = _text) -> list[dict[str, Any]]:
    """Of each place the token and the `top` likeliest ones, itself among them if it is one."""
    return [
        {**_entry(place.chosen, name), "top_logprobs": [_entry(t, name) for t in place.likeliest(top)]}
        for place in places
    ]


def legacy(
    places: Sequence[Place | None],
    top: int,
    texts: Sequence[str],
    offsets: Sequence[int],
    ids: Sequence[int] = (),
) -> dict[str, list]:
    """Of each place the token's text, log-probability, {text: log-probability} of the likeliest ones and of itself, and
    where it begins in the text. None for the first token of a prompt.

    Args:
      texts: of the tokens.
      offsets: characters of the text before each.
      ids: of the tokens, where they are to be called by them.
    """
    return {
        "tokens": [f"token_id:{id}" for id in ids] if ids else list(texts),
        "token_logprobs": [place and _value(place.chosen) for place in places],
        "top_logprobs": [
            place and _by_name([*place.likeliest(top), place.chosen], named(bool(ids))) for place in places
        ],
        "text_offset": list(offsets),
    }


class Offsets:
    """Characters of a text before each of its tokens, which may be parts of characters."""

    def __init__(self, stream: DecodeStream, before: int = 0):
        """`stream`: a new one, as the text is made. `before`: characters before the first token."""
        self._stream, self._at = stream, before

    def push(self, tokens: Iterable[int]) -> list[int]:
        found = []
        for token in tokens:
            found.append(self._at)
            self._at += len(self._stream.step(token))
        return found


def _by_name(tokens: Sequence[TokenLogprob], name: Named) -> dict[str, float]:
    """Different tokens may have one text: it gets the likeliest one's."""
    found: dict[str, float] = {}
    for token in tokens:
        text = name(token)
        found[text] = max(found.get(text, _LEAST), _value(token))
    return found


def prompt(places: Sequence[Place | None] | None) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's: {token id: {logprob, rank, decoded_token}} of each token of the prompt."""
    if places is None:
        return None
    return [
        place
        and {
            str(id): {"logprob": _value(t), "rank": t.rank, "decoded_token": t.decoded_token} for id, t in place.items()
        }
        for place in places
    ]
