"""python -m launch.train --config=configs/llama3_8b_128k.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 8 x H100 80 GB in one host, each row of 131,072 tokens over all of them (context=8).
Expected: compiled without a GPU, not measured: 11.2 GiB of state and 18.2 GiB of temporaries a GPU; keys and values go
round a ring, each move beside a meeting; no speed is known yet.
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
        mesh=MeshSpec(context=8),
        rules="zero3",
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=1e-5, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=8, seq_len=131_072, accumulation=8, eval_every=1000, eval_batches=32
        ),
        run_dir="runs/llama3_8b_128k",
    )
