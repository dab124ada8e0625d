"""The state of a training run: parameters, optimizer state and counters, created sharded inside one jit so that no
device and no host ever holds a whole model."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.layers import ngrams
from shardlm.layers.context import INDEXES
from shardlm.layers.lora import A, B
from shardlm.layers.param import Execution, in_groups
from shardlm.models.transformer import Transformer
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.grouped_weights import Groups
from shardlm.optim import ENCODER
from shardlm.precision import LossScale
from shardlm.rules import Table

Tree = Any
TEACHER = "teacher"  # of frozen weights, those of another model that a run learns from


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params float32 by path, the trained ones, ENCODER's too; opt_state; step int32, number of updates tried; ema like
    params or None; loss_scale or None; skipped int32, steps whose update was left out because it was not finite;
    bad_steps int32, how many of them in a row up to now (in fp16 only those at the lowest loss scale); link, what
    replicas behind a slow link keep of their own between exchanges (train/compression.py, train/diloco.py), or None;
    frozen, weights that no step changes (under adapters, layers/lora.py; of the reference, train/preference.py; under
    TEACHER of a teacher, train/distill.py), or None: not part of checkpoints."""

    params: Tree
    opt_state: Tree
    step: jax.Array
    ema: Tree | None
    loss_scale: LossScale | None
    skipped: jax.Array
    bad_steps: jax.Array
    link: Tree = None
    frozen: Tree = None


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that jit can take it as static
class ModelDef:
    """A model without its weights: enough to call it with any parameters of its tree.

    graph   NNX graph definition
    shapes  tree of jax.ShapeDtypeStruct, with resting shardings, of the parameters that are trained: of adapters where
            there are any, else of all
    names   the same tree with (stack_names, names) of each parameter's dimensions
    frozen_shapes, frozen_names  the same of the others, as they are held; None where there are none
    frozen  what no step changes, of a model that is bound to it: the others, or where all are trained what training
            compares them with (train/preference.py); and a teacher
    groups  by path how weights are held that are in groups (ops/grouped_weights.py)
    """

    config: TransformerConfig
    execution: Execution
    graph: nnx.GraphDef
    shapes: Tree
    names: Tree
    frozen_shapes: Tree = None
    frozen_names: Tree = None
    frozen: Tree = None
    groups: Mapping[tuple, Groups] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(cls, config: TransformerConfig, execution: Execution) -> "ModelDef":
        """Traces the model's constructor without creating anything. Call under the run's mesh.

        Raises ShardlmError when a parameter does not divide over the mesh.
        """
        graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, execution, None)))
        shapes = flatten_dict(nnx.to_pure_dict(state))
        names = {path: (v.get_metadata("stack_names"), v.get_metadata("names")) for path, v in nnx.to_flat_state(state)}
        alone = execution.lora.rank and not execution.adapters  # several are served, and none is trained
        trained = {path for path in shapes if not alone or is_adapter(path)}
        frozen = {path: held_as(path, s, execution.dtype) for path, s in shapes.items() if path not in trained}
        return cls(
            config,
            execution,
            graph,
            unflatten_dict({path: s for path, s in shapes.items() if path in trained}),
            unflatten_dict({path: n for path, n in names.items() if path in trained}),
            unflatten_dict(frozen) if frozen else None,
            unflatten_dict({path: names[path] for path in frozen}) if frozen else None,
            groups={path: found for path, v in nnx.to_flat_state(state) if (found := in_groups(v))},
        )

    def held_at_rest(self, mesh: Mesh) -> Tree:
        """What parameters that no step changes are held in, at rest on real devices: the frozen ones, or all of a model
        that has none."""
        shapes = self.frozen_shapes
        if shapes is None:
            held = {path: held_as(path, s, self.execution.dtype) for path, s in flatten_dict(self.shapes).items()}
            shapes = unflatten_dict(held)
        return jax.tree.map(lambda s: at_rest(s, mesh), shapes)

    def bound(self, frozen: Tree) -> "ModelDef":
        """The model beside these parameters that no step changes (`TrainState.frozen`)."""
        return dataclasses.replace(self, frozen=frozen)

    def model(self, params: Tree) -> Transformer:
        """The model with these parameters, wherever they rest; for use inside jit."""
        return nnx.merge(self.graph, on_device(self.whole(params)))

    def outline(self) -> Transformer:
        """The model with shapes where its parameters stand."""
        return nnx.merge(self.graph, joined(self.shapes, self.frozen_shapes))

    def whole(self, params: Tree) -> Tree:
        """All of the model's parameters, of those that are trained: with the frozen ones, where there are any, and
        without an encoder of images that is trained beside them."""
        params = {name: part for name, part in params.items() if name != ENCODER}
        if self.frozen_shapes is None:
            return params
        return joined(params, {name: part for name, part in (self.frozen or {}).items() if name != TEACHER})

    def init(self, key: jax.Array) -> Tree:
        """New trained parameters; call inside jit. The values depend on the key only, not on the mesh."""
        model = Transformer(self.config, self.execution, nnx.Rngs(key))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        if not self.execution.lora.rank:
            return params
        return unflatten_dict({path: a for path, a in flatten_dict(params).items() if is_adapter(path)})

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
    encoder: Tree | None = None,
    *,
    ema: bool,
    loss_scaling: bool,
) -> TrainState:
    """A new state of these parameters, or of new ones from an integer seed, and of those of an encoder of images that
    is trained beside them; call inside jit or under eval_shape."""
    params = model.init(jax.random.key(seed)) if params is None else params
    params = params if encoder is None else {**params, ENCODER: encoder}
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


# The steps of a bias that decides between experts, numbers of experts, factors on frequencies, and what mixes
# streams (beside "..streams").
EXACT = ("router_bias", "experts_of_token", "faster")


def is_adapter(path: tuple) -> bool:
    """Whether a parameter belongs to an adapter (layers/lora.py)."""
    return str(path[-1]).endswith((A, B))


def adapters_of(params: Tree) -> Tree:
    """The part of a parameter tree that is adapters."""
    return unflatten_dict({path: a for path, a in flatten_dict(params).items() if is_adapter(path)})


def replaced(first: Tree, second: Tree) -> Tree:
    """A parameter tree with the leaves of a second one in place of its own."""
    return unflatten_dict(flatten_dict(first, keep_empty_nodes=True) | flatten_dict(second))


def held_as(path: tuple, shape: jax.ShapeDtypeStruct, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """A parameter that no step changes: in the compute dtype, unless it is in few bits or a scale of such, or one of
    those that 16 bits do not resolve."""
    exact = path[-1] in EXACT or (len(path) > 1 and str(path[-2]).endswith("streams"))
    keep = shape.dtype != jnp.float32 or exact or path[-1].endswith("_scale")
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype if keep else dtype, sharding=shape.sharding)


def joined(first: Tree, second: Tree | None) -> Tree:
    """One parameter tree of two that share no leaf."""
    if second is None:
        return first
    if not (isinstance(first, dict) and isinstance(second, dict)):
        raise ValueError("two trees of parameters share a leaf")
    both = {key: joined(first[key], second[key]) for key in first.keys() & second.keys()}
    return {**first, **second, **both}


def cache_entries(model: ModelDef) -> dict[str, tuple[tuple[int, int], str]]:
    """What there is room for of each token in a layer's place in the pages: {name: ((K, H), name of the K dimension)}.
    Of layers whose heads differ as many numbers as each goes into without rest (layers/page_layout.py, parts).

    Raises ShardlmError for heads of different sizes in int8, which has a scale for each, and for keys with positions in
    them in 8 bits.
    """
    check_positions_in_keys(model.config, model.execution.kv_cache)
    every = [entries for a in _attentions(model) if (entries := a.cache_entries())]
    # Of layers that have no indexer too (MiniMax M3's first).
    index = {name: of for entries in every for name, of in entries.items() if name in INDEXES}
    kinds = list(dict.fromkeys(tuple((n, of) for n, of in entries.items() if n not in INDEXES) for entries in every))
    if len(kinds) < 2:
        return dict(kinds[0]) | index if kinds else {}
    if model.execution.kv_cache == "int8" and len({width for _, width in model.config.kept_heads}) > 1:
        raise ShardlmError(
            "kv_cache_dtype=int8: layers of the model have heads of different sizes, and int8 a scale for each head; "
            "choose auto or fp8"
        )
    most = math.lcm(*model.config.kept_numbers(kv_ways(model)).values())
    split = [kind for kind in kinds if all(name == "kv_heads" for _, (_, name) in kind)]
    return {name: ((most // width, width), of) for name, ((_, width), of) in (split or kinds)[0]} | index


def check_positions_in_keys(config: TransformerConfig, held: str) -> None:
    """Raises ShardlmError for keys with positions in them in 8 bits."""
    if held in ("fp8", "int8") and any(getattr(a, "slopes", ()) for a in config.attentions()):
        raise ShardlmError(
            f"kv_cache_dtype={held}: keys of the model have their positions in them (linear biases), which 8 bits do "
            "not hold; choose auto or bfloat16"
        )


def kv_ways(model: ModelDef) -> int:
    """Over how many devices kv heads are split, where they divide."""
    rules = model.execution.rules
    return rules.mesh.size(*rules.act.axes("kv_heads"))


def memory_entries(model: ModelDef, unsure: int = 0) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
    """What a layer remembers a text by that has slots for texts, with so many tokens that may turn out wrong, the same
    in all of them: {name: (shape, dtype)}."""
    blocks = (block for stack in model.outline().segments for block in stack.blocks)
    layers = (layer for block in blocks for layer in (block.attention, getattr(block, "memory", None)))
    remembering = (layer for layer in layers if hasattr(layer, "memory_entries"))
    return next((layer.memory_entries(model.execution.dtype, unsure) for layer in remembering), {})


def text_entries(model: ModelDef, unsure: int = 0) -> dict[str, ngrams.Kept]:
    """What is kept of each text for n-grams, with so many tokens that may turn out wrong, by name."""
    return ngrams.text_entries(model.config.ngrams, model.config.embed_dim, model.execution.dtype, unsure)


def _attentions(model: ModelDef):
    for stack in model.outline().segments:
        yield from (block.attention for block in stack.blocks)
