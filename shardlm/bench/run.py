"""Runs the cases of `launch.bench gpu` in processes of their own, one after another, each with a limit, and keeps what
they yield. A case that fails, hangs or dies is recorded with what it said last, and the next goes on."""

import importlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardlm.bench import machine, results
from shardlm.bench.case import errors, said
from shardlm.bench.sizes import Sizes, named
from shardlm.errors import ShardlmError

MODULES = {
    "train": "training",
    "decode": "decoding",
    "kernels": "kernel_timing",
    "code": "code_table",
    "plan": "planning",
    "tests": "testing",
}
LEAST = 60.0  # seconds that are worth beginning a case in
Command = Callable[[str, Sequence[str], pathlib.Path], list[str]]  # (part, cases, file for rows)


def module_of(part: str):
    """The module that measures a part."""
    return importlib.import_module(f"shardlm.bench.{MODULES[part]}")


def jobs(parts: Sequence[str], sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(part, cases of one process), in order."""
    for part in parts:
        cases = module_of(part).cases(sizes)
        yield from ((part, (case,)) for case in cases) if sizes.apart else [(part, cases)]


def run_all(
    parts: Sequence[str],
    sizes_name: str,
    output: pathlib.Path,
    command: Command,
    *,
    resume: bool,
    seconds: float,
    say: Callable[[str], Any],
) -> tuple[results.Results, list[str]]:
    """(what was measured, cases that are left for want of time). Raises ShardlmError without the GPU that the sizes
    need, and for a file that cannot be resumed."""
    ends, sizes = time.monotonic() + seconds, named(sizes_name)
    about = machine.facts() | {"devices": devices(sizes)}
    found = results.fresh(sizes_name, about)
    if resume and output.exists():
        found = results.read(output, sizes_name, about)
        found.setdefault("resumed", []).append(machine.now())
    left = []
    for part, cases in jobs(parts, sizes):
        todo = [case for case in cases if not results.done(found, part, case)]
        room = ends - time.monotonic()
        if not todo or room < LEAST:
            left += [f"{part}: {case}" for case in todo]
            continue
        limit = min(sizes.seconds, room)
        own = sizes.served[todo[0]].environment if part == "decode" and todo[0] in sizes.served else {}
        for case, one in measured(part, todo, command, limit, own):
            results.put(found, part, case, one, output)
            wrong = errors(one)
            say(f"{part}: {case}: {one['seconds']:.0f} s, {wrong[0].splitlines()[-1] if wrong else 'done'}")
    return found, left


def devices(sizes: Sizes) -> list[dict[str, Any]]:
    """jax's, as a process of its own sees them. Raises ShardlmError where they are not what the sizes need."""
    done = subprocess.run(machine.devices_command(), capture_output=True, text=True, env=environment())
    if done.returncode:
        raise ShardlmError(f"jax does not start: {said(done.stderr)}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if sizes.gpu and found[0]["platform"] != "gpu":
        raise ShardlmError(
            f"--sizes=full needs an NVIDIA GPU, and jax has {found[0]['kind']} here; --sizes=tiny runs anywhere"
        )
    return found


def environment(own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Of the processes that measure: jax may have most of a GPU's memory, as serving and training want it. `own`: of
    one case; its XLA_FLAGS come after those that are set."""
    found = {"XLA_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), own.get("XLA_FLAGS"))))
    return found | own | ({"XLA_FLAGS": flags} if flags else {})


def measured(
    part: str, cases: Sequence[str], command: Command, limit: float, own: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(case, what is kept of it) of one process, with variables of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = pathlib.Path(folder, "rows.jsonl"), pathlib.Path(folder, "log")
        error = _run(command(part, cases, rows), log, limit, environment(own))
        lines = rows.read_text().split("\n")[:-1] if rows.exists() else []  # the last one may be half written
    seconds, state = time.monotonic() - started, machine.smi(machine.NOW)
    for case in cases:
        own = [row for row in map(json.loads, lines) if row["case"] == case]
        ended = any(row.get("ended") for row in own)
        yield (
            case,
            {
                "rows": [row["row"] for row in own if "row" in row],
                "error": None if ended else next((row["error"] for row in own if "error" in row), error),
                "seconds": seconds,
                "date": machine.now(),
                "state_after": state,
            },
        )


def _run(command: list[str], log: pathlib.Path, limit: float, env: dict[str, str]) -> str:
    """Why a process did not do its work. At the limit it ends with those that it started; not a session of its own,
    which would outlive this command where a machine's tool ends that."""
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, process_group=0)
        try:
            status = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"{said(log.read_text(errors='replace'))}\nended after {limit:.0f} s, the limit of a case"
    return f"{said(log.read_text(errors='replace'))}\nended with status {status}"


def write_rows(part: str, cases: Sequence[str], given, file: pathlib.Path) -> int:
    """In the process that measures: each row as it comes, then that the case ended or what it raised. 1 if one did."""
    module, status = module_of(part), 0
    with open(file, "a") as out:
        for case in cases:
            try:
                for row in module.measure(case, given):
                    print(json.dumps({"case": case, "row": row}), file=out, flush=True)
                print(json.dumps({"case": case, "ended": True}), file=out, flush=True)
            except Exception as error:  # recorded: the other cases of this process go on
                text = str(error) if isinstance(error, ShardlmError) else f"{type(error).__name__}: {error}"
                print(json.dumps({"case": case, "error": text[:4000]}), file=out, flush=True)
                status = 1
    return status
