"""`launch.topology` as a user runs it, in one process and in two."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from commands import run
from ports import free_port

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topology")
    flags = ["--cpu_devices=8", "--mesh=fsdp=-1,tensor=2", "--axes=fsdp,fsdp+tensor", "--sizes=512,64K"]
    flags += ["--collectives=all-gather,all-reduce", f"--output={folder / 'points.json'}", f"--png={folder / 'b.png'}"]
    return run("launch.topology", *flags), folder


def test_it_shows_the_machine_the_mesh_and_a_table(shown):
    done, _ = shown
    assert done.returncode == 0, done.stderr
    assert "8 x cpu" in done.stdout and "mesh fsdp=4 x tensor=2" in done.stdout
    assert "| 0:0.0  1:0.1  2:1.0" in done.stdout and "fsdp: groups of 4, each within a host" in done.stdout
    assert "links are not known" in done.stdout or "links of this host" in done.stdout
    lines = done.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("collective  "))
    rows = [line.split() for line in lines[head + 1 : head + 9]]
    assert [row[:4] for row in rows] == [
        [kind, over, devices, size]
        for over, devices in (("fsdp", "4"), ("fsdp+tensor", "8"))
        for kind in ("all-gather", "all-reduce")
        for size in ("512", "65,536")
    ]


def test_it_writes_points_and_a_picture(shown):
    _, folder = shown
    data = json.loads((folder / "points.json").read_text())
    assert data["mesh"] == {"fsdp": 4, "tensor": 2} and data["devices"] == 8 and len(data["measurements"]) == 8
    for row in data["measurements"]:
        factor = (row["group_size"] - 1) / row["group_size"] * (2 if row["kind"] == "all-reduce" else 1)
        assert row["bus_bandwidth"] == pytest.approx(factor * row["bytes"] / row["seconds"])
    assert (folder / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh=fdsp=8"], "mesh: there is no axis 'fdsp'; did you mean fsdp? (axes: data, pipeline"),
        (["--mesh=fsdp=3"], "the mesh fsdp=3 does not fit: it needs 3 devices and there are 2"),
        (["--axes=tensor"], "--axes=tensor: tensor has one device, so nothing is sent (larger than 1: fsdp)"),
        (["--collectives=all-gathr"], "--collectives: there is no 'all-gathr'; did you mean all-gather? (there are:"),
        (["--sizes=huge"], "--sizes: 'huge' is not a size"),
        (["--nomeasure", "--png=x.png"], "--png: nothing is measured that it could show"),
        (["--config=x.py"], "this command takes no configuration"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(flags, message):
    done = run("launch.topology", "--cpu_devices=2", *flags)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {message}"), done.stderr
    assert "Traceback" not in done.stderr


def test_one_device_has_nothing_to_send():
    done = run("launch.topology", "--cpu_devices=1")
    assert done.returncode == 0 and "mesh: one device" in done.stdout and "bus GB/s" not in done.stdout


def test_two_processes_on_a_host_measure_together(tmp_path):
    address = f"localhost:{free_port()}"
    words = ["--cpu_devices=2", "--mesh=data=2,tensor=2", "--sizes=512", "--collectives=all-reduce"]
    words += [f"--coordinator_address={address}", "--num_processes=2", f"--output={tmp_path / 'points.json'}"]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "launch.topology", *words, f"--process_id={rank}"],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": ""},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        first, second = (child.communicate(timeout=200) for child in children)
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], first[1] + second[1]
    rows = [line.split() for line in first[0].splitlines() if line.startswith("all-reduce  ")]
    assert [row[1] for row in rows] == ["data", "tensor"] and "all-reduce" not in second[0]
    data = json.loads((tmp_path / "points.json").read_text())
    assert [(row["axes"], row["group_size"]) for row in data["measurements"]] == [(["data"], 2), (["tensor"], 2)]
    assert len(data["hosts"]) == 1 and data["devices"] == 4  # two processes, one host
