"""python -m launch.train --config=configs/deepseek_v3.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 1,024 x H100 80 GB in 128 hosts: 8 pipeline stages, the 256 experts over 64 GPUs, fsdp=2. Needs the extra
`experts`. A GPU takes at most twice an even share of another's tokens; the rest is dropped and counted.
Expected: compiled without a GPU, not measured: 9.6 GiB of state and 24.9 GiB of temporaries a GPU, with cuDNN's
attention; no speed is known yet. The pipeline idles for 18.3% of the layers' time (computed).
Data: your own text or shards, and DeepSeek V3's tokenizer.json in data.tokenizer.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=DeepseekConfig(capacity_factor=2.0),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(pipeline=8, fsdp=2, expert=64),
        rules="zero3",
        pipeline=PipelineConfig(schedule="1f1b"),
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=2.2e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=16_384, seq_len=4096, accumulation=128, eval_every=1000, eval_batches=32
        ),
        run_dir="runs/deepseek_v3",
    )
