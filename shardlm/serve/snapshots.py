"""Prefix caching for models some of whose layers remember a text by arrays of one size (memories.py): copies of such
memories as they were at the ends of pages. Pages alone say what tokens were; to go on behind them, these layers need
what they had made of the text there. Owns the numbers of the slots that hold the copies, which texts they are of, and
where texts are copied; what is copied is the runner's (memory_copies.py). No jax.

A copy takes as much as the keys and values of a thousand tokens or so, thus few are made: of a text that is read, near
its end, where the next turn of a conversation goes on; and where it turns out that another text had the same beginning,
at the end of that, where others will go on (as SGLang does, https://github.com/sgl-project/sglang/pull/14792). What was
used longest ago makes room. A text that is read again with a part of its reply, as after preemption, is copied near the
end of its prompt too where there is no copy of that any more (new weights, a reset): others have that prompt alone.
"""

import collections
from collections.abc import Hashable, Sequence

# Tokens that a copy has to save. It cuts a chunk in two, which costs a program more, about as much as reading so many
# tokens (chunk_programs.py, WHILE_WEIGHTS_ARE_READ).
LEAST = 512
# Tokens at the end of a prompt that may differ in the next turn: chat templates end a prompt with what begins a reply,
# and show replies that were given otherwise, without their thoughts.
TAIL = 16

Copies = tuple[tuple[int, int], ...]  # (from, to), slots


class Snapshots:
    """Copies in the slots from `first` on. `begin` and `read` collect those of a batch, `taken` hands them out."""

    def __init__(self, first: int, count: int, page_size: int, least: int = LEAST, tail: int = TAIL):
        self.first, self.count, self.page_size, self.least, self.tail = first, count, page_size, least, tail
        self._ends: dict[Hashable, list[int]] = {}  # of each owner, where it is to be copied
        self._slot_of: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # used longest ago first
        self.forget()

    def __contains__(self, digest: bytes) -> bool:
        """Whether there is a copy of the text up to the end of the page with this hash."""
        return digest in self._slot_of

    def renewed(self) -> "Snapshots":
        """One without copies in its place."""
        return Snapshots(self.first, self.count, self.page_size, self.least, self.tail)

    def begin(
        self, owner: Hashable, slot: int, prompt: int, length: int, hashes: Sequence[bytes], found: int, known: int
    ) -> None:
        """A text of `length` tokens, of which its `prompt` has so many, is read in a slot from the end of its first
        `found` pages on, of which there is a copy; `known` pages have been read with the same beginning."""
        if found:
            self._slot_of.move_to_end(hashes[found - 1])
            self._restored.append((self._slot_of[hashes[found - 1]], slot))
        ends, last = [], found
        for end in sorted((known, *((tokens - self.tail) // self.page_size for tokens in (prompt, length)))):
            if (end - last) * self.page_size >= self.least:
                ends.append(end * self.page_size)
                last = end
        self._ends[owner] = ends

    def until(self, owner: Hashable, start: int, end: int) -> int:
        """Where a chunk from `start` on ends at the latest, so that the text is copied where it is to be."""
        return next((stop for stop in self._ends.get(owner, ()) if start < stop), end)

    def read(self, owner: Hashable, slot: int, end: int, hashes: Sequence[bytes]) -> None:
        """The text in a slot is read up to `end` in the batch that is made now."""
        if end not in self._ends.get(owner, ()):
            return
        digest = hashes[end // self.page_size - 1]
        if digest in self._slot_of or digest in self._saved:
            return
        if self._free:
            self._saved[digest] = slot, self._free.pop()
        elif self._slot_of:  # else all are of this batch; one that it begins from is copied before
            self._saved[digest] = slot, self._slot_of.popitem(last=False)[1]

    def end(self, owner: Hashable) -> None:
        """The owner gives its slot on."""
        self._ends.pop(owner, None)

    def taken(self) -> tuple[Copies, Copies]:
        """(copies to be made before the programs of the batch that is made now, and those after them), which later ones
        may go on from."""
        found = tuple(self._restored), tuple(self._saved.values())
        self._slot_of |= {digest: slot for digest, (_, slot) in self._saved.items()}
        self._restored, self._saved = [], {}
        return found

    def forget(self) -> None:
        """All copies, for new weights."""
        self._free = list(range(self.first + self.count - 1, self.first - 1, -1))
        self._slot_of.clear()
        self._restored: list[tuple[int, int]] = []
        self._saved: dict[bytes, tuple[int, int]] = {}

    def check_invariants(self) -> None:
        """AssertionError where a slot is lost or has two texts. For tests."""
        held = [*self._free, *self._slot_of.values(), *(slot for _, slot in self._saved.values())]
        assert sorted(held) == list(range(self.first, self.first + self.count)), f"slots of copies: {sorted(held)}"
