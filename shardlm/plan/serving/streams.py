"""Several streams in place of one (layers/hyper_connections.py) in a served model: what mixing them around a layer
moves, as XLA fuses it for H100s (jax 0.10.2)."""

from collections.abc import Iterator

from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.plan.op import Op

WIDE = 4  # bytes of a float32
# Kernels around one layer: the norm, the product's two, the sum that the layer reads, weights of the mix, the mix and
# what is added to it. Projecting the matrices takes two where a row has one token, and else three for each iteration.
KERNELS, PROJECTED, OF_ITERATION = 6, 2, 3
PASSES = 6  # over the streams in their own type: norm, sum, the mix (read, written), what is added (read, written)


def around(streams: StreamsConfig, D: int, tokens: float, each: float, itemsize: int) -> Iterator[Op]:
    """One layer, of rows of `each` tokens. The normed streams are written in float32, for a product of float32."""
    S = streams.count
    numbers, made = tokens * S * D, (2 + S) * S
    kernels = KERNELS - 2 + (PROJECTED if each == 1 else OF_ITERATION * streams.iterations)
    moved = numbers * (PASSES * itemsize + WIDE) + 2 * tokens * D * itemsize
    yield Op("other", "streams", "memory", 0, moved / kernels, kernels)
    yield product(streams, D, tokens, made)


def product(streams: StreamsConfig, D: int, tokens: float, made: int) -> Op:
    """That weights of the streams are made of."""
    width = streams.count * D
    moved = WIDE * (tokens * (width + made) + width * made)
    dims, how = (tokens, made, width), {"dtype": "fp32", "split": True}
    return Op("other", "weights of streams", "matmul", 2.0 * tokens * width * made, moved, 1, dims=dims, **how)


def joined(streams: StreamsConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """Behind the last layer."""
    numbers = tokens * streams.count * D
    yield Op("other", "streams", "memory", 0, (numbers * (3 * itemsize + WIDE) + tokens * D * itemsize) / 3, 3)
    yield product(streams, D, tokens, streams.count)
