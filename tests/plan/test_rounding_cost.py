"""What it costs to train what will be served in few bits: a pass over weights, and 8-bit products forward alone."""

import pytest
from record_memory import Run

from shardlm.hardware import GPUS
from shardlm.plan.compute import operations
from shardlm.plan.kernels import Kernels
from shardlm.plan.sketch import Sketch


def seconds(matmul: str) -> tuple[float, float, float]:
    """(forward products, their gradients, rounding) of a step on an H100, by the estimate."""
    sketch = Sketch.of(Run.parse(f"llama3_8b matmul={matmul}").config(), GPUS["h100"])
    kernels, ops = Kernels.of(GPUS["h100"]), operations(sketch)
    up = next(op for op in ops if op.what == "up")
    rounding = sum(
        kernels.forward_seconds(op) * (op.forward + op.again) for op in ops if op.what == "rounding of weights"
    )
    return kernels.forward_seconds(up), kernels.gradient_seconds(up), rounding


def test_weights_are_rounded_once_a_pass_and_gradients_are_those_of_16_bits():
    plain, eight, weights, both = (seconds(matmul) for matmul in ("dtype", "fp8", "W4A16", "FP8_DYNAMIC"))
    assert weights[:2] == plain[:2] and plain[2] == eight[2] == 0
    assert both[0] == eight[0] < plain[0] and both[1] == plain[1] > eight[1]
    # 32 layers of 218 million numbers over 8 GPUs, 10 bytes each, at 2.9 TB/s, in the forward pass and again.
    assert weights[2] == pytest.approx(2 * 32 * 218e6 / 8 * 10 / 2.9e12, rel=0.1)
