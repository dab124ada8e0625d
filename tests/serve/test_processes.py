"""One model in several processes says what it says in one."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tiny_run
from engines import CONFIG, decoding_from, folder_of
from one_of_two import SIZES, replies
from ports import free_port

import shardlm

# What one process runs the others do (test_followers.py), processes meet (test_distributed.py), meshes say what one
# device says (test_meshes.py): together here, for 23 s of a core.
pytestmark = pytest.mark.wide
SHAPE = dataclasses.replace(CONFIG, num_layers=2)
WORKER = pathlib.Path(__file__).parent / "one_of_two.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("processes")
    return [folder_of(home / name, seed, SHAPE) for seed, name in enumerate(("first", "second"))]


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory):
    """{mesh: what the two processes said}."""
    port, home = free_port(), tmp_path_factory.mktemp("found")
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(port), str(process), str(home / str(process)), *map(str, folders)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=tiny_run.environment(),
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    said, followed = (json.loads((home / str(process)).read_text()) for process in range(2))
    assert followed == ["followed"] * 2
    return dict(zip(("tensor", "pipeline"), said, strict=True))


@pytest.fixture(scope="module")
def expected(folders):
    """What one process says of both folders."""
    with decoding_from(SIZES["max_num_seqs"]):
        llm = shardlm.LLM(folders[0], **SIZES)
    first = replies(llm)
    llm.update_weights(folders[1])
    return first, replies(llm)


@pytest.mark.parametrize("mesh", ["tensor", "pipeline"])
def test_several_processes_say_what_one_says(found, expected, mesh):
    same(found[mesh]["before"], expected[0])


def test_new_weights_are_read_by_each(found, expected):
    same(found["tensor"]["after"], expected[1])
    assert "pipeline stages in several processes take no new weights" in found["pipeline"]["after"]


def same(said, wanted):
    assert said["tokens"] == wanted["tokens"]
    for name in ("score", "embedding"):
        np.testing.assert_allclose(said[name], wanted[name], atol=2e-5)
