"""One trainer a run directory (run_lock.py)."""

import os
import re
import subprocess
import sys

import pytest

from shardlm.errors import ShardlmError
from shardlm.run_lock import LOCK, only_trainer

HOLD = """
import pathlib, sys
from shardlm.run_lock import only_trainer
with only_trainer(pathlib.Path(sys.argv[1])):
    print(1, flush=True)
    input()
"""


def test_a_second_trainer_is_refused_and_told_of_the_first(tmp_path):
    run = tmp_path / "run"
    with only_trainer(run):
        first = rf"{re.escape(str(run))} is being trained by process {os.getpid()} on "
        with pytest.raises(ShardlmError, match=first), only_trainer(run):
            raise AssertionError
        with only_trainer(tmp_path / "other"):
            pass
    with only_trainer(run):  # given back
        pass


def test_a_killed_trainer_leaves_nothing_behind(tmp_path):
    held = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdout.readline() == b"1\n"
    with pytest.raises(ShardlmError, match=f"process {held.pid} on"), only_trainer(tmp_path):
        raise AssertionError
    held.kill()
    held.wait()
    with only_trainer(tmp_path):
        pass


def test_a_lock_that_says_nothing_still_holds(tmp_path):
    with only_trainer(tmp_path):
        (tmp_path / LOCK).write_text("")
        with pytest.raises(ShardlmError, match="by another process: two trainers"), only_trainer(tmp_path):
            raise AssertionError


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "run").write_text("a file")
    refused = pytest.raises(ShardlmError, match=r"Cannot write .*run/.lock: .*choose another place")
    with refused, only_trainer(tmp_path / "run"):
        raise AssertionError
