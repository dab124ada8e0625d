"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama's decoder with factors on embedding,
residuals, scores and logits; dense, or a mixture of experts in every layer, with a shared one beside them in some.
Granite SWA: sinks, sliding windows in three of four layers, and a rotation of each layer's own, or none.
HyperCLOVA X (https://huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B): norms behind layers too."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig

MIXTURES = ("granitemoe", "granitemoeshared", "granitemoe_swa")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` granite, granite_swa, hyperclovax and those of MIXTURES."""
    kind = options("model_type")
    own = 0.0 if kind == "hyperclovax" else 1.0  # of what is not said; 0: as usual
    usual = hf_decoder.attention(options, length, scale=float(options("attention_multiplier", own)))
    scale, factor = float(options("residual_multiplier", 1.0)), options("logits_scaling", 1.0)
    norms = "both" if kind == "hyperclovax" and options("use_post_norm", True) else "pre"
    feed_forward = experts_of(options) if kind in MIXTURES else hf_decoder.mlp(options)
    attentions = [usual] * options("num_hidden_layers")
    if kind.endswith("_swa"):
        attentions = _of_each(options, dataclasses.replace(usual, sinks=True))
    return hf_decoder.decoder(
        options,
        lambda layer: BlockConfig(attentions[layer], feed_forward, norms, scale),
        hf_decoder.rms(options),
        tied=kind == "granite_swa",
        embed_scale=float(options("embedding_multiplier", 1.0)),
        logits=LogitsConfig(scale=factor if kind == "hyperclovax" else 1 / factor),
    )


def _of_each(options: Options, usual: AttentionConfig) -> list[AttentionConfig]:
    """Each layer with its window and the base of its rotation; 0 is none."""
    windows = hf_decoder.sliding(options, lambda layer: layer % 4 != 0)
    bases = options("layer_rope_theta", [usual.rope.theta] * len(windows))
    if len(bases) != len(windows):
        raise ShardlmError(
            f"config.json has layer_rope_theta={bases!r}; it needs num_hidden_layers={len(windows)} numbers"
        )
    ropes = [dataclasses.replace(usual.rope, theta=float(base)) if base else None for base in bases]
    return [dataclasses.replace(usual, window=w, rope=rope) for w, rope in zip(windows, ropes, strict=True)]


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard(attention_post_norm="post_norm1", mlp_post_norm="post_norm2") | {
        "attention.sinks": Tensor(f"{LAYER}self_attn.sinks")
    }
    if isinstance(block.mlp, MoeConfig):
        published = not block.attention.sinks  # all experts of a layer in two tensors, gate before up
        found |= experts_names(block.mlp, published) | shared_names(block.mlp.shared_dim)
    return found


def experts_names(mixture: MoeConfig, published: bool) -> Names:
    theirs, F = f"{LAYER}block_sparse_moe.", mixture.expert_dim
    into, out_of, router = (
        ("input_linear.weight", "output_linear.weight", "router.layer.weight")
        if published
        else ("experts.gate_up_proj", "experts.down_proj", "router.weight")
    )
    gate, up = (Tensor(f"{theirs}{into}", "E F D -> E D F", part=(1, at, at + F, 1)) for at in (0, F))
    down = Tensor(f"{theirs}{out_of}", "E D F -> E F D")
    return {
        "mlp.gate": gate,
        "mlp.up": up,
        "mlp.down": down,
        "mlp.router": Tensor(f"{theirs}{router}", "E D -> D E"),
    }


def shared_names(F: int) -> Names:
    """Of the shared feed-forward layer of this width."""
    theirs = f"{LAYER}shared_mlp."
    gate, up = (Tensor(f"{theirs}input_linear.weight", "F D -> D F", part=(0, at, at + F, 1)) for at in (0, F))
    down = Tensor(f"{theirs}output_linear.weight", "D F -> F D")
    return {"mlp.shared.gate": gate, "mlp.shared.up": up, "mlp.shared.down": down}


def experts_of(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        shared_dim=options("shared_intermediate_size", 0),
        balance_loss=float(options("router_aux_loss_coef", 0.001)),
        activation=options.activation(),
    )
