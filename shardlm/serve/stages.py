"""Cuts a model whose layers are apart into pipeline stages, each a contiguous run of layers with its weights on devices
of its own: the embedding in the first, the last norm and the head in the last; tied embeddings in both."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.models.transformer import Transformer
from shardlm.state import ModelDef, at_rest, joined

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Some layers of a model, as a model of these layers alone, and where they are.

    layers  of the whole model
    absent  shapes of the parameters that other stages have, so that the model can be put together
    """

    model: ModelDef
    mesh: Mesh
    first: bool
    last: bool
    layers: slice
    absent: Tree

    def lm(self, params: Tree) -> Transformer:
        """The layers with these parameters, of this stage alone; for use inside jit."""
        return nnx.merge(self.model.graph, joined(params, self.absent))

    def layout(self, whole: PageLayout) -> PageLayout:
        """The page layout of the whole model as this stage has it: the same pages, of fewer layers."""
        counts, places = collections.Counter(), []
        for group, _ in whole.places[self.layers]:
            places.append((group, counts[group]))
            counts[group] += 1
        return dataclasses.replace(whole, places=tuple(places))


def layers_of(num_layers: int, count: int) -> list[slice]:
    """The layers of each stage: equally many, and one less in the last ones, as the head is there too. Raises
    ShardlmError for more stages than layers."""
    if count > num_layers:
        raise ShardlmError(f"pipeline={count} stages of {num_layers} layers; choose at most {num_layers}")
    ends = [-(-num_layers * (i + 1) // count) for i in range(count)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def cut(model: ModelDef, params: Tree, meshes: Sequence[Mesh]) -> tuple[list[Stage], list[Tree]]:
    """(the stages of a model whose layers are apart, their parameters), which it takes over and moves; of one mesh, the
    model as it is."""
    if len(meshes) == 1:
        return [Stage(model, meshes[0], True, True, slice(None), {})], [copied(params, meshes[0])]
    stages, own = [], []
    for number, run in enumerate(layers_of(model.config.num_layers, len(meshes))):
        stage, targets = _stage(model, meshes[number], run, number == 0, number == len(meshes) - 1)
        layers = {i: params["segments"][layer] for i, layer in enumerate(range(run.start, run.stop))}
        kept = {name: params[name] for name in targets if name != "segments"} | {"segments": layers}
        stages.append(stage)
        own.append(jax.tree.map(lambda a, to: jax.device_put(a, to.sharding), kept, targets))
    return stages, own


def _stage(model: ModelDef, mesh: Mesh, run: slice, first: bool, last: bool) -> tuple[Stage, Tree]:
    """(a stage, its parameters' shapes and places)."""
    config = dataclasses.replace(model.config.without_mtp(), segments=model.config.segments[run])
    execution = dataclasses.replace(model.execution, rules=model.execution.rules.inside("pipeline"))
    with jax.set_mesh(mesh):
        part = ModelDef.make(config, execution)
        held = part.held_at_rest(mesh)
        if part.frozen_shapes is not None:
            held = joined(held, jax.tree.map(lambda s: at_rest(s, mesh), part.shapes))
    here = {"segments"}
    here |= {"embedding", "positions"} if first else set()
    here |= {"final_norm", "head"} if last else set()
    here |= {"embedding"} if last and config.tie_embeddings else set()
    targets = {name: held[name] for name in held if name in here}
    return Stage(part, mesh, first, last, run, {name: held[name] for name in held if name not in here}), targets


def repeated(stages: Sequence[Stage], params: Sequence[Tree], meshes: Sequence[Mesh]) -> tuple[list[Stage], list[Tree]]:
    """The same stages on other meshes of their shapes."""
    others = [dataclasses.replace(stage, mesh=mesh) for stage, mesh in zip(stages, meshes, strict=True)]
    return others, [copied(own, mesh) for own, mesh in zip(params, meshes, strict=True)]


def copied(params: Tree, mesh: Mesh) -> Tree:
    """Parameters on the devices of another mesh of the same shape, from device to device; the same where they are
    there."""
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, a.sharding.spec)), params)
