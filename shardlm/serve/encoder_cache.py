"""Which images' vectors are on the device, and where: a pool of places, given to the images of requests whose prompts
are being read, and kept for others with the same image until the room is wanted, the least recently used first. No jax.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardlm.serve.request import Request
from shardlm.vision.picture import Picture, Placed


class Look(NamedTuple):
    """An image that is to be read before a batch, and the places of its vectors, int32 [vectors]."""

    picture: Picture
    places: np.ndarray


class EncoderCache:
    """`size` places. A prompt's images are all there, or none is: what a prompt may hold (max_model_len) fits, and who
    reads a prompt ends, so that nobody waits for ever."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._places: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()  # the latest last
        self._readers: collections.Counter[bytes] = collections.Counter()  # requests that may still read it
        self._held: dict[str, tuple[bytes, ...]] = {}  # of each request
        self._looks: list[Look] = []
        self._reading: list[Request] = []  # to their end, in the batch that is made

    def has_room(self, request: Request) -> bool:
        """Whether all of a waiting request's images can be on the device."""
        if not request.pictures:
            return True
        new = {p.picture.digest: p.picture.vectors for p in request.pictures}
        idle = sum(len(own) for digest, own in self._places.items() if not self._readers[digest] and digest not in new)
        return sum(count for digest, count in new.items() if digest not in self._places) <= len(self._free) + idle

    def hold(self, request: Request, computed: int) -> None:
        """The images of a request that has room, of which `computed` tokens need not be read."""
        pictures = {p.picture.digest: p.picture for p in request.pictures if p.end > computed}
        if not pictures:
            return
        self._held[request.id] = tuple(pictures)
        self._readers.update(tuple(pictures))
        for digest, picture in pictures.items():
            if digest in self._places:
                self._places.move_to_end(digest)
                continue
            self._make_room(picture.vectors)
            own = np.array([self._free.pop() for _ in range(picture.vectors)], np.int32)
            self._places[digest] = own
            self._looks.append(Look(picture, own))

    def read(self, request: Request) -> None:
        """The rest of a prompt is in the batch that is made, before which others' images are read: what it sees stays
        where it is until then."""
        self._reading.append(request)

    def let_go(self, request: Request) -> None:
        """A request that loses what it holds."""
        self._readers.subtract(self._held.pop(request.id, ()))
        self._readers = +self._readers

    def taken(self) -> tuple[Look, ...]:
        """The images that are to be read before the batch that is made now."""
        looks, self._looks = tuple(self._looks), []
        for request in self._reading:
            self.let_go(request)
        self._reading.clear()
        return looks

    def places(self, placed: Sequence[Placed], start: int, end: int) -> np.ndarray:
        """int32 [end - start]: where the vectors are of a prompt's tokens, which is held; -1 for others."""
        found = np.full(end - start, -1, np.int32)
        for one in placed:
            first, last = np.searchsorted(one.takes, (start, end))
            if first < last:
                found[one.takes[first:last] - start] = self._places[one.picture.digest][first:last]
        return found

    def forget(self) -> None:
        """Nothing is on the device any more."""
        assert not self._held, "who reads a prompt has lost what it held"
        self._places.clear()
        self._looks.clear()
        self._reading.clear()  # of a batch that could not be made
        self._free = list(range(self.size - 1, -1, -1))

    def check_invariants(self) -> None:
        """For tests. Raises AssertionError where a place is lost or in two images, or a reader is not one."""
        places = [place for own in self._places.values() for place in own.tolist()]
        assert sorted([*self._free, *places]) == list(range(self.size)), "places are lost or given twice"
        readers = collections.Counter(digest for own in self._held.values() for digest in own)
        assert readers == self._readers, "readers do not match who holds images"
        assert readers.keys() <= self._places.keys(), "an image that is read has no places"

    def _make_room(self, count: int) -> None:
        """Gives up images that nobody reads, the least recently used first."""
        for digest in list(self._places):
            if len(self._free) >= count:
                return
            if not self._readers[digest]:
                self._free += self._places.pop(digest)[::-1].tolist()
        assert len(self._free) >= count, "has_room was asked before"
