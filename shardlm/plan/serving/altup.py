"""Streams that are predicted and corrected (Gemma 3n: layers/altup.py) in a served model: what is moved beside the
products of a layer's weights, which are projections like others, and the products at both ends."""

from collections.abc import Iterator

from shardlm.layers.altup import AltUpConfig
from shardlm.plan.op import Op

# Around one layer: predictions are made of the streams, corrected, and what is made of the layer's own inputs is added
# (each read and written); norms, routers, gates and sums of the stream that the layer reads are kernels of their own.
PASSES, KERNELS = 6, 12
ENDS, KERNELS_OF_ENDS = 4, 6  # at both ends: streams of one size, and their sum


def around(streams: AltUpConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """One layer."""
    moved = tokens * D * itemsize * (PASSES * streams.count + 6)
    yield Op("other", "streams", "memory", 0, moved / KERNELS, KERNELS)


def joined(streams: AltUpConfig, D: int, tokens: float, itemsize: int) -> Iterator[Op]:
    """Before the first layer and behind the last: a product for each stream but one, both times."""
    moved = tokens * streams.count * D * itemsize * ENDS
    yield Op("other", "streams", "memory", 0, moved / KERNELS_OF_ENDS, KERNELS_OF_ENDS)
    count, nbytes = 2 * (streams.count - 1), itemsize * (2 * tokens * D + D * D)
    how = {"dims": (tokens, D, D), "dtype": {2: "bf16", 4: "fp32"}[itemsize]}
    yield Op("other", "streams made and joined", "matmul", 2.0 * tokens * D * D, nbytes, count, **how)


def least_bytes(streams: AltUpConfig, D: int, itemsize: int) -> float:
    """Of the weights at both ends."""
    return 2.0 * (streams.count - 1) * D * D * itemsize
