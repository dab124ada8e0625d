"""Checkpoints on disks that are full or that go: what is said, and that no checkpoint is lost by it."""

import contextlib
import errno
import resource
import shutil

import jax
import jax.numpy as jnp
import pytest

from shardlm.checkpoint import CheckpointConfig, Checkpoints
from shardlm.checkpoint_messages import SaveFailed
from shardlm.errors import ShardlmError

CONFIG = CheckpointConfig(every_steps=10, keep=9, keep_best=0)


def make_state():
    return {"params": jnp.arange(8192.0).reshape(64, 128)}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def saved(tmp_path):
    """A directory with checkpoints at 10 and 20."""
    with Checkpoints(tmp_path / "checkpoints", CONFIG) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, make_state(), {}, {})
    return tmp_path / "checkpoints"


@contextlib.contextmanager
def full_disk(limit):
    """A limit on the size of a file stands for the disk: writing past it fails in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_and_costs_no_checkpoint(saved, capfd):
    with Checkpoints(saved, CONFIG) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        with full_disk(1000):
            checkpoints.save(30, make_state(), {}, {})
            with pytest.raises(ShardlmError) as error:
                checkpoints.wait()
        message = str(error.value)
        assert f"{saved}/30 could not be written: the disk is full: it needs" in message
        assert "free on its file system (or files may not become so large: ulimit -f)" in message
        assert "The checkpoints at step 10, 20 are intact. Free some space or lower checkpoint.keep" in message
        checkpoints.save(40, make_state(), {}, {})
    assert checkpoints.steps() == [10, 20, 40]
    assert "Traceback" not in capfd.readouterr().err


def test_a_disk_that_will_not_hold_it_is_not_filled(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("shardlm.checkpoint.shutil.disk_usage", lambda _: usage)
    message = "the disk is full: it needs 1.0 MiB, and there are 1.0 MiB free .* It was the first. .* or set run_dir"
    with Checkpoints(tmp_path, CONFIG) as checkpoints, pytest.raises(ShardlmError, match=message):
        checkpoints.save(1, {"params": jnp.ones((512, 513))}, {}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_all_processes_find_that_one_has_no_room_before_any_writes(saved, monkeypatch, code):
    """One that wrote would wait for the other, 20 minutes by Orbax's timeout; and all know that the run goes on."""
    with Checkpoints(saved, CONFIG) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        monkeypatch.setattr("shardlm.checkpoint_files.of_all", lambda own: [own, code])
        with pytest.raises(SaveFailed, match=r"30 could not be written: .*The checkpoints at step 10, 20") as error:
            checkpoints.save(30, make_state(), {}, {})
        monkeypatch.undo()
        assert error.value.everywhere and checkpoints.steps() == [10, 20]
        checkpoints.save(40, make_state(), {}, {})
    assert checkpoints.steps() == [10, 20, 40]


def test_a_save_that_fails_while_it_is_written_is_known_to_one_process(saved, monkeypatch):
    with Checkpoints(saved, CONFIG) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        with full_disk(1000):
            checkpoints.save(30, make_state(), {}, {})
            monkeypatch.setattr("shardlm.checkpoint.jax.process_count", lambda: 2)
            with pytest.raises(SaveFailed) as error:
                checkpoints.wait()
        monkeypatch.undo()
        assert not error.value.everywhere


def test_a_directory_that_was_removed_is_made_again(saved):
    with Checkpoints(saved, CONFIG) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        shutil.rmtree(saved)
        checkpoints.save(30, make_state(), {}, {})
    assert checkpoints.steps() == [30]
    assert Checkpoints(saved).restore(abstract(make_state())).step == 30


def test_an_error_that_ends_a_run_is_not_hidden_by_a_failed_save(saved):
    ends = pytest.raises(ZeroDivisionError)
    with ends as error, full_disk(1000), Checkpoints(saved, CONFIG) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        checkpoints.save(30, make_state(), {}, {})
        raise ZeroDivisionError
    assert "could not be written: the disk is full" in error.value.__notes__[0]
