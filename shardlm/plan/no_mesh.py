"""Why a search has no mesh to look at, in words: constraints that cannot be, one by one or together."""

import functools
import math
from collections.abc import Callable

from shardlm.errors import ShardlmError
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.mesh import AXES
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import Constraint, Constraints
from shardlm.plan.ways import laid_out, memories
from shardlm.train.config import RunConfig


class NothingRuns(ShardlmError):
    """No mesh can run a configuration. Which batch one could run takes as long to find as that none can: the words are
    made when they are asked for, as an advice asks of few of the numbers of GPUs that it tries."""

    def __init__(self, say: Callable[[], str]):
        super().__init__(say)
        self._say = functools.cache(say)

    def __str__(self) -> str:
        return self._say()

    def __reduce__(self):
        return ShardlmError, (str(self),)


def no_mesh(config: RunConfig, cluster: Cluster, constraints: Constraints) -> str:
    """Which constraints leave no mesh: those of one axis by themselves, and the sizes that it could have; or all of
    them together. Where they leave meshes, they leave nothing to keep on them."""
    if any(laid_out(config, cluster, constraints)):
        said = constraints.of("pipeline.schedule", "remat")
        return f"{said} do not go together: 1f1b keeps the inputs of its stages, which is remat=full"
    axes = [one for one in constraints.items if one.field.startswith("mesh.")]
    for field in {one.field: None for one in axes}:
        own = Constraints(tuple(one for one in axes if one.field == field))
        if not any(laid_out(config, cluster, own)):
            could = ", ".join(map(str, _sizes(config, cluster, field)))
            return f"{own.of(field)} cannot be; {field} could be {could} here{_divides(config, cluster, field)}"
    given = {one.field: int(one.values[0]) for one in axes if one.operator == "=" and len(one.values) == 1}
    if len(given) < 2:
        return "each of these can be, and all of them together cannot"
    product = f"{' x '.join(map(str, given.values()))} = {math.prod(given.values())}"
    free = [f"mesh.{axis}" for axis in AXES if f"mesh.{axis}" not in given]
    if not cluster.num_gpus % math.prod(given.values()):
        rest = cluster.num_gpus // math.prod(given.values())
        others = f"the other {rest} ways would be for {', '.join(free)}" if free else "no axis is left for the rest"
        return f"each of these can be, and all of them together ({product}) cannot: {others}"
    return f"each of these can be, and all of them together ({product}) cannot: that does not divide {cluster.num_gpus}"


def _sizes(config: RunConfig, cluster: Cluster, field: str) -> list[int]:
    """Those that an axis could have, whatever the others have."""
    free = Constraints((Constraint(field, "<=", (str(cluster.num_gpus),)),))
    return sorted({laid.mesh.sizes()[field.removeprefix("mesh.")] for laid in laid_out(config, cluster, free)})


def _divides(config: RunConfig, cluster: Cluster, field: str) -> str:
    """What an axis has to divide."""
    shape, gpus = config.model.transformer(), f", which divides the {cluster.num_gpus} {cluster.device}s"
    heads = ", ".join(map(str, sorted({block.attention.num_heads for block in shape.kinds})))
    linear = memories(shape)
    keys = " and the ".join(map(_heads, linear))
    routed = sorted({block.mlp.num_experts for block in shape.kinds if block.mlp.num_experts})
    experts = f"{', '.join(map(str, routed))} experts" if routed else "experts, of which a dense model has none"
    return gpus + {
        "mesh.tensor": f" and the {heads} attention heads"
        + (f", and mesh.tensor x mesh.context the {keys}" if linear else ""),
        "mesh.context": f"; mesh.tensor x mesh.context divides the {keys}" if linear else "",
        "mesh.expert": f" and the {experts}",
        "mesh.pipeline": f" and is no more than the {shape.segments[shape.pipelined_segment()].repeats} layers",
    }.get(field, "")


def _heads(attention: DeltaNetConfig) -> str:
    """What tensor and context together have to divide."""
    if isinstance(attention, MambaConfig):
        return f"{attention.num_heads} heads of Mamba 2, by whole groups of {attention.num_kv_heads} or parts of one"
    return f"{attention.num_kv_heads} heads of the queries and keys of linear attention"
