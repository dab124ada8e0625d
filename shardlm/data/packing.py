"""Which tokens stand in which training row. Pure numpy over `TokenShards`; order and batching are `loader`'s.

A row has `seq_len` inputs and their targets (the next tokens). Its segments are documents or parts of
documents: they number from 1 and count positions from 0, and 0 marks padding. `loss_mask` is 0 on padding
and where the target belongs to another document than the input, or is not to be learned (chats.py); predicting
end-of-document counts. All are
int32 but `loss_mask`, float32. For a model whose tokens stand on three axes (M-RoPE) there is `turns` int32
[rows, seq_len, 3] besides: those of each segment as of a prompt, equal to its positions where it has no images.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from shardlm.data.config import Packing
from shardlm.data.row_images import turns_of
from shardlm.data.shards import ShownImage, TokenShards
from shardlm.errors import ShardlmError

Batch = dict[str, np.ndarray]
DESIRABLE = "desirable"
PADDING_ROW = -1  # the index of a row of nothing but padding
# Pieces packed together by "whole". Bounds the memory of packing, not of the result (24 bytes a document).
_WINDOW = 1 << 20
MAX_PAIRS = 128  # in a row: sums over each take memory for [rows, seq_len, pairs] (ops/preference.py)


def make_rows(shards: TokenShards, seq_len: int, packing: Packing, axes: bool = False) -> "CutRows | WholeRows":
    """The rows of one epoch, in corpus order; `axes`: with `turns`.

    Raises:
      ShardlmError: the packing is unknown or cuts documents with images, `seq_len` is not positive, a document with
        images is longer than a row, or pairs are no pairs or longer than a row.
    """
    kinds = {"cut": CutRows, "whole": WholeRows, "pairs": PairRows, "labelled": LabelledRows}
    if packing not in kinds:
        raise ShardlmError(f"unknown packing {packing!r}: it is one of {', '.join(kinds)}")
    if seq_len < 1:
        raise ShardlmError(f"seq_len is {seq_len}: a row needs at least one token")
    return kinds[packing](shards, seq_len, axes)


class CutRows:
    """Row i is tokens[i*T : i*T + T + 1] of the stream: no padding but in the last row; documents are cut."""

    def __init__(self, shards: TokenShards, seq_len: int, axes: bool = False):
        if shards.image_token is not None:
            raise ShardlmError(
                "data.packing=cut would cut images in two, and the data have some: set data.packing=whole, which cuts "
                "no document that a row holds"
            )
        self._shards, self.seq_len, self._axes = shards, seq_len, axes
        self._length = -(-(shards.num_tokens - 1) // seq_len)

    def __len__(self) -> int:
        return self._length

    @property
    def padding_fraction(self) -> float:
        """Share of input positions that hold nothing."""
        return 1 - (self._shards.num_tokens - 1) / max(1, self._length * self.seq_len)

    def read(self, indices: Sequence[int]) -> Batch:
        """Rows by their index: {name: [len(indices), seq_len]}."""
        shape = len(indices), self.seq_len + 1
        ids, begins, learned = np.zeros(shape, np.int32), np.zeros(shape, bool), np.ones(shape, bool)
        filled = np.zeros(len(indices), np.int32)
        for row, index in enumerate(indices):
            if index == PADDING_ROW:
                continue
            start = index * self.seq_len
            window = self._shards.window(start, self.seq_len + 1)
            ids[row, : len(window)] = window
            learned[row, : len(window)] = self._shards.scored(start, self.seq_len + 1)
            begins[row, self._shards.document_starts(start + 1, start + len(window)) - start] = True
            filled[row] = len(window) - 1
        # A target that begins a document belongs to another one than its input.
        batch = _batch(ids[:, :-1], ids[:, 1:], begins[:, :-1], filled, ~begins[:, 1:] & learned[:, 1:])
        turns = {"turns": np.repeat(batch["positions"][..., None], 3, axis=-1)} if self._axes else {}
        return batch | turns

    def images(self, indices: Sequence[int]) -> Iterator[tuple[int, int, ShownImage]]:
        """There are none."""
        return iter(())


class WholeRows:
    """No document is cut unless it exceeds a row; the rest of a row is padding.

    Best-fit decreasing within windows of about a million pieces: a long document's full rows stand alone,
    its remainder is packed like a document. The last token of a document is only a target, so a document of
    n tokens fills n - 1 inputs.
    """

    def __init__(self, shards: TokenShards, seq_len: int, axes: bool = False):
        self._shards, self.seq_len, self._axes = shards, seq_len, axes
        offsets = shards.document_offsets()
        if shards.image_token is not None:
            _check_whole(offsets, shards.image_places(), seq_len)
        starts, lengths = _pieces(offsets, seq_len)
        order, self._first = _by_row(lengths, seq_len)  # of row i: its pieces are first[i] : first[i + 1]
        self._starts, self._lengths = starts[order], lengths[order]

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def padding_fraction(self) -> float:
        """Share of input positions that hold nothing."""
        return 1 - int(self._lengths.sum()) / max(1, len(self) * self.seq_len)

    def read(self, indices: Sequence[int]) -> Batch:
        """Rows by their index: {name: [len(indices), seq_len]}."""
        shape = len(indices), self.seq_len
        tokens, targets, begins = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
        filled, learned = np.zeros(len(indices), np.int32), np.ones(shape, bool)
        turns = np.zeros((*shape, 3), np.int32) if self._axes else None
        for row, at, start, n in self._placed(indices):
            window = self._shards.window(start, n + 1)
            tokens[row, at : at + n], targets[row, at : at + n] = window[:-1], window[1:]
            learned[row, at : at + n] = self._shards.scored(start, n + 1)[1:]
            begins[row, at] = True
            filled[row] = at + n
            if turns is not None:
                turns[row, at : at + n] = turns_of(self._shown(start, n), start, n)
        batch = _batch(tokens, targets, begins, filled, learned)
        return batch if turns is None else batch | {"turns": turns}

    def images(self, indices: Sequence[int]) -> Iterator[tuple[int, int, ShownImage]]:
        """(place in `indices`, place of its first token in that row, image) of each in these rows, in order."""
        if self._shards.image_token is not None:
            for row, at, start, n in self._placed(indices):
                yield from ((row, at + one.first - start, one) for one in self._shown(start, n))

    def _placed(self, indices: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """(place in `indices`, place in the row, first token, number of inputs) of each piece."""
        for row, index in enumerate(indices):
            if index == PADDING_ROW:
                continue
            pieces, at = slice(self._first[index], self._first[index + 1]), 0
            for start, n in zip(self._starts[pieces].tolist(), self._lengths[pieces].tolist(), strict=True):
                yield row, at, start, n
                at += n

    def _shown(self, start: int, length: int) -> list[ShownImage]:
        return [] if self._shards.image_token is None else self._shards.images(start, start + length)


class PairRows(WholeRows):
    """Documents 2k and 2k + 1, a chosen answer and a rejected one (preferences.py), stand in one row, the one's segment
    after the other's: odd segments are chosen, even ones rejected. No pair is cut; best-fit decreasing as above, up to
    MAX_PAIRS in a row."""

    def __init__(self, shards: TokenShards, seq_len: int, axes: bool = False):
        self._shards, self.seq_len, self._axes = shards, seq_len, axes
        offsets = shards.document_offsets()
        if shards.num_documents % 2 or not shards.partly_scored:
            where = ", ".join(map(str, shards.directories))
            raise ShardlmError(
                f"{where} holds {shards.num_documents:,} documents that are no pairs of a chosen and a rejected answer:"
                " name the JSONL files of the pairs in data.train and data.validation, or set data.packing to cut or"
                " whole"
            )
        pairs = (np.diff(offsets) - 1).reshape(-1, 2)
        lengths = pairs.sum(axis=1)
        if too_long := np.count_nonzero(lengths > seq_len):
            raise ShardlmError(
                f"{too_long:,} of {len(pairs):,} pairs are longer than a row of {seq_len:,} tokens, in which both"
                f" answers stand, each behind the prompt; the longest is {lengths.max():,}. Set train.seq_len to at"
                " least that, or leave those pairs out of the data"
            )
        order, first = _by_row(lengths, seq_len)
        place = np.arange(len(pairs)) - np.repeat(first[:-1], np.diff(first))  # of a pair in its row
        first = np.append(np.flatnonzero(place % MAX_PAIRS == 0), len(pairs))
        self._starts, self._lengths = (a.reshape(-1, 2)[order].reshape(-1) for a in (offsets[:-1], pairs))
        self._first = 2 * first


class LabelledRows(PairRows):
    """The same of answers that are wanted or not, each beside its prompt with another's answer (labelled.py), with
    DESIRABLE float32 [rows, seq_len]: 1 on segments whose answer is wanted."""

    def read(self, indices: Sequence[int]) -> Batch:
        wanted = np.zeros((len(indices), self.seq_len), np.float32)
        for row, at, start, n in self._placed(indices):
            wanted[row, at : at + n] = self._shards.scored(start, 1)[0]
        return super().read(indices) | {DESIRABLE: wanted}


def _check_whole(offsets: np.ndarray, images: np.ndarray, seq_len: int) -> None:
    """Raises ShardlmError where documents with images, of which these are the first tokens, are longer than a row."""
    documents = np.unique(np.searchsorted(offsets, images, "right") - 1)
    lengths = offsets[documents + 1] - offsets[documents] - 1
    if too_long := np.count_nonzero(lengths > seq_len):
        raise ShardlmError(
            f"{too_long:,} of {len(documents):,} documents with images are longer than a row of {seq_len:,} tokens, and"
            f" none of them is cut; the longest is {lengths.max():,}. Set train.seq_len to at least that, make images"
            " smaller by data.max_pixels, or leave those documents out of the data"
        )


def _batch(tokens, targets, begins, filled, scored) -> Batch:
    """Masks [rows, seq_len] arrays from `filled` inputs on; a segment begins in column 0 and at `begins`."""
    column = np.arange(tokens.shape[1], dtype=np.int32)
    real = column < filled[:, None]
    begins = begins & (column > 0)
    return {
        "tokens": tokens * real,
        "targets": targets * real,
        "segment_ids": (np.cumsum(begins, axis=1, dtype=np.int32) + 1) * real,
        "positions": (column - np.maximum.accumulate(begins * column, axis=1)) * real,
        "loss_mask": (real & scored).astype(np.float32),
    }


def _pieces(offsets: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of inputs) of each document, those beyond `seq_len` inputs cut into several."""
    inputs = np.diff(offsets) - 1
    counts = -(-inputs // seq_len)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece
    lengths = np.minimum(seq_len, np.repeat(inputs, counts) - number * seq_len)
    return np.repeat(offsets[:-1], counts) + number * seq_len, lengths


def _by_row(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces in the order of their rows, where in that order each row begins, then the number of pieces)."""
    order, first = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for low in range(0, len(lengths), _WINDOW):
        rows = best_fit_decreasing(lengths[low : low + _WINDOW], seq_len)
        order.append(np.argsort(rows, kind="stable") + low)
        first.append(np.cumsum(np.bincount(rows)) + low)
    return np.concatenate(order), np.concatenate(first)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece: longest pieces first, each into the row with the least room that holds it.

    Places all pieces of one length at a time, so that the cost grows with the number of different lengths
    rather than of pieces (the histogram idea of Krell et al. 2021, arXiv:2107.02027).

    Args:
      lengths: int[pieces], each from 1 to `capacity`.
    """
    rows = np.empty(len(lengths), np.int64)
    open_rows: dict[int, list[np.ndarray]] = {}  # by the room they have left

    def leave(room: int, which: np.ndarray) -> None:
        if room and len(which):
            open_rows.setdefault(room, []).append(which)

    def put(pieces: np.ndarray, length: int, into: np.ndarray, room: int) -> np.ndarray:
        """Fills rows of equal room one after the other; returns the pieces that are left."""
        each = room // length
        used = min(len(into), -(-len(pieces) // each))
        placed, last = pieces[: used * each], used - 1
        rows[placed] = np.repeat(into[:used], each)[: len(placed)]
        leave(room - each * length, into[:last])
        leave(room - (len(placed) - last * each) * length, into[last:used])
        leave(room, into[used:])
        return pieces[len(placed) :]

    opened = 0
    by_length = np.argsort(-lengths, kind="stable")
    for pieces in np.split(by_length, np.flatnonzero(np.diff(lengths[by_length])) + 1):
        length = int(lengths[pieces[0]])
        for room in sorted(room for room in open_rows if room >= length):
            if len(pieces):
                pieces = put(pieces, length, np.concatenate(open_rows.pop(room)), room)
        if len(pieces):
            new = np.arange(opened, opened - (-len(pieces) // (capacity // length)))
            opened += len(new)
            put(pieces, length, new, capacity)
    return rows
