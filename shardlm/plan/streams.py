"""Several streams in place of one (layers/hyper_connections.py), or one and what is added to it later
(layers/shortcut.py), as formulas see them in a training step: products and what mixing them around the layers moves, as
XLA fuses it for H100s (jax 0.10.2)."""

from collections.abc import Iterator

from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.shortcut import ShortcutConfig
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

WIDE = 4  # bytes of a float32
PASSES = 6  # over the streams, forward: the norm, the sum, the mix and what is added to it (read and written)
PASSES_BACK = 23
SMALL, SMALL_BACK = 5, 26  # small kernels of weights and matrices that mix, and of their gradients
PARTED, PARTED_BACK = 4, 6  # over what is added later: taken apart, and written beside the stream


def operations(streams: StreamsConfig | ShortcutConfig, sketch: Sketch) -> Iterator[Op]:
    """Around both parts of a layer, forward, once. What the second mix makes, no gradient asks for."""
    if isinstance(streams, ShortcutConfig):
        one = sketch.itemsize * sketch.tokens / sketch.mesh.tensor * sketch.shape.embed_dim
        yield Op("other", "what is added later", "memory", 0, PARTED * one, 1, gradient_bytes=PARTED_BACK * one)
        return
    S, D, tokens = streams.count, sketch.shape.embed_dim, sketch.tokens / sketch.mesh.tensor
    numbers = tokens * S * D
    moved = numbers * PASSES * sketch.itemsize
    for what, again in (("attention", True), ("mlp", False)):
        yield weights(streams, sketch, made_of(streams), f"streams around {what}")
        flops, back = 2.0 * numbers * S, numbers * PASSES_BACK * sketch.itemsize
        how = {"gradient_bytes": back, "host": SMALL * GAP, "gradient_host": SMALL_BACK * GAP}
        yield Op("other", f"streams mixed around {what}", "memory", flops, moved, 1, anew=again, **how)


def joined(streams: StreamsConfig | ShortcutConfig, sketch: Sketch) -> Iterator[Op]:
    """Behind the last layer, where weights of their sum are made of them."""
    if isinstance(streams, StreamsConfig) and not streams.plain_head:
        yield weights(streams, sketch, streams.count, "streams joined")


def made_of(streams: StreamsConfig) -> int:
    """Numbers of a token by which streams are summed around one part of a layer, and mixed."""
    return (2 + streams.count * (streams.iterations > 0)) * streams.count


def weights(streams: StreamsConfig, sketch: Sketch, made: int, what: str) -> Op:
    """The product that weights of sums are made of: of float32 as it is multiplied, not as it is read."""
    tokens, width = sketch.tokens / sketch.mesh.tensor, streams.count * sketch.shape.embed_dim
    moved = sketch.itemsize * tokens * width + WIDE * made * (tokens + width)
    dims, how = (tokens, made, width), {"dtype": "fp32", "split": True}
    return Op("other", what, "matmul", 2.0 * tokens * width * made, moved, 1, dims=dims, **how)
