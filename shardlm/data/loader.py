"""Batches for training and evaluation: the order of rows, the part that a process reads, prefetch, position.

Built on grain: rows -> shuffle -> repeat -> batches -> reader threads. What is in a row is `packing`'s, whose turn it
is of several sources with weights `mixture`'s.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from shardlm.data.config import Packing
from shardlm.data.mixture import Drawn, Mixed, MixedRows
from shardlm.data.packing import PADDING_ROW, Batch, CutRows, WholeRows, make_rows
from shardlm.data.row_images import ImageAt, Look, image_at
from shardlm.data.shards import TokenShards
from shardlm.errors import ShardlmError
from shardlm.vision.sight import Sight

_THREADS = 2  # reading holds Python's lock most of the time: more threads only wait for each other
_WITH_IMAGES = 8  # which are unpacked and resized without it, in 26 ms of CPU for one of 1152 x 864 (measured)


class Loader:
    """An endless (or `epochs` long) iterator of batches: {name: [len(rows), seq_len]} (see `packing`), and with `look`
    under "images" what it makes of the images, where the data have some.

    Row g of global batch b is row b * global_batch + g of the epochs laid end to end, each shuffled anew.
    This depends on the seed only, so however the rows of a batch are divided over processes, all of them
    together read the same batch, and `get_state` fits any division.

    Of sources with weights each has its epochs, shuffled anew, and in every batch its share of the tokens, to within a
    few rows; which row of the batch is whose changes from one to the next.

    Attributes:
      num_rows: in an epoch.
      padding_fraction: share of the positions of an epoch that are padding.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        seq_len: int,
        global_batch: int,
        seed: int,
        rows: Sequence[int] | None = None,
        packing: Packing = "cut",
        prefetch: int = 8,
        shuffle: bool = True,
        epochs: int | None = None,
        sight: Sight | None = None,
        look: Look | None = None,
        sources: Mapping[str, TokenShards] | None = None,
        weights: Sequence[float] = (),
    ):
        """Packs and starts reading.

        Args:
          sources, weights: by name the parts of `shards`, one after the other, and the share of each in the tokens that
            are read; none: all of them in their proportions. They have no end (`epochs`).
          rows: the rows of the global batch that this process needs, ascending; None for all of them.
          sight: how the model sees, by which images are prepared; where its tokens stand on three axes, batches have
            `turns`.
          look: called by reader threads, of two batches at once too, with the images of all rows of a global batch,
            the same in every process; needs `sight`.
          prefetch: batches read ahead by threads; 0 reads when asked.

        Raises:
          ShardlmError: `rows` are not rows of the batch, or the data do not fill one batch.
        """
        self._local = _checked_rows(rows, global_batch)
        axes = sight is not None and sight.axes
        mixed = MixedRows(sources, weights, seq_len, packing, axes) if weights else None
        self._rows = make_rows(shards, seq_len, packing, axes) if mixed is None else mixed
        self._looks = _Looks.make(shards, self._rows, sight, look)
        self.num_rows = len(self._rows)
        self.padding_fraction = self._rows.padding_fraction
        if self.num_rows < global_batch:
            raise ShardlmError(
                f"the dataset is smaller than one batch: {shards.num_tokens:,} tokens make {self.num_rows}"
                f" rows of {seq_len}, a batch takes {global_batch}. Use a smaller batch, shorter rows or more"
                " text"
            )
        # What decides the sequence of batches, and so must be equal where a position is taken up again.
        self._identity = {
            "dataset": shards.fingerprint,
            "seq_len": seq_len,
            "global_batch": global_batch,
            "seed": seed,
            "packing": packing,
            "shuffle": shuffle,
            "epochs": epochs,
        }
        if mixed is not None:
            self._identity |= {"weights": list(weights), "sources": [one.fingerprint for one in sources.values()]}
            self._order = _mixed_order(mixed, seed, global_batch, shuffle)
        else:
            self._order = _order((0, self.num_rows), seed, shuffle).repeat(epochs)
        self._global_batch = global_batch
        self._prefetch = prefetch
        self._iterator = self._read_from(0)
        self._next_batch = 0

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._next_batch += 1
        return batch

    @property
    def epoch(self) -> float:
        """Epochs read so far, with the fraction of the current one."""
        return self._next_batch * self._global_batch / self.num_rows

    def drawn(self, batches: int) -> list[Drawn]:
        """What so many batches take of each source with a weight."""
        return self._rows.drawn(batches * self._global_batch) if isinstance(self._rows, MixedRows) else []

    def get_state(self) -> dict:
        """The position, ready for JSON, the same in every process."""
        return {"next_batch": self._next_batch, **self._identity}

    def set_state(self, state: dict) -> None:
        """Continues where `get_state` was taken.

        Raises:
          ShardlmError: the state belongs to other data, another seed or another shape of batch.
        """
        own = dict.fromkeys(("weights", "sources")) | self._identity  # which a state may have where this has none
        differing = [
            f"{name} was {state.get(name)!r}, is {value!r}" for name, value in own.items() if state.get(name) != value
        ]
        if differing:
            raise ShardlmError(
                f"the saved position in the data does not fit this run: {'; '.join(differing)}. Restore those"
                " settings, or start a new run from the checkpoint's weights"
            )
        self.close()
        self._next_batch = state["next_batch"]
        self._iterator = self._read_from(self._next_batch)

    def close(self) -> None:
        """Stops the reader threads."""
        self._iterator.close()

    def _read_from(self, batch: int) -> grain.DatasetIterator:
        threads = min(self._prefetch, _WITH_IMAGES if self._looks else _THREADS)
        threads = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=self._prefetch)
        batches = _Batches(self._order, self._rows, self._global_batch, self._local, batch, self._looks)
        return iter(batches.to_iter_dataset(threads))


def validation_batches(
    shards: TokenShards,
    *,
    seq_len: int,
    global_batch: int,
    rows: Sequence[int] | None = None,
    packing: Packing = "cut",
    max_batches: int | None = None,
    sight: Sight | None = None,
    look: Look | None = None,
) -> Iterator[Batch]:
    """One pass in order; the last batch is filled up with padding rows, so that all have one shape.

    Args:
      rows: the rows of the global batch that this process needs, ascending; None for all of them.
      max_batches: at most so many batches, their rows spread evenly over the data.
      sight, look: as of a `Loader`, though called when a batch is asked for.

    Raises:
      ShardlmError: `rows` are not rows of the batch.
    """
    local = _checked_rows(rows, global_batch)
    source = make_rows(shards, seq_len, packing, axes=sight is not None and sight.axes)
    total = len(source)
    if max_batches is not None:
        total = min(total, max_batches * global_batch)
    chosen = np.arange(total) * len(source) // max(1, total)
    return _padded_batches(source, chosen, global_batch, local, _Looks.make(shards, source, sight, look))


def _padded_batches(
    source: CutRows | WholeRows, chosen: np.ndarray, global_batch: int, local: np.ndarray, looks: "_Looks | None"
) -> Iterator[Batch]:
    whole = np.full(-(-len(chosen) // global_batch) * global_batch, PADDING_ROW)
    whole[: len(chosen)] = chosen
    for batch in whole.reshape(-1, global_batch):
        yield _with_images(source.read(batch[local].tolist()), looks, batch.tolist())


@dataclasses.dataclass(frozen=True)
class _Looks:
    """What a batch has of its images."""

    shards: TokenShards
    rows: CutRows | WholeRows
    sight: Sight
    look: Look

    @classmethod
    def make(cls, shards: TokenShards, rows, sight: Sight | None, look: Look | None) -> "_Looks | None":
        """None: nothing. Raises ShardlmError for shards whose images are of another model."""
        if shards.image_token is None or sight is None:
            return None
        if shards.image_token != sight.vector:
            where = ", ".join(map(str, shards.directories))
            raise ShardlmError(
                f"the images of {where} have the token {shards.image_token}, and the model's have {sight.vector}: they "
                "were prepared for another one; name the JSONL of the conversations in data.train and data.validation"
            )
        return None if look is None else cls(shards, rows, sight, look)

    def __call__(self, indices: Sequence[int]) -> Any:
        """Of the rows of a global batch."""
        images: list[ImageAt] = [
            image_at(self.shards, image, row, place, self.sight) for row, place, image in self.rows.images(indices)
        ]
        return self.look(images)


def _with_images(batch: Batch, looks: _Looks | None, indices: Sequence[int]) -> Batch:
    return batch if looks is None else batch | {"images": looks(indices)}


class _Batches(grain.MapDataset):
    """Element i is this process's part of global batch `first` + i. The parent gives the order of rows."""

    def __init__(
        self,
        order: grain.MapDataset,
        rows: CutRows | WholeRows,
        global_batch: int,
        local: np.ndarray,
        first: int,
        looks: _Looks | None,
    ):
        super().__init__(order)
        self._rows, self._global_batch, self._local, self._first = rows, global_batch, local.tolist(), first
        self._looks = looks

    def __len__(self) -> int:
        return max(0, len(self._parent) // self._global_batch - self._first)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        begin = (self._first + index) * self._global_batch
        own = self._rows.read([self._parent[begin + row] for row in self._local])
        if self._looks is None:
            return own
        return _with_images(own, self._looks, [self._parent[begin + row] for row in range(self._global_batch)])


def _checked_rows(rows: Sequence[int] | None, global_batch: int) -> np.ndarray:
    if global_batch < 1:
        raise ShardlmError(f"the global batch is {global_batch}: it needs at least one row")
    local = np.arange(global_batch) if rows is None else np.asarray(rows, np.int64)
    if not len(local) or local[0] < 0 or local[-1] >= global_batch or (np.diff(local) <= 0).any():
        raise ShardlmError(
            f"rows {local.tolist()} are not ascending rows of a global batch of {global_batch}: each process"
            f" needs at least one, from 0 to {global_batch - 1}"
        )
    return local


def _order(rows: tuple[int, int], seed: int | Sequence[int], shuffle: bool) -> grain.MapDataset:
    """Of the rows from one to another in an epoch."""
    order = grain.MapDataset.range(*rows)
    return order.shuffle(seed=_shuffle_seed(seed)) if shuffle else order


def _mixed_order(rows: MixedRows, seed: int, global_batch: int, shuffle: bool) -> grain.MapDataset:
    each = [_order(own, [seed, number], shuffle).repeat() for number, own in enumerate(rows.ranges)]
    return Mixed(each, rows.parts, global_batch, seed if shuffle else None)


def _shuffle_seed(seed: int | Sequence[int]) -> int:
    """32 bits far from those of neighbouring seeds: grain shuffles epoch e with this plus e."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0])
