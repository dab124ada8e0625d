"""python -m launch.train --config=configs/sft_images.py

Hardware: any computer with a CPU, as two virtual devices. Trains a small model that sees on conversations about
pictures, the loss on the assistant's tokens only, its encoder as it is (--config.train.encoder=all trains that too, and
projector what brings its vectors into the text's width). Both are made here first:

    python examples/square_chats.py data/squares

Then it says which square is where in a picture that it has not seen:

    python -m launch.generate --checkpoint=runs/sft_images --chat --image=data/squares/images/validation_0000.png \\
        --prompt='What is in the picture?' --temperature=0
    python -m launch.convert --checkpoint=runs/sft_images --output=runs/sft_images_hf    # for transformers, whole

Measured: see BUILD_NOTES.md.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=Pretrained("data/squares/model"),
        data=DataConfig(
            train=("data/squares/train.jsonl",),
            validation=("data/squares/validation.jsonl",),
            tokenizer="data/squares/model",
            chat_template="data/squares/model",
            packing="whole",
        ),
        mesh=MeshSpec(fsdp=2),
        precision="fp32",
        remat="none",
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=10),
        train=TrainConfig(steps=150, global_batch=16, seq_len=128, eval_every=50),
        run_dir="runs/sft_images",
        cpu_devices=2,
    )
