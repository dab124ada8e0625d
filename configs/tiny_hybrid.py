"""python -m launch.train --config=configs/tiny_hybrid.py

Hardware: any computer with a CPU: 16 virtual devices as data=4 x tensor=2 x pipeline=2, in microbatches of 8 rows a
replica, 4 of which make an update. The same mesh as on 16 GPUs, small enough to try.
Measured on two cores with other work on them: 1 min 26 s, validation loss 4.80 after 60 steps (smoothed bigram 4.46).
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
            vocab_size=2048,
            embed_dim=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_dim=384,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        data=DataConfig(train=("stdlib:train",), validation=("stdlib:validation",), tokenizer="bpe:2048"),
        mesh=MeshSpec(data=4, tensor=2, pipeline=2),
        rules="zero1",
        pipeline=PipelineConfig(rounds=2),
        precision="fp32",
        remat="full",
        optim=OptimConfig(name="muon", learning_rate=1e-2, warmup_steps=10, final_fraction=0.05),
        train=TrainConfig(
            steps=60,
            global_batch=128,
            seq_len=64,
            accumulation=4,
            eval_every=30,
            eval_batches=4,
            baselines=True,
            sample_prompt="def __init__(self",
        ),
        checkpoint=CheckpointConfig(every_steps=30),
        run_dir="runs/tiny_hybrid",
        cpu_devices=16,
    )
