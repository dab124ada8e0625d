"""`launch.bench gpu`: every part of it runs on a CPU in tiny sizes, as a user starts it; and what happens to cases that
fail, hang, die or find no time. Nothing here is timed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from shardlm.bench import pytest_rows, results, run
from shardlm.bench.case import PARTS, Given, chosen_parts, errors
from shardlm.bench.cases import cases_of, jobs
from shardlm.bench.code_table import OWN
from shardlm.bench.planning import summary
from shardlm.bench.report import markdown
from shardlm.bench.sizes import FULL, TINY, named
from shardlm.errors import ShardlmError

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
    assert [row["name"] for row in rows["decode"]] == ["engine", "decode 1", "decode 2", "prefill", "transformers"]
    one, two = rows["decode"][1:3]
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
    assert "rank_correlation" in table and "| 4 x 64 in 2 |" in table


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
        (begun, 1, "begun\nended after 1 s, the limit of a case"),
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


def test_time_that_ends_leaves_some_of_every_part():
    """The first case of each part comes before the second of any; a part that has no more is left out."""
    order = list(jobs(("kernels", "tests", "plan"), FULL))
    first, *others = FULL.kernels
    steps = list(FULL.plan)
    assert order[:5] == [
        ("kernels", (first,)),
        ("tests", ("pytest",)),
        ("plan", ("profile",)),
        ("kernels", (others[0],)),
        ("plan", (steps[0],)),
    ]
    assert len(order) == len(FULL.kernels) + 1 + 1 + len(steps)


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


def test_tests_that_ended_are_known_of_a_run_that_died(tmp_path):
    test = "import os, pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='no GPU')\ndef test_b(): pass\n"
    (tmp_path / "test_it.py").write_text(f"{test}def test_c(): assert 1 == 2\ndef test_d(): os._exit(9)\n")
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", pytest_rows.__name__, "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {pytest_rows.ROWS: str(rows), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert done.returncode == 9 and [row["name"] for row in found] == ["test_a", "test_b", "test_c"]
    assert [row["outcome"] for row in found] == ["passed", "skipped", "failure"]
    assert "no GPU" in found[1]["reason"] and "assert 1 == 2" in found[2]["error"]


def test_what_is_refused():
    with pytest.raises(ShardlmError, match="no part 'trian'; there are train, decode, kernels, plan, tests, code"):
        chosen_parts(["trian"])
    assert chosen_parts(["plan", "train", "plan"]) == ("plan", "train")
    assert cases_of("train", FULL)[len(FULL.train) :] == ("torch, 0.5B", "torch, 1B", "torch, 8B, 8 layers")
    with pytest.raises(ShardlmError, match="--sizes=huge: choose from full, tiny"):
        named("huge")
    with pytest.raises(ShardlmError, match="--sizes=full needs an NVIDIA GPU, and jax has cpu here; --sizes=tiny"):
        run.devices(FULL)


def test_the_planner_is_held_to_what_was_measured():
    rows = [
        {"predicted_seconds": p, "measured_seconds": m, "predicted_bytes": 9.0, "compiled_bytes": 10.0}
        for p, m in ((1.0, 2.0), (2.0, 3.0), (3.0, 2.5))
    ]
    found = summary([*rows, {"error": "too large"}])
    assert found["steps"] == 3 and found["rank_correlation"] == pytest.approx(0.5)
    assert found["median_ratio, time"] == pytest.approx(2 / 3) and found["median_ratio, compiled memory"] == 0.9
