"""How long a pipeline of other systems waits for its last stage, which computes the logits and the loss of every
microbatch besides its layers; ours deals those out over all stages (layers/pipeline.py).

Layers fill the places of a pipeline, and the last one holds what is left, as DeepSeek V3's layouts have it
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/recipes/deepseek/deepseek_v3.py), with
multi-token prediction beside the loss; NeMo AutoModel's come to the same, as embedding and head count as layers there.
Not counted: recipes that put the gradient of the head's weight off until the pipeline drains
(defer_embedding_wgrad_compute).
"""

import math

from shardlm.plan.cost import StepCost, kernel_seconds
from shardlm.plan.kernels import Kernels
from shardlm.plan.op import Op
from shardlm.plan.published import Point

LAYERS = ("attention", "mlp", "moe", "norm", "other")


def at_the_end(ops: list[Op], bare: list[Op]) -> list[Op]:
    """Of `ops` what only the last stage runs: the head, and modules of multi-token prediction, which `bare`, those of
    the model without, has not."""
    layers = set(bare)
    return [op for op in ops if op.layer == "head" or (op not in layers and op.layer != "optimizer")]


def layers_of_last(layers: int, stages: int, parts: int) -> tuple[int, int]:
    """(layers of a stage whose `parts` places are full, of the last one)."""
    slots = math.ceil(layers / (stages * parts))
    return slots * parts, slots * parts - min(stages * parts * slots - layers, slots)


def waiting_for_stages(
    point: Point, layers: int, last: list[Op], cost: StepCost, kernels: Kernels, ends: bool
) -> Op | None:
    """What the others wait for it, and for the pipeline to fill again in each further round: `last` is what it alone
    runs, counted as if all stages shared it, `cost` what the step takes without. With `ends` the first and the last
    stage hold one layer fewer, which `layers` has as if they did not."""
    stages = point.mesh.pipeline
    parts = point.virtual_stages or 1
    full, held = layers_of_last(layers, stages, parts)
    busy = sum(cost.compute.get(kind, 0.0) for kind in LAYERS)
    busy += sum(one.exposed_seconds for one in cost.comms if not one.sent.beside and "pipeline" not in one.sent.axes)
    layer = busy * stages / layers
    seconds = max(0.0, (held - ends - full) * layer + stages * kernel_seconds(last, kernels))
    passes = point.microbatches
    filling = (stages - 1) * full / parts * layer / passes
    seconds += (point.rounds - 1) * filling
    if not seconds:
        return None
    return Op("other", "waits for other stages", "memory", 0, 0, passes, passes, host=seconds / passes)
