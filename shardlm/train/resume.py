"""The start of a run in a directory: a new state, or the one that an earlier start left there."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from shardlm.checkpoint import BEST_METRIC, Checkpoints
from shardlm.config import ABSENT, difference, from_json, to_json
from shardlm.data.chats import template_of
from shardlm.errors import ShardlmError
from shardlm.hf_files import behind_it
from shardlm.models.pretrained import Pretrained
from shardlm.run_files import CHECKPOINTS, CONFIG, find_run, save_run_files
from shardlm.run_lock import LOCK, holder
from shardlm.state import TrainState
from shardlm.tokenizer import Tokenizer
from shardlm.train.alike import check_same
from shardlm.train.config import RunConfig
from shardlm.train.frozen import check_frozen, keep_frozen
from shardlm.train.program import Program
from shardlm.train.task import Source

# What a checkpoint's arrays depend on; the rest of a configuration may change between starts.
FIXED = (
    "model.",
    "lora.",
    "optim.name",
    "optim.moments",
    "optim.ema_decay",
    "slow_link.",
    "local_sgd.",
    "train.encoder",
)
SHOWN = 4  # options of a config.json that a message names


def claim(run_dir: pathlib.Path, config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """What has changed since the last start in the run directory, in which nothing is written.

    Raises ShardlmError when the directory holds checkpoints of another model or tokenizer, or stands on other weights
    (frozen.py), and where it is another one for some process of the job.
    """
    latest = Checkpoints(run_dir / CHECKPOINTS).latest()
    remedy = "give all of them one run_dir, in a file system that their hosts share"
    check_same({"the latest checkpoint in run_dir": latest}, remedy)
    # Of a new run there is nothing else yet. It would stand still at its first checkpoint.
    check_same({f"who holds run_dir/{LOCK}": holder(run_dir)}, remedy)
    check_frozen(run_dir, config, resumes=latest is not None)
    if latest is None or not (run_dir / CONFIG).is_file():
        return []
    before = find_run(run_dir)
    changed = difference(from_json(RunConfig, before.config_json), config)
    fixed = [said for path, old, new in changed if path.startswith(FIXED) for said in another(path, old, new)]
    if before.tokenizer_path and Tokenizer.load(before.tokenizer_path).fingerprint != tokenizer.fingerprint:
        fixed.append("the tokenizer is another one")
    if fixed:
        raise ShardlmError(
            f"{run_dir} holds checkpoints of another run: {'; '.join(fixed)}. "
            "Set --config.run_dir to a new directory, or restore those settings to resume"
        )
    return [f"{path}: {old!r} -> {new!r}" for path, old, new in changed]


def keep(run_dir: pathlib.Path, config: RunConfig, tokenizer_path: pathlib.Path) -> None:
    """Writes configuration, tokenizer and chat template into the run directory, once its checkpoint and position in the
    data fit them: those who use the run go by what is there, also after a start that was refused."""
    save_run_files(run_dir, to_json(config), tokenizer_path)
    keep_frozen(run_dir, config)
    if config.data.chat_template:
        template_of(config.data.chat_template).save(run_dir)


def another(path: str, old: Any, new: Any) -> list[str]:
    """What to say of a field that differs: nothing of a folder that is spelt otherwise, of a config.json what in it."""
    if path == "model.folder" and ABSENT not in (old, new) and os.path.realpath(old) == os.path.realpath(new):
        return []
    if path == "model.config" and ABSENT not in (old, new):
        one, two = _by_real_path(json.loads(old)), _by_real_path(json.loads(new))
        names = [name for name in one | two if one.get(name) != two.get(name)]
        more = [f"{len(names) - SHOWN} more options of {path} differ"] if len(names) > SHOWN else []
        return [f"{path}'s {name} was {one.get(name)!r}, is {two.get(name)!r}" for name in names[:SHOWN]] + more
    return [f"{path} was {old!r}, is {new!r}"]


def _by_real_path(options: dict[str, Any]) -> dict[str, Any]:
    """A config.json, and the file of llama.cpp that it names, however that is spelt."""
    if not (file := behind_it(options)):
        return options
    return options | {"quantization_config": {**options["quantization_config"], "file": os.path.realpath(file)}}


def resume(program: Program, checkpoints: Checkpoints, source: Source) -> tuple[TrainState, int, bool, str]:
    """The state to start from, the number of steps it stands for, whether it was to be evaluated there and was not, and
    a line that says where it came from."""
    if checkpoints.latest() is None:
        origin = (
            f"the weights of {program.config.model.folder}"
            if isinstance(program.config.model, Pretrained)
            else "new weights"
        )
        adapters = ", with new adapters" if program.config.lora.rank else ""
        state = program.init(program.pretrained(), program.frozen(), program.encoder())
        return state, 0, False, f"starting from {origin}{adapters}"
    restored = checkpoints.restore(dataclasses.replace(program.state_shapes(), frozen=None))
    source.set_state(restored.data_state)
    state = dataclasses.replace(restored.state, frozen=program.frozen())
    left = f" (removed what an interrupted save left: {', '.join(checkpoints.removed)})" if checkpoints.removed else ""
    where = checkpoints.directory / str(restored.step)
    owes = restored.step % program.config.train.eval_every == 0 and BEST_METRIC not in restored.metrics
    owes = (owes and restored.step > 0) or restored.step >= program.config.train.steps
    return state, restored.step, owes, f"resuming after step {restored.step} from {where}{left}"
