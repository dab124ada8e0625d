"""StableLM (https://arxiv.org/abs/2402.17834): Llama's decoder with layer norms and a rotation of a part of each head;
the 12B has both layers side by side and norms of each head of queries and keys."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, layer_norms, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` stablelm."""
    options("hidden_dropout", None)  # of training
    options.where_absent(hidden_act="silu")
    eps = options("layer_norm_eps", 1e-5)
    own = {
        "bias": bool(options("use_qkv_bias", False)),
        "out_bias": False,
        "norm": NormConfig("layer", eps, bias=False),
    }
    own["qk_norm"] = "each" if options("qk_layernorm", False) else "none"
    attention = hf_decoder.attention(options, length, partial=0.25, **own)
    block = BlockConfig(attention, hf_decoder.mlp(options), parallel=bool(options("use_parallel_residual", False)))
    return hf_decoder.decoder(options, lambda layer: block, NormConfig("layer", eps))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard()
    for letter in "qk":  # a tensor for each head
        name = f"{LAYER}self_attn.{letter}_layernorm.norms.{{expert}}.weight"
        found[f"attention.{letter}_norm.scale"] = Tensor(name, "H -> E H")
    return found | layer_norms(
        attention_norm=f"{LAYER}input_layernorm",
        mlp_norm=f"{LAYER}post_attention_layernorm",
        final_norm="model.norm",
    )
