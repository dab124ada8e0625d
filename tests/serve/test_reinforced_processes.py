"""Reinforcement learning in several processes: each samples and judges its share, once, and what is learned is what one
process learns; it resumes bit for bit, and an error of a reward in one ends all."""

import dataclasses
import json
import pathlib

import pytest
import tiny_run
from engines import CONFIG as MODEL
from engines import folder_of
from ports import free_port
from test_reinforced_run import CONFIG, LOGGED, logged

JUDGE = """
import os

def thirds(prompts, completions, completion_ids, wanted, **columns):
    if os.environ.get("FAILS") in prompts:
        raise KeyError("no such answer")
    with open(os.environ["JUDGED"], "a") as file:  # of this process
        file.write(f"{os.getpid()} {len(prompts)}\\n")
    return [sum(token % 3 == rest for token in ids) / 12 for ids, rest in zip(completion_ids, wanted)]
"""
# Each process compiles for itself: few programs of few layers.
SMALL = ("train.global_batch=8", "grpo.group_size=4", "train.seq_len=24", "train.steps=4")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
    home = tmp_path_factory.mktemp("reinforced")
    folder_of(home / "hf", 0, dataclasses.replace(MODEL, num_layers=1))
    prompts = [{"prompt": text, "wanted": 0} for text in ("name", "age", "tags", "true", "x", "12")]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (home / "judge.py").write_text(JUDGE)
    (home / "config.py").write_text(CONFIG.format(home=home))
    return home


def two_processes(home: pathlib.Path, run: str, *flags: str) -> tuple[list[str], list[int]]:
    """(what both said, their exit statuses) of a run with one device each."""
    cluster = (f"--coordinator_address=localhost:{free_port()}", "--num_processes=2")
    own = (f"run_dir={home / run}", "cpu_devices=1", *flags)
    started = [tiny_run.start(home / "config.py", *own, extra=(*cluster, f"--process_id={i}")) for i in range(2)]
    said = [process.communicate(timeout=300)[0] for process in started]
    return said, [process.returncode for process in started]


def steps_of(run: pathlib.Path) -> list[dict]:
    return [line for line in logged(run) if "reward" in line]


@pytest.fixture
def judged(home, monkeypatch) -> pathlib.Path:
    path = home / "judged"
    path.unlink(missing_ok=True)
    monkeypatch.setenv("JUDGED", str(path))
    return path


@pytest.mark.wide
def test_two_processes_learn_what_one_learns(home, judged):
    done = tiny_run.train(home / "config.py", f"run_dir={home}/one", *SMALL)
    assert done.returncode == 0, done.stderr
    judged.unlink()
    said, statuses = two_processes(home, "two", *SMALL)
    assert statuses == [0, 0], said
    assert "sampled by 2 copies over 1 devices each, of 2 processes" in said[0] and "sampled by" not in said[1]
    one, two = steps_of(home / "one"), steps_of(home / "two")
    assert len(one) == 4
    for name in LOGGED:
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5, abs=1e-6), name
    assert [line["reward"] for line in one] == [line["reward"] for line in two]  # the same replies
    validated = [[line for line in logged(home / name) if "validation_reward" in line] for name in ("one", "two")]
    assert validated[0][0]["validation_reward"] == pytest.approx(validated[1][0]["validation_reward"])
    calls = [line.split() for line in judged.read_text().splitlines()]
    counts = {pid: sum(int(count) for own, count in calls if own == pid) for pid, _ in calls}
    assert sorted(counts.values()) == [2 * 4 + 3] * 2  # of 2 batches of 2 prompts, and of 6 validation prompts


@pytest.mark.wide
def test_two_processes_go_on_between_two_updates(home, judged):
    flags = (*SMALL[:-1], "lora.rank=4", "grpo.beta=0.05")
    for run, ends in (("whole", (6,)), ("stopped", (3, 6))):
        for steps in ends:
            said, statuses = two_processes(home, run, f"train.steps={steps}", *flags)
            assert statuses == [0, 0], said
    whole, stopped = steps_of(home / "whole"), steps_of(home / "stopped")
    assert len(whole) == 6
    for name in (*LOGGED, "divergence"):
        assert [line[name] for line in whole] == [line[name] for line in stopped], name
    # And one process takes the run over.
    done = tiny_run.train(home / "config.py", f"run_dir={home}/stopped", "train.steps=8", *flags)
    assert done.returncode == 0 and "resuming after step 6" in done.stdout, done.stderr


@pytest.mark.wide
def test_an_error_of_a_reward_ends_all_with_its_message(home, judged, monkeypatch):
    monkeypatch.setenv("FAILS", "age")  # which one process alone is given
    said, statuses = two_processes(home, "failed", *SMALL)
    assert statuses == [1, 1], said
    assert all("the reward thirds ended with KeyError: 'no such answer'" in text for text in said), said
