"""python -m launch.train --config=configs/diloco_two_sites.py --config.data.train=TEXT --config.data.validation=TEXT

Hardware: 2 sites of 8 x H100 80 GB each, joined by an ordinary network: data=2 between the sites, fsdp=8 within each.
Streaming DiLoCo (https://arxiv.org/abs/2501.18512): each site trains Llama 3 8B on its own half of every batch; each of
4 fragments of the layers is exchanged in 8 bits once in 100 steps, beside the step that starts it.
Expected: compiled without GPUs, not measured: 26.2 GiB of state and 13.4 GiB of temporaries a GPU; 9.7 MiB a step cross
from each GPU on average, 3,830 MiB in synchronous training; the first half of an exchange runs beside all layers
(tests/test_diloco_gpu.py). No speed and no loss is known yet.
Data: your own text or shards, and Llama 3's tokenizer.json in data.tokenizer.
"""

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import LocalSgdConfig, RunConfig, SlowLinkConfig, TrainConfig


def get_config() -> RunConfig:
    return RunConfig(
        model=LlamaConfig(),
        data=DataConfig(
            train=("data/train/*.jsonl",), validation=("data/validation/*.jsonl",), tokenizer="data/tokenizer.json"
        ),
        mesh=MeshSpec(data=2, fsdp=8),
        rules="hybrid",
        precision="bf16",
        remat="full",
        optim=OptimConfig(learning_rate=3e-4, warmup_steps=2000),
        train=TrainConfig(steps=100_000, global_batch=16, seq_len=8192, eval_every=1000, eval_batches=32),
        slow_link=SlowLinkConfig(compression="int8"),
        local_sgd=LocalSgdConfig(
            inner_steps=100, outer_learning_rate=0.4, outer_momentum=0.9, fragments=4, overlap=1, mixing=0.5
        ),
        xla_profile="hopper",
        run_dir="runs/diloco_two_sites",
    )
