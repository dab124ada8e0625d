"""Experiment trackers that a run's metrics also go to: Weights & Biases, MLflow, trackio. Each is called in a thread of
its own, so that one that is slow or fails costs metrics there and no training. Which metrics there are is `log`'s."""

import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically
from shardlm.run_files import CONFIG

TrackerName = Literal["wandb", "mlflow", "trackio"]
WAITING = 10_000  # lines that may wait for a tracker; further ones are not sent
PATIENCE = 30.0  # seconds that the end of a run waits for all of them

# What each gives: the name it knows its run by, (step, metrics) -> None, and (whether the run failed) -> None.
_Session = tuple[str, Callable[[int, Mapping[str, float]], Any], Callable[[bool], Any]]


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raises ShardlmError for one whose package is not installed, or that is named twice."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # of a folder wandb/ of runs, in which there is no package
            raise ShardlmError(f"trackers={','.join(names)}: {name} is not installed; pip install it, or leave it out")
    if len(set(names)) < len(names):
        raise ShardlmError(f"trackers={','.join(names)}: name each once")


class Tracker:
    """A run in one tracker; a run that resumes goes on in the same one there, which RUN/NAME.id names."""

    def __init__(self, name: TrackerName, run_dir: str | os.PathLike, resumes: bool, say: Callable[[str], None]):
        """`say` tells the user once where it fails or falls behind."""
        self._name, self._run_dir, self._resumes, self._say = name, pathlib.Path(run_dir), resumes, say
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | bool] = queue.Queue(WAITING)
        self._lost = ""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics, and returns at once."""
        try:
            self._waiting.put_nowait((step, metrics))
        except queue.Full:
            self._lose(f"is {WAITING:,} lines behind, and further ones are not sent; the run goes on")

    def end(self, failed: bool = False) -> None:
        """Ends the run there once it has what is on its way, and returns at once."""
        while True:
            with contextlib.suppress(queue.Full):
                return self._waiting.put_nowait(failed)
            with contextlib.suppress(queue.Empty):  # its oldest line makes room
                self._waiting.get_nowait()

    def wait(self, until: float) -> None:
        """For the end of the run there, until this time (time.monotonic)."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._lose(f"was not done {PATIENCE:.0f} s after the run's end, and is left")

    def _work(self) -> None:
        try:
            identity, log, finish = self._start()
            write_atomically(self._run_dir / f"{self._name}.id", identity.encode())
            while not isinstance(line := self._waiting.get(), bool):
                log(*line)
            finish(line)
        except (Exception, SystemExit) as error:
            self._lose(f"failed and gets nothing further; the run goes on ({type(error).__name__}: {error})")

    def _start(self) -> _Session:
        start, variable = _KNOWN[self._name]
        where = pathlib.Path(os.path.abspath(self._run_dir))
        kept = where / f"{self._name}.id"
        before = kept.read_text() if self._resumes and kept.exists() else None
        config = json.loads((where / CONFIG).read_bytes())
        project = os.environ.get(variable) or where.parent.name or "shardlm"
        return start(importlib.import_module(self._name), project, where, before, config)

    def _lose(self, what: str) -> None:
        if not self._lost:
            self._lost = what
            self._say(f"warning: the tracker {self._name} {what}; metrics.jsonl has all")


def end_all(trackers: Sequence[Tracker], failed: bool = False) -> None:
    """Ends the run in all of them, and waits for what is on its way for so long as PATIENCE says."""
    until = time.monotonic() + PATIENCE
    for tracker in trackers:
        tracker.end(failed)
    for tracker in trackers:
        tracker.wait(until)


def _wandb(wandb: Any, project: str, where: pathlib.Path, before: str | None, config: dict[str, Any]) -> _Session:
    how = {"id": before, "resume": "allow"} if before else {"name": where.name}
    # The run's output stays as it is: wandb would put itself in the place of both streams in the middle of it.
    run = wandb.init(project=project, dir=str(where), config=config, settings={"console": "off"}, **how)
    # Its own steps only go up: of a run that resumes at an earlier checkpoint it dropped all lines up to where the run
    # had been (wandb 0.31). So they are its count of lines, and charts are over a metric, as those of transformers.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def log(step: int, metrics: Mapping[str, float]) -> None:
        run.log({"step": step, **metrics})

    return run.id, log, lambda failed: run.finish(exit_code=int(failed))


def _mlflow(mlflow: Any, project: str, where: pathlib.Path, before: str | None, config: dict[str, Any]) -> _Session:
    mlflow.set_experiment(project)
    run = mlflow.start_run(run_id=before) if before else mlflow.start_run(run_name=where.name)
    mlflow.log_dict(config, CONFIG)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        mlflow.log_metrics(_as_paths(metrics), step=step)

    return run.info.run_id, log, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED")


def _as_paths(metrics: Mapping[str, float]) -> dict[str, float]:
    """By names that MLflow takes: plain paths of letters, digits and few signs. Those that would be the same have the
    number of their place behind them."""
    found: dict[str, float] = {}
    for place, (name, value) in enumerate(metrics.items(), 1):
        parts = [re.sub(r"[^\w. -]", "_", part) for part in name.split("/")]
        # Sources are called by paths, in which /data and ../data may be.
        path = "/".join(part if part.strip(".") else "_" * len(part) for part in parts if part)
        found[path if path not in found else f"{path}_{place}"] = value
    return found


def _trackio(trackio: Any, project: str, where: pathlib.Path, before: str | None, config: dict[str, Any]) -> _Session:
    run = trackio.init(project=project, name=before or where.name, config=config, resume="allow" if before else "never")
    return run.name, lambda step, metrics: run.log(metrics, step=step), lambda failed: run.finish()


# How each begins a run, and the variable by which its users name the project, which else is the run's folder's folder.
_KNOWN = {
    "wandb": (_wandb, "WANDB_PROJECT"),
    "mlflow": (_mlflow, "MLFLOW_EXPERIMENT_NAME"),
    "trackio": (_trackio, "TRACKIO_PROJECT"),
}
