"""A law: a run resumed after any stop continues bit for bit on the same mesh, and within rounding on any other."""

import shutil
import signal
import sys
import time

import numpy as np
import pytest
import tiny_run
from ports import free_port

from shardlm.train import faults
from shardlm.train.faults import StopSignal

# Meshes add the same float32 numbers in another order; twelve AdamW steps amplify that (measured: up to 1e-5).
OTHER_MESH = 1e-3


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    home = tmp_path_factory.mktemp("uninterrupted")
    config = tiny_run.write(home)
    done = tiny_run.train(config)
    assert done.returncode == 0, done.stderr
    return config, home / "run", tiny_run.losses(home / "run")


def test_kill_9_then_the_same_command(uninterrupted, tmp_path):
    config, _, expected = uninterrupted
    run = tmp_path / "run"
    process = tiny_run.start(config, f"run_dir={run}", "train.steps=12", last=True)
    while not (run / "checkpoints" / "4").is_dir() or not [1 for step, _ in tiny_run.losses(run) if step > 4]:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    process.kill()
    process.wait()
    again = tiny_run.train(config, f"run_dir={run}")
    assert again.returncode == 0, again.stderr
    assert f"from {run}/checkpoints/" in again.stdout and "resuming after step" in again.stdout
    assert tiny_run.losses(run) == expected


@pytest.mark.parametrize(
    "flags",
    [
        ("mesh.data=1", "mesh.tensor=4", "rules=zero1"),
        ("mesh.fsdp=8", "mesh.data=1", "mesh.tensor=1", "rules=hybrid"),
        ("mesh.data=1", "mesh.pipeline=2", "train.accumulation=4", "pipeline.schedule=1f1b", "remat=full"),
    ],
    ids=["tensor4-zero1", "fsdp8-hybrid", "pipeline2-1f1b"],
)
def test_resume_on_another_mesh(uninterrupted, tmp_path, flags):
    config, run, expected = uninterrupted
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    for step in (8, 12):
        shutil.rmtree(moved / "checkpoints" / str(step))
    done = tiny_run.train(config, f"run_dir={moved}", *flags)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 4" in done.stdout and "changed since the last start: mesh." in done.stdout
    assert tiny_run.largest_difference(tiny_run.losses(moved), expected) < OTHER_MESH


def test_ctrl_c_saves_says_how_to_resume_and_resumes(uninterrupted, tmp_path):
    config, _, expected = uninterrupted
    run = tmp_path / "run"
    process = tiny_run.start(config, f"run_dir={run}", "checkpoint.every_steps=12", last=True)
    while not (run / "metrics.jsonl").exists() or len(tiny_run.losses(run)) < 4:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 130, output
    assert "SIGINT: saved after step" in output and "resume with: " in output and " -m launch.train --config=" in output
    assert "Traceback" not in output
    again = tiny_run.train(config, f"run_dir={run}", "checkpoint.every_steps=12")
    assert again.returncode == 0 and "resuming after step" in again.stdout, again.stderr
    assert tiny_run.losses(run) == expected


def test_a_finished_run_started_again_ends_at_once(uninterrupted, tmp_path):
    config, run, expected = uninterrupted
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    done = tiny_run.train(config, f"run_dir={copy}", "train.steps=10")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("resuming after step 12")
    assert "the run has 12 steps behind it, so none is left to do: it is evaluated as it is" in lines
    [command] = [line for line in lines if line.startswith("resume:")]
    assert command.count("train.steps") == 1 and command.endswith(" --config.train.steps=24")
    assert tiny_run.losses(copy) == expected


def test_signals_are_kept_for_the_loop_once_there_is_something_to_save():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert signal.getsignal(signal.SIGTERM) == before
        stop.listen()
        signal.raise_signal(signal.SIGTERM)
        assert stop.asking()() and stop.told == signal.SIGTERM and stop.name == "SIGTERM" and stop.status == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def test_a_terminal_that_closes_stops_a_run_unless_it_is_to_outlive_it(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopSignal() as stop:
            stop.listen()
            signal.raise_signal(signal.SIGHUP)
            told = (stop.name, stop.status)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == (("SIGHUP", 129) if handler == signal.SIG_DFL else (None, 143))


@pytest.mark.parametrize(("seconds", "asked"), [(0.01, [1, 2, 456]), (2.0, [1, 2, 4, 6]), (40.0, [1, 2, 3, 4])])
def test_processes_ask_each_other_by_the_clock_whether_to_stop(monkeypatch, seconds, asked):
    """Of steps of 40 s each, ten between two looks would be longer than any scheduler waits."""
    found, now = [], [0.0]

    def gathered(own):
        found.append(round(now[0] / seconds))  # steps done
        other = own * (1, 1.1)  # a slower one
        return np.array([own, other])

    monkeypatch.setattr(faults.jax, "process_count", lambda: 2)
    monkeypatch.setattr(faults.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(faults.multihost_utils, "process_allgather", gathered)
    asks = StopSignal().asking()
    for _ in range(599):
        now[0] += seconds
        assert not asks()
    assert found[: len(asked)] == asked


def test_all_processes_know_that_one_was_told_and_by_what(monkeypatch):
    """By Ctrl-C here, by its scheduler there: a machine that is taken away is no end on purpose."""
    monkeypatch.setattr(faults.jax, "process_count", lambda: 2)
    monkeypatch.setattr(faults.multihost_utils, "process_allgather", lambda own: np.array([own, [signal.SIGTERM, 0]]))
    stop = StopSignal()
    stop.name = "SIGINT"
    assert stop.asking()() and stop.told == signal.SIGTERM and stop.status == 130


@pytest.mark.wide
def test_several_processes_give_the_losses_of_one(uninterrupted, tmp_path):
    # Each compiles for itself, 7 s of a core: four, over which fsdp is split too, where Python is 3.12 or newer.
    count = 4 if sys.version_info >= (3, 12) else 2
    config, _, expected = uninterrupted
    run = tmp_path / "run"
    port = free_port()
    cluster = (f"--coordinator_address=localhost:{port}", f"--num_processes={count}")
    flags = (f"run_dir={run}", f"cpu_devices={8 // count}")
    processes = [tiny_run.start(config, *flags, extra=(*cluster, f"--process_id={i}")) for i in range(count)]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, outputs
    assert "starting from new weights" in outputs[0] and "starting from" not in outputs[1]
    assert tiny_run.largest_difference(tiny_run.losses(run), expected) < OTHER_MESH
    # And one process takes the run over.
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / str(step))
    more = tiny_run.train(config, f"run_dir={run}")
    assert more.returncode == 0 and "resuming after step 4" in more.stdout, more.stderr
    assert tiny_run.largest_difference(tiny_run.losses(run), expected) < OTHER_MESH
