"""From outputs that hold everything so far to what is new in each, and to the tokens that are paid for."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput


class Progress:
    """How much of one reply was seen. ids: tokens whose ids were sent. ended: its last part was seen."""

    def __init__(self):
        self.chars = self.tokens = self.ids = 0
        self.ended = False

    def advance(self, reply: CompletionOutput) -> tuple[str, Sequence[Place]]:
        """(new text, log-probabilities of new tokens)."""
        text = reply.text[self.chars :]
        self.chars += len(text)
        places = (reply.logprobs or [])[self.tokens :]
        self.tokens += len(places)
        self.ended = reply.finish_reason is not None
        return text, places


class Usage:
    """Tokens of a request with one or more prompts."""

    def __init__(self, outputs: Mapping[int, RequestOutput] | None = None):
        self._outputs = dict(outputs or {})

    def saw(self, i: int, output: RequestOutput) -> None:
        self._outputs[i] = output

    def counts(self) -> tuple[int, int, int]:
        """Tokens of prompts, those of them found in the cache, tokens of replies."""
        outputs = self._outputs.values()
        return (
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
            sum(len(reply.token_ids) for output in outputs for reply in output.outputs),
        )

    def body(self, thoughts: int | None = None) -> dict[str, Any]:
        """`thoughts`: tokens of replies that are thought; None: nobody told them apart."""
        prompt, cached, generated = self.counts()
        details = {} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            **details,
        }
