"""python -m launch.train --config=configs/tiny.py

Hardware: two CPU cores, as eight virtual devices that split everything a mesh can split in a dense model.
Data: the source code of this Python's own standard library.
"""

from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(
            vocab_size=2048,
            embed_dim=192,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=48,
            mlp_dim=512,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        data=DataConfig(train=("stdlib:train",), validation=("stdlib:validation",), tokenizer="bpe:2048"),
        mesh=MeshSpec(data=2, fsdp=2, tensor=2),
        rules="zero3",
        precision="fp32",
        remat="none",
        optim=OptimConfig(name="muon", learning_rate=1e-2, warmup_steps=30, final_fraction=0.05),
        train=TrainConfig(
            steps=600,
            global_batch=8,
            seq_len=256,
            eval_every=150,
            eval_batches=20,
            baselines=True,
            sample_prompt="def __init__(self",
        ),
        checkpoint=CheckpointConfig(every_steps=150),
        run_dir="runs/tiny",
        cpu_devices=8,
    )
