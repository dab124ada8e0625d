"""Tensors of a checkpoint that repeat others: modules that predict further tokens come with the embedding and the
output head of their model. We hold one of each."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.models.naming import Names
from shardlm.models.transformer_config import TransformerConfig

ROWS_BYTES = 64 * 2**20  # of each tensor at once


class Readable(Protocol):
    """What hf_files.Stored and hf_quantised's are."""

    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, index) -> np.ndarray: ...


def copies(config: TransformerConfig, names: Names) -> Iterator[tuple[str, str]]:
    """(a copy's name, our parameter) of all copies that a checkpoint of this model has. `names` are those of any of its
    blocks."""
    if not config.mtp or "mtp.copy.head" not in names:
        return
    for part in ("embedding", "head"):
        ours = "embedding" if config.tie_embeddings else part
        for i in range(config.mtp.depth):
            yield names[f"mtp.copy.{part}"].name.format(layer=config.num_layers + i), ours


def check_copies(found: Mapping[str, str], stored: Mapping[str, Readable]) -> None:
    """Refuses copies that differ from what they repeat; `found` are names of both. Holds a few rows of each."""
    for copy, original in found.items():
        a, b = stored[copy], stored[original]
        if a.shape != b.shape:
            raise _refused(copy, original, f"is {list(a.shape)}, and so differs")
        rows = max(1, ROWS_BYTES // (a.shape[1] * max(a.dtype.itemsize, b.dtype.itemsize)))
        largest, where = 0.0, 0
        for first in range(0, a.shape[0], rows):
            both = (t.read((slice(first, first + rows), slice(None))) for t in (a, b))
            apart = np.abs(np.subtract(*(part.astype(np.float32) for part in both))).max(axis=1)
            apart = np.where(np.isnan(apart), np.inf, apart)
            if apart.max() > largest:
                largest, where = float(apart.max()), first + int(apart.argmax())
        if largest:
            raise _refused(copy, original, f"differs by up to {largest:.3g}, in row {where}")


def _refused(copy: str, original: str, how: str) -> ShardlmError:
    return ShardlmError(
        f"{copy} {how} from {original}, which it has to repeat: modules that predict further tokens share embedding "
        "and output head with their model here. Open the checkpoint without them (of a Pretrained model, mtp=False)"
    )
