"""Images as PaddleOCR-VL reads them: as Qwen's, each a single frame, with learned positions between centres. No jax."""

import dataclasses

import numpy as np

from shardlm.vision.qwen_images import QwenImages

SIZE = {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}  # pixels, where a folder does not say


@dataclasses.dataclass(frozen=True)
class PaddleImages(QwenImages):
    """As those."""

    def shares(self, at: tuple[np.ndarray, np.ndarray], grid: tuple[int, int]) -> dict[str, np.ndarray]:
        (rows, row_shares), (columns, shares) = (between(*each, self.side) for each in zip(at, grid, strict=True))
        near, own = rows[:, :, None] * self.side + columns[:, None], row_shares[:, :, None] * shares[:, None]
        return {"near": near.reshape(-1, 4), "shares": own.reshape(-1, 4)}


def between(place: np.ndarray, size: int, there: int) -> tuple[np.ndarray, np.ndarray]:
    """Along one axis: of each place among `size`, centres to centres, the two of those that are there around it, and
    their shares: (int32, float32) [P, 2]; at an end its last counts again."""
    at = (place.astype(np.float32) + np.float32(0.5)) * np.float32(there) / np.float32(size) - np.float32(0.5)
    first = np.floor(at)
    near = np.clip(first[:, None].astype(np.int32) + np.arange(2, dtype=np.int32), 0, there - 1)
    return near, np.stack([1 - (at - first), at - first], axis=-1)
