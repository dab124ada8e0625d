"""In which form a GGUF file has a tensor of Hugging Face's: of which of its tensors it is made, and how. No jax."""

from typing import Literal, NamedTuple

import numpy as np

from shardlm.gguf_files.header import Block

Form = Literal["plain", "columns", "less_one", "turned", "rate", "stacked", "by_groups", "gate_up", "kv_b"]


class Order(NamedTuple):
    """Rows or columns that are not in ours: from `first` on, of each a * b * each of them, ours are [a, b, each] and
    the file's [b, a, each]."""

    first: int
    a: int
    b: int
    each: int = 1

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """Where those of ours are in the file."""
        at = np.maximum(ours - self.first, 0)
        block, inside = np.divmod(at, self.a * self.b * self.each)
        i, j = np.divmod(inside // self.each, self.b)
        found = self.first + ((block * self.b + j) * self.a + i) * self.each + inside % self.each
        return np.where(ours < self.first, ours, found)

    def counted_by(self, every: int) -> "Order":
        """The same of what counts so many as one, of which a whole number are in `each`."""
        return Order(self.first // every, self.a, self.b, self.each // every)


def halves(size: int) -> Order:
    """Of a head's rows: its first half and its second in turn."""
    return Order(0, 2, size // 2)


class Place(NamedTuple):
    """Where a tensor of Hugging Face's is.

    form    plain      as it is, but for the order of its rows
            columns    as it is, but for the order of its columns
            less_one   one more than it is: what norms multiply with
            turned     its last two dimensions are exchanged
            rate       minus the exponential of it
            stacked    of two tensors: the rows of the one and then those of the other
            by_groups  of two tensors, the first of which has several parts: of each group its rows of every part
            gate_up    of two tensors: columns in turn, each turned
            kv_b       of two tensors: a head's keys, turned, and then its values
    blocks  tensors of the file
    order   of its rows, or of its columns, where it is another
    groups  (groups, rows of one in each part): of by_groups; the last part is the second tensor
    """

    form: Form
    blocks: tuple[Block, ...]
    order: Order | None = None
    groups: tuple[int, ...] = ()
