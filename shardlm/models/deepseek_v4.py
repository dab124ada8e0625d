"""DeepSeek V4 (transformers' modeling_deepseek_v4.py is the definition): queries attend to the last tokens and to
entries that stand for 4 tokens, of which an indexer chooses, or for 128; several streams, mixed around every layer; and
experts everywhere, in the first layers by the token itself. Modules that predict further tokens are left aside, as
transformers does."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.compressed_attention import ChooserConfig, CompressedConfig
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import NUMBERED, Names, Tensor, gated, renamed
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.ops.routing import Router

SLIDING, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {CHOSEN: 4, ALL: 128}
LAYER = "layers.{layer}."


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` deepseek_v4, as published and as transformers writes it."""
    for name in ("attention_bias", "mlp_bias"):
        options.only(name, False)
    options.only("scoring_func", "sqrtsoftplus")
    options.only("norm_topk_prob", True)
    options.only("num_key_value_heads", 1)
    options.aside("num_nextn_predict_layers", "expert_dtype")
    kinds, rates = _kinds(options), _rates(options)
    norm = hf_decoder.rms(options)
    attentions = {kind: _attention(options, kind, rates, length) for kind in dict.fromkeys(kinds)}
    hashed, experts = _hashed(options, len(kinds)), _experts(options)
    streams = StreamsConfig(
        options("hc_mult", 4), options("hc_sinkhorn_iters", 20), float(options("hc_eps", 1e-6)), norm.eps
    )

    def block(layer: int) -> BlockConfig:
        own = experts
        if hashed[layer]:
            own = dataclasses.replace(experts, hashed=options("vocab_size"), load_bias=False)
        return BlockConfig(attentions[kinds[layer]], own, streams=streams)

    return hf_decoder.decoder(options, block, norm, streams=streams)


def _kinds(options: Options) -> list[str]:
    """Of each layer: by name, by the tokens of an entry, or as they usually are."""
    layers, told = options("num_hidden_layers"), options("layer_types", None)
    ratios = options("compress_ratios", None)
    if told is None and ratios is not None:
        names = {0: SLIDING} | {rate: kind for kind, rate in RATES.items()}
        told = [names.get(ratio, str(ratio)) for ratio in ratios]
    if told is None:
        told = [ALL] * min(layers, 2) + [CHOSEN if i % 2 else ALL for i in range(max(layers - 2, 0))]
    told = told[:layers]  # those of modules that predict further tokens may follow
    if len(told) != layers or not {SLIDING, *RATES}.issuperset(told):
        raise ShardlmError(
            f"config.json has layer types {told!r}; it needs num_hidden_layers={layers} of {SLIDING}, {CHOSEN}, {ALL} "
            "(or compress_ratios of 0, 4, 128)"
        )
    return told


def _rates(options: Options) -> dict[str, int]:
    rates = dict(options("compress_rates", None) or RATES)
    for kind, name in ((CHOSEN, "compress_rate_csa"), (ALL, "compress_rate_hca")):
        rates[kind] = options(name, 0) or rates[kind]
    if min(rates.values()) < 2 or rates[ALL] % rates[CHOSEN]:
        raise ShardlmError(
            f"config.json has entries of {rates[CHOSEN]} tokens for {CHOSEN} and of {rates[ALL]} for {ALL}; the second "
            "must be a multiple of the first, which must be at least 2"
        )
    return rates


def _hashed(options: Options, layers: int) -> list[bool]:
    """Which layers' experts go by the token."""
    told, first = options("mlp_layer_types", None), options("num_hash_layers", 3)
    if told is None:
        return [layer < first for layer in range(layers)]
    told = told[:layers]
    if len(told) != layers or not {"hash_moe", "moe"}.issuperset(told):
        raise ShardlmError(
            f"config.json has mlp_layer_types={told!r}; it needs num_hidden_layers={layers} of hash_moe, moe"
        )
    return [kind == "hash_moe" for kind in told]


def _attention(options: Options, kind: str, rates: dict[str, int], length: int) -> CompressedConfig:
    head_dim = options("head_dim", 512)
    own = ChooserConfig(options("index_n_heads", 64), options("index_head_dim", 128), options("index_topk", 512))
    return CompressedConfig(
        num_heads=options("num_attention_heads"),
        head_dim=head_dim,
        q_latent_dim=options("q_lora_rank"),
        window=options("sliding_window", 128),
        rope=_rope(options, kind, head_dim, length),
        out_groups=options("o_groups", 8),
        out_latent_dim=options("o_lora_rank", 1024),
        rate=rates.get(kind, 0),
        overlap=kind == CHOSEN,
        chooser=own if kind == CHOSEN else None,
        index_dim=own.head_dim if CHOSEN in _kinds(options) else 0,
        norm=hf_decoder.rms(options),
    )


def _rope(options: Options, of: str, head_dim: int, length: int) -> Rope:
    """Layers with entries have a base of their own, and are stretched; their sines and cosines are as they are."""
    turned = options("qk_rope_head_dim", 0)
    told = dict(options("rope_parameters", None) or options("rope_scaling", None) or {})
    partial = options("partial_rotary_factor", 0.0) or (turned or 64) / head_dim
    main, compress = float(options("rope_theta", 10_000.0)), float(options("compress_rope_theta", 160_000.0))
    theta = main if of == SLIDING else compress
    options("rope_scaling", None)
    own = told.get("main" if of == SLIDING else "compress")
    if own is None:
        flat = {} if of == SLIDING else {k: v for k, v in told.items() if k not in ("main", "compress")}
        kind = flat.get("rope_type") or flat.get("type") or "default"
        own = flat | {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial}
    plain = Options({**options.values, "rope_parameters": own})
    rope = rope_of(plain, head_dim, length=length, partial=partial)
    magnitude = float(own.get("attention_factor") or 1.0)
    return dataclasses.replace(rope, dim=rope.dim or head_dim, magnitude=magnitude)


def _experts(options: Options) -> MoeConfig:
    count = options("n_routed_experts", 0) or options("num_local_experts")
    width = options("moe_intermediate_size")
    options.only("intermediate_size", None, width)
    limit = float(options("swiglu_limit", 10.0))
    if options.activation() != "silu":
        raise ShardlmError(f"config.json has hidden_act={options('hidden_act')!r}; supported: silu")
    return MoeConfig(
        num_experts=count,
        top_k=options("num_experts_per_tok"),
        expert_dim=width,
        shared_dim=width * options("n_shared_experts", 1),
        router=Router("sqrtsoftplus", scale=float(options("routed_scaling_factor", 1.5))),
        activation="silu_of_cut",
        limit=limit,
        shared_limit=limit,
        load_bias=True,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    """As published; `published_name` has what transformers writes otherwise."""
    own, theirs = block.attention, f"{LAYER}attn."
    turned = own.rope.dim
    tail = ("H", own.head_dim - turned, turned)
    found = {
        "embedding": Tensor("embed.weight"),
        "head": Tensor("head.weight", "V D -> D V"),
        "final_norm.scale": Tensor("norm.weight"),
        "head_streams.fn": Tensor("hc_head_fn", "S I -> I S"),
        "head_streams.base": Tensor("hc_head_base"),
        "head_streams.scale": Tensor("hc_head_scale"),
        "attention_norm.scale": Tensor(f"{LAYER}attn_norm.weight"),
        "mlp_norm.scale": Tensor(f"{LAYER}ffn_norm.weight"),
        "attention.wq_down": Tensor(f"{theirs}wq_a.weight", "Q D -> D Q"),
        "attention.q_norm.scale": Tensor(f"{theirs}q_norm.weight"),
        "attention.wq_up": Tensor(f"{theirs}wq_b.weight", "(N H) Q -> Q N H", pairs=tail),
        "attention.wkv": Tensor(f"{theirs}wkv.weight", "H D -> D H", pairs=tail),
        "attention.kv_norm.scale": Tensor(f"{theirs}kv_norm.weight", "H -> H", pairs=tail),
        "attention.wo_down": Tensor(f"{theirs}wo_a.weight", "(G R) (M H) -> G M H R", pairs=tail),
        "attention.wo_up": Tensor(f"{theirs}wo_b.weight", "D (G R) -> G R D"),
        "attention.sinks": Tensor(f"{theirs}attn_sink"),
        "mlp.router": Tensor(f"{LAYER}ffn.gate.weight", "E D -> D E"),
        "mlp.router_bias": Tensor(f"{LAYER}ffn.gate.bias"),
        "mlp.experts_of_token": Tensor(f"{LAYER}ffn.gate.tid2eid", dtype="int64"),
    }
    found |= gated("mlp.", f"{LAYER}ffn.experts.{{expert}}.", **NUMBERED)
    found |= gated("mlp.shared.", f"{LAYER}ffn.shared_experts.", **NUMBERED)
    for ours, short in (("attention", "attn"), ("mlp", "ffn")):
        found[f"{ours}_streams.fn"] = Tensor(f"{LAYER}hc_{short}_fn", "S I -> I S")
        found[f"{ours}_streams.base"] = Tensor(f"{LAYER}hc_{short}_base")
        found[f"{ours}_streams.scale"] = Tensor(f"{LAYER}hc_{short}_scale")
    found |= _compressor("attention.compressor.", f"{theirs}compressor.", tail)
    if own.chooser:
        tail = ("H", own.chooser.head_dim - turned, turned)
        found |= _compressor("attention.indexer.compressor.", f"{theirs}indexer.compressor.", tail)
        found["attention.indexer.wq"] = Tensor(f"{theirs}indexer.wq_b.weight", "(N H) Q -> Q N H", pairs=tail)
        found["attention.indexer.heads"] = Tensor(f"{theirs}indexer.weights_proj.weight", "N D -> D N")
    return found


def _compressor(ours: str, theirs: str, tail: tuple[str, int, int]) -> Names:
    return {
        f"{ours}wkv": Tensor(f"{theirs}wkv.weight", "(W H) D -> D W H", pairs=tail),
        f"{ours}wgate": Tensor(f"{theirs}wgate.weight", "(W H) D -> D W H", pairs=tail),
        f"{ours}bias": Tensor(f"{theirs}ape", "A (W H) -> A W H", pairs=tail),
        f"{ours}norm.scale": Tensor(f"{theirs}norm.weight", "H -> H", pairs=tail),
    }


WRITTEN = (  # by transformers, which reads both
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)


def published_name(name: str) -> str:
    """The published name of a tensor that transformers wrote."""
    return renamed(name, WRITTEN)
