"""Parameters: born sharded and stacked, with the names of their dimensions in their metadata. Projections by them, as
they are held (in the compute dtype or in few bits) and as they are adapted (layers/lora.py)."""

import dataclasses
import math
from collections.abc import Callable, Container, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.lora import A, B, LoraConfig
from shardlm.layers.own_sums import einsum_of_own
from shardlm.mesh import shard_map
from shardlm.ops import dynamic_matmul
from shardlm.ops.anew_matmul import anew_einsum
from shardlm.ops.cpu_einsum import cpu_einsum
from shardlm.ops.grouped_weights import (
    FEW_ROWS,
    LONGEST,
    Grouped,
    GroupedProducts,
    Groups,
    dequantised,
    packed_shape,
    product,
    scale_shape,
)
from shardlm.ops.kv_format import KvFormat
from shardlm.ops.quantized_matmul import Matmul, in_eight_bits, quantized_einsum
from shardlm.ops.schemes import SCHEMES, as_served
from shardlm.ops.weight_format import DYNAMIC, WeightFormat, groups_of, weight_key
from shardlm.rules import Rules

MADE_FIRST = "_made_first"  # after the name of a weight that lies so
SCALE, ZERO = "_scale", "_zero"  # after that of one in few bits, what is beside it

Initializer = Callable[[jax.Array | None, tuple[int, ...], jax.sharding.PartitionSpec], jax.Array]
"""(key, shape, spec) -> float32 values; without a key any, where only shapes are asked for."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs, as opposed to what it is: chosen per run, not stored in checkpoints' architecture.

    rules      where dimensions are split
    dtype      of activations and of weights in use
    remat      what the backward pass keeps of each block (layers/stack.py)
    attention  implementation, resolved: "xla" or "cudnn" (ops/attention.py)
    context_attention  how it crosses the context axis, resolved: "ring" or "ulysses"
    matmul     numbers that projections multiply in training (ops/quantized_matmul.py)
    grouped_matmul  implementation of the experts' matmuls, resolved (ops/grouped_matmul.py)
    unroll     blocks per iteration of the scan over layers; 0 unrolls them all
    microbatches, rounds  of a pipeline (layers/pipeline.py)
    learns_images  whether gradients of the vectors of images are made (train/learned_encoder.py)
    lora       adapters beside the projections
    adapters   how many of them lie side by side in parts of lora.rank, of which a row of tokens has one or none
               (layers/lora.py); 0: a single one, which all rows have
    shares     float [B, lora.rank], of a call with several: what each row takes of each part
    weights    what projections and experts are held in, and may be multiplied in (ops/weight_format.py)
    paged_attention  implementation over a cache, resolved: "blocked" or "pallas" (ops/paged_attention.py)
    kv_cache   what keys and values are held in (ops/kv_format.py)
    made_first  whether projections and head lie with what they make first, for one CPU (ops/cpu_einsum.py)
    few_bits   of products with weights in few bits, resolved: one of GroupedProducts (ops/grouped_weights.py)
    gathers_tokens  whether experts gather the tokens of all devices of their axis (ops/expert_dispatch.py, `near`)
    handed_out  of a decoder whose layers are apart, behind how many of them its stream is handed out (context.HANDED)
    fused_rows tokens up to which projections are kernels with norm and gate (layers/fused.py), and what is between them
               and pages is one (ops/rotate_write.py); 0: none
    """

    rules: Rules
    dtype: jnp.dtype = jnp.float32
    remat: str = "none"
    attention: str = "xla"
    context_attention: str = "ring"
    matmul: Matmul = "dtype"
    grouped_matmul: str = "blocked"
    unroll: int = 1
    microbatches: int = 1
    rounds: int = 1
    learns_images: bool = False
    lora: LoraConfig = LoraConfig()
    adapters: int = 0
    shares: jax.Array | None = None
    weights: WeightFormat = "dtype"
    paged_attention: str = "blocked"
    kv_cache: KvFormat = "auto"
    made_first: bool = False
    few_bits: GroupedProducts = "dequantised"
    handed_out: tuple[int, ...] = ()
    fused_rows: int = 0
    gathers_tokens: bool = False

    @property
    def by_scheme(self) -> bool:
        """Whether training multiplies by weights as a scheme will write them, which it makes of float32 ones."""
        return self.matmul in SCHEMES

    @property
    def plain(self) -> "Execution":
        """For weights so small that 8 bits would save nothing. What a scheme writes is rounded wherever it is."""
        return self if self.by_scheme else dataclasses.replace(self, matmul="dtype")


def normal(std: float) -> Initializer:
    """Normal with this standard deviation, truncated at two of them."""

    def draw(key, shape, spec):
        return std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32, out_sharding=spec)

    return drawn(draw)


def drawn(draw: Initializer) -> Initializer:
    """Random values. Without a key nothing is drawn, which is most of what a model's constructor traces."""

    def init(key, shape, spec):
        return jnp.zeros(shape, jnp.float32, out_sharding=spec) if key is None else draw(key, shape, spec)

    return init


def constant(value: float) -> Initializer:
    """Every element the same."""

    def init(key, shape, spec):
        return jnp.full(shape, value, jnp.float32, out_sharding=spec)

    return init


def _zeros(dtype) -> Initializer:
    return lambda key, shape, spec: jnp.zeros(shape, dtype, out_sharding=spec)


@dataclasses.dataclass(frozen=True)
class Params:
    """Makes the parameters of one module: carries the random stream, the rules, the leading stack dimensions, and what
    projections are held in, how they lie, and what they have beside them; `place` as weight_format.weight_key has it,
    and the numbers of the layers. `rngs` is None where only shapes are asked for."""

    rngs: nnx.Rngs | None
    rules: Rules
    lora: LoraConfig = LoraConfig()
    weights: WeightFormat = "dtype"
    made_first: bool = False
    stack: tuple[int, ...] = ()
    place: str = ""
    layers: Sequence[int] = ()

    def projection(
        self, module: nnx.Module, name: str, shape, names, init: Initializer, *, into: int = 1, both_ways: bool = False
    ) -> None:
        """Sets module.`name`, a weight [*shape] whose first `into` dimensions are summed over, as `project` reads it:
        with its scales where it is held in few bits, and with its adapter where it has one.
        both_ways: what it makes may be summed over instead."""
        groups = groups_of(self.weights, weight_key(name, names[0], self.place), self.layers)
        if self.weights in DYNAMIC and names[0] != "experts" and not both_ways:
            self._by_result(module, name, shape, names, into)
        elif groups is not None:
            self._in_groups(module, name, shape, names, into, groups)
        elif names[0] == "experts":
            setattr(module, name, self(shape, names, init, into, projection=True))
        else:
            self.weight(module, name, shape, names, init, into=into, projection=True)
        if names[0] != "experts":
            self.adapter(module, name, shape, names, into=into)

    def adapter(self, module: nnx.Module, name: str, shape, names, *, into: int = 1) -> None:
        """Sets what stands beside module.`name` where it has an adapter."""
        if self.lora.adapts(name):
            rank, width = self.lora.rank, math.prod(shape[:into])
            a = self((*shape[:into], rank), (*names[:into], "rank"), normal(width**-0.5))
            setattr(module, name + A, a)
            setattr(module, name + B, self((rank, *shape[into:]), ("rank", *names[into:]), constant(0.0)))

    def _in_groups(self, module: nnx.Module, name: str, shape, names, into: int, groups: Groups) -> None:
        packed, scale = (of(shape, into - 1, groups) for of in (packed_shape, scale_shape))
        count, along = scale[into - 1], names[into - 1]
        over, at_rest = (self.rules.mesh.size(*table.axes(along)) for table in (self.rules.use, self.rules.rest))
        if count % over and count > 1:
            raise ShardlmError(
                f"{name} has {count} groups of {shape[into - 1] // count} in {groups.numbers} along {along!r}, which "
                f"cannot be split over {over} devices; choose sizes of the mesh that divide {count}, or another "
                "quantization (int8_dynamic and fp8_dynamic have no groups)"
            )
        setattr(module, name, self(packed, names, _zeros(groups.stored), into, groups=groups))
        divides = count % at_rest == 0
        of_scale = names if divides else (*names[: into - 1], "groups", *names[into:])
        setattr(module, name + SCALE, self(scale, of_scale, _zeros(groups.scale)))
        if groups.zeros:
            setattr(module, name + ZERO, self(scale, of_scale, _zeros(groups.zero)))

    def _by_result(self, module: nnx.Module, name: str, shape, names, into: int) -> None:
        """[*made, *summed] with scales [*made] (ops/dynamic_matmul.py)."""
        held = dynamic_matmul.stored(self.weights)
        setattr(module, name, self((*shape[into:], *shape[:into]), (*names[into:], *names[:into]), _zeros(held), into))
        setattr(module, name + SCALE, self(shape[into:], names[into:], _zeros(dynamic_matmul.SCALE)))

    def weight(
        self, module: nnx.Module, name: str, shape, names, init: Initializer, *, into: int = 1, **metadata
    ) -> None:
        """Sets module.`name`, a weight as in `projection` in the compute dtype; where weights lie made first, one of
        that name and MADE_FIRST [*shape[into:], *shape[:into]]."""
        if self.made_first:
            turned = (*shape[into:], *shape[:into]), (*names[into:], *names[:into])
            setattr(module, name + MADE_FIRST, self(*turned, init, into, **metadata))
        else:
            setattr(module, name, self(shape, names, init, into, **metadata))

    def __call__(
        self, shape: tuple[int, ...], names: tuple[str, ...], init: Initializer, into: int = 0, **metadata
    ) -> nnx.Param:
        """A float32 parameter [*stack, *shape], at rest where the rules put it.

        Its metadata holds `names` of one layer's dimensions, `stack_names`, `into`, and what more is given. Raises
        ShardlmError when the shape does not divide over the mesh. The values depend on the seed only, not on the mesh.
        """
        stack_names = ("layers",) * len(self.stack)
        full = (*self.stack, *shape)
        spec = self.rules.rest.spec(*stack_names, *names, shape=full)
        value = init(None if self.rngs is None else self.rngs.params(), full, spec)
        return nnx.Param(value, names=names, stack_names=stack_names, into=into, **metadata)


def project(
    letters: str,
    x: jax.Array,
    module: nnx.Module,
    name: str,
    execution: Execution,
    out_sharding: jax.sharding.PartitionSpec | None = None,
) -> jax.Array:
    """x times module.`name`, by einsum letters, and its adapter's part; where the weight's sharded dimension is summed
    over, `out_sharding` says where the sum goes. Every projection of a block passes here; embedding, router, experts
    and head do not."""
    if hasattr(module, name + MADE_FIRST):
        y = _made_first(letters, x, getattr(module, name + MADE_FIRST), execution)
    elif by_result(module, name):
        y = _in_eight_bits(letters, x, module, name, execution, out_sharding)
    elif few_rows(letters, x.shape, module, name, execution):
        y = _by_kernel(x, module, name, execution, out_sharding)
    elif wider := getattr(module, name).ndim - len(getattr(module, name).get_metadata("names")):
        y = einsum_of_own(letters, x, getattr(module, name)[...], wider, out_sharding)
    elif (groups := in_groups(getattr(module, name))) is not None:
        held, axis = Grouped(*held_parts(module, name, execution).values()), getattr(module, name).get_metadata("into")
        y = anew_einsum(letters, x, held, axis - 1, groups, out_sharding)
    elif not in_eight_bits(execution.matmul, is_projection(getattr(module, name))):
        y = jnp.einsum(letters, x, in_use(getattr(module, name), execution), out_sharding=out_sharding)
    else:
        param = getattr(module, name)
        use = execution.rules.use.spec(*param.get_metadata("names"))
        y = quantized_einsum(letters, x, param[...], execution.matmul, use=use, out_sharding=out_sharding)
    return y + _adapter(letters, x, module, name, execution, out_sharding) if hasattr(module, name + A) else y


def is_projection(param: nnx.Param) -> bool:
    """Whether it is of those that are held, and written, in few bits."""
    return param.get_metadata("projection", False)


def _made_first(letters: str, x: jax.Array, param: nnx.Param, execution: Execution) -> jax.Array:
    """The einsum of x and a weight [*summed, *made] that lies made first."""
    return cpu_einsum(_turned(letters, param), x, in_use(param, execution))


def _turned(letters: str, param: nnx.Param) -> str:
    """The letters of x times a weight [*summed, *made] where that lies made first."""
    into, (inputs, y) = param.get_metadata("into"), letters.split("->")
    xs, ws = inputs.split(",")
    return f"{xs},{ws[into:]}{ws[:into]}->{y}"


def by_result(module: nnx.Module, name: str) -> bool:
    """Whether the weight has a scale for each result, and is multiplied as it is held."""
    scale = getattr(module, name + SCALE, None)
    return scale is not None and scale.ndim < getattr(module, name).ndim


def in_groups(param: nnx.Param) -> Groups | None:
    """How a weight is held, None: not in groups."""
    return param.get_metadata("groups", None)


def _in_eight_bits(letters, x, module: nnx.Module, name: str, execution: Execution, out_sharding) -> jax.Array:
    values, scale = (gathered(module, part, execution) for part in (name, name + SCALE))
    letters = _turned(letters, getattr(module, name))
    einsum = cpu_einsum if execution.made_first else jnp.einsum
    return dynamic_matmul.dynamic_einsum(letters, x, values, scale, out_sharding, einsum)


def few_rows(letters: str, shape: tuple[int, ...], module: nnx.Module, name: str, execution: Execution) -> bool:
    """Whether a kernel multiplies x of this shape: so few rows that reading the weight takes longest (on a CPU any), by
    a weight in whole groups on each device, whose leading dimensions are those that are summed over. Where latent
    attention multiplies by each head's part of a weight, they are not."""
    into = getattr(module, name).get_metadata("into")
    xs, ws = letters.split("->")[0].split(",")
    return (
        letters.endswith(f"->{xs[:-into]}{ws[into:]}")
        and xs.endswith(ws[:into])
        and (execution.few_bits == "looped" or math.prod(shape[:-into]) <= FEW_ROWS)
        and has_kernel(module, name, execution)
    )


def has_kernel(module: nnx.Module, name: str, execution: Execution) -> bool:
    """Whether a kernel, or a CPU's loops, multiply few rows by a weight of this layout, of experts too."""
    param = getattr(module, name)
    groups = in_groups(param)
    if groups is None or execution.few_bits == "dequantised":
        return False
    scale, names = getattr(module, name + SCALE), param.get_metadata("names")
    at = param.get_metadata("into") - 1 - len(names)
    group = param.shape[at] * groups.a_byte // scale.shape[at]
    return (execution.few_bits == "looped" or group <= LONGEST) and names == scale.get_metadata("names")


def _by_kernel(x: jax.Array, module: nnx.Module, name: str, execution: Execution, out_sharding) -> jax.Array:
    """x [..., *summed] times a weight [*summed, *made], by each device's part of the weight. Where that is a part of
    what is summed over, sums cross devices."""
    rules, param = execution.rules, getattr(module, name)
    names, into = param.get_metadata("names"), param.get_metadata("into")
    weight, rows = rules.use.spec(*names), jax.typeof(x).sharding.spec[:-into]
    over = tuple(axis for summed in names[:into] for axis in rules.use.axes(summed))
    held = held_parts(module, name, execution)

    def local(x, *held):
        before, made = x.shape[:-into], held[0].shape[into:]
        held = Grouped(*(a.reshape(math.prod(a.shape[:into]), -1) for a in held))
        y = product(x.reshape(math.prod(before), -1), held, in_groups(param), execution.few_bits)
        y = jax.lax.psum(y, over) if over else y
        return y.reshape(*before, *made)

    of_x, of_y = (jax.sharding.PartitionSpec(*rows, *part) for part in (weight[:into], weight[into:]))
    run = shard_map(local, in_specs=(of_x, *[weight] * len(held)), out_specs=of_y)
    y = run(jax.reshard(x, of_x), *held.values())
    return y if out_sharding is None else jax.reshard(y, out_sharding)


def _adapter(letters, x, module, name, execution: Execution, out_sharding) -> jax.Array:
    """alpha / rank * x A B; where latent attention absorbs W into queries, and so sums over its outputs, x B^T A^T. The
    middle is as narrow as the rank, so a sum over devices happens there. Of several adapters each row keeps its own
    part of the middle."""
    assert not execution.adapters or execution.shares is not None, "who calls says which adapter each row has"
    inputs, y = letters.split("->")
    xs, ws = inputs.split(",")
    into = len(getattr(module, name + A).get_metadata("names")) - 1
    summed = set(xs) & set(ws) - set(y)
    factors = [(name + A, ws[:into] + "z"), (name + B, "z" + ws[into:])]
    (first, of_first), (second, of_second) = factors if summed <= set(ws[:into]) else factors[::-1]
    middle = "".join(letter for letter in xs if letter not in summed) + "z"
    split = None
    if out_sharding is not None:
        parts = dict(zip(y, out_sharding, strict=True))
        split = jax.sharding.PartitionSpec(*(parts.get(letter) for letter in middle))
    narrow = jnp.einsum(f"{xs},{of_first}->{middle}", x, in_use(getattr(module, first), execution), out_sharding=split)
    narrow = narrow * jnp.asarray(execution.lora.alpha / execution.lora.rank, narrow.dtype)
    if execution.shares is not None:
        narrow = narrow * jnp.expand_dims(execution.shares, range(1, narrow.ndim - 1)).astype(narrow.dtype)
    wide = in_use(getattr(module, second), execution)
    return jnp.einsum(f"{middle},{of_second}->{y}", narrow, wide, out_sharding=out_sharding)


def whole_groups(module: nnx.Module, name: str, execution: Execution) -> bool:
    """Whether each device has whole groups of this weight where it is used: of a single one it may have a part."""
    param, rules = getattr(module, name), execution.rules
    names, at = param.get_metadata("names"), param.get_metadata("into") - 1
    return getattr(module, name + SCALE).shape[at - len(names)] % rules.mesh.size(*rules.use.axes(names[at])) == 0


def made_anew(module: nnx.Module, name: str, execution: Execution) -> jax.Array:
    """One layer's weight in groups, in the compute dtype where the layer uses it."""
    held, param = Grouped(*held_parts(module, name, execution).values()), getattr(module, name)
    return dequantised(held, param.get_metadata("into") - 1, in_groups(param), execution.dtype)


def held_parts(module: nnx.Module, name: str, execution: Execution) -> dict[str, jax.Array]:
    """One layer's weight in groups where the layer uses it, by name: bytes, scales and, where it has them, zeros."""
    return {part: gathered(module, part, execution) for part in parts_of(name, dir(module))}


def parts_of(name: str, names: Container[str]) -> list[str]:
    """Of `names`, those of a weight's bytes, its scales and its zeros."""
    return [name + end for end in ("", SCALE, ZERO) if name + end in names]


def gathered(module: nnx.Module, name: str, execution: Execution) -> jax.Array:
    """One layer's parameter where the layer uses it, as it is held."""
    param = getattr(module, name)
    return execution.rules.gather(param[...], *param.get_metadata("names"))


def in_use(param: nnx.Param, execution: Execution) -> jax.Array:
    """One layer's weight, cast and then gathered, so that the all-gather moves the compute dtype. Where training rounds
    to what will be served, what that stands for."""
    w, names = param[...], param.get_metadata("names")
    if execution.by_scheme and is_projection(param):
        w = as_served(w, tuple(range(names[0] == "experts", param.get_metadata("into"))), SCHEMES[execution.matmul])
    return execution.rules.gather(w.astype(execution.dtype), *names)
