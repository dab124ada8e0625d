"""Positions of a prompt's tokens on three axes: time, row and column (M-RoPE, https://arxiv.org/abs/2409.12191,
section 2.1). No jax."""

from collections.abc import Sequence

import numpy as np

from shardlm.vision.picture import Placed


def axes_of(length: int, placed: Sequence[Placed]) -> tuple[np.ndarray, int]:
    """int32 [3, length], where each token of a prompt stands on the axes, and the position on all of them of the first
    token after the prompt.

    A text's tokens count on alike on all axes. Those of a picture, which lie side by side, have the time of the first
    and from there on their row and column; what follows goes on after the longer side. Pictures of a video that
    share a place have their time beside it. `placed` is in their order.
    """
    axes, token, position = np.empty((3, length), np.int32), 0, 0
    for each in placed:
        axes[:, token : each.start] = position + np.arange(each.start - token)
        position += each.start - token
        rows, columns = each.picture.grid
        own = axes[:, each.start : each.end]
        own[0] = position + each.time
        own[1] = position + np.repeat(np.arange(rows), columns)
        own[2] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns) * each.last
        token = each.end
    axes[:, token:] = position + np.arange(length - token)
    # The time of a long video may be ahead of what follows: transformers' `generate` counts on from the last token all
    # the same, and not from there, as its `rope_deltas` and vLLM do.
    return axes, position + length - token
