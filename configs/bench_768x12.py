"""python -m launch.bench train --config=configs/bench_768x12.py

Hardware: two CPU cores, one device. The shape of the comparison with PyTorch in benchmarks/README.md.
"""

from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(
            vocab_size=8192,
            embed_dim=768,
            num_layers=12,
            num_heads=12,
            num_kv_heads=4,
            head_dim=64,
            mlp_dim=2048,
            rope_theta=10_000.0,
            tie_embeddings=False,
        ),
        mesh=MeshSpec(),
        rules="replicated",
        precision="fp32",
        remat="none",
        unroll=0,
        train=TrainConfig(global_batch=4, seq_len=256),
        run_dir="runs/bench_768x12",
        cpu_devices=1,
    )
