"""One kind of work of a device, as kernels.py times it."""

import dataclasses
from typing import Literal

Layer = Literal["attention", "linear attention", "mlp", "moe", "norm", "embedding", "head", "optimizer", "other"]
Unit = Literal["matmul", "attention", "memory"]


@dataclasses.dataclass(frozen=True)
class Op:
    """One kind of work of one device.

    unit       what limits it: the matrix units by a matmul's shape, attention kernels, or memory alone
    flops, hbm_bytes  of one execution
    count      executions in a step, or what they are worth
    forward    of these, those of the forward pass
    again      and those that the backward pass repeats; the others make gradients
    dims       of a matmul: rows, columns, summed; of attention: positions of a row, keys that a query sees on average,
               mean width of a head
    dtype      of its operands, as hardware.Peak.of takes it
    in_stages  whether it belongs to layers that pipeline stages run, and waits while they fill and drain
    executed   what a program runs for each of its FLOPs: stages that fill and drain compute too, as do their empty
               slots, and so do attention's kernels where a mask hides parts of their blocks
    wide       of attention: width of queries and keys of a head
    seen       of attention that is not fused: keys that it computes for a query, on average; 0: all
    grouped    a matmul of experts: kernels whose operations no compiled program shows, since tokens decide them
    host       seconds that the device waits for its host, as other systems' does (systems_experts.py), or between small
               kernels; gradient_host: the same for its gradient, where that is another
    both       a matmul of two activations, as of linear attention: each has a gradient, whatever is trained
    gradients  of these: executions that its gradients are worth, where they are not two; None: two
    anew       whether recomputation runs it again; else nothing in the backward pass asks for it, or its gradient's
               executions are with it
    split      a matmul so narrow that XLA cuts what is summed into parts, so that more cores have work
    weight_dtype  of the product that makes a weight's gradient, where it is another; "": the same
    back_dtype  the same of that which makes the gradient of what came in
    frozen     a matmul with a weight that is not trained: no gradient of it is made
    Other systems' as well (systems_passes.py):
    gradient_bytes  what its gradient moves, of what only moves memory; None: twice as much
    cast_weights    share of its forward runs that make the 8-bit weight anew
    cast_rows, cast_gradients  shares of its operands that are made 8-bit by passes of their own: rows forward, and what
                    comes back; the rest leaves the kernel before in 8 bits
    added_bytes     read and written besides where a weight's gradient is added to what is there
    drawn           whether chance deals rows to experts, dims[0] on average
    """

    layer: Layer
    what: str
    unit: Unit
    flops: float
    hbm_bytes: float
    count: float
    forward: float = 0
    again: float = 0
    dims: tuple[float, float, float] = (0, 0, 0)
    dtype: str = "bf16"
    in_stages: bool = False
    executed: float = 1.0
    grouped: bool = False
    wide: float = 0.0
    seen: float = 0.0
    host: float = 0.0
    gradient_host: float = 0.0
    both: bool = False
    gradients: float | None = None
    anew: bool = True
    split: bool = False
    weight_dtype: str = ""
    back_dtype: str = ""
    frozen: bool = False
    gradient_bytes: float | None = None
    cast_weights: float = 1.0
    cast_rows: float = 1.0
    cast_gradients: float = 1.0
    added_bytes: float = 0.0
    drawn: bool = False
