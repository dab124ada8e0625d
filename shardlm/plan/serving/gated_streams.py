"""Gated streams and n-grams (Qwen4-Exp: layers/gated_streams.py, layers/ngrams.py) in a served model: what is moved
beside the products of their weights, which are projections like others."""

from collections.abc import Iterator

from shardlm.layers.gated_streams import GatedStreamsConfig
from shardlm.layers.ngrams import NgramsConfig
from shardlm.plan.op import Op

# Around one layer: the norm (read, written), the gated mean of normed streams and gates, what is added (read, written).
PASSES, KERNELS = 6, 5
JOINED, KERNELS_JOINED = 4, 3  # of the same, behind the last layer
# Of a layer's n-grams, over the streams: keys, queries and what is made have norms, products and a convolution.
OF_NGRAMS, KERNELS_OF_NGRAMS = 12, 10


def around(streams: GatedStreamsConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """One layer."""
    moved = tokens * D * itemsize * (PASSES * streams.count + 2)
    yield Op("other", "streams", "memory", 0, moved / KERNELS, KERNELS)


def joined(streams: GatedStreamsConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """Behind the last layer, with the products of gates."""
    width = streams.count * D
    yield Op("other", "streams", "memory", 0, tokens * width * itemsize * JOINED / KERNELS_JOINED, KERNELS_JOINED)
    for n, k in ((streams.rank, width), (width, streams.rank)):
        moved = itemsize * (tokens * (n + k) + n * k)
        dtype = {2: "bf16", 4: "fp32"}[itemsize]
        yield Op("other", "gates", "matmul", 2.0 * tokens * n * k, moved, 1, dims=(tokens, n, k), dtype=dtype)


def looked_up(ngrams: NgramsConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """Of a layer that has n-grams."""
    moved = tokens * itemsize * (OF_NGRAMS * ngrams.streams * D + 3 * ngrams.dim)
    yield Op("other", "n-grams", "memory", 0, moved / KERNELS_OF_NGRAMS, KERNELS_OF_NGRAMS)
