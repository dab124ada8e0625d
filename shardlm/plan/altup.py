"""Streams that are predicted and corrected (Gemma 3n: layers/altup.py) as formulas see them in a training step:
products, and what is moved around the layers, as XLA fuses it for H100s (jax 0.10.2)."""

from collections.abc import Iterator

from shardlm.layers.altup import AltUpConfig
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

# Of the bytes of all streams, how often they are moved, forward and for gradients, in how many kernels beside products.
PASSES, PASSES_BACK = 15, 39
SMALL, SMALL_BACK = 10, 30


def operations(streams: AltUpConfig, sketch: Sketch, matmul) -> Iterator[Op]:
    """Of a layer, forward, once, on each device's part of the sequence; `matmul` makes the operation of a product. The
    router is asked before the layer and behind it."""
    S, D, tokens = streams.count, sketch.shape.embed_dim, sketch.tokens / sketch.mesh.tensor
    for what, n, k in (("low rank down", streams.rank, D), ("low rank up", D, streams.rank)):
        yield matmul("other", what, tokens, n, k)
    for what in ("router of predictions", "router of corrections"):
        yield matmul("other", what, tokens, S, D)
    nbytes = tokens * S * D * sketch.itemsize
    how = {"gradient_bytes": PASSES_BACK * nbytes, "host": SMALL * GAP, "gradient_host": SMALL_BACK * GAP}
    yield Op("other", "streams predicted and corrected", "memory", 0, PASSES * nbytes, 1, **how)


def at_ends(streams: AltUpConfig, sketch: Sketch, matmul) -> Iterator[Op]:
    """A product for each stream but one, before the layers and behind them."""
    D, tokens = sketch.shape.embed_dim, sketch.tokens / sketch.mesh.tensor
    for what in ("streams made", "streams joined"):
        yield matmul("embedding", what, tokens, (streams.count - 1) * D, D)
