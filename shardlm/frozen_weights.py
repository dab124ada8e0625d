"""Which weights a run stands on that are in no checkpoint of its own: those of adapters, of a reference, of a teacher.
They are read again at every use, from folders in which others may be by then. RUN/frozen.json has what is known of each
by the option that names its folder."""

import hashlib
import json
import pathlib
from collections.abc import Mapping

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically
from shardlm.hf_files import behind_it, home, read_config
from shardlm.weight_files import hold

FROZEN = "frozen.json"
BASE = "model.folder"  # of adapters, or of a reference
SAMPLE_BYTES = 1 << 16  # of the beginning, the middle and the end of each file; a step of training changes all of them


def check(run_dir: pathlib.Path, found: Mapping[str, str], otherwise: str = "") -> None:
    """Raises ShardlmError where these digests are others than the run began with; `otherwise` is what else may be done
    than to put the weights back."""
    path = run_dir / FROZEN
    if not path.exists():  # of a run that is older, or stood on none
        return
    try:
        before = json.loads(path.read_bytes())
    except ValueError as error:
        raise ShardlmError(f"{path} is damaged ({error}): delete it, and the weights are taken as they are") from error
    if others := [name for name, one in found.items() if before.get(name, one) != one]:
        raise ShardlmError(
            f"the weights that {' and '.join(others)} names are others than those that {run_dir} began with, by name, "
            f"size or content of their files: put those back{otherwise}. Where they are the same, cut into files in "
            f"another way, delete {path}"
        )


def check_base(run_dir: pathlib.Path, folder: str) -> None:
    """The same of the checkpoint in `folder` that the run's adapters stand on, for whoever uses them."""
    if (run_dir / FROZEN).exists():
        check(run_dir, {BASE: digest(folder)}, ", or train on these")


def keep(run_dir: pathlib.Path, found: Mapping[str, str]) -> None:
    """Writes down what `check` compares, where there is any."""
    if found:
        write_atomically(run_dir / FROZEN, json.dumps(found, indent=1).encode() + b"\n")


def digest(folder: str) -> str:
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
