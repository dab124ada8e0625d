"""Log-probabilities in the three shapes that clients know: chat, legacy completions, and vLLM's for prompts."""

from collections.abc import Sequence
from typing import Any

from shardlm.serve.outputs import TokenLogprob

Place = Sequence[TokenLogprob]  # the token that stands there, then the alternatives
_LEAST = -9999.0  # JSON has no -inf


def _value(token: TokenLogprob) -> float:
    return max(token.logprob, _LEAST)


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _value(token), "bytes": list(token.text.encode())}


def chat(places: Sequence[Place], top: int) -> list[dict[str, Any]]:
    """Of each place the token and the `top` likeliest ones, itself among them if it is one."""
    return [{**_entry(place[0]), "top_logprobs": [_entry(t) for t in likeliest(place, top)]} for place in places]


def likeliest(place: Place, top: int) -> list[TokenLogprob]:
    """The `top` likeliest, each once, whether or not the alternatives repeat the token that stands there."""
    once = {token.token_id: token for token in place}
    return sorted(once.values(), key=lambda token: -token.logprob)[:top]


def legacy(places: Sequence[Place | None], top: int, texts: Sequence[str], offset: int) -> dict[str, list]:
    """Of each place the token's text, log-probability, {text: log-probability} of the likeliest ones and of itself, and
    where it begins in the text. None for the first token of a prompt.

    Args:
      texts: of the tokens.
      offset: characters before the first.
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": [place and _value(place[0]) for place in places],
        "top_logprobs": [place and _by_text([*likeliest(place, top), place[0]]) for place in places],
        "text_offset": offsets,
    }


def _by_text(tokens: Sequence[TokenLogprob]) -> dict[str, float]:
    """Different tokens may have one text: it gets the likeliest one's."""
    found: dict[str, float] = {}
    for token in tokens:
        found[token.text] = max(found.get(token.text, _LEAST), _value(token))
    return found


def prompt(places: Sequence[Place | None] | None) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's: {token id: {logprob, rank, decoded_token}} of each token of the prompt."""
    if places is None:
        return None
    return [
        place and {str(t.token_id): {"logprob": _value(t), "rank": t.rank, "decoded_token": t.text} for t in place}
        for place in places
    ]
