"""How a reply's thoughts are marked, as far as a budget of them must know (`SamplingParams.thinking_token_budget`).
Which marks a model has is api/reasoning's to say. No jax."""

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """
    end      the mark after them, which is written where the budget is used up
    over     the text that they end with: of all spellings of the mark
    begins   spellings of the mark before them
    said     what of them the prompt has; None: the reply thinks if it begins with one of `begins`
    """

    end: str
    over: str
    begins: tuple[str, ...]
    said: str | None = None


def after_last(text: str, marks: Collection[str]) -> str | None:
    """What follows the last of these marks; None where there is none."""
    at, mark = max((text.rfind(mark), mark) for mark in marks)
    return None if at < 0 else text[at + len(mark) :]
