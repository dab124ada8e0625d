"""Qwen4-Exp (transformers' modeling_qwen4_exp.py is the definition), the part that reads text: Qwen 3.5's layers and
experts between several streams, attention to blocks of tokens that an indexer chooses, and in some layers rows of a
large table for the n-grams that end with a token."""

import dataclasses
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.block_indexer import BlockIndexerConfig
from shardlm.layers.gated_streams import GatedStreamsConfig
from shardlm.layers.ngrams import NgramsConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder, qwen_hybrid
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.ngram_hash import NgramHash

LINEAR, ATTENDS = "linear_attention", ("indexed_attention", "full_attention")
INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
USUAL = {  # of n-grams, where config.json does not say
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 512,
}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` qwen4_exp_text."""
    # Of caches, of no layer, and how states are held, which are float32 here.
    options.aside("number_of_conv_states", "intermediate_size", "mamba_ssm_dtype")
    norm, linear = hf_decoder.rms(options, offset=1.0), _linear_layers(options)
    attention = _attention(options, norm, length)
    experts = qwen_hybrid.mixture(options, bool(options("norm_topk_prob", True)))
    gate = options("output_gate_type", None) or options("hidden_act")
    if gate not in ("silu", "sigmoid"):
        raise ShardlmError(f"config.json has output_gate_type={gate!r}; supported: silu, sigmoid")
    memory = dataclasses.replace(qwen_hybrid.memory_of(options, norm), gate=gate)
    streams = GatedStreamsConfig(options("hc_count", 4), options("hc_lowrank", 320), norm.eps)
    ngrams = _ngrams(options, linear, streams.count, norm.eps)

    def block(layer: int) -> BlockConfig:
        beside = {"norms": "none", "streams": streams, "ngrams": ngrams.get(layer)}
        return BlockConfig(memory if linear[layer] else attention, experts, **beside)

    return hf_decoder.decoder(options, block, norm, streams=streams, final_norm=False)


def _linear_layers(options: Options) -> list[bool]:
    """Which layers are linear attention: by `layer_types`, or all but every `full_attention_interval`-th."""
    layers, kinds = options("num_hidden_layers"), options("layer_types", None)
    every = options("full_attention_interval", 4)
    if kinds is None:
        return [(layer + 1) % every > 0 for layer in range(layers)]
    if len(kinds) != layers or not {LINEAR, *ATTENDS}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {LINEAR}, "
            f"{', '.join(ATTENDS)}"
        )
    return [kind == LINEAR for kind in kinds]


def _attention(options: Options, norm: NormConfig, length: int) -> AttentionConfig:
    head_dim = options("head_dim", 256)
    rope = rope_of(options, head_dim, length=length)
    rope = dataclasses.replace(rope, dim=rope.dim or head_dim)  # so many of an indexer's heads too
    told = {name: options(name, None) for name in INDEXER}
    indexer = None
    if any(told.values()):
        if lacking := [name for name, value in told.items() if not value]:
            raise ShardlmError(f"config.json has an indexer without {', '.join(lacking)}; set all of them or none")
        options.only("indexer_kv_heads", 1)
        heads, _, width, budget, block = told.values()
        indexer = BlockIndexerConfig(heads, width, budget, block, rope, norm)
    own = {"head_dim": head_dim, "qk_norm": "head", "norm": norm, "gate": True, "indexer": indexer}
    return hf_decoder.attention(options, length, rope=rope, **own)


def _ngrams(options: Options, linear: list[bool], streams: int, eps: float) -> dict[int, NgramsConfig]:
    """By layer, of those that have some, whose numbers in config.json count from 1."""
    told: dict[str, Any] = {name: options(name, usual) for name, usual in USUAL.items()}
    dim, eos = options("ple_embed_dim", options("hidden_size")), options("eos_token_id", None)
    layers = sorted(set(options("ple_layer_ids", [])))
    if any(not 0 < layer <= len(linear) or not linear[layer - 1] for layer in layers):
        works = [layer + 1 for layer, own in enumerate(linear) if own]
        raise ShardlmError(f"config.json has ple_layer_ids={layers}; supported: layers of linear attention, {works}")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if layers and not isinstance(eos, int):
        raise ShardlmError(f"config.json has eos_token_id={eos!r}, which ends what n-grams see; it needs a token")
    if layers and told["ngram_size"] < 2:
        raise ShardlmError(f"config.json has ngram_size={told['ngram_size']}; it needs at least 2")
    found, pad = {}, told["make_ngram_vocab_size_divisible_by"]
    for number, layer in enumerate(layers):
        sizes = told["ngram_size"], options("vocab_size"), told["heads_per_ngram"], told["ngram_vocab_size_base"]
        own = NgramHash.of_layer(number, *sizes, told["seed"], eos)
        rows, parts = -(-sum(own.sizes) // pad) * pad, told["split_ngram_parts"]
        at = number, layer - 1
        found[layer - 1] = NgramsConfig(*at, own, rows, dim, streams, told["ple_conv_kernel_size"], eps, parts)
    return found


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = qwen_hybrid.layer_names(block) | qwen_hybrid.expert_names()
    for ours, theirs in (("attention", "attn"), ("mlp", "mlp")):
        inside = f"{LAYER}{theirs}_hyper_connection."
        found |= _gates(f"{ours}_gates.", inside)
        found[f"{ours}_gates.add"] = Tensor(f"{inside}block_inject_weight.weight", "J (S D) -> S D J")
    found |= _gates("head_gates.", "model.hyper_connection_mixer.")
    for own in config.ngrams:
        found |= _table(own)
    if block.ngrams:
        found |= _ngram_names()
    if isinstance(block.attention, AttentionConfig) and block.attention.indexer:
        found |= _indexer_names(block.attention.indexer)
    return found


def _gates(ours: str, theirs: str) -> Names:
    return {
        f"{ours}scale": Tensor(f"{theirs}hc_norm.weight"),
        f"{ours}down": Tensor(f"{theirs}input_mix_weight_down.weight", "R (S D) -> S D R"),
        f"{ours}up": Tensor(f"{theirs}input_mix_weight_up.weight", "(S D) R -> R S D"),
    }


def _table(own: NgramsConfig) -> Names:
    """A layer's table, and what is told of how its rows are found."""
    ours, theirs = f"ngram_tables.{own.number}.", f"model.layers.{own.layer}.ple.ple_embedding."
    table = f"{theirs}ngram_embedding."
    told = {
        "layer_multipliers": own.hash.multipliers,
        "ngram_heads_vocab_sizes": own.hash.sizes,
        "ngram_heads_offsets": own.hash.firsts,
    }
    return {
        f"{ours}table": Tensor(f"{table}weight", pieces=(f"{table}shard_{{piece}}.weight", own.parts)),
        **{f"{ours}{name}": Tensor(f"{theirs}{name}", dtype="int64", told=of) for name, of in told.items()},
    }


def _ngram_names() -> Names:
    theirs = f"{LAYER}ple."
    norms = {f"ngrams.{name}_norm": Tensor(f"{theirs}norm_{name}.weight") for name in ("key", "query", "conv")}
    return norms | {
        "ngrams.key": Tensor(f"{theirs}key_proj.weight", "(S D) E -> E S D"),
        "ngrams.value": Tensor(f"{theirs}value_proj.weight", "D E -> E D"),
        "ngrams.taps": Tensor(f"{theirs}conv1d.weight", "(S D) 1 W -> S D W"),
    }


def _indexer_names(indexer: BlockIndexerConfig) -> Names:
    theirs, of_queries = f"{LAYER}self_attn.indexer.", indexer.num_heads * indexer.head_dim
    both, every = f"{theirs}index_qk_proj.weight", of_queries + indexer.head_dim
    return {
        "attention.indexer.wq": Tensor(both, "(N H) D -> D N H", part=(0, 0, of_queries, 1)),
        "attention.indexer.wk": Tensor(both, "H D -> D H", part=(0, of_queries, every, 1)),
        "attention.indexer.q_norm.scale": Tensor(f"{theirs}q_layernorm.weight"),
        "attention.indexer.k_norm.scale": Tensor(f"{theirs}k_layernorm.weight"),
    }
