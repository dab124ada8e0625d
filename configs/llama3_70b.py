"""python -m launch.train --config=configs/llama3_70b.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 64 x H100 80 GB in 8 hosts, tensor=4 inside a host, fsdp=16.
Expected: compiled without a GPU, not measured: 12.3 GiB of state and 11.1 GiB of temporaries a GPU for 16 rows of
8,192 (tests/test_gpu_program.py); no speed is known yet.
Data: your own text or shards, and Llama 3's tokenizer.json in data.tokenizer.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(embed_dim=8192, num_layers=80, num_heads=64, mlp_dim=28_672),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(fsdp=16, tensor=4),
        rules="zero3",
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=1.5e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=16, seq_len=8192, accumulation=1, eval_every=1000, eval_batches=32
        ),
        xla_profile="hopper",
        run_dir="runs/llama3_70b",
    )
