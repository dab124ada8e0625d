"""What a published model is made of: its decoder, its parameters, and a step's FLOPs as its source counts them."""

from shardlm.errors import ShardlmError
from shardlm.flops import attention_pairs, attention_width, training_flops
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.plan.published import Model, Point


def transformer(model: Model, seq_len: int) -> TransformerConfig:
    """The decoder of these sizes. What does not change its cost is left out: biases, norms of queries and keys, sinks,
    how experts are scored."""
    blocks = [BlockConfig(_attention(model, layer), _mlp(model, layer)) for layer in range(model.num_layers)]
    return TransformerConfig(
        vocab_size=model.vocab_size,
        embed_dim=model.embed_dim,
        segments=segments_of(blocks),
        norm=NormConfig("rms" if model.positions == "rope" else "layer"),
        tie_embeddings=model.tied,
        max_positions=seq_len if model.positions == "learned" else 0,
        mtp=MtpConfig(blocks[-1], model.mtp_modules) if model.mtp_modules else None,
    )


def _attention(model: Model, layer: int) -> AttentionConfig | MlaConfig:
    rope = Rope() if model.positions == "rope" else None
    if sizes := model.latent:
        return MlaConfig(
            model.num_heads, sizes.q_dim, sizes.kv_dim, sizes.nope_dim, sizes.rope_dim, sizes.value_dim, Rope()
        )
    windowed = model.window and layer % model.window.every == 0
    window = model.window.size if windowed else 0
    return AttentionConfig(model.num_heads, model.num_kv_heads, model.head_dim, rope, window)


def _mlp(model: Model, layer: int) -> MlpConfig | MoeConfig:
    experts = model.experts
    if experts and layer >= experts.dense_layers:
        return MoeConfig(experts.num_experts, experts.top_k, experts.expert_dim, experts.shared_dim)
    if model.mlp_dim is None:
        raise ShardlmError(f"model {model.name}: layer {layer} is dense and mlp_dim is not given")
    return MlpConfig(model.mlp_dim, "silu" if model.gated else "gelu", model.gated)


def parameters(model: Model, seq_len: int) -> int:
    """Weights in all matrices, embeddings and positions; norms and biases are left out."""
    config = transformer(model, seq_len)
    embedding = config.vocab_size * config.embed_dim
    idle = sum(
        3 * config.embed_dim * block.mlp.expert_dim * (block.mlp.num_experts - block.mlp.top_k)
        for block in config.all_blocks()
        if block.mlp.num_experts
    )
    # The head counts once more in each module of multi-token prediction, which shares it.
    once = config.parameters_per_token() - model.mtp_modules * embedding
    return once + idle + (0 if config.tie_embeddings else embedding) + config.max_positions * config.embed_dim


def model_flops(model: Model, tokens: int, seq_len: int, full_square: bool = False) -> float:
    """Of one step, by the convention of flops.py; with `full_square`, attention counts masked pairs too."""
    config = transformer(model, seq_len)
    rows = tokens / seq_len
    macs = 0.0
    for a in (block.attention for block in config.all_blocks()):
        pairs = seq_len**2 if full_square else attention_pairs([seq_len], a.window or None)
        macs += rows * pairs * attention_width(a.num_heads, a.head_dim, a.value_dim)
    return training_flops(config.parameters_per_token(), tokens, macs)


def step_seconds(point: Point, model: Model) -> float | None:
    """How long the measured step took. None where only TFLOP/s are given and the source does not say what it counts, or
    counts a recomputation other than that of every layer."""
    measured = point.measured
    if measured.step_seconds is not None:
        return measured.step_seconds
    if measured.tokens_per_s_per_gpu is not None:
        return point.tokens / (measured.tokens_per_s_per_gpu * point.num_gpus)
    counted = point.counted
    if counted is None or (counted.recomputation and point.remat != "full"):
        return None
    flops = model_flops(model, point.tokens, point.seq_len, counted.causal == "full")
    if counted.recomputation:  # of the layers, not of the head
        flops += (flops - 6 * model.vocab_size * model.embed_dim * point.tokens) / 3
    return flops / (measured.tflops_per_s_per_gpu * 1e12 * point.num_gpus)
