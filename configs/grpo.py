"""python -m launch.train --config=configs/grpo.py

Hardware: any computer with a CPU, as two virtual devices, each of which samples too. Trains the model of configs/sft.py
on what two functions say of its own answers (examples/docstring_prompts.py: one sentence, of about 60 characters), by
group relative policy optimisation. First, after configs/sft.py:

    python -m launch.convert --checkpoint=runs/sft --output=runs/sft_hf --dtype=float32
    python examples/docstring_prompts.py data/questions
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.train.config import GrpoConfig, RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=Pretrained("runs/sft_hf"),
        data=DataConfig(
            train=("data/questions/train.jsonl",),
            validation=("data/questions/validation.jsonl",),
            tokenizer="runs/sft_hf",
            chat_template="runs/sft_hf",
        ),
        mesh=MeshSpec(fsdp=2),
        grpo=GrpoConfig(
            reward=("examples/docstring_prompts.py:sentence", "examples/docstring_prompts.py:length"),
            max_tokens=96,
            kv_cache_gib=0.05,
        ),
        precision="fp32",
        remat="none",
        optim=OptimConfig(learning_rate=2e-4, schedule="constant", warmup_steps=5, weight_decay=0.0),
        train=TrainConfig(steps=60, global_batch=64, seq_len=160, accumulation=4, log_every=1, eval_every=20),
        run_dir="runs/grpo",
        cpu_devices=2,
    )
