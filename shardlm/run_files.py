"""The layout of a run directory, and the files that make its checkpoints usable by whoever meets them later:

    RUN/config.json          the resolved configuration
    RUN/tokenizer.json       the tokenizer, where the run has one
    RUN/checkpoints/<step>/  what `shardlm.checkpoint` writes
    RUN/frozen.json          which weights it stands on that are elsewhere, where it does (frozen_weights.py)
    RUN/.lock                held by who trains it (run_lock.py)

This module writes and finds the files beside the weights; it needs no jax.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

CONFIG, TOKENIZER, CHECKPOINTS = "config.json", "tokenizer.json", "checkpoints"


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """A run found on disk. `step` is that of the checkpoint that was asked for, None where the whole run was;
    `tokenizer_path` is None for a run without one."""

    run_dir: pathlib.Path
    config_json: dict[str, Any]
    tokenizer_path: pathlib.Path | None
    step: int | None

    @property
    def checkpoints_dir(self) -> pathlib.Path:
        return self.run_dir / CHECKPOINTS


def save_run_files(
    run_dir: str | os.PathLike,
    config_json: dict[str, Any],
    tokenizer: str | os.PathLike | bytes | None = None,
) -> None:
    """Writes the configuration and the tokenizer (a file to copy, or its content), in one process of a run.

    Raises:
        ShardlmError: a file cannot be written, or the tokenizer not read.
    """
    run_dir = pathlib.Path(run_dir)
    write_atomically(run_dir / CONFIG, json.dumps(config_json, indent=2).encode() + b"\n")
    if tokenizer is not None:
        content = tokenizer if isinstance(tokenizer, bytes) else _read(pathlib.Path(tokenizer))
        write_atomically(run_dir / TOKENIZER, content)


def find_run(path: str | os.PathLike) -> RunFiles:
    """Finds the run that `path` names: RUN, RUN/checkpoints, or RUN/checkpoints/<step> for one checkpoint.

    Raises:
        ShardlmError: there is no run at `path`, or its configuration is damaged.
    """
    path = pathlib.Path(path).absolute()
    one = path.parent.name == CHECKPOINTS and path.name.isdigit()
    run_dir = path.parent.parent if one else path.parent if path.name == CHECKPOINTS else path
    if not path.is_dir():
        steps = _steps(run_dir) if one else []
        remedy = f"the run has {', '.join(map(str, steps))}" if steps else "check the path"
        raise ShardlmError(f"There is no directory {path}: {remedy}.")
    if not (run_dir / CONFIG).is_file():
        raise ShardlmError(
            f"{run_dir} is not a run: it has no {CONFIG}. Give the directory that training printed, which "
            f"holds {CONFIG}, {TOKENIZER} and {CHECKPOINTS}/, or one checkpoint, as RUN/{CHECKPOINTS}/100; or all of a "
            f"Hugging Face checkpoint's folder, whose {CONFIG} says what it is."
        )
    config = _load(run_dir / CONFIG)
    if not isinstance(config, dict) or "model" not in config:
        raise ShardlmError(
            f"{run_dir / CONFIG} has neither model_type, as those of Hugging Face have, nor model, as that of a run: "
            "give the folder of a checkpoint or of a run, or add what is missing."
        )
    tokenizer = run_dir / TOKENIZER
    return RunFiles(
        run_dir=run_dir,
        config_json=config,
        tokenizer_path=tokenizer if tokenizer.is_file() else None,
        step=int(path.name) if one else None,
    )


def _steps(run_dir: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (run_dir / CHECKPOINTS).glob("*") if p.name.isdigit())


def _load(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise ShardlmError(f"{path} is damaged ({error}): restore it from a copy of the run.") from error


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ShardlmError(f"Cannot read {path}: {error.strerror or error}. Check the path and permissions.") from error
