"""Which weights a run stands on that are in no checkpoint of its own: those of adapters, of a reference, of a teacher.
They are read again at every start, from folders in which others may be by then."""

import hashlib
import json
import pathlib

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically
from shardlm.hf_files import behind_it, home, read_config
from shardlm.models.pretrained import Pretrained
from shardlm.train.alike import check_same
from shardlm.train.config import RunConfig
from shardlm.weight_files import hold

FROZEN = "frozen.json"  # in the run's directory: by the option that names its folder, what is known of each
SAMPLE_BYTES = 1 << 16  # of the beginning, the middle and the end of each file; a step of training changes all of them


def check_frozen(run_dir: pathlib.Path, config: RunConfig, resumes: bool) -> None:
    """Raises ShardlmError where a run would go on with other weights than it began with, or one of its processes with
    others than process 0. All must call it."""
    found = _digests(config)
    check_same({f"the weights of {name}": one for name, one in found.items()}, "give all hosts the same files")
    path = run_dir / FROZEN
    if not resumes or not path.exists():  # of a run that is older, or stood on none
        return
    try:
        before = json.loads(path.read_bytes())
    except ValueError as error:
        raise ShardlmError(f"{path} is damaged ({error}): delete it, and the weights are taken as they are") from error
    if others := [name for name, one in found.items() if before.get(name, one) != one]:
        raise ShardlmError(
            f"the weights that {' and '.join(others)} names are others than those that {run_dir} began with, by name, "
            "size or content of their files: put those back, or set --config.run_dir to a new directory. Where they "
            f"are the same, cut into files in another way, delete {path}"
        )


def keep_frozen(run_dir: pathlib.Path, config: RunConfig) -> None:
    """Writes down what `check_frozen` compares, where there is any."""
    if found := _digests(config):
        write_atomically(run_dir / FROZEN, json.dumps(found, indent=1).encode() + b"\n")


def _digests(config: RunConfig) -> dict[str, str]:
    """By the option that names their folder."""
    folders = {"distill.teacher": config.distill.teacher} if config.distill.teacher else {}
    if isinstance(config.model, Pretrained) and (config.lora.rank or config.preference.compares or config.grpo.beta):
        folders["model.folder"] = config.model.folder
    return {name: _digest(folder) for name, folder in folders.items()}


def _digest(folder: str) -> str:
    """Of the files of a checkpoint, of parts of them: all of 140 GB would take minutes."""
    path = home(pathlib.Path(folder))
    behind, known = behind_it(read_config(path)), hashlib.sha256()
    for file in sorted([behind] if behind else hold(path)):
        size = file.stat().st_size
        known.update(json.dumps([file.name, size]).encode())
        with open(file, "rb") as opened:
            for at in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                opened.seek(at)
                known.update(opened.read(SAMPLE_BYTES))
    return known.hexdigest()
