"""OLMo (https://arxiv.org/abs/2402.00838): layer norms without a scale or a bias, queries, keys and values in bounds.
OLMo 2 and 3 (https://arxiv.org/abs/2501.00656, https://arxiv.org/abs/2512.13961): norms after each layer, and on all
queries and all keys together; 3 has sliding windows between layers that see everything, which alone are stretched.
OLMoE (https://arxiv.org/abs/2409.02060): the same norms on queries and keys, norms before layers, experts."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, experts, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` olmo, olmo2, olmo3, olmoe and flex_olmo, OLMo 2 with OLMoE's experts
    (https://arxiv.org/abs/2507.07024)."""
    kind = options("model_type")
    if kind == "olmo":
        return _first(options, length)
    options.only("clip_qkv", None)
    norm = hf_decoder.rms(options)
    windows = [0] * options("num_hidden_layers")
    if kind == "olmo3":
        windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % 4 != 0)
    ropes = {windowed: hf_decoder.rope_of_kind(options, windowed, length) for windowed in (True, False)}
    feed_forward = _experts(options) if kind in ("olmoe", "flex_olmo") else hf_decoder.mlp(options)

    def block(layer: int) -> BlockConfig:
        own = {"window": windows[layer], "rope": ropes[windows[layer] > 0]}
        attention = hf_decoder.attention(options, qk_norm="all", norm=norm, **own)
        return BlockConfig(attention, feed_forward, norms="pre" if kind == "olmoe" else "post")

    return hf_decoder.decoder(options, block, norm)


def _first(options: Options, length: int) -> TransformerConfig:
    options("rms_norm_eps", None)  # of no effect: layer norms have a fixed one
    attention = hf_decoder.attention(options, length, clip=float(options("clip_qkv", 0.0)))
    block, norm = BlockConfig(attention, hf_decoder.mlp(options)), NormConfig("layer", 1e-5, bias=False, scaled=False)
    return hf_decoder.decoder(options, lambda layer: block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    if block.norms == "pre":
        return standard() | (experts("mlp") if isinstance(block.mlp, MoeConfig) else {})
    found = standard(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
    return found | experts("mlp") if isinstance(block.mlp, MoeConfig) else found


def _experts(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=options("num_experts", 0) or options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        router=Router(normalize=bool(options("norm_topk_prob", False))),
        balance_loss=float(options("router_aux_loss_coef", 0.01)),
        activation=options.activation(),
    )
