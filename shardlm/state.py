"""The state of a training run: parameters, optimizer state and counters, created sharded inside one jit so that no
device and no host ever holds a whole model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.layers.param import Execution
from shardlm.models.transformer import Transformer, TransformerConfig
from shardlm.precision import LossScale
from shardlm.rules import Table

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params float32 by path; opt_state; step int32, number of updates tried; ema like params or None; loss_scale or
    None; skipped int32, steps whose update was left out because it was not finite; bad_steps int32, how many of them
    in a row up to now (in fp16 only those at the lowest loss scale); link, what replicas behind a slow link keep of
    their own between exchanges (train/compression.py, train/diloco.py), or None."""

    params: Tree
    opt_state: Tree
    step: jax.Array
    ema: Tree | None
    loss_scale: LossScale | None
    skipped: jax.Array
    bad_steps: jax.Array
    link: Tree = None


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that jit can take it as static
class ModelDef:
    """A model without its weights: enough to call it with any parameters of its tree.

    graph   NNX graph definition
    shapes  parameter tree of jax.ShapeDtypeStruct with resting shardings
    names   the same tree with (stack_names, names) of each parameter's dimensions
    """

    config: TransformerConfig
    execution: Execution
    graph: nnx.GraphDef
    shapes: Tree
    names: Tree

    @classmethod
    def make(cls, config: TransformerConfig, execution: Execution) -> "ModelDef":
        """Traces the model's constructor without creating anything. Call under the run's mesh.

        Raises ShardlmError when a parameter does not divide over the mesh.
        """
        graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, execution, nnx.Rngs(0))))
        variables = nnx.to_flat_state(state)
        names = {path: (v.get_metadata("stack_names"), v.get_metadata("names")) for path, v in variables}
        return cls(config, execution, graph, nnx.to_pure_dict(state), _nest(names))

    def model(self, params: Tree) -> Transformer:
        """The model with these parameters, wherever they rest; for use inside jit."""
        return nnx.merge(self.graph, on_device(params))

    def init(self, key: jax.Array) -> Tree:
        """New parameters; call inside jit. The values depend on the key only, not on the mesh."""
        model = Transformer(self.config, self.execution, nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def place(self, tree: Tree, table: Table) -> Tree:
        """Reshards a parameter-shaped tree to where `table` puts each dimension; call inside jit. What is there already
        stays in its memory."""

        def move(a, names):
            spec = table.spec(*names[0], *names[1])
            return a if jax.typeof(a).sharding.spec == spec else jax.reshard(on_device(a), spec)

        return jax.tree.map(move, tree, self.names)


def make_state(
    model: ModelDef,
    tx: optax.GradientTransformation,
    seed: jax.Array,
    params: Tree | None = None,
    *,
    ema: bool,
    loss_scaling: bool,
) -> TrainState:
    """A new state of these parameters, or of new ones from an integer seed; call inside jit or under eval_shape."""
    params = model.init(jax.random.key(seed)) if params is None else params
    rules = model.execution.rules
    split = model.place(params, rules.optimizer)
    return TrainState(
        params=params,
        opt_state=tx.init(split),
        step=jnp.int32(0),
        ema=split if ema else None,
        loss_scale=LossScale.start() if loss_scaling else None,
        skipped=jnp.int32(0),
        bad_steps=jnp.int32(0),
    )


def at_rest(shape: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A traced shape with its sharding on real devices; without one it is whole on each."""
    spec = shape.sharding.spec if shape.sharding else PartitionSpec()
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))


def on_host(a: jax.Array) -> bool:
    """Whether an array is in the host's memory (train/offload.py); also inside jit, where its type says so."""
    return jax.typeof(a).memory_space == jax.memory.Space.Host


def on_device(tree: Tree) -> Tree:
    """Brings what is in the host's memory to the device; inside jit."""
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device) if on_host(a) else a, tree)


def _nest(flat: dict[tuple, Any]) -> Tree:
    """{("a", 0, "b"): x} -> {"a": {0: {"b": x}}}."""
    tree: dict = {}
    for path, leaf in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    return tree
