"""The checks of test_families.py on checkpoints that transformers makes here and now from other seeds; and what we
write of them, opened by transformers. Runs where torch and transformers are: in this environment, or in that of the
Python that SHARDLM_TORCH_PYTHON names."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import test_mtp_reference
import test_text_parts
from test_families import NAMES, Reference, check

from shardlm.mesh import MeshSpec

HERE = pathlib.Path(__file__).parent
INSTALLED = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
PYTHON = os.environ.get("SHARDLM_TORCH_PYTHON") or (sys.executable if INSTALLED else "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs torch and transformers, here or in the environment of SHARDLM_TORCH_PYTHON"
)


def run(script: str, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"SHARDLM_REFERENCE_SEED": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, str(HERE / script), *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    home = tmp_path_factory.mktemp("made")
    (home / "written").mkdir()
    run("make_references.py", str(home / "originals"), *NAMES)
    return home


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_checkpoint(made, name):
    check(Reference(name, MeshSpec(), made / "originals"), made / "written" / name)


def test_a_fresh_checkpoint_that_predicts_further_tokens(tmp_path):
    run("make_mtp_reference.py", str(tmp_path / "f"))
    test_mtp_reference.check(tmp_path / "f")


def test_transformers_opens_what_was_written(made):
    assert sorted(path.name for path in (made / "written").iterdir()) == NAMES
    known = [name for name in NAMES if name != "deepseek"]  # whose code is not part of transformers
    found = json.loads(run("compare_written.py", str(made / "originals"), str(made / "written"), *known))
    assert found == dict.fromkeys(known, 0.0)


def test_what_sees_is_opened_without_its_sight(tmp_path):
    """What we write of it is a language model to transformers."""
    names = test_text_parts.NAMES
    run("make_seeing_references.py", str(tmp_path / "originals"), *names)
    (tmp_path / "written").mkdir()
    for name in names:
        test_text_parts.check(tmp_path / "originals" / name, tmp_path / "written" / name)
    found = json.loads(run("compare_written.py", str(tmp_path / "originals"), str(tmp_path / "written"), *names))
    assert max(found.values()) < 1e-5
