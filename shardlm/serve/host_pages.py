"""Pages whose keys and values lie in the host's memory: where the prefix cache goes on when the devices' is full. A
page that is about to be given on is saved there first, together with those that come next, as one bundle; a text that
begins as one before did has such pages brought back. Owns which bundle has which pages, and what is to be moved in
which order; what is moved is the runner's (host_copies.py). No jax.

8B keeps 128 KiB of a token, 2.6 us of the 50 GB/s of PCIe 5; computing it anew takes about 23 us on an H200 (counted).
"""

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BUNDLE = 16  # pages of a bundle: with 16 tokens each and 8B 33 MB, what a copy over PCIe needs to run at full rate

Key = tuple[int, bytes]  # group of layers and hash, as PageTable knows a full page


class Move(NamedTuple):
    """Of a bundle. `pages` are those of its places, on the devices, 0 where a place is empty or not asked for."""

    saves: bool  # else it is brought back
    bundle: int
    pages: tuple[int, ...]


class HostPages:
    """So many bundles. What `save` and `load` say is collected for the batch that is made now; `taken` hands it out. In
    that order: a page is saved before it is given on, and brought back into a page that was given."""

    def __init__(self, count: int):
        self.count = count
        self.saved = self.loaded = 0  # pages, since the start
        self.forget()

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        """Pages that there are."""
        return len(self._places)

    def renewed(self) -> "HostPages":
        """One that is empty in its place, with this one's counts."""
        new = HostPages(self.count)
        new.saved, new.loaded = self.saved, self.loaded
        return new

    def lacking(self, pages: Iterable[tuple[int, Key]]) -> list[tuple[int, Key]]:
        """Those of some pages, BUNDLE at most, that are not here."""
        return list(itertools.islice(((page, key) for page, key in pages if key not in self._places), BUNDLE))

    def save(self, pages: Sequence[tuple[int, Key]]) -> None:
        """Pages of the devices, BUNDLE at most and none of them here: into the bundle that was used longest ago.
        Nothing is saved where all are held."""
        if (bundle := self._room()) is None:
            return
        self._keys[bundle] = [key for _, key in pages]
        self._places |= {key: (bundle, place) for place, (_, key) in enumerate(pages)}
        numbers = [page for page, _ in pages]
        self._moves.append((True, bundle, [*numbers, *[0] * (BUNDLE - len(numbers))]))
        self.saved += len(pages)

    def _room(self) -> int | None:
        if self._free:
            return self._free.pop()
        bundle = next((bundle for bundle in self._keys if bundle not in self._held), None)
        if bundle is not None:
            for key in self._keys.pop(bundle):
                del self._places[key]
        return bundle

    @contextlib.contextmanager
    def holding(self, keys: Iterable[Key]) -> Iterator[None]:
        """Meanwhile the bundles that have these are kept."""
        self._held = {self._places[key][0] for key in keys if key in self._places}
        try:
            yield
        finally:
            self._held = set()

    def load(self, key: Key, page: int) -> None:
        """Into a page of the devices."""
        bundle, place = self._places[key]
        self._keys.move_to_end(bundle)
        saves, last, pages = self._moves[-1] if self._moves else (True, -1, [])
        if saves or last != bundle or pages[place]:
            pages = [0] * BUNDLE
            self._moves.append((False, bundle, pages))
        pages[place] = page
        self.loaded += 1

    def taken(self) -> tuple[Move, ...]:
        """What is to be moved before the programs of the batch that is made now, in this order."""
        moves = tuple(Move(saves, bundle, tuple(pages)) for saves, bundle, pages in self._moves)
        self._moves = []
        return moves

    def forget(self) -> None:
        """All pages, for new weights."""
        self._free = list(range(self.count - 1, -1, -1))
        self._keys: collections.OrderedDict[int, list[Key]] = collections.OrderedDict()  # used longest ago first
        self._places: dict[Key, tuple[int, int]] = {}
        self._held: set[int] = set()
        self._moves: list[tuple[bool, int, list[int]]] = []

    def check_invariants(self) -> None:
        """AssertionError where a bundle is lost or known wrongly. For tests."""
        assert sorted([*self._free, *self._keys]) == list(range(self.count)), "bundles are lost or in two states"
        places = {key: (bundle, place) for bundle, keys in self._keys.items() for place, key in enumerate(keys)}
        assert places == self._places, "pages and bundles disagree"
        assert not self._held
