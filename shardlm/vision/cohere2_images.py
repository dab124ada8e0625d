"""Images as Command A Vision reads them: InternVL's tiles, on the canvas that is the smallest above the image. No
jax."""

import dataclasses

import numpy as np

from shardlm.vision.internvl_images import InternvlImages


@dataclasses.dataclass(frozen=True)
class Cohere2Images(InternvlImages):
    """As those."""

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: those to which an image grows the least, and where it would shrink to all the
        least."""
        counts = range(1, self.most + 1)
        every = sorted(
            ((c, r) for c in counts for r in counts if c * r <= self.most), key=lambda pair: pair[0] * pair[1]
        )
        scales = np.min(np.array(every) * self.side / np.array([width, height]), axis=-1)
        grown = np.where(scales < 1, np.inf, scales)
        best = int(np.argmax(scales)) if np.all(scales < 1) else int(np.argmin(grown))
        columns, rows = every[best]
        return rows, columns
