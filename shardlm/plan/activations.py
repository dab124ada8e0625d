"""Bytes of one layer's activations on one device: what the forward pass keeps of it for the backward pass, and what the
backward pass holds while it is at that layer. Of one microbatch; counted in XLA's buffer assignments (memory.py)."""

import dataclasses
import math

import jax.numpy as jnp

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig, dispatch_of
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.layers.shortcut import ShortcutConfig
from shardlm.ops.attention_pair import BIAS_BYTES
from shardlm.plan import compressed_attention, linear_attention
from shardlm.plan.attention import gates_of, heads_given, keeps_heads
from shardlm.plan.changed import changed
from shardlm.plan.sketch import Sketch
from shardlm.plan.sparse_attention import chosen_bytes, heads_apart
from shardlm.plan.workspace import workspace

Kinds = dict[str, float]
"""Bytes by what they are for."""
WIDE = 4  # bytes of a float32
SCORE_KEPT = 7  # bytes of a score with entries of several tokens: as float32, as weight, and whether it counts
BLOCKS = 8  # of queries in which XLA's attention goes through a row (ops/blocked_attention.py)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Activations of one layer and microbatch on one device, in bytes of the compute type.

    stream   between layers, where tensor splits the sequence; `whole` inside them
    queries, keys, values, output  of attention, of this device's heads
    exchanged  what Ulysses makes of keys, values and output besides: copies of a device's few heads of keys, and the
             output before its exchange
    latents  of latent attention, of which tensor splits the sequence
    rotated  of its keys, the part with positions, which all heads share: joined to the others where it is read
    hidden   of the MLP or the shared experts: as wide as gate, up and their product each
    products of which hidden layers are made: with a gate 2
    expert_hidden  the same of experts, for all rows that may come to this device
    rows     that come, as wide as the stream
    pairs    of tokens and their choices, as wide as the stream: of own ones, or of all that are gathered
    zeros    that experts of 1F1B's stages need throughout: XLA makes them once for all layers
    mask     that keeps documents apart in a ring, and which tokens are chosen; of XLA's attention the scores of a block
    bias     that keeps documents of whole rows apart, in a branch of a conditional around cuDNN's kernel: there are no
             two layers' at once (ops/cudnn_attention.py)
    workspace  with which gradients are made there, with that bias or what other ways have in its place (workspace.py)
    gate     of attention's output
    rule     of linear attention, at its fullest; rule_kept: what of it, of scores or of choices, is kept without
             recomputation
    heads    what remat=dots keeps of attention's kernel
    one      of several streams, which `stream` has side by side; 0: there is one
    later    of `stream`, what is added to it a layer later, which only goes by
    """

    stream: float
    whole: float
    queries: float
    keys: float
    values: float
    output: float
    exchanged: float
    latents: float
    rotated: float
    hidden: float
    expert_hidden: float
    rows: float
    pairs: float
    zeros: float
    mask: float = 0.0
    bias: float = 0.0
    workspace: float = 0.0
    gate: float = 0.0
    rule: float = 0.0
    rule_kept: float = 0.0
    heads: float = 0.0
    one: float = 0.0
    later: float = 0.0
    products: int = 2


# What a layer has of each of what mixes tokens in it.
OF_MIXERS = "queries", "keys", "values", "output", "exchanged", "gate", "rule", "rule_kept"


def layer(block: BlockConfig, sketch: Sketch) -> Layer:
    """The sizes of a block's activations."""
    if not block.memory:
        return _of_one(block, sketch)
    first, beside = (_of_one(changed(block, attention=mixer, memory=None), sketch) for mixer in block.mixers)
    return changed(first, **{name: getattr(first, name) + getattr(beside, name) for name in OF_MIXERS})


def _of_one(block: BlockConfig, sketch: Sketch) -> Layer:
    """The same where one thing mixes tokens."""
    D, tensor, attention = sketch.shape.embed_dim, sketch.mesh.tensor, block.attention
    nbytes = sketch.tokens * itemsize(sketch)  # of a number for each token
    heads, kv = attention.num_heads / tensor, max(1, attention.num_kv_heads / tensor)
    copies = max(1, sketch.mesh.context / kv) - 1
    ulysses = sketch.mesh.context > 1 and sketch.execution.context_attention == "ulysses"
    twice = copies * kv * (attention.head_dim + attention.value_dim) + heads * attention.value_dim
    latent = isinstance(attention, MlaConfig)
    compressed = isinstance(attention, CompressedConfig)
    streams = block.streams.count if block.streams else 1
    moe = block.mlp if isinstance(block.mlp, MoeConfig) else None
    exchange = _exchange(block, sketch)
    rows = _visitors(moe, sketch) * itemsize(sketch) if moe else 0
    chosen = chosen_bytes(attention, sketch)
    scores = not (compressed or isinstance(attention, DeltaNetConfig))
    masks = _masks(sketch, heads, chosen, heads_apart(attention, sketch)) if scores else {}
    return Layer(
        stream=nbytes * D / tensor * streams,
        whole=nbytes * D,
        queries=nbytes * _query_heads(attention, heads, kv) * attention.head_dim,
        keys=nbytes * kv * attention.head_dim,
        values=nbytes * _value_heads(attention, heads, kv) * attention.value_dim,
        output=nbytes * heads * attention.value_dim,
        exchanged=nbytes * twice if ulysses else 0,
        latents=nbytes * _latent_dims(attention, sketch) / (1 if compressed else tensor),
        rotated=nbytes * kv * attention.rope_dim if latent else 0,
        hidden=nbytes * (moe.shared_dim if moe else sum(block.mlp.widths)) / tensor,
        expert_hidden=rows * moe.expert_dim / tensor if moe else 0,
        rows=rows * (L := moe.read_dim(D) if moe else 0),
        pairs=nbytes * moe.top_k * L * (sketch.mesh.expert if exchange == "gather" else 1) if moe else 0,
        zeros=_zeros(moe, exchange, rows, nbytes, sketch) if moe else 0,
        **masks,
        workspace=workspace(attention, sketch, masks.get("bias", 0.0)) if masks else 0.0,
        one=nbytes * D / tensor if block.mixes else 0.0,
        later=nbytes * D / tensor if isinstance(block.streams, ShortcutConfig) else 0.0,
        products=1 + (not block.mlp.there or block.mlp.gated),
        **_gated(attention, sketch),
    )


def _query_heads(attention, heads: float, kv: float) -> float:
    """Of one device; a short convolution has what is convolved, its gate, and that of what is made."""
    if isinstance(attention, ShortConvConfig):
        return 0.0
    return kv if isinstance(attention, DeltaNetConfig) else heads


def _value_heads(attention, heads: float, kv: float) -> float:
    """Of one device; with entries of several tokens keys are values too."""
    if isinstance(attention, CompressedConfig):
        return 0.0
    return heads if isinstance(attention, DeltaNetConfig) else kv


def _gated(attention: AttentionConfig | MlaConfig | DeltaNetConfig, sketch: Sketch) -> Kinds:
    """The sizes that only linear attention and gated attention have."""
    each = sketch.tokens * itemsize(sketch) / sketch.mesh.tensor
    if isinstance(attention, CompressedConfig):
        return {"rule_kept": SCORE_KEPT * compressed_attention.Blocks.of(attention, sketch).scores}
    if not isinstance(attention, DeltaNetConfig):
        found = {"gate": each * gates_of(attention), "rule_kept": chosen_bytes(attention, sketch)}
        return found | ({"heads": heads_given(sketch, attention)} if keeps_heads(sketch) else {})
    rule, held = linear_attention.needs(attention, sketch)
    return {"gate": each * attention.num_heads * attention.value_dim, "rule": rule, "rule_kept": held}


def _latent_dims(attention, sketch: Sketch) -> int:
    """Numbers of a token that heads of all devices read besides their own queries."""
    if isinstance(attention, CompressedConfig):
        return attention.q_latent_dim + sum(compressed_attention.numbers(attention, sketch))
    if isinstance(attention, MlaConfig):
        return attention.q_latent_dim + attention.kv_latent_dim + attention.rope_dim
    return 0


def _exchange(block: BlockConfig, sketch: Sketch) -> str:
    """How rows come to experts; "" without any."""
    return dispatch_of(block.mlp, sketch.execution).exchange if isinstance(block.mlp, MoeConfig) else ""


def exchanges(sketch: Sketch) -> set[str]:
    """How rows come to the experts of any layer: "all_to_all" where each goes to its own, "gather" where experts see
    the tokens of all devices of their axis, "local"; none without experts."""
    return {_exchange(block, sketch) for block in sketch.shape.kinds} - {""}


def _zeros(moe: MoeConfig, exchange: str, rows: float, nbytes: float, sketch: Sketch) -> float:
    """For rows that stay empty: of the hidden layer, and of all that is moved; sent rows are received in others."""
    D, mesh = moe.read_dim(sketch.shape.embed_dim), sketch.mesh
    hidden = rows * moe.expert_dim / mesh.tensor
    if exchange == "all_to_all":
        return hidden + 4 * rows * D
    return hidden + rows * D + (nbytes * moe.top_k * D if exchange == "local" else 0)


def itemsize(sketch: Sketch) -> int:
    """Bytes of a number in the compute type."""
    return jnp.dtype(sketch.execution.dtype).itemsize


def _visitors(moe: MoeConfig, sketch: Sketch) -> float:
    """Rows of experts for which this device has room (ops/expert_dispatch.py)."""
    ranks = sketch.mesh.expert
    if ranks == 1:
        return sketch.tokens * moe.top_k
    worst = sketch.tokens * min(moe.top_k, moe.num_experts / ranks) * ranks
    even = sketch.tokens * moe.top_k
    return min(worst, math.ceil(even * moe.capacity_factor)) if moe.capacity_factor else worst


def _masks(sketch: Sketch, heads: float, chosen: float, apart: float) -> Kinds:
    """What hides keys: cuDNN's bias [rows, T, T] in 16 bits, of a ring's block at most BIAS_BYTES; where tokens are
    `chosen` it is in no conditional, and there is one for each of the kv heads that choose `apart`. Of XLA's attention
    the float32 scores of a block of queries."""
    T, mesh = sketch.config.train.seq_len, sketch.mesh
    ring = mesh.context > 1 and sketch.execution.context_attention == "ring"
    if sketch.execution.attention == "cudnn" and ring:
        return {"mask": min(sketch.rows * (T / mesh.context) ** 2 * 2, BIAS_BYTES) + chosen}
    if sketch.execution.attention == "cudnn":
        whole = sketch.rows * T**2 * 2
        return {"mask": whole * apart + chosen} if chosen else {"mask": 0.0, "bias": whole}
    # Blocks of queries see the keys up to their own: 9/16 of the square. Once as scores; under Ulysses' exchange once
    # more as what masked ones are, which XLA makes for all layers, but not inside the scan over stages.
    causal = (BLOCKS + 1) / (2 * BLOCKS)
    times = 2 if mesh.context > 1 and (mesh.pipeline == 1 or sketch.schedule.both_ways) else 1
    return {"mask": chosen + (0 if ring else times * causal * sketch.rows * heads / mesh.context * T**2 * WIDE)}


def kept(one: Layer, sketch: Sketch) -> Kinds:
    """Bytes on the device that the forward pass keeps of a layer (layers/stack.py), by what they are."""
    remat = sketch.config.remat
    projections = one.queries + one.keys + one.values + one.latents + one.gate
    if remat == "offload" and sketch.gpu.generation != "cpu":
        return {}
    if remat in ("full", "offload"):  # the host of a CPU device is the device
        return {"streams kept": one.stream}
    if remat == "names":  # its input and the attention's part; the MLP's is not needed, but where streams are several
        return {"streams kept": one.stream + 2 * one.one if one.one else 2 * one.stream - one.later}
    if remat == "dots":
        products = projections - one.rotated + one.heads
        return {
            "streams kept": 2 * one.stream - one.later,
            "attention kept": products,
            "mlp kept": one.products * one.hidden,
        }
    if one.one:  # streams in float32 too: normed, summed and mixed, around both parts
        return {
            "streams kept": 18 * one.stream + 6 * one.whole,
            "attention kept": 2 * one.queries + one.output + 3 * one.latents + one.rule_kept,
            "mlp kept": 3 * one.hidden,
            "experts kept": 6 * one.expert_hidden + one.rows,
        }
    return {
        # The inputs of the norms; what the projections read.
        "streams kept": 2 * one.stream - one.later + 2 * one.whole,
        "attention kept": projections + one.output + one.exchanged + one.gate + one.rule_kept,
        "mlp kept": (one.products + 1) * one.hidden,
        "experts kept": (one.products + 1) * one.expert_hidden + 2 * one.rows + one.pairs,
    }


def working(one: Layer, sketch: Sketch) -> Kinds:
    """Bytes that a layer's forward pass, made again, and its backward pass hold at their fullest, by what they are. Its
    attention and its MLP are full in turn; experts begin while attention is under way, but neither while cuDNN's has a
    bias, as that is in a conditional, nor while keys and values go round a ring, which waits for each of its moves.
    Pairs that are not sent are made where they are read."""
    wide = WIDE / itemsize(sketch)
    attention = 2 * (one.queries + one.keys + one.values + one.output + one.latents)
    sent = "all_to_all" in exchanges(sketch)
    experts = 4 * one.expert_hidden + 5 * one.rows + (3 * one.pairs if sent else 2 * one.expert_hidden)
    # Whole over tensor: a dense layer's inputs and their gradients; beside experts' rows most are gone or to come.
    whole = 3 if one.rows else 10
    streams = 7 * one.stream + (whole * one.whole if sketch.mesh.tensor > 1 else 0)
    found = {"mlp": 4 * one.hidden, "streams": streams, "experts": experts}
    if sketch.mesh.context == 1 or sketch.execution.context_attention != "ring":
        without = found | {"attention": one.mask + max(0, attention - 4 * one.hidden)}
        if not one.bias or sketch.mesh.pipeline == 1:  # elsewhere that is a moment of its own (temporaries.py)
            return without
        own = 7 * one.stream + (3 * one.whole if sketch.mesh.tensor > 1 else 0)
        biased = {"mlp": 2 * one.hidden, "streams": own, "attention": one.bias + attention, "experts": 0.0}
        return max((without, biased), key=lambda kinds: sum(kinds.values()))
    # The queries' gradient in float32, twice; keys and values on their way, with their float32 gradients, twice.
    ring = one.mask + 2 * wide * one.queries + 2 * (1 + wide) * (one.keys + one.values)
    ring += max(0, attention - 4 * one.hidden)
    return found | ({"attention": ring, "experts": 0} if ring > experts else {"attention": 0})
