"""What programs are told of images, as numpy arrays: of a chunk's tokens, and what an encoder reads."""

from collections.abc import Sequence

import numpy as np

from shardlm.serve.batch import Row
from shardlm.serve.encoder_cache import Look
from shardlm.vision.sight import Sight


def image_rows(sight: Sight | None, rows: Sequence[Row], size: tuple[int, int], whole: bool) -> dict[str, np.ndarray]:
    """Fields of ChunkRows, none where the model does not see: of chunks in a program of this size, in which tokens see
    what is before them alone where it is of the kind `whole` (runner_config.py)."""
    if not sight:
        return {}
    seen = np.full(size, -1, np.int32)
    for i, row in enumerate(rows):
        if row.seen is not None:
            seen[i, : len(row.seen)] = row.seen
    found = {"seen": seen}
    if sight.axes:
        found |= {"turns": np.zeros((*size, 3), np.int32), "shift": np.zeros(size[0], np.int32)}
        for i, row in enumerate(rows):
            found["turns"][i, : len(row.tokens)] = row.request.turned(row.start, row.end)
            found["shift"][i] = row.request.shift
    if sight.whole and not whole:
        found["until"] = _until(rows, size)
    return found


def image_tokens(sight: Sight, tokens: Sequence[tuple[Row, int]], size: int) -> dict[str, np.ndarray]:
    """Fields of TokenRows, of tokens by their row and their place in its chunk."""
    seen, turns = np.full((size, 1), -1, np.int32), np.zeros((size, 1, 3), np.int32)
    for i, (row, offset) in enumerate(tokens):
        if row.seen is not None:
            seen[i] = row.seen[offset]
        if sight.axes and row.tokens is not None:
            turns[i] = row.request.turned(row.start + offset, row.start + offset + 1)
    return {"seen": seen, "turns": turns} if sight.axes else {"seen": seen}


def shifts(sight: Sight | None, rows: Sequence[Row], size: int) -> dict[str, np.ndarray]:
    """Field of StageRows, of rows with a token each: none where tokens have one axis."""
    if not sight or not sight.axes:
        return {}
    found = np.zeros(size, np.int32)
    found[: len(rows)] = [row.request.shift for row in rows]
    return {"shift": found}


def _until(rows: Sequence[Row], size: tuple[int, int]) -> np.ndarray:
    """The last position that each token sees: that of what it is among (Request.blocks), or its own. Of padding, that
    of the row's last."""
    found = np.zeros(size, np.int32)
    for i, row in enumerate(rows):
        found[i] = row.start + np.minimum(np.arange(size[1]), len(row.tokens) - 1)
        for first, last in row.request.blocks:
            own = slice(max(0, first - row.start), max(0, min(last + 1, row.end) - row.start))
            found[i, own] = last
    return found


def look_inputs(sight: Sight, look: Look, size: int) -> tuple[dict[str, np.ndarray], np.int32, np.ndarray]:
    """What an encoder's program of so many patches reads of an image (programs.look)."""
    places, count = np.full(size // sight.merged, -1, np.int32), look.picture.patches
    places[: len(look.places)] = look.places
    rest = {name: [(0, size - count)] + [(0, 0)] * (a.ndim - 1) for name, a in look.picture.inputs.items()}
    padded = {name: np.pad(a, rest[name]) for name, a in look.picture.inputs.items()}
    return padded, np.int32(count), places
