"""python -m launch.train --config=configs/deepseek_67b_4096.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 4,096 x H100 80 GB in 512 hosts: data=128 x tensor=4 x pipeline=8, microbatches of one row a replica.
The model is DeepSeek LLM 67B (https://arxiv.org/abs/2401.02954, table 2).
Expected: compiled without a GPU, not measured: 8.0 GiB of state and 20.9 GiB of temporaries a GPU; no speed is known
yet. The pipeline idles for 10.8% of the layers' time (computed).
Data: your own text or shards, and the model's tokenizer.json in data.tokenizer.
"""

from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(
            vocab_size=102_400,
            embed_dim=8192,
            num_layers=95,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=22_016,
            rope_theta=10_000.0,
            norm_eps=1e-6,
        ),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(data=128, tensor=4, pipeline=8),
        rules="zero1",
        pipeline=PipelineConfig(rounds=2),
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=3.2e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=4096, seq_len=4096, accumulation=32, eval_every=1000, eval_batches=32
        ),
        checkpoint=CheckpointConfig(every_steps=500),
        run_dir="runs/deepseek_67b_4096",
    )
