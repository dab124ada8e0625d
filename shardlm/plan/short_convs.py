"""Gated short convolutions (layers/short_conv.py) as formulas see them in a training step: what one device computes of
a layer, moves in its memory and has of it at once. How often what is moved, and how many arrays there are, is read from
programs compiled for H100s (jax 0.10.2)."""

from collections.abc import Iterator

from shardlm.layers.short_conv import ShortConvConfig
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

# Of the bytes that are convolved, how often they are moved, in how many kernels: what gates it, what it gates, and what
# is mixed of it; gradients of all of them and of the taps.
MOVED, MOVED_BACK = 7, 16
KERNELS, KERNELS_BACK = 2, 6
AT_WORK, HELD = 4, 2  # arrays of as many bytes while a layer is done backwards; and that are kept without recomputation


def projections(attention: ShortConvConfig, D: int, tensor: int) -> Iterator[tuple[str, float, float]]:
    """(name, columns, summed) on one device."""
    width = attention.num_heads * attention.value_dim / tensor
    yield "values and gates", 3 * width, D
    yield "output", D, width


def convolved_bytes(attention: ShortConvConfig, sketch: Sketch) -> float:
    """Of what one device convolves."""
    return sketch.itemsize * sketch.tokens / sketch.mesh.tensor * attention.num_heads * attention.value_dim


def moved(narrow: float) -> Op:
    """What moves memory, forward and for gradients, of `narrow` bytes that are convolved."""
    kernels = {"host": (KERNELS - 1) * GAP, "gradient_host": (KERNELS_BACK - 1) * GAP}
    how = {"gradient_bytes": MOVED_BACK * narrow, **kernels}
    return Op("linear attention", "gates and convolution", "memory", 0, MOVED * narrow, 1, **how)


def tokens_before(attention: ShortConvConfig, sketch: Sketch) -> float:
    """Bytes that a device of `context` gives the next one: the tokens that its first ones see."""
    tokens = sketch.rows * (attention.conv_width - 1)
    return sketch.itemsize * tokens * attention.num_heads * attention.value_dim / sketch.mesh.tensor
