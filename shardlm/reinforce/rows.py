"""Which tokens of which replies stand in which training row: prompts and replies packed whole, in the first rows, with
the images of the prompts."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from shardlm.data.packing import Batch, best_fit_decreasing
from shardlm.data.row_images import ImageAt
from shardlm.layers.seen import TURNS
from shardlm.reinforce.images import PromptImage, in_row, turns
from shardlm.train.config import PolicyLoss
from shardlm.train.policy import ADVANTAGES, SAMPLED
from shardlm.vision.picture import Picture

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
    images     of the prompt
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    taught: bool = True
    images: tuple[PromptImage, ...] = ()


def rows_of(
    replies: Sequence[Reply], num_rows: int, seq_len: int, microbatches: int, loss: PolicyLoss, axes: bool = False
) -> Batch:
    """{name: [num_rows, seq_len]}, with `axes` "turns" [num_rows, seq_len, 3] too.

    loss_mask is what a token weighs in the mean that `loss` is over, 0 of prompts, padding and what is not taught.
    """
    batch = {name: np.zeros((num_rows, seq_len), dtype) for name, dtype in COLUMNS.items()}
    batch |= {TURNS: np.zeros((num_rows, seq_len, 3), np.int32)} if axes else {}
    segments = np.zeros(num_rows, int)
    for reply, (row, at) in zip(replies, _places(replies, num_rows, seq_len, microbatches), strict=True):
        n, told = length_of(reply), len(reply.tokens)
        tokens = np.array([*reply.prompt, *reply.tokens], np.int32)
        inside, learned = slice(at, at + n), slice(at + n - told, at + n)
        segments[row] += 1
        values = (tokens[:-1], tokens[1:], segments[row], np.arange(n))
        for name, value in zip(("tokens", "targets", "segment_ids", "positions"), values, strict=True):
            batch[name][row, inside] = value
        batch["loss_mask"][row, learned] = reply.taught / (told if loss == "grpo" else 1)
        batch[ADVANTAGES][row, learned] = reply.advantage
        batch[SAMPLED][row, learned] = reply.logprobs
        if axes:
            batch[TURNS][row, inside] = turns(reply.images, n)
    return batch


def images_of(
    replies: Sequence[Reply], num_rows: int, seq_len: int, microbatches: int, prepare: Callable[[bytes], Picture]
) -> list[ImageAt]:
    """The images in the rows of `rows_of`; `prepare` is given their files."""
    places = _places(replies, num_rows, seq_len, microbatches)
    every = (in_row(reply.images, *place, prepare) for reply, place in zip(replies, places, strict=True))
    return [image for own in every for image in own]


def _places(replies: Sequence[Reply], num_rows: int, seq_len: int, microbatches: int) -> list[tuple[int, int]]:
    """(row, first place in it) of each reply. There are no more replies than rows, and none is longer than a row: so
    they fit. Row r is in microbatch r % microbatches (step.microbatches); the first microbatches are filled before the
    next are."""
    packed = best_fit_decreasing(np.array([length_of(reply) for reply in replies]), seq_len)
    filled, each = np.zeros(num_rows, int), num_rows // microbatches
    found = []
    for reply, number in zip(replies, packed.tolist(), strict=True):
        row = number % each * microbatches + number // each
        found.append((row, int(filled[row])))
        filled[row] += length_of(reply)
    return found


def length_of(reply: Reply) -> int:
    """Inputs in a row: the last token is only a target."""
    return len(reply.prompt) + len(reply.tokens) - 1
