"""The weights of a served model as its engine places them, layer by layer, from shapes and names alone."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

from shardlm.held_weights import of_scale
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.lora import A
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution, in_groups
from shardlm.mesh import MeshSpec
from shardlm.models.transformer import Transformer
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.grouped_weights import FEW_ROWS, FEW_ROWS_OF_EXPERT
from shardlm.ops.kv_format import KvFormat
from shardlm.ops.weight_format import WeightFormat, grouped, layers_differ
from shardlm.rules import Rules, Table
from shardlm.serve.adapter_table import NO_ROOM, Room
from shardlm.serve.adapters import executed
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import apart
from shardlm.serve.pool_size import page_bytes
from shardlm.serve.stages import layers_of
from shardlm.serve.submeshes import of_stage
from shardlm.serving_rules import serving_rules, split_pages
from shardlm.state import ModelDef, held_as, is_adapter, kv_ways

MEMORY = "memory."  # before the names of what a layer has beside attention
BY_HEAD = ("wk_up", "wv_up")  # latent attention multiplies by each head's part of them (layers/mla.py)


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter of one layer, or of none.

    name      the last part of its path
    shape     of one layer's
    names     of the dimensions
    into      how many leading ones a projection sums over; 0: it is none
    itemsize  bytes of an element as it is held
    packed    numbers in one element, where it is dequantised before it is multiplied; 0: it is not
    group     of them, those that share a scale
    product   "int8" or "fp8", which it is multiplied as; "": in the compute dtype
    """

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    into: int
    itemsize: int
    packed: int = 0
    group: int = 0
    product: str = ""

    def elements(self, table: Table) -> int:
        """On one device, where `table` puts it."""
        return math.prod(self.shape) // table.mesh.size(*(axis for name in self.names for axis in table.axes(name)))

    def nbytes(self, table: Table) -> int:
        return self.elements(table) * self.itemsize

    @property
    def of_experts(self) -> bool:
        return self.names[:1] == ("experts",)


@dataclasses.dataclass(frozen=True)
class InUse:
    """A parameter as one device uses it.

    nbytes    as it is held
    numbers   unpacked
    summed    numbers that one result is summed from; 0: it is no projection
    packed, group, product   as Held has them
    over      axes of the mesh whose devices hold parts of what is summed
    """

    name: str
    of_experts: bool
    nbytes: int
    numbers: int
    summed: int
    packed: int
    group: int
    product: str
    over: tuple[str, ...]

    @classmethod
    def of(cls, held: Held, rules: Rules) -> "InUse":
        use, unpacked = rules.use, max(1, held.packed)
        inner = range(held.of_experts, held.into)
        sizes = [held.shape[i] // use.mesh.size(*use.axes(held.names[i])) for i in inner]
        return cls(
            held.name,
            held.of_experts,
            held.nbytes(use),
            held.elements(use) * unpacked,
            math.prod(sizes) * unpacked if held.into else 0,
            held.packed,
            held.group,
            held.product,
            tuple(axis for i in inner for axis in use.axes(held.names[i])),
        )


@dataclasses.dataclass(frozen=True)
class Weights:
    """layers  the parameters of each layer, first to last
    beside  of no layer, by name: embedding, embed_norm, head_streams, head_gates, final_norm, head, head_bias,
            positions, layer_inputs, ngram_tables, and, in models that have no stages, faster, altup_ends
    """

    layers: tuple[tuple[Held, ...], ...]
    beside: dict[str, tuple[Held, ...]]
    tied: bool

    def stage(self, layers: slice, first: bool, last: bool) -> list[Held]:
        """Of a pipeline stage (serve/stages.py)."""
        first_ones = ["embedding", "positions", "embed_norm", "layer_inputs", "ngram_tables", "faster", "altup_ends"]
        here = first_ones if first else []
        here += ["head_streams", "head_gates", "final_norm", "head", "head_bias"] if last else []
        here += ["embedding"] if last and self.tied and not first else []
        own = [held for layer in self.layers[layers] for held in layer]
        return own + [held for name in here for held in self.beside.get(name, ())]


def weights_of(
    shape: TransformerConfig, mesh: MeshSpec, dtype: str, held: WeightFormat, room: Room = NO_ROOM
) -> Weights:
    """Of a replica on a mesh, with room for adapters. Raises ShardlmError for what does not divide, as the engine
    does."""
    found = _traced(shape, of_stage(mesh), dtype, held, room)
    rest = serving_rules(shape, dataclasses.replace(mesh, data=1), held).rest
    kinds = set(found.layers) | set(found.beside.values())
    for weight in {weight for kind in kinds for weight in kind}:
        for name, size in zip(weight.names, weight.shape, strict=True):
            if not weight.name.endswith("_scale"):
                rest.check(name, size)
    return found


def made_anew(held: Held | InUse, rows: float) -> bool:
    """Whether a weight is written in the compute dtype before so many rows multiply it, or so many each expert on
    average: what is in few bits, but for what the kernel multiplies (layers/param.py's few_rows, layers/moe.py)."""
    most = FEW_ROWS_OF_EXPERT if held.of_experts else FEW_ROWS
    return bool(held.packed) and (rows > most or held.name in BY_HEAD)


def stages_of(num_layers: int, mesh: MeshSpec) -> list[slice]:
    """The layers of each pipeline stage. Raises ShardlmError for more stages than layers."""
    return layers_of(num_layers, mesh.pipeline)


@functools.lru_cache(maxsize=256)
def _traced(shape: TransformerConfig, mesh: MeshSpec, dtype: str, weights: WeightFormat, room: Room) -> Weights:
    """On a mesh."""
    shape = shape.apart() if layers_differ(weights) else shape
    execution = executed(Execution(serving_rules(shape, mesh, weights), jnp.dtype(dtype), weights=weights), room)
    with jax.sharding.use_abstract_mesh(mesh.abstract()):
        _, state = nnx.split(nnx.eval_shape(lambda: Transformer(shape, execution, None)))
    shapes = flatten_dict(nnx.to_pure_dict(state))
    blocks: dict[tuple[int, int], list[Held]] = {}
    beside: dict[str, list[Held]] = {}
    for path, param in nnx.to_flat_state(state):
        stack, names = param.get_metadata("stack_names"), param.get_metadata("names")
        leaf = held_as(path, shapes[path], jnp.dtype(dtype))
        into, sizes, groups, product = param.get_metadata("into"), leaf.shape[len(stack) :], in_groups(param), ""
        if groups is None and of_scale(path) in shapes:  # it lies with what it makes first
            made, product = len(sizes) - into, grouped(weights)
            sizes, names = (*sizes[made:], *sizes[:made]), (*names[made:], *names[:made])
        if is_adapter(path):  # [inputs, rank] and [rank, outputs], as they are in training
            into = len(names) - 1 if path[-1].endswith(A) else 1
        packed, group = (groups.a_byte, groups.size(sizes[into - 1] * groups.a_byte)) if groups else (0, 0)
        beside_attention = MEMORY if path[0] == "segments" and f"{path[4]}." == MEMORY else ""
        own = Held(f"{beside_attention}{path[-1]}", sizes, names, into, leaf.dtype.itemsize, packed, group, product)
        if path[0] == "segments":
            blocks.setdefault((path[1], path[3]), []).append(own)
        else:
            beside.setdefault(path[0], []).append(own)
    layers = []
    for i, segment in enumerate(shape.segments):
        pattern = [tuple(blocks[i, offset]) for offset in range(len(segment.pattern))]
        layers += pattern * segment.repeats
    return Weights(tuple(layers), {name: tuple(own) for name, own in beside.items()}, shape.tie_embeddings)


def rules_for(engine: EngineConfig, shape: TransformerConfig, held: WeightFormat = "dtype") -> Rules:
    """The tables of a stage, as an engine with these options has them. Raises ShardlmError for pages that cannot be
    split so."""
    ways = engine.decode_context_parallel_size
    return split_pages(serving_rules(shape, of_stage(engine.mesh), held), shape, ways, engine.block_size or ways)


@functools.lru_cache(maxsize=256)
def one_layer(shape: TransformerConfig, mesh: MeshSpec, dtype: str, kv_cache: KvFormat, split: int = 1) -> ModelDef:
    """A model of one layer that attends, or one for each size of heads, and one that chooses what it attends to, one
    that does not attend, where there are such, and all that have n-grams, on the mesh of a stage: they keep of a text
    what all do (serve/pool_size.py's page_bytes, serve/memories.py's slot_bytes). `split`: devices over which positions
    of pages are split."""
    rules = split_pages(serving_rules(shape, mesh), shape, split, split)
    execution = Execution(rules, jnp.dtype(dtype), kv_cache=kv_cache)
    whole = apart(shape)
    own = [(layer, whole.segments[layer]) for layer in sorted(set(shape.sources[: shape.num_layers]), reverse=True)]
    kinds = {}
    for layer, segment in own:
        [block] = segment.pattern
        keeps = bool(getattr(block.attention, "indexer", None)), layer if block.ngrams else None
        kinds[layer in shape.memories, _heads(shape, block.attention), *keeps] = segment
    small = dataclasses.replace(whole, segments=tuple(kinds.values()))
    with jax.sharding.use_abstract_mesh(mesh.abstract()):
        return ModelDef.make(small, execution)


def _heads(shape: TransformerConfig, attention: Any) -> tuple[int, int] | None:
    """(kv heads, numbers of one), where layers' differ."""
    differ = len(shape.kept_heads) > 1 and isinstance(attention, AttentionConfig)
    return (attention.num_kv_heads, attention.head_dim) if differ else None


def cache_bytes(model: ModelDef, attention: Any = None) -> float:
    """Of one position in one layer of `one_layer`'s, on one device. Where heads are of several sizes, in a layer with
    this attention: its part of a place in the pages, which others share."""
    place = page_bytes(model, PageLayout.whole(1, 0), 1) / model.execution.rules.mesh.size("expert", "tensor")
    if not (own := _heads(model.config, attention)):
        return place
    numbers = model.config.kept_numbers(kv_ways(model))
    return place * numbers[own] / math.lcm(*numbers.values())


def held_bytes(weights: Sequence[Held], rules: Rules) -> int:
    """On one device."""
    return sum(held.nbytes(rules.rest) for held in weights)
