"""python -m launch.train --config=configs/sft.py

Hardware: any computer with a CPU, as eight virtual devices. Fine-tunes a small Hugging Face checkpoint on chats, the
loss on the assistant's tokens only; both are made here first:

    python -m launch.train --config=configs/tiny.py
    python -m launch.convert --checkpoint=runs/tiny --output=runs/tiny_hf --dtype=float32
    python examples/docstring_chats.py data/chats

Measured: see BUILD_NOTES.md.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=Pretrained("runs/tiny_hf"),
        data=DataConfig(
            train=("data/chats/train.jsonl",),
            validation=("data/chats/validation.jsonl",),
            tokenizer="runs/tiny_hf",
            chat_template="data/chats/chatml.jinja",
            packing="whole",
        ),
        mesh=MeshSpec(fsdp=4, tensor=2),
        precision="fp32",
        remat="none",
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=10),
        train=TrainConfig(steps=100, global_batch=16, seq_len=128, eval_every=50),
        run_dir="runs/sft",
        cpu_devices=8,
    )
