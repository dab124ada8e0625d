"""Makes, loads and calls the part of a checkpoint that sees: a tower of layers over an image's patches, and what brings
its vectors into the text's width. Families say what it is made of (`Seeing`). Its weights are whole on each device."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.hf_files import Folder
from shardlm.layers.param import Execution, Params
from shardlm.mesh import MeshSpec
from shardlm.models.naming import Names
from shardlm.ops import attention
from shardlm.rules import Rules
from shardlm.vision import tower_weights

Tree = Any


class Seeing(Protocol):
    """What a family says of its encoder: a frozen dataclass.

    tower    its layers, whose heads have `each` dimensions
    inputs   of each patch, by name: (shape, dtype), as Picture.inputs has them
    module   makes it. Called with (inputs [P, ...], count int32, execution) it returns [P // merged, width]
    names    where its weights are in a checkpoint, by path, {layer} in those of stacked ones
    tensors  which of a checkpoint's tensors are its
    """

    @property
    def tower(self) -> Any: ...

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]: ...

    @property
    def tensors(self) -> tower_weights.Tensors: ...

    def module(self, params: Params) -> nnx.Module: ...

    def names(self) -> Names: ...


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that jit can take it as static
class Encoder:
    """An encoder without its weights: enough to call it with any of its tree.

    graph   NNX graph definition
    shapes  tree of jax.ShapeDtypeStruct of its parameters, with their shardings on the mesh
    layers  by path of a stacked parameter, how many it has
    dims    by path, (stack_names, names) of a parameter's dimensions
    """

    config: Seeing
    execution: Execution
    graph: nnx.GraphDef
    shapes: Tree
    layers: Mapping[tuple, int]
    dims: Mapping[tuple, tuple[tuple, tuple]]

    @classmethod
    def make(cls, config: Seeing, dtype: jnp.dtype, mesh: Mesh, learns: bool = False) -> "Encoder":
        """Traces the constructor without creating anything. Weights are held, and computed with, in `dtype`. `learns`:
        gradients of its tower are made, each layer anew from what it was given."""
        dtype, head = jnp.dtype(dtype), config.tower.each
        kind = attention.choose("auto", mesh.devices.flat[0], dtype, [(head, head)], trained=learns)
        remat = "full" if learns else "none"
        execution = Execution(Rules.make("replicated", MeshSpec()), dtype, remat, attention=kind)
        with jax.set_mesh(mesh):
            graph, state = nnx.split(nnx.eval_shape(lambda: config.module(Params(None, execution.rules))))
        whole = NamedSharding(mesh, PartitionSpec())
        flat = flatten_dict(nnx.to_pure_dict(state))
        shapes = {path: jax.ShapeDtypeStruct(s.shape, execution.dtype, sharding=whole) for path, s in flat.items()}
        dims = {path: (v.get_metadata("stack_names"), v.get_metadata("names")) for path, v in nnx.to_flat_state(state)}
        stacked = {path: shapes[path].shape[0] for path, (stack, _) in dims.items() if stack}
        return cls(config, execution, graph, unflatten_dict(shapes), stacked, dims)

    @property
    def bytes(self) -> int:
        """Of its weights, on each device."""
        return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(self.shapes))

    def inputs(self, patches: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes that a program for so many patches is called with."""
        return {name: jax.ShapeDtypeStruct((patches, *own), dtype) for name, (own, dtype) in self.config.inputs.items()}

    def load(
        self,
        folder: Folder,
        progress: Callable[[int, int], None] = lambda done, total: None,
        shapes: Tree | None = None,
    ) -> Tree:
        """The parameters of a checkpoint, or those of `shapes`, in the dtypes and where these say. `progress` is called
        with (bytes read, bytes to read).

        Raises ShardlmError for tensors that are missing, left over, or of another shape, all named.
        """
        whole, names, tensors = flatten_dict(self.shapes), self.config.names(), self.config.tensors
        wanted = whole if shapes is None else flatten_dict(shapes)
        return unflatten_dict(tower_weights.load(wanted, whole, self.layers, names, tensors, folder, progress))

    def __call__(self, params: Tree, inputs: Mapping[str, jax.Array], count: jax.Array) -> jax.Array:
        """The vectors [P // merged, width] of one image; for use inside jit, under the mesh.

        inputs [P, ...], those of a Picture, padded with zeros; count int32, how many patches it has. Vectors of padding
        are any.
        """
        return nnx.merge(self.graph, params)(inputs, count, self.execution)


def shapes_of(config: Seeing) -> dict[tuple, tuple[int, ...]]:
    """The shapes of an encoder's parameters by path. Needs no devices."""
    rules = Rules.make("replicated", MeshSpec())
    with jax.sharding.use_abstract_mesh(MeshSpec().abstract()):
        state = nnx.state(nnx.eval_shape(lambda: config.module(Params(None, rules))))
    return {path: leaf.shape for path, leaf in flatten_dict(nnx.to_pure_dict(state)).items()}


def parameters_of(config: Seeing) -> int:
    """How many an encoder has. Needs no devices."""
    return sum(map(math.prod, shapes_of(config).values()))
