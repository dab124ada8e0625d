"""OLMo Hybrid (https://allenai.org/blog/olmohybrid): three of four layers are Gated DeltaNet that may turn its states
over, with norms before layers; the others attend to tokens as OLMo 3's do, without a rotation."""

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder, olmo
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.qwen_hybrid import linear_layers
from shardlm.models.transformer_config import TransformerConfig

# How rates begin, in training from nothing.
ASIDE = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
OTHERWISE_WRITTEN = (
    "save_pretrained of transformers 5.24 writes q_conv1d, k_conv1d and v_conv1d as thirds of all channels, which "
    "published checkpoints have as those of queries, keys and values, and post_attention_layernorm of layers that "
    "attend to tokens as feedforward_layer_norm: join the three, split them by the sizes of q_proj, k_proj and v_proj, "
    "and rename those norms"
)
OUT_EPS = 1e-5  # of the norm of what is read, whatever the others have


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` olmo_hybrid."""
    options.aside(*ASIDE)
    linear, norm = linear_layers(options), hf_decoder.rms(options)
    memory, attention, feed_forward = _memory(options), _attention(options, norm, length), hf_decoder.mlp(options)

    def block(layer: int) -> BlockConfig:
        own = (memory, "pre") if linear[layer] else (attention, "post")
        return BlockConfig(own[0], feed_forward, norms=own[1])

    return hf_decoder.decoder(options, block, norm)


def _attention(options: Options, norm: NormConfig, length: int) -> AttentionConfig:
    """Not turned where no base is said, as in published ones."""
    turned = (options("rope_parameters", None) or {}).get("rope_theta") or options("rope_theta", 0)
    own = {"qk_norm": "all", "norm": norm} | ({} if turned else {"rope": None})
    return hf_decoder.attention(options, length, **own)


def _memory(options: Options) -> DeltaNetConfig:
    options.only("hidden_act", "silu")
    heads = options("num_attention_heads")
    of_keys = options("linear_num_key_heads", heads)
    head_dim = options("linear_key_head_dim", 0) or int(0.75 * options("hidden_size") / of_keys)
    return DeltaNetConfig(
        num_heads=options("linear_num_value_heads", heads),
        num_kv_heads=of_keys,
        head_dim=head_dim,
        value_dim=options("linear_value_head_dim", 2 * head_dim),
        conv_width=options("linear_conv_kernel_dim", 4),
        norm=NormConfig("rms", OUT_EPS),
        beta_scale=2.0 if options("linear_allow_neg_eigval", True) else 1.0,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    if not isinstance(block.attention, DeltaNetConfig):
        return olmo.names(config, block)
    inside, found = (
        f"{LAYER}linear_attn.",
        standard(attention_norm="attention_layer_norm", mlp_norm="feedforward_layer_norm"),
    )
    for letter in "qkv":
        found[f"attention.w{letter}"] = Tensor(f"{inside}{letter}_proj.weight", "(N H) D -> D N H")
        found[f"attention.taps_{letter}"] = Tensor(f"{inside}{letter}_conv1d.weight", "(N H) 1 W -> N H W")
    return found | {
        "attention.wg": Tensor(f"{inside}g_proj.weight", "(N H) D -> D N H"),
        "attention.wo": Tensor(f"{inside}o_proj.weight", "D (N H) -> N H D"),
        "attention.decay": Tensor(f"{inside}a_proj.weight", "N D -> D N"),
        "attention.beta": Tensor(f"{inside}b_proj.weight", "N D -> D N"),
        "attention.decay_bias": Tensor(f"{inside}dt_bias"),
        "attention.log_rate": Tensor(f"{inside}A_log"),
        "attention.out_norm.scale": Tensor(f"{inside}o_norm.weight"),
    }
