"""launch.plan as a user runs it: by formulas alone, so that it needs no GPU and no plugin."""

import ast
import json

import pytest
from commands import run

from shardlm.config import load


def test_a_plan_is_told_written_and_drawn(tmp_path):
    words = ("--config=configs/llama3_8b.py", "--cluster=dgx-h100", "--num_gpus=8", "--verify=0", "--format=json")
    files = (f"--write={tmp_path / 'plan.py'}", f"--report={tmp_path / 'plan.html'}")
    held = ("--mesh.tensor<=2", "--rules=zero3", "--tokens=1T", "--dollars_per_gpu_hour=2")
    done = run("launch.plan", *words, *files, *held)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    written = load(str(tmp_path / "plan.py"))
    assert told["plans"][0]["mesh"] == written.mesh.sizes() and written.rules == "zero3" and written.mesh.tensor <= 2
    assert told["plans"][0]["mesh_text"] in (tmp_path / "plan.html").read_text()
    said = ast.get_docstring(ast.parse((tmp_path / "plan.py").read_text()))
    assert f"python -m launch.train --config={tmp_path / 'plan.py'}" in said and "8 x h100 in 1 host of 8" in said
    assert "step: " in said and " s, estimated" in said and "compiled" not in said and "verified" not in said
    assert told["run"]["dollars_per_gpu_hour"] == 2 and told["run"]["tokens"] == 1e12
    assert [point["num_gpus"] for point in told["sweep"]] == [8, 16, 32]


def test_what_the_command_line_says_of_a_searched_field_holds_as_a_constraint_does():
    words = ("--config=configs/llama3_8b.py", "--gpu=h100-sxm", "--num_gpus=8", "--verify=0", "--config.mesh.tensor=4")
    done = run("launch.plan", *words, "--config.mesh=auto", "--config.matmul=fp8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3] == "With mesh.tensor=4, matmul=fp8"
    assert "Asked for: mesh.tensor=4, matmul=fp8." in " ".join(done.stdout.split())
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("  1  ", "  2  "))]
    assert len(rows) == 2 and all("tensor=4" in row and "fp8" in row for row in rows)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--gpu=h100", "--num_gpus=4", "--verify=0"), 2, "num_gpus=8  "),
        (("--gpu=h1000", "--num_gpus=8"), 1, "did you mean h100?"),
        (("--gpu=h100", "--num_gpus=8", "--mesh.tensr=2"), 1, "did you mean mesh.tensor?"),
        (("--gpu=h100", "--num_gpus=8", "--report=nowhere/plan.html"), 1, "in a folder that exists"),
        (("--gpu=h100", "--num_gpus=8", "--model=gpt"), 1, "--config=configs/sft.py --config.model.folder=gpt with"),
        (("--gpu=h100", "--num_gpus=8", "--tokens=nan"), 1, "'nan' is no amount; write it as 500k, 2.5T, 2e12"),
        (("--gpu=h100", "--num_gpus=8", "--tokens=-1T"), 1, "'-1T' is no amount"),
        (("--gpu=h100", "--num_gpus=8", "--write=/proc/plan.py"), 1, "nothing can be written there"),
        (("--gpu=h100", "--num_gpus=8", "--config.model.mlp_dim=0"), 1, "mlp_dim=0: it must be at least 1"),
        (("--gpu=h100", "--num_gpus=8", "--serve=false", "--max_num_seqs=2"), 1, "--max_num_seqs goes with --serve"),
        (("--gpu=h100", "--num_gpus=8", "--serve=true", "--config.mesh.tensor=2"), 1, "with --serve give --tensor=N"),
        (("--target=2T tokens in 30 days",), 1, "there is no flag --target: python -m launch.whatif has it"),
        (("--gpu=h100",), 1, "--num_gpus=N and either --gpu=NAME or --cluster=NAME are needed"),
    ],
)
def test_what_does_not_fit_and_what_is_wrong_ends_with_a_status_and_a_remedy(words, status, message):
    done = run("launch.plan", "--config=configs/llama3_70b.py", *words)
    assert done.returncode == status and message in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("launcher", ["launch.plan", "launch.whatif"])
def test_help_has_the_flags_of_serving_too(launcher):
    done = run(launcher, "--help")
    assert done.returncode == 0, done.stderr
    of_both, of_serving = done.stdout.split("with --serve also:")
    assert "--gpu:" in of_both and "--tokens:" in of_both
    assert "--prompt_len:" in of_serving and "--max_num_seqs:" in of_serving
