"""What a request is over its life. The scheduler alone changes one; the engine reads it."""

import enum
from array import array
from collections.abc import Collection, Sequence

from shardlm.errors import ShardlmError
from shardlm.serve.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # holds no slot and no page: new, or preempted
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One reply to one prompt.

    Positions count from 0 over prompt and reply. `computed` of them have their keys and values written, or will have
    once the batches already scheduled have run: the host is ahead of the device. `in_flight` tokens are sampled by
    batches that have not landed, so that the true length is at most `len(tokens) + in_flight`.
    """

    __slots__ = (
        *("id", "params", "priority", "arrival", "salt", "stop_ids", "tokens", "prompt_len", "truncated", "max_len"),
        *("lockstep", "status", "finish_reason", "stop_reason", "slot", "computed", "prefill_end", "in_flight"),
        *("batches_in_flight", "fresh", "page_hashes", "cached_tokens", "preemptions"),
    )

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_ids: Collection[int] = (),
        priority: int = 0,
        salt: str = "",
    ):
        """`eos_ids` end the reply unless `params.ignore_eos`. A lower `priority` runs earlier. Only requests of equal
        `salt` share pages. Raises ShardlmError for an empty prompt."""
        if not len(prompt):
            raise ShardlmError("the prompt has no tokens; give at least one")
        self.id, self.params, self.priority, self.salt = id, params, priority, salt
        self.tokens = array("i", prompt[-(params.truncate_prompt_tokens or 0) :])  # prompt and reply, as far as known
        self.prompt_len = len(self.tokens)
        self.truncated = len(prompt) - self.prompt_len  # tokens of the prompt left out, because that was asked for
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        # Whether the host must see each token before the next is sampled: a grammar's mask depends on it.
        self.lockstep = params.structured_outputs is not None
        self.arrival = -1  # its turn among equal priorities; the scheduler counts
        self.max_len = self.prompt_len  # of prompt and reply; the scheduler knows what the model can hold
        self.status = Status.WAITING
        self.finish_reason: str | None = None  # "stop", "length" or "abort"
        self.stop_reason: int | str | None = None  # the stop token or text; None for end of text
        self.slot = -1
        self.computed = self.in_flight = self.batches_in_flight = self.preemptions = 0
        self.prefill_end = 0  # tokens known when it was admitted: up to here it is prefilled, from here it decodes
        self.fresh = False  # the device has not heard of it in this slot
        self.page_hashes: list[bytes] = []
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted

    @property
    def key(self) -> tuple[int, int]:
        """The order of service: the smallest first."""
        return self.priority, self.arrival

    @property
    def generated(self) -> array:
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def remaining(self) -> int:
        """Tokens that may still be scheduled for sampling."""
        return self.max_len - len(self.tokens) - self.in_flight

    def __repr__(self) -> str:
        known = f"{self.prompt_len}+{len(self.tokens) - self.prompt_len} tokens"
        return f"Request({self.id!r}, {known}, computed {self.computed}, {self.status.value})"


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    """Raises ShardlmError where a token is outside a vocabulary of `vocab_size`."""
    if len(prompt) and not (min(prompt) >= 0 and max(prompt) < vocab_size):
        bad = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ShardlmError(
            f"token {bad} of the prompt is outside the vocabulary of {vocab_size}; use the model's tokenizer"
        )
