"""python -m launch.train --config=configs/dpo.py

Hardware: any computer with a CPU, as eight virtual devices. Direct preference optimisation of what configs/sft.py made
(its first lines make what that needs), on pairs of a function's docstring and a class's:

    python -m launch.train --config=configs/sft.py
    python -m launch.convert --checkpoint=runs/sft --output=runs/sft_hf --dtype=float32
    python examples/docstring_pairs.py data/pairs

By adapters: --config.lora.rank=8 --config.optim.learning_rate=5e-3 --config.run_dir=runs/dpo_lora

Measured: see BUILD_NOTES.md.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.train.config import PreferenceConfig, RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=Pretrained("runs/sft_hf"),
        data=DataConfig(
            train=("data/pairs/train.jsonl",),
            validation=("data/pairs/validation.jsonl",),
            tokenizer="runs/sft_hf",
            chat_template="runs/sft_hf",
            packing="pairs",
        ),
        mesh=MeshSpec(fsdp=4, tensor=2),
        preference=PreferenceConfig(beta=0.1),
        precision="fp32",
        remat="none",
        optim=OptimConfig(learning_rate=5e-4, warmup_steps=10, weight_decay=0.0),
        train=TrainConfig(steps=100, global_batch=8, seq_len=256, eval_every=25),
        run_dir="runs/dpo",
        cpu_devices=8,
    )
