"""The part `tests`: pytest's tests that need a GPU, one row each."""

import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterator
from typing import Any

from shardlm.bench.case import Given, said
from shardlm.bench.sizes import Sizes, named
from shardlm.errors import ShardlmError

FOLDER = pathlib.Path(__file__).parents[2] / "tests/gpu"


def cases(sizes: Sizes) -> tuple[str, ...]:
    return ("pytest",)


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """Raises ShardlmError where the source tree, pytest or a test is missing."""
    if not FOLDER.is_dir():
        raise ShardlmError(
            f"{FOLDER} is not there: the tests need the source tree (git clone, pip install -e '.[test]')"
        )
    sizes = named(given.sizes)
    environment = os.environ | ({"JAX_PLATFORMS": "cuda,cpu"} if sizes.gpu else {})
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", str(FOLDER), f"--junit-xml={file}"]
        done = subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True)
        if not file.exists():
            raise ShardlmError(f"pytest ended with status {done.returncode}: {said(done.stdout + done.stderr)}")
        cases = xml.etree.ElementTree.parse(file).getroot().iter("testcase")
        rows = [_row(case) for case in cases]
    if not rows:
        raise ShardlmError(f"pytest found no test: {said(done.stdout + done.stderr)}")
    yield from rows


def _row(case: xml.etree.ElementTree.Element) -> dict[str, Any]:
    found = {"name": case.get("name"), "seconds": float(case.get("time") or 0), "outcome": "passed"}
    for outcome in ("failure", "error", "skipped"):
        element = case.find(outcome)
        if element is not None:
            message = said(f"{element.get('message') or ''}\n{element.text or ''}")
            found |= {"outcome": outcome, "reason" if outcome == "skipped" else "error": message}
    return found
