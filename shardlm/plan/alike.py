"""What plans of one search have in common, and those of several: layers compute and send the same on all meshes that
differ only in where weights rest, but for what goes by that (cost.Layers.by_rest); and where GPUs have the same
programs, only rates and memory are others."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from shardlm.ops.expert_dispatch import beside_weights, near
from shardlm.plan.cluster import Cluster
from shardlm.plan.cost import Layers
from shardlm.plan.sketch import Sketch
from shardlm.plan.training_images import RowImages
from shardlm.train.config import RunConfig
from shardlm.train.replicas import apart

T = TypeVar("T")
INNER = ("context", "expert", "tensor")  # axes whose collectives layers wait for


class Shared:
    """Of searches for one configuration, of which nothing is varied but the rows of its global batch and what a search
    varies, on several clusters. It holds some ten thousand sketches, for as long as an advice is made."""

    def __init__(self):
        self._sketches: dict[tuple, Sketch] = {}
        self._made: dict[Hashable, Any] = {}

    def sketch(self, config: RunConfig, cluster: Cluster) -> Sketch:
        """As Sketch.of makes it, of rows without images. Raises ShardlmError as that does, which may name the GPU."""
        train, pipeline = config.train, config.pipeline  # by their fields: hashing whole ones took as long as the rest
        key = tuple(config.mesh.sizes().values())
        key += config.rules, pipeline.schedule, pipeline.rounds, train.global_batch, train.accumulation
        key += config.matmul, config.remat, config.optim.moments, config.offload.optimizer, config.offload.params
        key += config.unroll, *programs_of(cluster), near(config.mesh, _joined(cluster))
        found = self._sketches.get(key)
        if found is None:
            found = self._sketches[key] = Sketch.of(config, cluster.gpu, cluster.gpus_per_host)
        return found if found.gpu is cluster.gpu else found.on(cluster.gpu, cluster.gpus_per_host)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """make(), which `key` decides."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Alike:
    """Layers of the ways to run one configuration on a cluster, each reckoned once. The ways differ in nothing but what
    a search varies: meshes, rules, schedules, microbatches, products, what is kept, and in what and where moments are.

    shared  with searches on other clusters; None: there are no others, as where rows have images
    images  of each row
    """

    def __init__(self, cluster: Cluster, shared: Shared | None = None, images: RowImages | None = None):
        self.cluster, self.shared, self.images = cluster, shared, images
        self._layers: dict[tuple, Layers] = {}

    def sketch(self, config: RunConfig) -> Sketch:
        if self.shared:
            return self.shared.sketch(config, self.cluster)
        return Sketch.of(config, self.cluster.gpu, self.cluster.gpus_per_host, self.images)

    def once(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        """make(), which `key` and the number of GPUs decide, and nothing else of the cluster."""
        return self.shared.once((what, self.cluster.num_gpus, key), make) if self.shared else make()

    def layers(self, sketch: Sketch) -> Layers:
        config = sketch.config
        key = (*alike(config), config.pipeline, config.matmul, config.remat, config.train.accumulation)
        key += (config.unroll, config.optim.moments, sketch.execution.gathers_tokens, Layers.by_rest(sketch))
        if key not in self._layers:
            own = config.train, *programs_of(self.cluster)
            made = self.once("layers", (*key, *own), lambda: Layers.made(sketch))
            self._layers[key] = Layers.of(sketch, self.cluster, made)
        return self._layers[key]


def programs_of(cluster: Cluster) -> tuple[Any, ...]:
    """What is the same of clusters whose programs are, but for the number of GPUs."""
    return cluster.gpu.generation, cluster.num_gpus > cluster.gpus_per_host


def _joined(cluster: Cluster) -> int:
    return cluster.gpu.joined(min(cluster.gpus_per_host, cluster.num_gpus))


def inner(config: RunConfig) -> tuple[int, ...]:
    """Sizes of the axes that split layers, and what decides how tokens reach experts besides."""
    mesh = config.mesh
    return (mesh.pipeline, *(mesh.size(axis) for axis in INNER), beside_weights(mesh))


def alike(config: RunConfig) -> tuple[Any, ...]:
    """Of meshes whose layers are alike; where replicas do more than sum gradients each has its own."""
    own = (config.mesh, config.rules) if config.train.shares or apart(config) else ()
    return (*inner(config), *own)
