"""Kimi Linear (https://arxiv.org/abs/2510.26692): three of four layers are Kimi Delta Attention, the others latent
attention without a rotation; a dense layer, then experts as DeepSeek V3's."""

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import deepseek
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, NUMBERED, Names, Tensor, experts, gated
from shardlm.models.qwen_hybrid import linear_layers
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router

# As all published ones have them.
FIXED = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
}
OTHERWISE_WRITTEN = (
    "save_pretrained of transformers 5.24 writes dense layers as block_sparse_moe.*, which published checkpoints have "
    "as mlp.*: rename those tensors"
)
# The longest text, rotations that no layer has, and sizes that repeat others.
ASIDE = ("model_max_length", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "qk_head_dim")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` kimi_linear."""
    del length
    options.only_all(FIXED)
    options.aside(*ASIDE)
    options("num_key_value_heads", None)  # those of queries
    linear_layers, memory, latent = _linear_layers(options), _memory(options), _latent(options)

    def attention(layer: int) -> DeltaNetConfig | MlaConfig:
        return memory if linear_layers[layer] else latent

    return deepseek.decoder(options, attention, experts_of(options), first=1)


def _linear_layers(options: Options) -> list[bool]:
    """Which layers are linear attention: as published by their numbers from 1, or by `layer_types`."""
    layers, kinds = options("num_hidden_layers"), options("layer_types", None)
    published = options("linear_attn_config", {})
    if kinds is None and "kda_layers" in published:
        linear, full = (set(published.get(name, ())) for name in ("kda_layers", "full_attn_layers"))
        if linear & full or linear | full != set(range(1, layers + 1)):
            raise ShardlmError(
                f"config.json has linear_attn_config={published!r}; kda_layers and full_attn_layers together need "
                f"each number from 1 to num_hidden_layers={layers} once"
            )
        return [layer + 1 in linear for layer in range(layers)]
    if kinds is None:
        return [layer == 0 or layer % 4 > 0 for layer in range(layers)]
    return linear_layers(options)


def _memory(options: Options) -> DeltaNetConfig:
    published = options("linear_attn_config", {})

    def size(name: str, first: str, usual: int) -> int:
        return published.get(first) or options(name, usual)

    heads, width = size("linear_num_heads", "num_heads", 32), size("linear_head_dim", "head_dim", 128)
    conv = size("linear_conv_kernel_dim", "short_conv_kernel_size", 4)
    options.aside("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    norm = NormConfig("rms", options("rms_norm_eps"))
    return DeltaNetConfig(heads, heads, width, width, conv, norm, by_channel=True, gate="sigmoid")


def _latent(options: Options) -> MlaConfig:
    return MlaConfig(
        num_heads=options("num_attention_heads"),
        q_latent_dim=options("q_lora_rank", 0),
        kv_latent_dim=options("kv_lora_rank"),
        nope_dim=options("qk_nope_head_dim"),
        rope_dim=options("qk_rope_head_dim"),
        value_dim=options("v_head_dim"),
        rope=None,
    )


def experts_of(options: Options, usual_groups: int = 1, usual_scale: float = 2.446) -> MoeConfig:
    """Several numbers have two names, of which the first is the published one's."""

    def either(first: str, second: str, usual: int) -> int:
        found = options(first, None), options(second, None)
        return next((value for value in found if value is not None), usual)

    width = options("moe_intermediate_size")
    normalize = bool(either("moe_renormalize", "norm_topk_prob", True))
    groups, scale = (
        either("num_expert_group", "n_group", usual_groups),
        float(options("routed_scaling_factor", usual_scale)),
    )
    return MoeConfig(
        num_experts=options("num_experts", 0) or options("num_local_experts"),
        top_k=options("num_experts_per_token", 0) or options("num_experts_per_tok"),
        expert_dim=width,
        shared_dim=width * either("num_shared_experts", "n_shared_experts", 1),
        router=Router("sigmoid", normalize, groups, options("topk_group", 1), scale),
        load_bias=True,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = deepseek.names(config, block)
    if isinstance(block.attention, DeltaNetConfig):
        found |= memory_names() | made_of_latents()
    if isinstance(block.mlp, MoeConfig):
        mixture = f"{LAYER}block_sparse_moe."
        found |= {"mlp.router_bias": Tensor(f"{mixture}gate.e_score_correction_bias")}
        found |= experts("block_sparse_moe", **NUMBERED)
        found |= gated("mlp.shared.", f"{mixture}shared_experts.")
    return found


def memory_names() -> Names:
    """Of Kimi Delta Attention, whatever makes its decays and gates."""
    inside = f"{LAYER}self_attn."
    taps = {f"attention.taps_{letter}": f"{letter}_conv1d" for letter in "qkv"}
    return {
        **{path: Tensor(f"{inside}{name}.weight", "(N H) 1 W -> N H W") for path, name in taps.items()},
        "attention.beta": Tensor(f"{inside}b_proj.weight", "N D -> D N"),
        "attention.decay_bias": Tensor(f"{inside}dt_bias", "(N H) -> N H"),
        "attention.out_norm.scale": Tensor(f"{inside}o_norm.weight"),
    }


def made_of_latents() -> Names:
    """Of those that make decays and gates, through a few numbers of each token."""
    inside = f"{LAYER}self_attn."
    return {
        "attention.log_rate": Tensor(f"{inside}A_log", "1 1 N 1 -> N"),
        "attention.decay_down": Tensor(f"{inside}f_a_proj.weight", "R D -> D R"),
        "attention.decay": Tensor(f"{inside}f_b_proj.weight", "(N H) R -> R N H"),
        "attention.wg_down": Tensor(f"{inside}g_a_proj.weight", "R D -> D R"),
        "attention.wg": Tensor(f"{inside}g_b_proj.weight", "(N H) R -> R N H"),
    }
