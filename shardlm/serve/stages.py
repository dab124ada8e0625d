"""Cuts a model whose layers are apart into pipeline stages, each a contiguous run of layers with its weights on devices
of its own: the embedding in the first, the last norm and the head in the last; tied embeddings in both. Modules that
predict further tokens are in the last one, with the embedding."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding

from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.models.transformer import Transformer
from shardlm.ops.weight_format import AsPublished
from shardlm.serve.carry import moved
from shardlm.state import ModelDef, at_rest, joined

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Some layers of a model, as a model of these layers alone, and where they are.

    layers  of the whole model
    absent  shapes of the parameters that other stages have, so that the model can be put together
    held    shapes and places of its own
    heard   how many streams stages before it hand out (Execution.handed_out), which come with what enters it
    """

    model: ModelDef
    mesh: Mesh
    first: bool
    last: bool
    layers: slice
    absent: Tree
    held: Tree = None
    heard: int = 0

    @property
    def count(self) -> int:
        """How many layers it has."""
        return self.layers.stop - self.layers.start

    def lm(self, params: Tree) -> Transformer:
        """The layers with these parameters, of this stage alone; for use inside jit."""
        return nnx.merge(self.model.graph, joined(params, self.absent))

    def layout(self, whole: PageLayout) -> PageLayout:
        """The page layout of the whole model as this stage has it."""
        return layout_of(whole, self.layers)


def layout_of(whole: PageLayout, layers: slice) -> PageLayout:
    """The same pages, of these layers alone."""
    each = whole.firsts or whole.places
    if len(each[layers]) == len(each):  # in which layers may share a place, or have several
        return whole
    counts, places = collections.Counter(), []
    for group, _ in whole.places[layers]:
        places.append((group, counts[group]))
        counts[group] += 1
    return dataclasses.replace(whole, places=tuple(places), parts=())  # of other sizes here, maybe


def layers_of(num_layers: int, count: int) -> list[slice]:
    """The layers of each stage: equally many, and one less in the last ones, as the head is there too. Raises
    ShardlmError for more stages than layers."""
    if count > num_layers:
        raise ShardlmError(f"pipeline={count} stages of {num_layers} layers; choose at most {num_layers}")
    ends = [-(-num_layers * (i + 1) // count) for i in range(count)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@dataclasses.dataclass(frozen=True)
class Place:
    """One replica on its devices: the stages, the parameters of each, and those of a draft model, in the last one."""

    stages: list[Stage]
    params: list[Tree]
    draft: Tree = ()


def cut(model: ModelDef, params: Tree, meshes: Sequence[Mesh], draft: Tree = ()) -> Place:
    """The stages of a model whose layers are apart, whose parameters it takes over and moves; of one mesh, the model as
    it is."""
    if len(meshes) == 1:
        return Place([Stage(model, meshes[0], True, True, slice(None), {})], [copied(params, meshes[0])], draft)
    found = stages_on(model, meshes)
    return Place(found, [part_of(params, stage) for stage in found], copied(draft, meshes[-1]))


def stages_on(model: ModelDef, meshes: Sequence[Mesh]) -> list[Stage]:
    """The stages of a model whose layers are apart, one on each mesh; no weights are touched."""
    runs, last = layers_of(model.config.num_layers, len(meshes)), len(meshes) - 1
    return [_stage(model, mesh, run, i == 0, i == last) for i, (mesh, run) in enumerate(zip(meshes, runs, strict=True))]


def part_of(params: Tree, stage: Stage) -> Tree:
    """A stage's own of all parameters, or of some, moved to its devices as far as they are not there."""
    layers = range(stage.layers.start, stage.layers.stop)
    own = {name: params[name] for name in stage.held if name != "segments" and name in params}
    own["segments"] = {i: params["segments"][layer] for i, layer in enumerate(layers)}
    held = flatten_dict(stage.held)
    return unflatten_dict({path: moved(a, held[path].sharding) for path, a in flatten_dict(own).items()})


def together(params: Sequence[Tree], stages: Sequence[Stage]) -> Tree:
    """All parameters from those of the stages, each where it is: `part_of` undone."""
    layers = {}
    for own, stage in zip(params, stages, strict=True):
        layers |= {stage.layers.start + i: layer for i, layer in own["segments"].items()}
    names = {name: a for own in reversed(params) for name, a in own.items()}  # the first stage's where two have it
    return names | {"segments": layers}


def _stage(model: ModelDef, mesh: Mesh, run: slice, first: bool, last: bool) -> Stage:
    config = dataclasses.replace(model.config, segments=model.config.segments[run])
    places = model.execution.handed_out
    end = run.stop + last  # the stream behind its last layer is the next one's
    own = tuple(place - run.start for place in places if run.start <= place < end)
    execution = dataclasses.replace(model.execution, rules=model.execution.rules.inside("pipeline"), handed_out=own)
    if isinstance(execution.weights, AsPublished):
        execution = dataclasses.replace(execution, weights=execution.weights.behind(run.start))
    with jax.set_mesh(mesh):
        part = ModelDef.make(config, execution)
        held = part.held_at_rest(mesh)
        if part.frozen_shapes is not None:
            held = joined(held, jax.tree.map(lambda s: at_rest(s, mesh), part.shapes))
    here = {"segments"}
    here |= {"embedding", "positions", "embed_norm"} if first else set()
    here |= {"final_norm", "head", "head_bias"} if last else set()
    here |= {"embedding"} if last and config.tie_embeddings else set()
    here |= {"mtp", "embedding", "positions"} if last and config.mtp else set()
    own = {name: held[name] for name in held if name in here}
    absent, heard = {name: held[name] for name in held if name not in here}, sum(place < run.start for place in places)
    return Stage(part, mesh, first, last, run, absent, own, heard)


def repeated(place: Place, meshes: Sequence[Mesh]) -> Place:
    """The same on other meshes of the same shapes, copied from device to device."""
    stages = []
    for stage, mesh in zip(place.stages, meshes, strict=True):
        held = jax.tree.map(lambda s, mesh=mesh: at_rest(s, mesh), stage.held)
        stages.append(dataclasses.replace(stage, mesh=mesh, held=held))
    params = [copied(own, mesh) for own, mesh in zip(place.params, meshes, strict=True)]
    return Place(stages, params, copied(place.draft, meshes[-1]))


def copied(params: Tree, mesh: Mesh) -> Tree:
    """Parameters on the devices of another mesh of the same shape, from device to device; the same where they are
    there."""
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, a.sharding.spec)), params)
