"""python -m launch.bench strategies --config=configs/bench_strategies.py --output=benchmarks/results/strategies.json

Hardware: any computer with a CPU, as eight virtual devices. A small decoder that every strategy of
shardlm/train/strategies.py divides; its mesh and rules are theirs.
Measured: benchmarks/results/strategies.md.
"""

from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(
            vocab_size=2048,
            embed_dim=128,
            num_layers=8,
            num_heads=8,
            num_kv_heads=8,
            head_dim=16,
            mlp_dim=384,
            rope_theta=10_000.0,
        ),
        mesh=MeshSpec(),
        rules="replicated",
        precision="fp32",
        remat="full",
        train=TrainConfig(global_batch=16, seq_len=128),
        run_dir="runs/bench_strategies",
        cpu_devices=8,
    )
