"""MiniMax-01 and M1 (https://arxiv.org/abs/2501.08313, https://arxiv.org/abs/2506.13585): lightning attention in seven
of eight layers, attention to tokens in the others, experts chosen by a softmax; what layers make is added to the stream
after its norm."""

import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.lightning import LightningConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, experts, standard
from shardlm.models.transformer_config import TransformerConfig

LINEAR, FULL = "linear_attention", "full_attention"
# A factor's names in config.json: as transformers has it, and as published.
FACTORS = {
    FULL: ("full_attn_{}_factor", "layernorm_full_attention_{}"),
    LINEAR: ("linear_attn_{}_factor", "layernorm_linear_attention_{}"),
    "mlp": ("mlp_{}_factor", "layernorm_mlp_{}"),
}
# How many tokens transformers takes at once; and of shared experts, which there are none of.
ASIDE = ("block_size", "shared_moe_mode")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` minimax, and as published minimax_text_01 and minimax_m1."""
    options.where_absent(hidden_act="silu", rope_theta=1_000_000.0)
    for name, known in {"hidden_act": "silu", "postnorm": True, "shared_intermediate_size": 0}.items():
        options.only(name, known)
    for name in ASIDE:
        options(name, None)
    norm, kinds, window = hf_decoder.rms(options), _kinds(options), options("sliding_window", 0)
    alphas = {of: _alpha(options, *own) for of, own in FACTORS.items()}
    for own in FACTORS.values():
        for name in own:
            options.only(name.format("beta"), 1)
    heads, head_dim = options("num_attention_heads"), options("head_dim", 0)
    head_dim = head_dim or options("hidden_size") // heads
    partial = (options("rotary_dim", 0) or head_dim) / head_dim
    attention = hf_decoder.attention(options, length, partial, bias=False, out_bias=False, window=window)
    mixture = MoeConfig(
        num_experts=options("num_local_experts", 0) or options("num_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        balance_loss=float(options("router_aux_loss_coef", 0.001)),
    )

    def block(layer: int) -> BlockConfig:
        kind, last = kinds[layer], len(kinds) - 1
        decay = 1 - layer / (last + 1e-5) + 1e-5
        mixer = LightningConfig.of(heads, head_dim, decay) if kind == LINEAR else attention
        return BlockConfig(mixer, mixture, of_normed=(alphas[kind], alphas["mlp"]))

    return hf_decoder.decoder(options, block, norm)


def _alpha(options: Options, name: str, published: str) -> float:
    """Of the stream; beta, of what a layer makes, is 1."""
    return float(options(name.format("alpha"), options(published.format("alpha"), 1)))


def _kinds(options: Options) -> list[str]:
    """Of each layer, as transformers has it, as published by numbers, or one after the other."""
    layers, told = options("num_hidden_layers"), options("attn_type_list", None)
    kinds = options("layer_types", [(LINEAR, FULL)[one] if one in (0, 1) else one for one in told or []])
    kinds = kinds or [LINEAR if layer % 2 else FULL for layer in range(layers)]
    if len(kinds) != layers or not {LINEAR, FULL}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layers {kinds!r}; it needs num_hidden_layers={layers} of {FULL}, {LINEAR}, or in "
            "attn_type_list of 1, 0"
        )
    return kinds


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | experts("block_sparse_moe", gate="w1", up="w3", down="w2")
    if not isinstance(block.attention, LightningConfig):
        return found
    inside, H = f"{LAYER}self_attn.", block.attention.head_dim
    for place, path in enumerate(("wq", "wk", "wv")):
        inner = ("H", place * H, 3 * H)
        found[f"attention.{path}"] = Tensor(f"{inside}qkv_proj.weight", "(N H) D -> D N H", inner=inner)
    return found | {
        "attention.wg": Tensor(f"{inside}output_gate.weight", "(N H) D -> D N H"),
        "attention.wo": Tensor(f"{inside}out_proj.weight", "D (N H) -> N H D"),
        "attention.out_scale": Tensor(f"{inside}norm.weight", "(N H) -> N H"),
    }


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """Decays, which options tell, and which transformers writes rounded."""
    del text
    return re.compile(r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$")
