"""Which tokens of which replies stand in which training row: prompts and replies packed whole, in the first rows."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from shardlm.data.packing import Batch, best_fit_decreasing
from shardlm.train.config import PolicyLoss
from shardlm.train.policy import ADVANTAGES, SAMPLED

COLUMNS = {
    "tokens": np.int32,
    "targets": np.int32,
    "segment_ids": np.int32,
    "positions": np.int32,
    "loss_mask": np.float32,
    ADVANTAGES: np.float32,
    SAMPLED: np.float32,
}


@dataclasses.dataclass(frozen=True)
class Reply:
    """What was sampled to a prompt, and how it was judged.

    logprobs   of each token, with which it was sampled
    taught     whether anything is learned from it
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    taught: bool = True


def rows_of(replies: Sequence[Reply], num_rows: int, seq_len: int, microbatches: int, loss: PolicyLoss) -> Batch:
    """{name: [num_rows, seq_len]}. There are no more replies than rows, and none is longer than a row: so they fit. Row
    r is in microbatch r % microbatches (step.microbatches); the first microbatches are filled before the next are.

    loss_mask is what a token weighs in the mean that `loss` is over, 0 of prompts, padding and what is not taught.
    """
    batch = {name: np.zeros((num_rows, seq_len), dtype) for name, dtype in COLUMNS.items()}
    packed = best_fit_decreasing(np.array([length_of(reply) for reply in replies]), seq_len)
    filled, segments = np.zeros(num_rows, int), np.zeros(num_rows, int)
    each = num_rows // microbatches
    for reply, number in zip(replies, packed.tolist(), strict=True):
        row = number % each * microbatches + number // each
        at, n, told = filled[row], length_of(reply), len(reply.tokens)
        tokens = np.array([*reply.prompt, *reply.tokens], np.int32)
        inside, learned = slice(at, at + n), slice(at + n - told, at + n)
        segments[row] += 1
        values = (tokens[:-1], tokens[1:], segments[row], np.arange(n))
        for name, value in zip(("tokens", "targets", "segment_ids", "positions"), values, strict=True):
            batch[name][row, inside] = value
        batch["loss_mask"][row, learned] = reply.taught / (told if loss == "grpo" else 1)
        batch[ADVANTAGES][row, learned] = reply.advantage
        batch[SAMPLED][row, learned] = reply.logprobs
        filled[row] += n
    return batch


def length_of(reply: Reply) -> int:
    """Inputs in a row: the last token is only a target."""
    return len(reply.prompt) + len(reply.tokens) - 1
