"""Which weights a run stands on that are in no checkpoint of its own (frozen_weights.py), by its configuration."""

import pathlib

from shardlm.frozen_weights import BASE, check, digest, keep
from shardlm.models.pretrained import Pretrained
from shardlm.train.alike import check_same
from shardlm.train.config import RunConfig


def check_frozen(run_dir: pathlib.Path, config: RunConfig, resumes: bool) -> None:
    """Raises ShardlmError where a run would go on with other weights than it began with, or one of its processes with
    others than process 0. All must call it."""
    found = _digests(config)
    check_same({f"the weights of {name}": one for name, one in found.items()}, "give all hosts the same files")
    if resumes:
        check(run_dir, found, ", or set --config.run_dir to a new directory")


def keep_frozen(run_dir: pathlib.Path, config: RunConfig) -> None:
    """Writes down what `check_frozen` compares, where there is any."""
    keep(run_dir, _digests(config))


def _digests(config: RunConfig) -> dict[str, str]:
    """By the option that names their folder."""
    folders = {"distill.teacher": config.distill.teacher} if config.distill.teacher else {}
    if isinstance(config.model, Pretrained) and (config.lora.rank or config.preference.compares or config.grpo.beta):
        folders[BASE] = config.model.folder
    return {name: digest(folder) for name, folder in folders.items()}
