"""Training with --profile_steps: the trace, what is said of it, and that nothing else changes."""

import collections
import dataclasses
import gzip
import json
import pathlib

import pytest
import tiny_run
from jax.profiler import ProfileData

from launch.train import without_profile
from shardlm.config import resolve
from shardlm.errors import ShardlmError
from shardlm.hlo.collectives import collectives
from shardlm.hlo.flops import matmul_flops
from shardlm.hlo.rows import LAYERS, communication, exposed
from shardlm.hlo.text import parse
from shardlm.hlo.walk import collect
from shardlm.mesh import MeshSpec
from shardlm.profile import trace
from shardlm.train.loop import train
from shardlm.train.profile import Profiler, ProfileSteps
from shardlm.train.program import Program


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Five steps over fsdp=4 x tensor=2."""
    home = tmp_path_factory.mktemp("profile")
    config = resolve(str(tiny_run.write(home)), []).config
    short = dataclasses.replace(config.train, steps=5, eval_every=5, sample_prompt="", baselines=False)
    return dataclasses.replace(config, mesh=MeshSpec(fsdp=4, tensor=2), train=short)


def run(config, name, profile=None):
    config = dataclasses.replace(config, run_dir=f"{config.run_dir}_{name}")
    assert train(config, command="again", started=0.0, profile=profile) == 0
    return config


@pytest.mark.wide
def test_a_profiled_run(config, capsys, tmp_path):
    plain = run(config, "plain")
    capsys.readouterr()
    done = run(config, "profiled", ProfileSteps(2, 4, predicted={"mlp": 0.5}))
    said = capsys.readouterr().out
    losses = [tiny_run.losses(pathlib.Path(c.run_dir)) for c in (plain, done)]
    assert losses[0] == losses[1]  # bit for bit

    written = trace.find(pathlib.Path(done.run_dir) / "profile" / "process_0")
    for name in ("perfetto_trace.json.gz", written.name.replace(".xplane.pb", ".trace.json.gz")):
        assert json.loads(gzip.decompress((written.parent / name).read_bytes()))["traceEvents"]
    profile = json.loads((written.parent / "profile.json").read_text())
    program = Program.make(done, done.mesh.build())
    text = program.compile("step", dict(program.xla_options().options)).as_text()
    events = trace.read(ProfileData.from_file(str(written)))

    assert profile["steps"] == [2, 4] and len(profile["step_seconds"]) == 3
    rows = profile["seconds_per_step"]
    assert {"attention", "mlp", "norm", "embedding", "head", "optimizer"} <= rows.keys()
    expected = {communication(one.kind, one.axes) for one in collectives(text, program.rules.mesh.sizes())}
    assert {row for row in rows if exposed(row) in rows} == expected and len(expected) > 3
    parts = sum(rows.get(row, 0.0) for row in LAYERS) + sum(rows[exposed(row)] for row in expected)
    assert parts == pytest.approx(rows["busy"], rel=1e-9)
    for device in profile["devices"].values():
        layers = sum(sum(phases.values()) for phases in device["computed"].values())
        assert layers + sum(device["exposed"].values()) == pytest.approx(device["busy"], rel=1e-9)
        assert device["idle"] >= 0 and device["unknown"] == 0
        assert all(device["exposed"][row] <= seconds * (1 + 1e-9) for row, seconds in device["sent"].items())
    flops = sum(sum(phases.values()) for phases in profile["flops_per_step_and_device"].values())
    assert flops == matmul_flops(text).flops

    # Each instruction was seen as often as the program says that it runs: three steps, loops included.
    ran = collections.Counter((event.op, event.device) for event in events if event.module == "jit_step")
    times = collections.Counter()
    for name, count in collect(parse(text), lambda visit: [(visit.instruction.name, visit.count)], len):
        times[name] += count
    assert {device for _, device in ran} == set(range(8)) and max(times[op] for op, _ in ran) == 2
    assert all(seen <= 3 * times[op] for (op, _), seen in ran.items())
    # XLA:CPU may end the record of an operation after the step: the very last ones can be missing.
    assert sum(ran.values()) >= 0.999 * sum(3 * times[op] for op, _ in ran)

    assert "profile of steps 2 to 4" in said and "all-gather fsdp" in said and "predicted" in said
    assert "https://ui.perfetto.dev" in said and "xprof --logdir=" in said

    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=6))
    run(longer, "profiled", ProfileSteps(5, 6))  # as by the command that began it
    assert "resumes after step 5: nothing is profiled; to profile steps, name some from 6 on" in capsys.readouterr().out


def test_a_run_that_stops_early_keeps_its_trace(config, tmp_path):
    program = Program.make(dataclasses.replace(config, run_dir=str(tmp_path)), config.mesh.build())
    profiler = Profiler(ProfileSteps(1, 3), program, dict)
    assert profiler.reached(0, None) == "" and not profiler.is_edge(2)
    said = profiler.close()
    assert "ended before step 3" in said and trace.find(tmp_path / "profile" / "process_0").is_file()
    assert profiler.close() == "" and Profiler(None, program, dict).reached(0, None) == ""


@pytest.mark.parametrize("text", ["10", "a:b", "3:3", "5:2", "0:4", "1:2:3", ":4", ""])
def test_steps_that_are_none(text):
    with pytest.raises(ShardlmError, match="takes FIRST:END with 1 <= FIRST < END"):
        ProfileSteps.parse(text)


def test_resuming_does_not_profile_again():
    rest = ["--config=a.py", "--config.train.steps=9"]
    for words in (["--profile_steps=2:3"], ["--profile_steps", "2:3"], ["-profile_steps=2:3"], []):
        assert without_profile([*rest, *words]) == without_profile([*words, *rest]) == rest


def test_steps_outside_of_the_run(config):
    assert ProfileSteps.parse("2:6") == ProfileSteps(2, 5)
    with pytest.raises(ShardlmError, match=r"2:7 ends after the run: train.steps=5.*at least 6"):
        train(config, command="again", started=0.0, profile=ProfileSteps.parse("2:7"))
    assert ProfileSteps(2, 5).passed(1) == ""
    assert ProfileSteps(2, 5).passed(2).startswith("warning: --profile_steps=2:6 begins before the run")
