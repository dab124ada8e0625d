"""What the engine hands back for a request, and what it tells of itself. The HTTP server reads these and nothing else
of the engine. No jax."""

import dataclasses
import time
from collections.abc import Iterable, Sequence

import numpy as np


class EngineError(Exception):
    """The engine died, or this request broke it: nothing that its user could have done otherwise."""


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """One token that stands, or could have stood, at a place. rank: 1 for the likeliest token."""

    token_id: int
    logprob: float
    rank: int
    decoded_token: str


class Place(dict[int, TokenLogprob]):
    """What is told of one place, by token id as users of vLLM read it: the token that stands there, then the
    alternatives, best first. A token that is both is there once."""

    @classmethod
    def make(cls, tokens: Iterable[TokenLogprob]) -> "Place":
        """`tokens`: the one that stands there first."""
        return cls((token.token_id, token) for token in tokens)

    @property
    def chosen(self) -> TokenLogprob:
        """The token that stands there."""
        return next(iter(self.values()))

    def likeliest(self, count: int) -> list[TokenLogprob]:
        """So many of the tokens that are told of, the one that stands there among them if it is one."""
        return sorted(self.values(), key=lambda token: -token.logprob)[:count]


@dataclasses.dataclass
class CompletionOutput:
    """One reply, as far as it has come.

    logprobs: of each token of the reply, where they are asked for.
    finish_reason: "stop", "length" or "abort"; None while it goes on. stop_reason: the stop token or text that ended
    it, None for end of text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Place] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """As vLLM's."""
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestTimes:
    """When what happened to a request, by vLLM's names: arrival_time in seconds since 1970, what ends in _ts on the
    clock of time.monotonic(), 0 until it happens. It is scheduled with the first batch that reads of its prompt, and
    stays so where it is preempted; a token comes when the host has seen it. num_generation_tokens: of all replies."""

    arrival_time: float = dataclasses.field(default_factory=time.time)
    queued_ts: float = dataclasses.field(default_factory=time.monotonic)
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds that the client waited for the first token."""
        return self.first_token_ts - self.queued_ts

    def scheduled(self) -> None:
        """A batch has something of it."""
        self.scheduled_ts = self.scheduled_ts or time.monotonic()

    def wrote(self, tokens: int) -> None:
        """So many have come; 0 where a prompt was read for its own sake."""
        self.last_token_ts = time.monotonic()
        self.first_token_ts = self.first_token_ts or self.last_token_ts
        self.num_generation_tokens += tokens


@dataclasses.dataclass
class RequestOutput:
    """All replies to one prompt, as far as they have come; `finished` when none goes on.

    prompt_logprobs: as `CompletionOutput.logprobs`, of the prompt; None for its first token, which nothing foretells.
    num_cached_tokens: of the prompt, found in the prefix cache. truncated: tokens of the prompt that were left out.
    hidden: float32 [D], what the model made of the prompt's last token, where that was asked for; embedding: the same,
    of length 1. error: what broke this request, where something of ours did.
    metrics: its times, which are still written while it runs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Place | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    truncated: int = 0
    hidden: np.ndarray | None = dataclasses.field(default=None, compare=False)
    embedding: list[float] | None = None
    error: str | None = None
    metrics: RequestTimes | None = dataclasses.field(default=None, compare=False)


def whole(outputs: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    """The same. Raises EngineError where one of them broke."""
    broken = [output.error for output in outputs if output.error]
    if broken:
        raise EngineError(f"{len(broken)} of {len(outputs)} requests broke: {broken[0]}")
    return outputs


@dataclasses.dataclass(frozen=True)
class SpeculationStats:
    """From the engine's start: steps that verified drafts, drafted tokens, and those of them that the model sampled
    too, by place in their step."""

    steps: int
    drafted: int
    accepted: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens that a step with drafts brings: the accepted ones and the model's own."""
        return 1 + sum(self.accepted) / max(1, self.steps)

    def plus(self, other: "SpeculationStats") -> "SpeculationStats":
        accepted = tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True))
        return SpeculationStats(self.steps + other.steps, self.drafted + other.drafted, accepted)

    def since(self, before: "SpeculationStats") -> "SpeculationStats":
        accepted = tuple(new - old for new, old in zip(self.accepted, before.accepted, strict=True))
        return SpeculationStats(self.steps - before.steps, self.drafted - before.drafted, accepted)


@dataclasses.dataclass(frozen=True)
class Stats:
    """num_running, num_waiting: requests now. kv_usage: share of the pages in use, 0 to 1. The rest counts from the
    engine's start: tokens looked up in the prefix cache and found there, preemptions, tokens read and written, what
    came of drafts, None where there are none, and batches that failed. engines_up: those that this has not ended.
    pages_saved, pages_loaded: to the host's memory, and from there (host_pages.py).
    num_pages, page_size: how many pages of so many tokens requests can have. replicas: the same of each, where
    there are several."""

    num_running: int
    num_waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    generation_tokens: int
    prompt_tokens: int
    speculation: SpeculationStats | None = None
    failed_batches: int = 0
    pages_saved: int = 0
    pages_loaded: int = 0
    engines_up: int = 1
    num_pages: int = 0
    page_size: int = 0
    replicas: tuple["Stats", ...] = ()
