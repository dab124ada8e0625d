"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama's decoder with factors on embedding,
residuals, scores and logits; dense, or a mixture of experts in every layer."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` granite and granitemoe."""
    attention = hf_decoder.attention(options, length, scale=float(options("attention_multiplier", 1.0)))
    scale = float(options("residual_multiplier", 1.0))
    feed_forward = _experts(options) if options("model_type") == "granitemoe" else hf_decoder.mlp(options)
    block = BlockConfig(attention, feed_forward, residual_scale=scale)
    return hf_decoder.decoder(
        options,
        lambda layer: block,
        hf_decoder.rms(options),
        embed_scale=float(options("embedding_multiplier", 1.0)),
        logits=LogitsConfig(scale=1 / options("logits_scaling", 1.0)),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard()
    if isinstance(block.mlp, MoeConfig):  # all experts of a layer in two tensors, gate before up
        theirs, F = f"{LAYER}block_sparse_moe.", block.mlp.expert_dim
        for path, first in (("mlp.gate", 0), ("mlp.up", F)):
            part = (1, first, first + F, 1)
            found[path] = Tensor(f"{theirs}input_linear.weight", "E F D -> E D F", part=part)
        found["mlp.down"] = Tensor(f"{theirs}output_linear.weight", "E D F -> E F D")
        found["mlp.router"] = Tensor(f"{theirs}router.layer.weight", "E D -> D E")
    return found


def _experts(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        balance_loss=float(options("router_aux_loss_coef", 0.001)),
        activation=options.activation(),
    )
