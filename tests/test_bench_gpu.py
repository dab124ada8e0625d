"""`launch.bench gpu`: every part of it runs on a CPU in tiny sizes, as a user starts it; and what happens to cases that
fail, hang, die or find no time. Nothing here is timed."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.bench import ahead, kernel_timing, pytest_rows, results, run
from shardlm.bench.case import PARTS, Given, chosen_parts, errors
from shardlm.bench.cases import cases_of, jobs
from shardlm.bench.code_table import OWN
from shardlm.bench.decode_trace import _idle
from shardlm.bench.planning import summary
from shardlm.bench.report import markdown
from shardlm.bench.sizes import FULL, TINY, named
from shardlm.bench.traces import busy
from shardlm.errors import ShardlmError
from shardlm.profile.trace import Event

ROOT = pathlib.Path(__file__).parent.parent


def bench(output: pathlib.Path, *words: str) -> subprocess.CompletedProcess:
    """With one CPU device."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launch.bench", "gpu", "--sizes=tiny", f"--output={output}"]
    command += ["--torch_python=/no/such/python", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    output = tmp_path_factory.mktemp("gpu") / "gpu.json"
    done = bench(output)
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done, json.loads(output.read_text())


@pytest.mark.wide
def test_every_part_runs(measured):
    output, done, found = measured
    assert list(found["parts"]) == list(PARTS) and found["sizes"] == "tiny"
    rows = {part: [row for case in cases.values() for row in case["rows"]] for part, cases in found["parts"].items()}
    assert rows["train"][0]["tokens_per_second"] > 0 and "no/such" in rows["train"][1]["not_compared"]
    served = [
        "engine",
        "decode 1",
        "decode 2",
        "short prompt",
        "prefill",
        "pages to the host",
        "pages from the host",
        "trace 1",
        "trace 2",
        "trace prefill",
        "transformers",
    ]
    assert [row["name"] for row in rows["decode"]] == served
    one, two, short, _, saved, loaded, trace = rows["decode"][1:8]
    assert saved["bundle_bytes"] == loaded["bundle_bytes"] and loaded["bytes_per_second"] > 0
    assert short["seconds"] > 0 and trace["steps"] == 8 and 0 < trace["of_longest"] <= 1
    assert all(gap["seconds"] > 0 and gap["count"] > 0 and gap["longest"][0] > 0 for gap in trace["idle"])
    assert trace["busy_seconds"] * 8 == pytest.approx(
        sum(k["seconds"] for k in trace["longest"]) * 8 / trace["of_longest"]
    )
    assert one["bytes_per_step"] < two["bytes_per_step"] < 2 * one["bytes_per_step"]  # weights are read once for both
    kernels = {name for family in TINY.kernels.values() for name in family}
    assert {row["name"] for row in rows["kernels"]} == kernels
    assert all(row["largest_error"] <= row["allowed_error"] and row["seconds"] > 0 for row in rows["kernels"])
    assert all("not_compared" in row or row["kernel"] in OWN for row in rows["code"])
    steps = rows["plan"][1:]
    assert [row["name"] for row in steps] == list(TINY.plan) and all(row["profiled"] for row in steps)
    assert all(row["predicted_seconds"] > 0 and row["compiled_bytes"] > 0 for row in steps)
    assert {row["outcome"] for row in rows["tests"]} == {"skipped"} and len(rows["tests"]) > 10
    assert all("needs an NVIDIA GPU and JAX_PLATFORMS=cuda,cpu" in row["reason"] for row in rows["tests"])
    assert found["machine"]["devices"][0]["kind"] == "cpu" and found["machine"]["versions"]["jax"]
    assert output.with_suffix(".profile.json").exists()
    table = output.with_suffix(".md").read_text()
    assert table in done.stdout and all(f"## {part}" in table for part in PARTS)
    assert "rank_correlation" in table and "| 4 x 64 in 2 |" in table and "| trace 2 |" in table


def fake(code: str):
    """A command that runs `code` with the names of the cases and the file for rows in sys.argv."""
    start = [sys.executable, "-c", f"import json, os, sys, time\n{code}"]
    return lambda part, cases, rows, have: [*start, str(rows), *cases, *have]


def begun(part, cases, rows, have=()):
    """A command that has a row, says so and stays. No Python: a busy machine may need its limit to start that."""
    row = json.dumps({"case": cases[0], "row": {"name": "one"}})
    return ["sh", "-c", f"echo '{row}' > {rows}; echo begun; exec sleep 60"]


WRITE = "print(json.dumps({'case': sys.argv[2], 'row': {'name': 'one'}}), file=open(sys.argv[1], 'a'), flush=True)\n"


@pytest.mark.parametrize(
    ("command", "limit", "error"),
    [
        (fake(WRITE + "print('a word'); sys.exit(3)"), 600, "a word\nended with status 3"),
        (fake(WRITE + "os.kill(os.getpid(), 9)"), 600, "ended with status -9"),
        (begun, 1, "begun\nended after 1 s, the limit of its cases"),
        (
            fake(
                WRITE + "print(json.dumps({'case': sys.argv[2], 'error': 'it says why'}), file=open(sys.argv[1], 'a'))"
            ),
            600,
            "it says why",
        ),
    ],
    ids=["status", "signal", "limit", "error"],
)
def test_what_a_failed_case_leaves(command, limit, error, tmp_path):
    """The rows that it had, and why it ended."""
    [(case, found)] = run.measured("train", ["a"], command, limit, tmp_path / "rows.jsonl")
    assert case == "a" and found["rows"] == [{"name": "one"}]
    assert found["error"].endswith(error) and found["seconds"] < 50


def test_a_case_has_variables_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    code = "print(json.dumps({'case': 'a', 'row': dict(os.environ)}), file=open(sys.argv[1], 'a'))"
    own = {"XLA_FLAGS": "--b=2", "OTHER": "3"}
    [(_, found)] = run.measured("decode", ["a"], fake("import os\n" + WRITE + code), 60, tmp_path / "rows.jsonl", own)
    told = found["rows"][-1]
    assert (told["XLA_FLAGS"], told["OTHER"]) == ("--a=1 --b=2", "3")
    assert run.environment()["XLA_FLAGS"] == "--a=1"
    flags = [served.environment.get("XLA_FLAGS", "") for served in FULL.served.values()]
    assert len(list(filter(None, flags))) == 2


def test_failures_are_measured_again_and_others_wait_for_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "devices", lambda sizes: [{"platform": "cpu", "kind": "cpu"}])
    ended = "print(json.dumps({'case': sys.argv[2], 'ended': True}), file=open(sys.argv[1], 'a'))\n"
    output, told = tmp_path / "gpu.json", []
    monkeypatch.setattr(run, "named", lambda name: TINY.__class__(**vars(TINY) | {"apart": True}))

    def go(code, seconds=1000.0):
        options = {"resume": True, "seconds": seconds, "say": told.append}
        return run.run_all(["train"], "tiny", output, fake(code), **options)

    found, left = go(WRITE + ended, seconds=1)
    assert left == ["train: tiny", "train: torch, tiny"] and not found["parts"]
    found, left = go(WRITE + f"if sys.argv[2] == 'tiny':\n    {ended}")
    assert not left and list(found["parts"]["train"]) == ["tiny", "torch, tiny"]
    assert results.done(found, "train", "tiny") and not results.done(found, "train", "torch, tiny")
    assert "ended with status 0" in markdown(found, {}) and told[1].endswith("ended with status 0")
    told.clear()
    found, _ = go(WRITE + ended)
    assert len(told) == 1 and told[0].startswith("train: torch") and results.done(found, "train", "torch, tiny")
    with pytest.raises(ShardlmError, match="has --sizes=tiny on cpu, and this is --sizes=full on NVIDIA H200"):
        results.read(output, "full", {"devices": [{"kind": "NVIDIA H200"}]})
    output.write_text("{")
    with pytest.raises(ShardlmError, match=r"gpu.json is not JSON: .*; leave --resume out"):
        go(WRITE)


def test_what_matters_most_comes_first():
    """Every case once; those of one process are compiled side by side, but none that takes long, and no engine or
    PyTorch has a GPU's memory to share."""
    order = list(jobs(tuple(PARTS), FULL))
    assert order[0] == ("decode", ("bf16",)) and order[-1] == ("code", cases_of("code", FULL))
    assert [part for part, _ in order[:9]] == [
        "decode",
        "plan",
        "train",
        "train",
        "train",
        *["kernels"] * 3,
        "tests",
    ]
    assert order[2:5] == [
        ("train", names) for names in (("1B", "8B, 8 layers"), ("torch, 1B",), ("torch, 8B, 8 layers",))
    ]
    assert (
        order[1][1][-1] == "profile" and len(order[1][1]) > 9 and not {"4 x 4k, fp8", "2 x 4k, fp32"} & set(order[1][1])
    )
    for part in PARTS:
        mine = [case for own, cases in order if own == part for case in cases]
        assert len(mine) == len(set(mine)) and set(mine) == set(cases_of(part, FULL))
    alone = [cases for _, cases in order if any("torch" in case or "fp8" in case or "int8" in case for case in cases)]
    assert all(len(cases) == 1 for cases in alone)
    assert [part for part, _ in jobs(("tests", "plan"), FULL)] == ["plan", "tests", "plan", "plan", "plan"]
    assert list(jobs(("plan",), TINY)) == [("plan", ("profile", *TINY.plan))]


def test_what_does_not_compile_is_its_own_cases_error():
    def refused():
        raise ValueError("no such kernel")

    made = ahead.compile_all({"a": lambda: lambda: 1, "b": refused, "c": lambda: refused, "d": lambda: lambda: 2})
    assert {key: one.program for key, one in made.items()} == {"a": 1, "b": None, "c": None, "d": 2}
    assert made["a"].get() == 1 and made["a"].seconds >= 0
    for key in "bc":
        with pytest.raises(ValueError, match="no such kernel"):
            made[key].get()
    program = ahead.Made(error=made["b"].error)
    family, shapes = next(iter(TINY.kernels.items()))
    broken = dict.fromkeys(((family, shape, use) for shape in shapes for use in kernel_timing.PROGRAMS), program)
    rows = list(kernel_timing.measure(family, Given("tiny", "", pathlib.Path(), ahead=broken)))
    assert [(row["name"], row["error"]) for row in rows] == [(shape, "ValueError: no such kernel") for shape in shapes]


def test_cases_of_a_process_that_died_are_tried_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "devices", lambda sizes: [{"platform": "cpu", "kind": "cpu"}])
    families = {name: {} for name in ("a", "b", "c")}
    monkeypatch.setattr(run, "named", lambda name: TINY.__class__(**vars(TINY) | {"kernels": families}))
    ended = "f = open(sys.argv[1], 'a')\nfor case in sys.argv[2:]:\n"
    ended += "    if case == 'b': os.kill(os.getpid(), 9)\n"
    ended += "    print(json.dumps({'case': case, 'ended': True, 'seconds': 2.5}), file=f, flush=True)\n"
    asked = []

    def command(part, cases, rows, have):
        asked.append(tuple(cases))
        return fake(ended)(part, cases, rows, have)

    def go():
        return run.run_all(
            ["kernels"], "tiny", tmp_path / "it.json", command, resume=True, seconds=900, say=asked.append
        )

    found, left = go()
    cases = found["parts"]["kernels"]
    assert not left and cases["a"]["error"] is None and cases["a"]["seconds"] == 2.5
    assert cases["b"]["error"] == cases["c"]["error"] == "no message\nended with status -9"
    asked.clear()
    found, _ = go()
    assert [one for one in asked if isinstance(one, tuple)] == [("b",), ("c",)]
    assert results.done(found, "kernels", "c") and results.failed(found, "kernels", "b")


def test_a_case_that_time_ended_for_goes_on_where_it_was(tmp_path, monkeypatch):
    """It has not failed, and what a kernel's shape took is not measured twice; nor is what was measured when the whole
    command was killed."""
    monkeypatch.setattr(run, "devices", lambda sizes: [{"platform": "cpu", "kind": "cpu"}])
    monkeypatch.setattr(run, "LEAST", 0.0)
    family = next(iter(TINY.kernels))
    monkeypatch.setattr(run, "named", lambda name: TINY.__class__(**vars(TINY) | {"kernels": {family: {}}}))
    output, told = tmp_path / "gpu.json", []

    def go(command, seconds):
        return run.run_all(["kernels"], "tiny", output, command, resume=True, seconds=seconds, say=told.append)

    found, left = go(begun, 1.0)
    case = found["parts"]["kernels"][family]
    assert left == [f"kernels: {family}"] and case["rows"] == [{"name": "one"}] and not errors(case)
    assert told[-1].endswith("left with 1 rows, for want of time") and not results.done(found, "kernels", family)
    killed = {"case": family, "row": {"name": "two"}}
    output.with_suffix(".kernels.rows.jsonl").write_text(f'{json.dumps(killed)}\n{{"case": "half')
    rest = "print(json.dumps({'case': sys.argv[2], 'row': {'name': 'three', 'had': sys.argv[3:]}}), file=f)\n"
    ended = "print(json.dumps({'case': sys.argv[2], 'ended': True}), file=f, flush=True)"
    found, left = go(fake(f"f = open(sys.argv[1], 'a')\n{rest}{ended}"), 600.0)
    rows = found["parts"]["kernels"][family]["rows"]
    assert not left and results.done(found, "kernels", family) and [row["name"] for row in rows[:2]] == ["one", "two"]
    assert rows[2] == {"name": "three", "had": [f"{family}: one", f"{family}: two"]}
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    given = Given("tiny", "", output, (f"{family}: one",))
    assert dict(given.left(family, {"one": 1, "two": 2})) == {"two": 2} and dict(given.left("other", {"one": 1}))


def test_a_part_whose_package_is_missing_says_so(tmp_path, monkeypatch):
    """And the others are measured: what measures is imported in the process of a case."""
    monkeypatch.setitem(sys.modules, "shardlm.bench.decoding", None)
    file = tmp_path / "rows.jsonl"
    assert run.write_rows("decode", ["bf16"], None, file) == 1
    assert json.loads(file.read_text())["error"].startswith("ModuleNotFoundError: import of shardlm.bench.decoding")
    code = "import sys; import launch.bench_gpu, shardlm.bench.run, shardlm.bench.report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert done.returncode == 0 and not loaded & {"starlette", "llguidance", "tokamax", "grain"}, done.stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_tests_that_ended_are_known_of_a_run_that_died(workers, tmp_path):
    """Or whose worker did: each is told once."""
    test = "import os, pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='no GPU')\ndef test_b(): pass\n"
    (tmp_path / "test_it.py").write_text(f"{test}def test_c(): assert 1 == 2\ndef test_d(): os._exit(9)\n")
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", pytest_rows.__name__, "-p", "no:cacheprovider", f"-n{workers}"]
    environment = os.environ | {pytest_rows.ROWS: str(rows), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    died = ["error"] * bool(workers)
    assert done.returncode == (1 if workers else 9), done.stdout
    assert [row["outcome"] for row in found] == ["passed", "skipped", "failure", *died]
    assert [row["name"] for row in found][:3] == ["test_a", "test_b", "test_c"]
    assert "no GPU" in found[1]["reason"] and "assert 1 == 2" in found[2]["error"]
    assert not died or "crashed" in found[3]["error"]


def test_what_is_refused():
    with pytest.raises(ShardlmError, match="no part 'trian'; there are train, decode, kernels, plan, tests, code"):
        chosen_parts(["trian"])
    assert chosen_parts(["plan", "train", "plan"]) == ("plan", "train")
    assert cases_of("train", FULL)[len(FULL.train) :] == ("torch, 1B", "torch, 8B, 8 layers", "torch, 0.5B")
    with pytest.raises(ShardlmError, match="--sizes=huge: choose from full, tiny"):
        named("huge")
    with pytest.raises(ShardlmError, match="--sizes=full needs an NVIDIA GPU, and jax has cpu here; --sizes=tiny"):
        run.devices(FULL)


def test_the_planner_is_held_to_what_was_measured():
    rows = [
        {"name": name, "predicted_seconds": p, "measured_seconds": m, "predicted_bytes": 9.0, "compiled_bytes": 10.0}
        for name, p, m in (("a", 1.0, 2.0), ("b", 2.0, 3.0), ("c", 3.0, 2.5))
    ]
    rows = [*(row | {"profiled": False} for row in rows), {"error": "too large"}]
    found = summary(rows)
    assert found["steps"] == 3 and found["rank_correlation"] == pytest.approx(0.5)
    assert found["median_ratio, time"] == pytest.approx(2 / 3) and found["median_ratio, compiled memory"] == 0.9
    assert "rank_correlation by profile" not in found
    measured = summary([*rows, {"name": "profile", "seconds_by_profile": {"a": 2.0, "b": 6.0, "c": 3.0}}])
    assert measured["rank_correlation by profile"] == pytest.approx(1.0)
    assert measured["rank_correlation"] == found["rank_correlation"]


def test_when_nothing_ran_is_told_by_how_long():
    at = lambda name, start, end: Event(0, name, "", "", -1, start, end, True)  # noqa: E731
    # Two streams beside each other from 10,000 to 22,000 ns; then 1 us, 3 us and 80 us without any.
    spans = ((0, 10_000), (10_000, 20_000), (12_000, 22_000), (23_000, 30_000), (33_000, 40_000), (120_000, 130_000))
    found = _idle([at(f"k{i}", *span) for i, span in enumerate(spans)], 2)
    assert found == [
        {"of_at_least": 0.0, "seconds": 2e-6, "count": 1.0, "longest": (3000, "k3", "k4")},
        {"of_at_least": 50e-6, "seconds": 40e-6, "count": 0.5, "longest": (80_000, "k4", "k5")},
    ]
    assert _idle([], 1) == []
    assert busy([at(f"k{i}", *span) for i, span in enumerate(spans)]) == pytest.approx(46e-6)


def test_a_kernel_is_timed_on_several_inputs_of_its_own():
    """So many that they are more than a device keeps of them, unless that were too many."""
    counted = lambda nbytes: len(kernel_timing.several(lambda key: (np.zeros(nbytes, np.int8),)))  # noqa: E731
    assert [counted(n) for n in (2**28, 2**26, 2**10)] == [1, 2, kernel_timing.MOST]
    run = jax.jit(lambda a: jnp.sin(a[0]))
    assert 0 < kernel_timing.seconds_of(run, [(jnp.ones(1000),), (jnp.zeros(1000),)]) < 1
