"""Runs on images go on as others do: bit for bit on the same mesh, within rounding on another and in two processes."""

import dataclasses
import json
import shutil

import pytest
import tiny_run
from ports import free_port
from squares import config_of, made

from shardlm.checkpoint import CheckpointConfig
from shardlm.config_json import to_json
from shardlm.mesh import MeshSpec

pytestmark = pytest.mark.wide
OTHER_MESH = 1e-3  # test_resume.py's
TWO_PROCESSES = 1e-5  # sums between processes add in another order; measured: at most 5e-7
CONFIG = """
import json
from shardlm.config_json import from_json
from shardlm.train.config import RunConfig


def get_config():
    return from_json(RunConfig, json.loads({text!r}))
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    home = made(tmp_path_factory.mktemp("squares"))
    found = config_of(home, home / "run", mesh=MeshSpec(data=2, fsdp=2), rules="hybrid", cpu_devices=4)
    train = dataclasses.replace(found.train, steps=6, eval_every=3)
    found = dataclasses.replace(found, train=train, checkpoint=CheckpointConfig(every_steps=2, keep=9))
    config = home / "config.py"
    config.write_text(CONFIG.format(text=json.dumps(to_json(found))))
    done = tiny_run.train(config)
    assert done.returncode == 0, done.stderr
    return config, home / "run", tiny_run.losses(home / "run")


def shortened(run, to):
    shutil.copytree(run, to)
    for step in (4, 6):
        shutil.rmtree(to / "checkpoints" / str(step))
    return to


def test_a_run_goes_on_bit_for_bit(uninterrupted, tmp_path):
    config, run, expected = uninterrupted
    done = tiny_run.train(config, f"run_dir={shortened(run, tmp_path / 'run')}")
    assert done.returncode == 0 and "resuming after step 2" in done.stdout, done.stderr
    assert tiny_run.losses(tmp_path / "run") == expected


def test_another_mesh_takes_over(uninterrupted, tmp_path):
    config, run, expected = uninterrupted
    flags = ("mesh.data=1", "mesh.tensor=2", "rules=zero3")
    done = tiny_run.train(config, f"run_dir={shortened(run, tmp_path / 'run')}", *flags)
    assert done.returncode == 0 and "resuming after step 2" in done.stdout, done.stderr
    assert tiny_run.largest_difference(tiny_run.losses(tmp_path / "run"), expected) < OTHER_MESH


def two_processes(config, run, *flags) -> dict:
    """What they logged."""
    cluster = (f"--coordinator_address=localhost:{free_port()}", "--num_processes=2")
    flags = (f"run_dir={run}", "cpu_devices=2", *flags)
    processes = [tiny_run.start(config, *flags, extra=(*cluster, f"--process_id={i}")) for i in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return tiny_run.losses(run)


def test_two_processes_are_one(uninterrupted, tmp_path):
    """Each reads the images of its own devices."""
    config, _, expected = uninterrupted
    found = two_processes(config, tmp_path / "run")
    assert found[1, "loss"] == expected[1, "loss"]
    assert tiny_run.largest_difference(found, expected) < TWO_PROCESSES


def test_two_processes_train_one_encoder(uninterrupted, tmp_path):
    config, _, without = uninterrupted
    flags = ("train.encoder=all", "train.steps=3")
    done = tiny_run.train(config, f"run_dir={tmp_path / 'alone'}", *flags)
    assert done.returncode == 0 and "of which all of it is trained" in done.stdout, done.stderr
    expected = tiny_run.losses(tmp_path / "alone")
    assert expected[1, "loss"] == without[1, "loss"] and expected[3, "loss"] != without[3, "loss"]
    found = two_processes(config, tmp_path / "run", *flags)
    assert tiny_run.largest_difference(found, expected) < TWO_PROCESSES
