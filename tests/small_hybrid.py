"""A small decoder most of whose layers are linear attention, beside small.py's."""

from shardlm.models.qwen_hybrid import QwenHybridConfig

# Layers as in the middle of a model: linear, attention, linear, attention; 8 heads divide over 8 devices.
HYBRID = QwenHybridConfig(
    vocab_size=64,
    embed_dim=32,
    num_layers=4,
    attend_every=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=64,
    linear_num_heads=16,
    linear_num_kv_heads=8,
    linear_head_dim=8,
    linear_value_dim=6,
    rope_theta=10_000.0,
)
