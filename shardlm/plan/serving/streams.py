"""Several streams in place of one (layers/hyper_connections.py), or one and what is added to it later
(layers/shortcut.py), in a served model: what mixing them around a layer moves, as XLA fuses it for H100s (jax 0.10.2).
"""

from collections.abc import Iterator

from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.shortcut import ShortcutConfig
from shardlm.plan.op import Op
from shardlm.plan.streams import made_of

WIDE = 4  # bytes of a float32
# Kernels around one layer beside the product: the norm, the weights of sums, the matrices that mix (three, of which one
# has all iterations), the sum that the layer reads, the mix and what is added to it.
KERNELS, KERNELS_UNMIXED = 8, 5
PASSES = 6  # over the streams in their own type: norm, sum, the mix (read, written), what is added (read, written)


def around(streams: StreamsConfig | ShortcutConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """One layer, or half of a block where nothing is mixed: what is added later goes by, read and written."""
    if isinstance(streams, ShortcutConfig):
        yield Op("other", "what is added later", "memory", 0, tokens * D * itemsize, 1)
        return
    kernels = KERNELS if streams.iterations else KERNELS_UNMIXED
    moved = tokens * D * itemsize * (PASSES * streams.count + 2)
    yield Op("other", "streams", "memory", 0, moved / kernels, kernels)
    yield product(streams, D, tokens, made_of(streams), itemsize)


def product(streams: StreamsConfig, D: int, tokens: float, made: int, itemsize: int) -> Op:
    """That weights of the streams are made of, of float32 as it is multiplied and not as it is read."""
    width = streams.count * D
    moved = itemsize * tokens * width + WIDE * made * (tokens + width)
    dims, how = (tokens, made, width), {"dtype": "fp32", "split": True}
    return Op("other", "weights of streams", "matmul", 2.0 * tokens * width * made, moved, 1, dims=dims, **how)


def joined(streams: StreamsConfig | ShortcutConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """Behind the last layer."""
    if isinstance(streams, ShortcutConfig):
        return
    numbers = tokens * streams.count * D
    yield Op("other", "streams", "memory", 0, (numbers * 2 * itemsize + tokens * D * itemsize) / 2, 2)
    if not streams.plain_head:
        yield product(streams, D, tokens, streams.count, itemsize)
