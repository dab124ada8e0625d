"""Runs the cases of `launch.bench gpu` in processes, one after another, each with a limit, and keeps what they yield. A
case that fails, hangs or dies is recorded with what it said last, and the next goes on; one that time ends for is left
with the rows that it has."""

import dataclasses
import gc
import importlib
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardlm.bench import machine, results
from shardlm.bench.ahead import compile_all
from shardlm.bench.case import Given, errors, of_case, said
from shardlm.bench.cases import jobs
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
LIMIT = "the limit of its cases"
START = 300.0  # that jax may take to say what devices it has
Command = Callable[[str, Sequence[str], pathlib.Path, Sequence[str]], list[str]]
"""(part, cases, file for rows, names of rows that there are)."""


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
    if resume:
        _take_up(found, parts, output)
    left = []
    for part, todo in _todo(found, parts, sizes):
        room = ends - time.monotonic()
        if room < LEAST:
            left += [f"{part}: {case}" for case in todo]
            continue
        most = sizes.seconds * len(todo)
        limit, rows = min(most, room), _rows_of(part, output)
        own = sizes.served[todo[0]].environment if part == "decode" and todo[0] in sizes.served else {}
        had = {case: results.kept(found, part, case) for case in todo}
        rows.unlink(missing_ok=True)
        started = time.monotonic()
        for case, one in measured(part, todo, command, limit, rows, own, had, whole=limit == most):
            results.put(found, part, case, one, output)
            left += [f"{part}: {case}"] if one["unfinished"] else []
            say(f"{part}: {case}: {one['seconds']:.0f} s, {_word(one)}")
        if len(todo) > 1:
            say(f"{part}: {len(todo)} cases in {time.monotonic() - started:.0f} s, with what was compiled ahead")
        rows.unlink(missing_ok=True)
    return found, left


def _todo(found: results.Results, parts: Sequence[str], sizes: Sizes) -> Iterator[tuple[str, list[str]]]:
    """(part, cases of one process) that are not done. Those that failed before are alone this time: it may have been
    another that their process died of."""
    for part, cases in jobs(parts, sizes):
        todo = [case for case in cases if not results.done(found, part, case)]
        failed = [case for case in todo if results.failed(found, part, case)]
        together = [case for case in todo if case not in failed]
        yield from ((part, some) for some in (together, *([case] for case in failed)) if some)


def _word(case: Mapping[str, Any]) -> str:
    if wrong := errors(case):
        return wrong[0].splitlines()[-1]
    return f"left with {len(case['rows'])} rows, for want of time" if case["unfinished"] else "done"


def _rows_of(part: str, output: pathlib.Path) -> pathlib.Path:
    """What a process writes to: beside the file, where it stays if this process is killed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.with_suffix(f".{part}.rows.jsonl")


def _take_up(found: results.Results, parts: Sequence[str], output: pathlib.Path) -> None:
    """What processes had measured when the command that started them was killed."""
    for part in parts:
        rows = _rows_of(part, output)
        told: dict[str, list[dict[str, Any]]] = {}
        for line in _lines(rows):
            told.setdefault(line["case"], []).extend([line["row"]] if "row" in line else [])
        for case, own in told.items():
            if not results.done(found, part, case):
                own = [*results.kept(found, part, case), *own]
                results.put(found, part, case, _case(own, None, True, 0.0), output)
        rows.unlink(missing_ok=True)


def _lines(rows: pathlib.Path) -> list[dict[str, Any]]:
    """The last one may be half written."""
    return list(map(json.loads, rows.read_text().split("\n")[:-1])) if rows.exists() else []


def _case(rows: list[dict[str, Any]], error: str | None, unfinished: bool, seconds: float) -> dict[str, Any]:
    return {
        "rows": rows,
        "error": error,
        "unfinished": unfinished,
        "seconds": seconds,
        "date": machine.now(),
        "state_after": machine.smi(machine.NOW),
    }


def devices(sizes: Sizes) -> list[dict[str, Any]]:
    """jax's, as a process of its own sees them. Raises ShardlmError where they are not what the sizes need."""
    try:
        asked = {"capture_output": True, "text": True, "timeout": START}
        done = subprocess.run(machine.devices_command(), env=environment(), **asked)
    except subprocess.TimeoutExpired as error:
        raise ShardlmError(f"jax does not say within {START:.0f} s what devices it has") from error
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
    part: str,
    cases: Sequence[str],
    command: Command,
    limit: float,
    rows: pathlib.Path,
    own: Mapping[str, str] = MappingProxyType({}),
    had: Mapping[str, list[dict[str, Any]]] = MappingProxyType({}),
    *,
    whole: bool = True,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(case, what is kept of it) of one process, with variables of its own. `had`: rows of before. `whole`: the limit
    is that of its cases, and one that reaches it has failed; else it is unfinished."""
    started = time.monotonic()
    have = [of_case(case, row["name"]) for case in cases for row in had.get(case, ())]
    log = rows.with_suffix(".log")
    error = _run(command(part, cases, rows, have), log, limit, environment(own))
    log.unlink(missing_ok=True)
    lines, seconds = _lines(rows), time.monotonic() - started
    for case in cases:
        told = [line for line in lines if line["case"] == case]
        found = [*had.get(case, ()), *(line["row"] for line in told if "row" in line)]
        said_last = next((line["error"] for line in told if "error" in line), error)
        wrong = None if any(line.get("ended") for line in told) else said_last
        unfinished = not whole and wrong is not None and wrong == error and error.endswith(LIMIT)
        own_seconds = next((line["seconds"] for line in told if "seconds" in line), seconds)
        yield case, _case(found, None if unfinished else wrong, unfinished, own_seconds)


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
            return f"{said(log.read_text(errors='replace'))}\nended after {limit:.0f} s, {LIMIT}"
    return f"{said(log.read_text(errors='replace'))}\nended with status {status}"


def write_rows(part: str, cases: Sequence[str], given: Given, file: pathlib.Path) -> int:
    """In the process that measures, after the programs of all cases are compiled: each row as it comes, then that the
    case ended or what it raised. 1 if one did."""
    status = 0
    with open(file, "a") as out:

        def tell(case: str, **what: Any) -> None:
            print(json.dumps({"case": case, **what}), file=out, flush=True)

        try:
            module = importlib.import_module(f"shardlm.bench.{MODULES[part]}")
            if hasattr(module, "programs"):
                given = dataclasses.replace(given, ahead=compile_all(module.programs(cases, given)))
        except Exception as error:
            for case in cases:
                tell(case, error=_told(error))
            return 1
        for case in cases:
            started = time.monotonic()
            try:
                for row in module.measure(case, given):
                    tell(case, row=row)
                tell(case, ended=True, seconds=time.monotonic() - started)
            except Exception as error:  # recorded: the other cases of this process go on
                tell(case, error=_told(error), seconds=time.monotonic() - started)
                status = 1
            gc.collect()  # the frames of what was raised may hold arrays that the next has no room beside
    return status


def _told(error: Exception) -> str:
    return (str(error) if isinstance(error, ShardlmError) else f"{type(error).__name__}: {error}")[:4000]
