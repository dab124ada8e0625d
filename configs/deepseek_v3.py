"""python -m launch.train --config=configs/deepseek_v3.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 1,024 x H100 80 GB in 128 hosts with InfiniBand: a sequence over 4 GPUs of a host, the 256 experts over 8 such
groups in 4 hosts, whose tokens each gathers, weights over fsdp=32. Needs the extra `experts`. A GPU takes at most twice
an even share of the tokens; the rest is dropped and counted.
Expected: compiled without a GPU, not measured: 8.5 GiB of state and 37.7 GiB of temporaries a GPU, with cuDNN's
attention; 84.8 s a step by the planner's rates.
Data: your own text or shards, and DeepSeek V3's tokenizer.json in data.tokenizer.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=DeepseekConfig(capacity_factor=2.0),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(fsdp=32, expert=8, context=4),
        rules="zero3",
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=2.2e-4, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000, global_batch=16_384, seq_len=4096, accumulation=8, eval_every=1000, eval_batches=32
        ),
        run_dir="runs/deepseek_v3",
    )
