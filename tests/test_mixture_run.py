"""A run on two sources with weights, stopped and gone on with, as a user starts it."""

import json
import shutil

import pytest
import tiny_run
from test_resume import OTHER_MESH


@pytest.mark.wide
def test_a_mixture_goes_on_bit_for_bit_and_on_another_mesh(tmp_path):
    config = tiny_run.write(tmp_path)
    (tmp_path / "code.txt").write_text(tiny_run.TEXT[:3000].replace("return", "yield"))
    both = [f"data.{name}={tmp_path}/{name}.txt,{tmp_path}/code.txt" for name in ("train", "validation")]
    flags = (*both, "data.weights=0.7,0.3")
    done = tiny_run.train(config, *flags)
    assert done.returncode == 0, done.stderr
    assert "source code.txt: " in done.stdout and " weight 0.3, " in done.stdout
    expected = tiny_run.losses(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_loss/code.txt" in line] == [6, 12]
    for name, mesh in (("same", ()), ("other", ("mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1"))):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        for step in (8, 12):
            shutil.rmtree(tmp_path / name / "checkpoints" / str(step))
        done = tiny_run.train(config, *flags, f"run_dir={tmp_path / name}", *mesh)
        assert done.returncode == 0 and "resuming after step 4" in done.stdout, done.stderr
        apart = tiny_run.largest_difference(tiny_run.losses(tmp_path / name), expected)
        assert apart < OTHER_MESH if mesh else apart == 0
