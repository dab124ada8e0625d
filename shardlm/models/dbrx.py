"""DBRX (https://www.databricks.com/blog/introducing-dbrx-new-state-art-open-llm): a mixture in every layer, layer norms
without biases, queries, keys and values that are clipped."""

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import Names, Tensor, fused
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router

LAYER = "transformer.blocks.{layer}."


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` dbrx, whose layers have options of their own. The rotation's base is said there, or of all."""
    for name in ("emb_pdrop", "num_key_value_heads", "max_seq_len"):  # of training; of attention; see registry.longest
        options(name, None)
    D, N = options("d_model"), options("n_heads")
    own, of_all = options.inside("attn_config"), options("rope_parameters", None) or {}
    if (theta := own("rope_theta", None)) is not None:
        _same(theta, of_all.get("rope_theta", theta))
        options.where_absent(rope_theta=theta)
    kv_heads, clip = own("kv_n_heads", 1), float(own("clip_qkv", 0.0))
    rope = rope_of(options, D // N, length=length)
    own("rope_parameters", None), own.finish()
    block = BlockConfig(AttentionConfig(N, kv_heads, D // N, rope, clip=clip), _experts(options.inside("ffn_config")))
    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=D,
        segments=segments_of([block] * options("n_layers")),
        norm=NormConfig("layer", bias=False),
        tie_embeddings=bool(options("tie_word_embeddings", False)),
    )


def _same(own: float, of_all: float) -> None:
    """Raises ShardlmError for two bases: transformers 5.24 writes the usual one beside that of the published models."""
    if own != of_all:
        raise ShardlmError(
            f"config.json has rope_theta={own} in attn_config and {of_all} in rope_parameters; remove that which the "
            "model was not trained with (as transformers 5 writes published models, it is the second)"
        )


def _experts(options: Options) -> MoeConfig:
    """Of the options of feed-forward layers."""
    for name in ("hidden_size", "moe_jitter_eps"):  # as the model has it; of training
        options(name, None)
    options.where_absent(moe_normalize_expert_weights=1)
    normalize = options("moe_normalize_expert_weights", None) is not None
    options.only("moe_normalize_expert_weights", None, 1, 1.0)
    activation = options.inside("ffn_act_fn")
    activation.where_absent(name="silu")
    found = MoeConfig(
        num_experts=options("moe_num_experts", 4),
        top_k=options("moe_top_k", 1),
        expert_dim=options("ffn_hidden_size", 3584),
        router=Router("softmax", normalize),
        balance_loss=float(options("moe_loss_weight", 0.01)),
        activation=activation.activation("name"),
    )
    activation.finish(), options.finish()
    return found


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    attention, theirs = block.attention, f"{LAYER}norm_attn_norm."
    sizes = {f"attention.w{letter}": attention.num_kv_heads * attention.head_dim for letter in "kv"}
    sizes = {"attention.wq": attention.num_heads * attention.head_dim} | sizes
    experts = f"{LAYER}ffn.experts.mlp."
    found = {
        "embedding": Tensor("transformer.wte.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
        "final_norm.scale": Tensor("transformer.norm_f.weight"),
        "attention_norm.scale": Tensor(f"{theirs}norm_1.weight"),
        "mlp_norm.scale": Tensor(f"{theirs}norm_2.weight"),
        "attention.wo": Tensor(f"{theirs}attn.out_proj.weight", "D (N H) -> N H D"),
        "mlp.router": Tensor(f"{LAYER}ffn.router.layer.weight", "E D -> D E"),
        "mlp.gate": Tensor(f"{experts}w1", "(E F) D -> E D F"),
        "mlp.up": Tensor(f"{experts}v1", "(E F) D -> E D F"),
        "mlp.down": Tensor(f"{experts}w2", "(E F) D -> E F D"),
    }
    of_each = dict.fromkeys(sizes, Tensor("", "(N H) D -> D N H"))
    return found | fused(of_each, f"{theirs}attn.Wqkv.weight", sizes)
