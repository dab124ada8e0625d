"""What the attention of prompts takes, by how their chunks attend in the engine (serve/prefill.py): over pages by a
kernel in Triton, or by cuDNN to what is at hand and, in parts, to what is gathered of pages before it."""

import math
from collections.abc import Iterator
from typing import Literal

from shardlm.layers.attention import AttentionConfig
from shardlm.ops.chunk_attention import block_positions
from shardlm.plan.op import Op
from shardlm.serve.runner_config import WHOLE_LEAST, RunnerConfig

How = Literal["", "whole", "parts", "pages"]
OVER_PAGES = "prompts over pages"  # 222 TFLOP/s on an H200, 2,048 tokens of 8,192 (measured); by Kernels' Triton 239


def how_of(sizes: RunnerConfig, each: float, before: float) -> How:
    """How a program attends of so many tokens a row."""
    if sizes.prefill == "pages" or each < WHOLE_LEAST:
        return "pages"
    if before == 0:
        return "whole"
    return "parts" if sizes.in_parts else "pages"


def attends(how: How, attention: AttentionConfig) -> How:
    """The same of one layer."""
    narrow = getattr(attention, "window", 0) or getattr(attention, "chunk", 0)
    return "pages" if (how == "parts" and narrow) or getattr(attention, "slopes", ()) else how


def gathered(tokens: float, rows: float, before: float, position: float, out: float) -> Iterator[Op]:
    """What parts take beside their products: keys and values of `before` positions of each row, `position` bytes each,
    are read and written, and for every block results of `out` numbers a token are merged in float32. Not counted: for
    each block but the first, and once more, the device waits for its host."""
    blocks = math.ceil(before / block_positions(math.ceil(rows), math.ceil(position)))
    yield Op("attention", "gathered pages", "memory", 0, 2 * rows * before * position, 1)
    yield Op("attention", "merged parts", "memory", 0, tokens * out * (2 + 4 + 4), blocks)
