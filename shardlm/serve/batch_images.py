"""The prompts of one call with their images. All are read before any runs, so that what cannot be is refused in time;
as many as HELD has room for stay prepared, and those after them are read again when their turn comes. No jax."""

import concurrent.futures
import functools
from collections.abc import Sequence

from shardlm.serve.images import THREADS, Given, Images, size_of, with_images
from shardlm.vision.picture import Placed

HELD = 8 * 2**30  # bytes of prepared images: 10,000 of a megapixel would be 31 GB, photographs of 12 ten times that
WAITING = 32  # prompts beside those that run, for the next steps

Seen = tuple[Sequence[int], Sequence[Placed]]  # the tokens of a prompt with those of its images, and where these are


class BatchImages:
    """`first`: so many prompts, from the first, are prepared."""

    def __init__(self, images: Images | None, ids: Sequence[Sequence[int]], given: Sequence[Given], most: int):
        """`ids`, `given`: of each prompt its tokens and what comes with it; `most`: tokens that the model has room for.
        Raises ShardlmError for what cannot be read."""
        self._ask = functools.partial(with_images, images, most=most)
        self._images, self._ids, self._given = images, ids, given
        self._kept: dict[int, Seen] = {}
        self._coming: dict[int, concurrent.futures.Future[Seen]] = {}
        held, size = set(), 0
        for number, found in enumerate((images.threads.map if images else map)(self._ask, ids, given)):
            new = [one.picture for one in found[1] if id(one.picture) not in held]
            size += sum(map(size_of, new))
            if size <= HELD:
                held.update(map(id, new))
                self._kept[number] = found
        self.first = len(self._kept)

    def take(self, number: int) -> Seen:
        """Of one prompt, once; those after it are prepared meanwhile."""
        if number in self._kept:
            return self._kept.pop(number)
        for ahead in range(number, min(number + THREADS, len(self._ids))):
            if ahead not in self._coming:
                self._coming[ahead] = self._images.threads.submit(self._ask, self._ids[ahead], self._given[ahead])
        return self._coming.pop(number).result()
