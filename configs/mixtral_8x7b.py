"""python -m launch.train --config=configs/mixtral_8x7b.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 32 x H100 80 GB in 4 hosts, the 8 experts over a host's GPUs, which gather each other's tokens, fsdp=4 over
hosts. Needs the extra `experts`.
Expected: compiled without a GPU, not measured: 16.3 GiB of state and 23.2 GiB of temporaries a GPU; 2.22 s a step by
the planner's rates.
Data: your own text or shards, and Mixtral's tokenizer.json in data.tokenizer.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.mixtral import MixtralConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=MixtralConfig(),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(fsdp=4, expert=8),
        rules="zero3",
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=3e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=32, seq_len=8192, accumulation=1, eval_every=1000, eval_batches=32
        ),
        run_dir="runs/mixtral_8x7b",
    )
