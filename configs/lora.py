"""python -m launch.train --config=configs/lora.py

Hardware: any computer with a CPU, as eight virtual devices. Fine-tunes the checkpoint and the chats of configs/sft.py
(its first lines make both) by adapters of rank 8, on weights that are held in int4 (QLoRA). On an 8B model in bfloat16
the same fits one 24 GB GPU (compiled: BUILD_NOTES.md).

    python -m launch.convert --checkpoint=runs/lora --output=runs/adapter            # for PEFT
    python -m launch.convert --checkpoint=runs/lora --output=runs/merged --merge     # for transformers
"""

from shardlm.data.config import DataConfig
from shardlm.layers.lora import LoraConfig
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
        lora=LoraConfig(rank=8, alpha=16.0, base="int4"),
        precision="fp32",
        remat="none",
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=10, weight_decay=0.0),
        train=TrainConfig(steps=100, global_batch=16, seq_len=128, eval_every=50),
        run_dir="runs/lora",
        cpu_devices=8,
    )
