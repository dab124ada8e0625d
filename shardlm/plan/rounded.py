"""What it costs to train what will be served in few bits (matmul=W4A16 and so on, ops/schemes.py)."""

from collections.abc import Iterator

from shardlm.ops.schemes import SCHEMES
from shardlm.plan import attention
from shardlm.plan.changed import changed
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch


def of_scheme(product: Op, sketch: Sketch) -> Op:
    """A projection's product; where it multiplies 8 bits, its gradients are made in the compute type all the same."""
    if sketch.config.matmul not in SCHEMES or sketch.products == "dtype":
        return product
    plain = attention.dtype(sketch)
    return changed(product, weight_dtype=plain, back_dtype=plain, cast_gradients=0.0)


def rounding(sketch: Sketch) -> Iterator[Op]:
    """Of a layer's weights where they rest: read for the largest numbers and once more, and written in the compute
    type. What comes back passes as it is."""
    if sketch.config.matmul in SCHEMES:
        pairs = zip(sketch.spread.weights, sketch.spread.rest, strict=True)
        numbers = sum(at_rest for weight, at_rest in pairs if weight.segment is not None and weight.is_matrix)
        each = numbers * sketch.mesh.pipeline / sketch.shape.num_layers
        yield Op("other", "rounding of weights", "memory", 0, (8 + sketch.itemsize) * each, 1, gradient_bytes=0)
