"""Small mixtures of experts, beside small.py's dense models."""

from shardlm.models.mixtral import MixtralConfig

# 8 experts of which a token visits 2: over 2 devices tokens are gathered, over 4 and 8 they are sent.
MOE = MixtralConfig(
    vocab_size=64,
    embed_dim=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    top_k=2,
    expert_dim=16,
    router_z_loss=1e-2,
    rope_theta=10_000.0,
)
