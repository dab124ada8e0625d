"""MiniCPM 3 (https://github.com/OpenBMB/MiniCPM): latent attention, dense layers, and factors on embedding, residuals
and logits by which its sizes were tuned (https://arxiv.org/abs/2404.06395, section 4)."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` minicpm3. Factors that are null are none."""
    options.where_absent(scale_emb=12, scale_depth=1.4, dim_model_base=256)
    D, N, layers = options("hidden_size"), options("num_attention_heads"), options("num_hidden_layers")
    if not options("v_head_dim", 0):
        options.values = {**options.values, "v_head_dim": D // N}
    for name in ("attention_bias", "mlp_bias"):
        options.only(name, False)
    for name in ("head_dim", "qk_head_dim", "num_key_value_heads"):  # said by others
        options(name, None)
    scale = options("scale_depth", layers**0.5) / layers**0.5
    block = BlockConfig(deepseek.latent(options, length), hf_decoder.mlp(options), residual_scale=scale)
    own = {"embed_scale": float(options("scale_emb")), "logits": LogitsConfig(scale=options("dim_model_base", D) / D)}
    return hf_decoder.decoder(options, lambda layer: block, hf_decoder.rms(options), True, **own)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    """Rotated dimensions are in halves, where DeepSeek has pairs."""
    latents = deepseek.latent_names(block.attention)
    return standard() | {path: dataclasses.replace(tensor, pairs=None) for path, tensor in latents.items()}
