"""python -m launch.train --config=configs/llama3_8b.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 8 x H100 80 GB in one host, fsdp=8.
Expected: compiled without a GPU, not measured: 11.2 GiB of state and 11.2 GiB of temporaries a GPU for 8 rows of 8,192
(tests/test_gpu_program.py); no speed is known yet.
Data: your own text or shards, and Llama 3's tokenizer.json in data.tokenizer.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(fsdp=8),
        rules="zero3",
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=3e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=8, seq_len=8192, accumulation=1, eval_every=1000, eval_batches=32
        ),
        xla_profile="hopper",
        run_dir="runs/llama3_8b",
    )
