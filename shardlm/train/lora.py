"""What a run that trains adapters cannot do besides, refused before anything compiles."""

from shardlm.errors import ShardlmError
from shardlm.models.pretrained import Pretrained
from shardlm.train.config import OffloadConfig, RunConfig
from shardlm.train.replicas import apart


def check_lora(config: RunConfig) -> None:
    """Refuses what does not go with config.lora."""
    lora = config.lora
    if not lora.rank:
        return
    if not isinstance(config.model, Pretrained):
        raise ShardlmError(
            f"lora.rank={lora.rank} with new weights: adapters stand on a checkpoint; set model to "
            "Pretrained(FOLDER), or lora.rank to 0"
        )
    if lora.base != "dtype" and config.matmul != "dtype":
        raise ShardlmError(
            f"lora.base={lora.base} with matmul={config.matmul}: weights in few bits are multiplied in the compute "
            "dtype; set matmul to dtype, or lora.base to dtype"
        )
    if apart(config):
        raise ShardlmError(
            f"lora.rank={lora.rank} with replicas that exchange in their own way (slow_link, local_sgd or "
            "train.shares): adapters are small, and their gradients are summed every step; leave those as they are"
        )
    if config.offload != OffloadConfig():
        raise ShardlmError(
            f"lora.rank={lora.rank} with offload: what adapters need of the optimizer is small; set "
            "offload.optimizer and offload.params to False"
        )
    if config.mesh.pipeline != 1:
        raise ShardlmError(
            f"lora.rank={lora.rank} with mesh.pipeline={config.mesh.pipeline}: stages train whole layers; give the "
            "devices of pipeline to fsdp or tensor"
        )
