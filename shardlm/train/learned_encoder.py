"""An encoder of images that is trained beside the language model: which of its weights are, where they rest, the copy
of them that reads, and the way back of a step's gradients, from the tokens that stand for images to these weights."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.mesh import shard_map
from shardlm.models.pretrained import Pretrained
from shardlm.optim import ENCODER
from shardlm.rules import Rules, Table
from shardlm.state import ModelDef, joined, on_device
from shardlm.train.config import RunConfig
from shardlm.train.replicas import apart
from shardlm.vision.encoder import Encoder
from shardlm.vision.parts import EncoderPart, Path
from shardlm.vision.registry import sees
from shardlm.vision.trained import parted, trained_of

Tree = Any
# Names by which rules split a weight: over the axes of rows, and over tensor; and one that they never do.
SPLIT, WHOLE = ("embed", "mlp"), "norm"


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that jit can take it as static
class Learned:
    """What is trained of an encoder.

    paths   of these weights
    shapes  of them, float32, at rest
    names   of their dimensions, as ModelDef.names: those by which they are split
    dims    the same as the encoder has them, which optimizers go by
    rules   that split them
    """

    paths: frozenset[Path]
    shapes: Tree
    names: Tree
    dims: Tree
    rules: Rules

    @classmethod
    def make(cls, encoder: Encoder, part: EncoderPart, rules: Rules, mesh: Mesh) -> "Learned":
        """Raises ShardlmError where the encoder has no such part."""
        paths = trained_of(encoder, part)
        if not paths:
            raise ShardlmError(f"train.encoder={part}: this encoder has none; set it to all or frozen")
        flat = {path: s for path, s in flatten_dict(encoder.shapes).items() if path in paths}
        names = {path: ((), split_as(s.shape, rules.optimizer)) for path, s in flat.items()}

        def resting(path: Path) -> jax.ShapeDtypeStruct:
            spec = rules.rest.spec(*names[path][1])
            return jax.ShapeDtypeStruct(flat[path].shape, jnp.float32, sharding=NamedSharding(mesh, spec))

        shapes = {path: resting(path) for path in flat}
        dims = {path: encoder.dims[path] for path in flat}
        return cls(paths, *map(unflatten_dict, (shapes, names, dims)), rules)

    def beside(self, model: ModelDef) -> ModelDef:
        """What is trained of both."""
        shapes, names = {**model.shapes, ENCODER: self.shapes}, {**model.names, ENCODER: self.names}
        return dataclasses.replace(model, shapes=shapes, names=names)

    @property
    def bytes(self) -> int:
        """Of these weights at rest, on each device."""
        return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(self.shapes))


def split_as(shape: tuple[int, ...], table: Table) -> tuple[str, ...]:
    """Names of a weight's dimensions: the longest that divides over an embedding's axes is split so, of the others the
    longest that divides over tensor; what does not divide is whole."""
    found = [WHOLE] * len(shape)
    for name in SPLIT:
        ways = table.mesh.size(*table.axes(name))
        fits = [i for i, size in enumerate(shape) if found[i] == WHOLE and size % ways == 0]
        if fits and ways > 1:
            found[max(fits, key=lambda i: shape[i])] = name
    return tuple(found)


class Compared(NamedTuple):
    """Of an encoder that is trained on preferences: what reads now, or what is not trained of that; and what read
    before."""

    now: Tree
    before: Tree


@functools.partial(jax.jit, static_argnums=0)
def in_use(encoder: Encoder, trained: Tree, still: Tree) -> Tree:
    """The weights that read: of those that are trained a copy in the compute dtype, whole on each device, and the
    others."""
    whole = jax.tree.map(
        lambda a: jax.reshard(on_device(a).astype(encoder.execution.dtype), PartitionSpec(*[None] * a.ndim)), trained
    )
    return joined(whole, still)


@functools.partial(jax.jit, static_argnums=(0, 1))
def no_sums(learned: Learned, by_device: NamedSharding) -> Tree:
    """What `learn` begins with."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding), sums_of(learned, by_device))


def sums_of(learned: Learned, by_device: NamedSharding) -> Tree:
    """Shapes of sums of gradients, float32 [devices, ...]: each device has its own until all are added."""
    ways = by_device.mesh.size

    def one(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((ways, *s.shape), jnp.float32, sharding=by_device)

    return jax.tree.map(one, learned.shapes)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def learn(seeing: Any, params: Tree, sums: Tree, inputs: Mapping[str, jax.Array], counts, index, wanted) -> Tree:
    """`sums` with what one image on each device adds, which is made anew. `seeing` is seeing.Seeing; inputs, counts and
    index as its `_read` takes them, `params` (trained, the others) as `in_use` gives them, wanted [B, T, W] the
    gradients of the vectors."""
    rows, each = seeing.rows.spec, seeing.by_device.spec
    names = jax.tree.leaves(tuple(rows))
    first = tuple(axis for axis in seeing.beside if axis not in names)  # whose devices have the same tokens

    def local(params, sums, inputs, counts, index, wanted):
        trained, still = params
        own = {name: a[0] for name, a in inputs.items()}
        made, back = jax.vjp(lambda trained: seeing.encoder(joined(trained, still), own, counts[0]), trained)
        count = made.shape[0] * math.prod(jax.lax.axis_size(axis) for axis in seeing.beside)
        alone = jnp.all(jnp.array([jax.lax.axis_index(axis) == 0 for axis in first] or [True]))
        places = jnp.where((index >= 0) & alone, index, count).ravel()
        every = jnp.zeros((count, made.shape[1]), jnp.float32)
        every = every.at[places].add(wanted.reshape(-1, made.shape[1]).astype(jnp.float32), mode="drop")
        if seeing.beside:  # to the devices that read them
            every = jax.lax.psum_scatter(every, seeing.beside, scatter_dimension=0, tiled=True)
        (found,) = back(every.astype(made.dtype))
        return jax.tree.map(lambda a, g: a + g.astype(jnp.float32)[None], sums, found)

    specs = (PartitionSpec(), each, each, each, rows, rows)
    return shard_map(local, in_specs=specs, out_specs=each)(params, sums, inputs, counts, index, wanted)


def added(learned: Learned, sums: Tree, by_device: NamedSharding) -> Tree:
    """The sum over all devices, where the optimizer rests it; inside jit."""
    table, every = learned.rules.optimizer, by_device.mesh.axis_names

    def one(a: jax.Array, names: tuple) -> jax.Array:
        spec = table.spec(*names[1])
        left = tuple(axis for axis in every if axis not in jax.tree.leaves(tuple(spec)))

        def local(a):
            a = a[0]
            for dim, axes in enumerate(spec):
                a = jax.lax.psum_scatter(a, axes, scatter_dimension=dim, tiled=True) if axes else a
            return jax.lax.psum(a, left)

        return shard_map(local, in_specs=by_device.spec, out_specs=spec)(a)

    return jax.tree.map(one, sums, learned.names)


def parts_of(learned: Learned, params: Tree) -> tuple[Tree, Tree]:
    """(what is trained, the others) of an encoder's weights."""
    return parted(params, learned.paths)


def check_encoder(config: RunConfig) -> None:
    """Refuses what does not go with an encoder that is trained, before anything compiles."""
    if config.train.encoder == "frozen":
        if config.optim.encoder_rate != 1:
            raise ShardlmError(
                f"optim.encoder_rate={config.optim.encoder_rate} with train.encoder=frozen: no encoder is trained, and "
                "the rate would change nothing; set train.encoder to projector or all, or leave optim.encoder_rate out"
            )
        return
    what, instead = f"train.encoder={config.train.encoder}", "or train.encoder to frozen"
    if not (isinstance(config.model, Pretrained) and sees(config.model.options)):
        raise ShardlmError(
            f"{what}: the model is no checkpoint that sees; set model to Pretrained(FOLDER) of one, {instead}"
        )
    if not config.data.chat_template:
        raise ShardlmError(
            f"{what} without data.chat_template: texts have no images; set data.chat_template to the model's folder "
            f"and data.train to conversations with images, {instead}"
        )
    if config.grpo.reward:
        raise ShardlmError(
            f"{what} with grpo.reward: replies are sampled with the encoder as it was; leave grpo.reward out, {instead}"
        )
    if config.pipeline.schedule == "1f1b" and config.mesh.pipeline > 1:
        raise ShardlmError(
            f"{what} with pipeline.schedule=1f1b: its backward pass gives no gradients of images; set "
            f"pipeline.schedule to circular or gpipe, {instead}"
        )
    if apart(config):
        raise ShardlmError(
            f"{what} with replicas that exchange in their own way (slow_link, local_sgd or train.shares): an encoder's "
            f"gradients are summed every step; leave those as they are, {instead}"
        )
