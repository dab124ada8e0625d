"""The part `tests`: pytest's tests that need a GPU, one row each, as they end."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from shardlm.bench import pytest_rows
from shardlm.bench.case import Given, said
from shardlm.bench.sizes import named
from shardlm.errors import ShardlmError

FOLDER = pathlib.Path(__file__).parents[2] / "tests/gpu"
RAN = (0, 1, 5)  # pytest's statuses of a run to the end: all passed, some failed, none was there


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """Raises ShardlmError where the source tree, pytest or a test is missing, and where pytest dies."""
    if not FOLDER.is_dir():
        raise ShardlmError(
            f"{FOLDER} is not there: the tests need the source tree (git clone, pip install -e '.[test]')"
        )
    sizes = named(given.sizes)
    own = {"JAX_PLATFORMS": "cuda,cpu"} if sizes.gpu else {}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", pytest_rows.__name__, str(FOLDER)]
    command += ["-n", str(sizes.workers), "--dist=load"]  # each test compiles for 10 s and more
    with tempfile.TemporaryDirectory() as folder:
        rows, log = pathlib.Path(folder, "rows.jsonl"), pathlib.Path(folder, "log")
        rows.touch()
        environment = os.environ | own | {pytest_rows.ROWS: str(rows)}
        with open(log, "wb") as out, open(rows) as told:
            running = subprocess.Popen(command, cwd=FOLDER.parents[1], env=environment, stdout=out, stderr=out)
            found = 0
            for row in _rows(told, running):
                found += 1
                yield row
        if running.returncode not in RAN or not found:
            last = said(log.read_text(errors="replace"))
            raise ShardlmError(f"pytest ended with status {running.returncode} after {found} tests: {last}")


def _rows(told, running: subprocess.Popen) -> Iterator[dict[str, Any]]:
    """Until it has ended and all is read."""
    text = ""
    while True:
        ended = running.poll() is not None
        *lines, text = (text + told.read()).split("\n")
        yield from map(json.loads, lines)
        if ended:
            return
        time.sleep(0.2)
