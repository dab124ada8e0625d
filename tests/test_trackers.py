"""Trackers of experiments, by small modules in their names: what they are told, and that they stop nothing."""

import json
import sys
import threading
import time

import pytest

from shardlm.errors import ShardlmError
from shardlm.metrics import trackers
from shardlm.metrics.log import MetricsLog
from shardlm.metrics.trackers import Tracker, check_trackers

WANDB = """
calls = []

class Run:
    def __init__(self, id):
        self.id = id
    def define_metric(self, name, step_metric=None):
        calls.append(("define", name, step_metric))
    def log(self, metrics):
        calls.append(("log", metrics))
    def finish(self, exit_code):
        calls.append(("finish", exit_code))

def init(**how):
    calls.append(("init", how))
    return Run(how.get("id", "made"))
"""
MLFLOW = """
import types
calls = []

def set_experiment(project):
    calls.append(("experiment", project))
def start_run(run_id=None, run_name=None):
    calls.append(("start", run_id, run_name))
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "made"))
def log_dict(config, name):
    calls.append(("config", name, config))
def log_metrics(metrics, step):
    calls.append(("log", step, metrics))
def end_run(status):
    calls.append(("end", status))
"""
TRACKIO = """
calls = []

class Run:
    def __init__(self, name):
        self.name = name
    def log(self, metrics, step):
        calls.append(("log", step, metrics))
    def finish(self):
        calls.append(("finish",))

def init(**how):
    calls.append(("init", how))
    return Run(how["name"])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run, beside modules in the trackers' names."""
    for name, text in (("wandb", WANDB), ("mlflow", MLFLOW), ("trackio", TRACKIO)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for _, variable in trackers._KNOWN.values():
        monkeypatch.delenv(variable, raising=False)
    home = tmp_path / "runs" / "mine"
    home.mkdir(parents=True)
    (home / "config.json").write_text('{"rules": "zero3"}')
    yield home
    for name in ("wandb", "mlflow", "trackio"):
        sys.modules.pop(name, None)


def session(run, name, steps, resume_step=0, said=None):
    say = (said if said is not None else []).append
    with MetricsLog(run, resume_step, trackers=lambda: [Tracker(name, run, resume_step > 0, say)]) as log:
        for step in steps:
            log.write(step, {"loss": 2.0, "validation_loss/*.txt": 1.0, "expert_load": [1.0, 2.0]})
    found = sys.modules[name].calls
    calls = [*found]
    found.clear()
    return calls


def test_wandb_gets_the_run_and_goes_on_with_it(run):
    metrics = {"loss": 2.0, "validation_loss/*.txt": 1.0}  # no arrays
    how = {"project": "runs", "dir": str(run), "config": {"rules": "zero3"}, "settings": {"console": "off"}}
    axis = [("define", "step", None), ("define", "*", "step")]
    logs = [*axis, *(("log", {"step": step} | metrics) for step in (1, 2, 3)), ("finish", 0)]
    assert session(run, "wandb", [1, 2, 3]) == [("init", how | {"name": "mine"}), *logs]
    [init, *again] = session(run, "wandb", [2], resume_step=1)  # wandb drops a line of an earlier step than its last
    assert init == ("init", how | {"id": "made", "resume": "allow"}) and again == [*axis, logs[3], ("finish", 0)]
    [init, *_] = session(run, "wandb", [1])  # begun anew, as metrics.jsonl is
    assert init == ("init", how | {"name": "mine"})


def test_mlflow_and_trackio_get_the_same(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    said, config = {"loss": 2.0, "validation_loss/_.txt": 1.0}, ("config", "config.json", {"rules": "zero3"})
    first = [("experiment", "theirs"), ("start", None, "mine"), config, ("log", 1, said), ("end", "FINISHED")]
    assert session(run, "mlflow", [1]) == first
    assert session(run, "mlflow", [], resume_step=1)[1] == ("start", "made", None)
    how = {"project": "runs", "name": "mine", "config": {"rules": "zero3"}}
    assert session(run, "trackio", [])[0] == ("init", how | {"resume": "never"})
    assert session(run, "trackio", [], resume_step=1)[0] == ("init", how | {"resume": "allow"})


def test_mlflow_is_told_plain_paths():
    """It refuses other names, and gets nothing further then (mlflow-skinny 3.17)."""
    names = ["validation_loss//data/a", "validation_loss/../b:c", "validation_loss/../b*c", "v/./x", "loss"]
    plain = ["validation_loss/data/a", "validation_loss/__/b_c", "validation_loss/__/b_c_3", "v/_/x", "loss"]
    assert [*trackers._as_paths(dict.fromkeys(names, 1.0))] == plain


def test_a_run_that_ends_in_an_error_has_failed(run):
    with pytest.raises(ShardlmError), MetricsLog(run, trackers=lambda: [Tracker("wandb", run, False, print)]):
        raise ShardlmError("no space")
    assert sys.modules["wandb"].calls[-1] == ("finish", 1)


@pytest.mark.parametrize("where", ["def init", "    def log", "    def finish"])
def test_a_tracker_that_fails_is_told_once_and_stops_nothing(run, where):
    said, path = [], run.parent.parent / "wandb.py"
    line = next(line for line in WANDB.splitlines() if line.startswith(where))
    inside = " " * (where.index("def") + 4)
    path.write_text(WANDB.replace(line, f"{line}\n{inside}raise SystemExit('no network')"))
    session(run, "wandb", range(1, 6), said=said)
    assert said == [
        "warning: the tracker wandb failed and gets nothing further; the run goes on (SystemExit: no network); "
        "metrics.jsonl has all"
    ]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_tracker_that_stands_still_holds_nothing_up(run, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    monkeypatch.setattr(trackers, "WAITING", 3)
    goes_on, said = threading.Event(), []
    monkeypatch.setitem(trackers._KNOWN, "wandb", (lambda *_: goes_on.wait(60), "WANDB_PROJECT"))
    begun = time.monotonic()
    session(run, "wandb", range(1, 9), said=said)
    assert time.monotonic() - begun < 30  # it would be 60
    [text] = said
    assert text.startswith(
        "warning: the tracker wandb is 3 lines behind, and further ones are not sent; the run goes on"
    )
    goes_on.set()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 9)]


def test_the_end_of_a_run_waits_once_for_all_and_tells_each_at_once(run, monkeypatch):
    """The first hangs: the second ends all the same, and what is open is closed though the user waits no longer."""
    goes_on, ended, said = threading.Event(), threading.Event(), []
    monkeypatch.setitem(trackers._KNOWN, "wandb", (lambda *_: goes_on.wait(60), "WANDB_PROJECT"))
    session = "theirs", lambda *_: None, lambda failed: ended.set()
    monkeypatch.setitem(trackers._KNOWN, "mlflow", (lambda *_: session, "MLFLOW_EXPERIMENT_NAME"))

    def interrupted(self, until):
        assert ended.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(Tracker, "wait", interrupted)
    log = MetricsLog(run, trackers=lambda: [Tracker(name, run, False, said.append) for name in ("wandb", "mlflow")])
    with pytest.raises(KeyboardInterrupt):
        log.close()
    goes_on.set()
    assert log._lines._file.closed and not said


def test_what_is_not_installed_is_refused(run):
    check_trackers(("wandb", "mlflow"))
    (run.parent.parent / "trackio.py").unlink()
    (run.parent.parent / "trackio").mkdir()  # of runs
    with pytest.raises(ShardlmError, match=r"trackers=wandb,trackio: trackio is not installed; pip install it"):
        check_trackers(("wandb", "trackio"))
    with pytest.raises(ShardlmError, match=r"trackers=wandb,wandb: name each once"):
        check_trackers(("wandb", "wandb"))
