"""What a request is over its life. The scheduler alone changes one; the engine reads it."""

import enum
import hashlib
import numbers
import sys
from array import array
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.sampling_params import SamplingParams
from shardlm.vision.picture import Placed

UNBOUNDED = sys.maxsize
Sees = Literal["before", "images", "prompt"]  # of a prompt: no tokens, those of each image, all


class PromptTooLong(ShardlmError):
    """The model has no room for a prompt; clients know this from other errors to make it shorter. tokens, most: of the
    prompt, at least, and of those that there may be, where they are known."""

    def __init__(self, message: str, tokens: int | None = None, most: int | None = None):
        super().__init__(message)
        self.tokens, self.most = tokens, most


class Status(enum.Enum):
    WAITING = "waiting"  # holds no slot and no page: new, or preempted
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One reply to one prompt.

    Positions count from 0 over prompt and reply. `computed` of them have their keys and values written, or will have
    once the batches already scheduled have run: the host is ahead of the device. `in_flight` tokens are sampled by
    batches that have not landed, so that the true length is `len(tokens) + in_flight` until a stop token is found.

    Where drafts are verified, `in_flight` is the fewest that can come, unless the reply ends with fewer, and
    `most_in_flight` the most; `computed` is where it will be if all drafts are right.

    `bound`: as long as prompt and reply are shorter, tokens are sampled that follow others which the host has not seen;
    from there on it sees each before the next. `revocable`: what was sampled after a token may turn out not to count;
    batches before the one numbered `heard` have nothing more for it.
    """

    __slots__ = (
        # What was asked for.
        *("id", "params", "priority", "salt", "adapter", "tokens", "prompt_len", "truncated"),
        *("pictures", "turns", "shift", "blocks"),
        *("eos_ids", "stop_ids"),
        # Where it stands.
        *("turn", "came", "max_len", "status", "finish_reason", "stop_reason", "slot", "fresh"),
        *("computed", "prefill_end", "in_flight", "most_in_flight", "batches_in_flight", "page_hashes"),
        *("cached_tokens", "preemptions", "bound", "revocable", "heard", "again"),
    )

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        eos_ids: Collection[int] = (),
        *,
        priority: int = 0,
        salt: str = "",
        adapter: int = 0,
        lockstep: bool = False,
        pictures: Sequence[Placed] = (),
        turns: tuple[np.ndarray, int] | None = None,
        sees: Sees = "before",
    ):
        """`eos_ids` end the reply unless `params.ignore_eos`. A lower `priority` runs earlier. Only requests of equal
        `salt` share pages. `adapter`: its number (adapters.py). With `lockstep` the host sees each token before the
        next is sampled, unless it sets `bound`. `pictures`: those in the prompt; `turns`: where tokens of the prompt
        are on three axes, int32 [prompt, 3], and how far from its place the first after it is, where models rotate by
        these. `sees`: which tokens of the prompt see those after them too. Raises ShardlmError for an empty prompt."""
        if not len(prompt):
            raise ShardlmError("the prompt has no tokens; give at least one")
        self.id, self.params, self.priority, self.salt, self.adapter = id, params, priority, salt, adapter
        self.truncated = max(0, len(prompt) - (params.truncate_prompt_tokens or len(prompt)))  # tokens left out
        self.tokens = array("i", prompt[self.truncated :])  # prompt and reply, as far as known
        self.prompt_len = len(self.tokens)
        self.pictures = tuple(pictures)
        self.turns, self.shift = turns or (None, 0)
        self.blocks = self._blocks(sees)
        if sees == "prompt":  # what is computed of its first tokens is of no other prompt that begins with them
            self.salt = f"{salt}\0{self._digest()}"
        self.eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self.stop_ids = self.eos_ids | frozenset(params.stop_token_ids)
        # A grammar's mask depends on each token.
        self.bound = 0 if lockstep or params.structured_outputs is not None else UNBOUNDED
        # The place in the order of service, and when that was given: see turns.py.
        self.turn, self.came = (priority, 0, -1), 0
        self.max_len = self.prompt_len  # of prompt and reply; the scheduler knows what the model can hold
        self.status = Status.WAITING
        self.finish_reason: str | None = None  # "stop", "length" or "abort"
        self.stop_reason: int | str | None = None  # the stop token or text; None for end of text
        self.slot = -1
        self.fresh = False  # the device has not heard of it in this slot
        self.revocable = self.again = False  # its slot has sampled what is dropped
        self.heard = 0
        self.computed = self.preemptions = 0
        self.in_flight = self.most_in_flight = self.batches_in_flight = 0
        self.prefill_end = 0  # tokens known when it was admitted: up to here it is prefilled, from here it decodes
        self.page_hashes: list[bytes] = []
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted

    def _blocks(self, sees: Sees) -> tuple[tuple[int, int], ...]:
        """The first and the last token of each stretch whose tokens see all of it."""
        if sees == "prompt":
            return ((0, self.prompt_len - 1),)
        if sees == "before":
            return ()
        return tuple((int(one.takes[0]), int(one.takes[-1])) for one in self.pictures)

    def _digest(self) -> str:
        found = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        for one in self.pictures:
            found.update(one.picture.digest)
        return found.hexdigest()

    def turned(self, start: int, end: int) -> np.ndarray:
        """int32 [end - start, 3]: where these tokens are on three axes."""
        found = np.repeat(np.arange(start, end, dtype=np.int32)[:, None] + self.shift, 3, axis=1)
        if self.turns is not None:
            own = self.turns[start:end]
            found[: len(own)] = own
        return found

    @property
    def generated(self) -> array:
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def start(self) -> int:
        """The first position that the next row to be scheduled writes, or one before it."""
        return min(self.computed, len(self.tokens) - 1 + self.in_flight)

    @property
    def remaining(self) -> int:
        """Tokens that may still be scheduled for sampling."""
        return self.max_len - len(self.tokens) - self.in_flight

    @property
    def least_start(self) -> int:
        """The first position that any further row may write."""
        return min(self.computed, len(self.tokens) - 1) if self.revocable else self.start

    def __repr__(self) -> str:
        known = f"{self.prompt_len}+{len(self.tokens) - self.prompt_len} tokens"
        return f"Request({self.id!r}, {known}, computed {self.computed}, {self.status.value})"


def check_room(prompt_len: int, max_tokens: int | None, max_model_len: int, images: int = 0) -> None:
    """Raises PromptTooLong where a prompt of so many tokens, of `images` among them, and one of the reply if any is
    wanted, do not fit."""
    least = prompt_len + (max_tokens != 0)
    if least > max_model_len:
        space = "" if max_tokens == 0 else " and at least one new token"
        other = "send fewer or smaller images" if images else "ask for truncate_prompt_tokens"
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens; max_model_len={max_model_len} must hold it{space}. Shorten it by "
            f"{least - max_model_len}, {other}, or raise max_model_len",
            prompt_len,
            max_model_len - (max_tokens != 0),
        )


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    """Raises ShardlmError where something in a prompt is no token of a vocabulary of `vocab_size`."""
    try:
        ids = array("q", prompt)
        fits = not ids or (min(ids) >= 0 and max(ids) < vocab_size)
    except (TypeError, OverflowError):
        fits = False
    if not fits:
        bad = next(t for t in prompt if not (isinstance(t, numbers.Integral) and 0 <= t < vocab_size))
        raise ShardlmError(
            f"token {bad!r} of the prompt is outside the vocabulary of {vocab_size}; use the model's tokenizer"
        )
