"""The one thing that bounds a step, in words: what takes most of it, and what would make it less."""

import dataclasses

from shardlm.plan.columns import three_digits

MATMUL, ATTENTION, MEMORY, OPTIMIZER, BUBBLE, CONTENTION, IMAGES = (
    "matmuls",
    "attention",
    "kernels that only move memory",
    "the optimizer",
    "the pipeline's idle time",
    "the slowing of kernels by communication beside them",
    "the encoder of images",
)
UNHIDDEN = " that nothing hides"
RELIEF = {
    MATMUL: "more GPUs make it less",
    ATTENTION: "shorter rows (train.seq_len) or more GPUs make it less",
    MEMORY: "a tensor axis, which splits them, or more GPUs make it less",
    OPTIMIZER: "weights split over more GPUs (rules=zero1 or more) or a larger train.global_batch make it less",
    BUBBLE: "more microbatches (train.accumulation), more pipeline.rounds or fewer stages (mesh.pipeline) make it less",
    CONTENTION: "fewer bytes make it less: more rows in a microbatch, or weights that stay (rules=zero1)",
    IMAGES: "smaller images (mm_processor_kwargs) or more GPUs, which read as many at once, make it less",
    "data": "a larger train.global_batch, or replicas that meet less often (local_sgd), make it less",
    "fsdp": "more rows in a microbatch (a larger train.global_batch, less train.accumulation) or gathers inside a host "
    "(rules=hybrid, mesh.data over hosts) make it less",
    "tensor": "a smaller mesh.tensor makes it less",
    "context": "a smaller mesh.context makes it less",
    "expert": "a smaller mesh.expert, inside a host, makes it less",
    "host": "state that stays on more GPUs (offload.optimizer=false, offload.params=false), or inputs made again "
    "(remat=full), make it less",
    "pipeline": "fewer pipeline.rounds or stages make it less",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Seconds of a step that have one cause. `key` is one of RELIEF's."""

    key: str
    name: str
    seconds: float


def sentence(
    kernels: list[Part], waits: list[Part], step_seconds: float, repeated_seconds: float, faster: str = ""
) -> str:
    """Of the largest part, where `waits`, for communication by axes, are one where none is the largest by itself;
    `repeated_seconds` are those that remat spends on the forward pass a second time, `faster` the products in fewer
    bits that the GPU has and the run does not use."""
    largest = max([*kernels, *waits], key=lambda part: part.seconds)
    waiting = sum(part.seconds for part in waits)
    if largest not in waits and waiting > largest.seconds:
        most = max(waits, key=lambda part: part.seconds)
        where = most.name.removesuffix(UNHIDDEN).removeprefix("communication ")
        largest = Part(most.key, f"communication{UNHIDDEN}, {three_digits(most.seconds)} s of it {where}", waiting)
    share = largest.seconds / step_seconds
    relief = RELIEF[largest.key]
    if largest.key == MATMUL and faster:
        relief = f"{faster} or {relief}"
    took, repeated = three_digits(largest.seconds), three_digits(repeated_seconds)
    words = f"{largest.name}: {took} of {three_digits(step_seconds)} s ({share:.0%}); {relief}"
    if largest.key in (MATMUL, ATTENTION, MEMORY) and repeated_seconds > 0.1 * step_seconds:
        words += f"; {repeated} s of the step are a second forward pass, which a lighter remat saves"
    return words
