"""What plans of one search have in common: layers compute and send the same on all meshes that differ only in where
weights rest, but for what goes by that (cost.Layers.by_rest)."""

from typing import Any

from shardlm.plan.cluster import Cluster
from shardlm.plan.cost import Layers
from shardlm.plan.sketch import Sketch
from shardlm.train.config import RunConfig
from shardlm.train.replicas import apart

INNER = ("context", "expert", "tensor")  # axes whose collectives layers wait for


class Alike:
    """Layers of the ways to run one configuration on a cluster, each reckoned once. The ways differ in nothing but what
    a search varies: meshes, rules, schedules, microbatches, products, what is kept, where the optimizer's state is."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._layers: dict[tuple, Layers] = {}

    def layers(self, sketch: Sketch) -> Layers:
        config = sketch.config
        key = (*alike(config), config.pipeline, config.matmul, config.remat, config.train.accumulation)
        key += (config.unroll, Layers.by_rest(sketch))
        if key not in self._layers:
            self._layers[key] = Layers.of(sketch, self.cluster)
        return self._layers[key]


def inner(config: RunConfig) -> tuple[int, ...]:
    """Sizes of the axes that split layers."""
    return (config.mesh.pipeline, *(config.mesh.size(axis) for axis in INNER))


def alike(config: RunConfig) -> tuple[Any, ...]:
    """Of meshes whose layers are alike; where replicas do more than sum gradients each has its own."""
    own = (config.mesh, config.rules) if config.train.shares or apart(config) else ()
    return (*inner(config), *own)
