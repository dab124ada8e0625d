"""python -m launch.bench train --config=configs/bench_experts.py

Hardware: any computer with a CPU, as eight virtual devices. The mixture of experts of `launch.bench strategies`: the
decoder of configs/bench_strategies.py with 8 experts in each layer, of which a token visits 2.
Measured: benchmarks/results/strategies.md.
"""

from shardlm.mesh import MeshSpec
from shardlm.models.mixtral import MixtralConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=MixtralConfig(
            vocab_size=2048,
            embed_dim=128,
            num_layers=8,
            num_heads=8,
            num_kv_heads=8,
            head_dim=16,
            expert_dim=192,
            rope_theta=10_000.0,
        ),
        mesh=MeshSpec(),
        rules="replicated",
        precision="fp32",
        remat="full",
        train=TrainConfig(global_batch=16, seq_len=128),
        run_dir="runs/bench_experts",
        cpu_devices=8,
    )
