"""What a run cannot do besides that trains what it will serve in few bits (matmul=W4A16 and so on), refused before
anything compiles."""

import functools

from shardlm.errors import ShardlmError
from shardlm.models import registry
from shardlm.models.naming import apart
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.schemes import SCHEMES
from shardlm.train.config import RunConfig
from shardlm.written_few_bits import checked


def check_rounded(config: RunConfig, shape: TransformerConfig) -> None:
    """Refuses what does not go with a scheme as config.matmul."""
    if config.matmul not in SCHEMES:
        return
    what = f"matmul={config.matmul}"
    if config.lora.rank:
        raise ShardlmError(
            f"{what} with lora.rank={config.lora.rank}: what is rounded is the sum of weights and adapters, and they "
            "are multiplied apart; set matmul to dtype, or lora.rank to 0"
        )
    if config.offload.params:
        raise ShardlmError(
            f"{what} with offload.params: weights are rounded from float32, and the device has a copy in the compute "
            "dtype; set offload.params to False (offload.optimizer works)"
        )
    if config.grpo.reward:
        raise ShardlmError(
            f"{what} with grpo.reward: replies are sampled by weights in 16 bits, which are others than those that are "
            "trained; set matmul to dtype"
        )
    if not hasattr(config.model, "to_hf"):
        raise ShardlmError(
            f"{what}: a {type(config.model).__name__} has no architecture on Hugging Face, and is written in no "
            "folder; set matmul to dtype"
        )
    _check_written(config.matmul, config.model, shape)


@functools.lru_cache(maxsize=16)
def _check_written(name: str, model, shape: TransformerConfig) -> None:
    options = model.to_hf()
    checked(name, shape, lambda block: apart(registry.names(options, shape, block)), trained=True)
