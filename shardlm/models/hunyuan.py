"""Hunyuan dense (https://github.com/Tencent-Hunyuan/Hunyuan-7B): Llama's decoder with norms on the queries and keys of
each head after the rotation, whose base is stretched once and for all."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import Names, standard
from shardlm.models.transformer import TransformerConfig
from shardlm.ops.rope import Rope


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` hunyuan_v1_dense."""
    options.only("use_qk_norm", True)
    options.only("use_cla", False)
    options("eod_token_id", None), options("attention_head_dim", None)  # a name for head_dim
    norm = hf_decoder.rms(options)
    own = {"qk_norm": "head", "norm_rotated": True, "norm": norm, "rope": _rope(options, length)}
    block = BlockConfig(hf_decoder.attention(options, **own), hf_decoder.mlp(options))
    return hf_decoder.decoder(options, lambda layer: block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard(**{"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"})


def _rope(options: Options, length: int) -> Rope:
    """What is called dynamic and has an alpha does not depend on the length."""
    head_dim = options("head_dim", 0) or options("hidden_size") // options("num_attention_heads")
    scaling = options("rope_parameters", {}) or options("rope_scaling", {})
    alpha = scaling.get("alpha")
    if not alpha or scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return rope_of(options, head_dim, length=length)
    theta = options("rope_theta", 0) or scaling.get("rope_theta") or 10_000.0
    return Rope(theta * alpha ** (head_dim / (head_dim - 2)))
