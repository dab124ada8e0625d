"""Small mixtures of experts and latent attention, beside small.py's dense models."""

from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.mixtral import MixtralConfig

# 8 experts of which a token visits 2: over 2 devices tokens are gathered, over 4 and 8 of a CPU's they are sent.
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
# Latent attention, a dense layer and then two of experts, of which a token visits 2 in 2 of 4 groups and a shared one.
DEEPSEEK = DeepseekConfig(
    vocab_size=64,
    embed_dim=32,
    num_layers=3,
    dense_layers=1,
    num_heads=8,
    q_latent_dim=24,
    kv_latent_dim=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=6,
    mlp_dim=64,
    num_experts=8,
    top_k=2,
    expert_dim=16,
    groups=4,
    top_groups=2,
    balance_loss=1e-2,
)
