"""python -m launch.train --config=configs/llama3_70b_256.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 256 x H100 80 GB in 32 hosts, tensor=8 inside a host, 4 pipeline stages, 8 replicas (fsdp, ZeRO-1).
Expected: compiled without a GPU, not measured: 10.3 GiB of state and 36.0 GiB of temporaries a GPU; no speed is known
yet. The pipeline idles for 2.3% of the layers' time (computed).
Data: your own text or shards, and Llama 3's tokenizer.json in data.tokenizer.
"""

from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(embed_dim=8192, num_layers=80, num_heads=64, mlp_dim=28_672),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(pipeline=4, fsdp=8, tensor=8),
        rules="zero1",
        pipeline=PipelineConfig(rounds=2),
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=1.5e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=512, seq_len=8192, accumulation=64, eval_every=1000, eval_batches=32
        ),
        checkpoint=CheckpointConfig(every_steps=500),
        run_dir="runs/llama3_70b_256",
    )
