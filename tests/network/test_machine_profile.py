"""Latency and bandwidth from points, the rates of one device, and the profile as a file."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.errors import ShardlmError
from shardlm.hlo.flops import matmul_flops
from shardlm.mesh import MeshSpec
from shardlm.network import machine
from shardlm.network.fit import fit
from shardlm.network.layout import layout_of
from shardlm.network.profile import load_profile, save_profile
from shardlm.network.report import Row
from shardlm.network.survey import machine_profile, rates

SIZES = [2.0**10, 2.0**14, 2.0**18, 2.0**22, 2.0**26]


@given(st.floats(1e-6, 1e-3), st.floats(1e9, 1e12))
def test_planted_latency_and_bandwidth_are_found(latency, bandwidth):
    found = fit(SIZES, [latency + size / bandwidth for size in SIZES])
    assert found.latency_seconds == pytest.approx(latency, rel=1e-4)
    assert found.bytes_per_second == pytest.approx(bandwidth, rel=1e-4)
    assert found.error <= found.largest_error < 1e-4


def test_noise_moves_the_line_no_more_than_it_is():
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(SIZES))
    found = fit(SIZES, [(2e-5 + size / 1e11) * factor for size, factor in zip(SIZES, noise, strict=True)])
    assert found.latency_seconds == pytest.approx(2e-5, rel=0.1) and found.bytes_per_second == pytest.approx(
        1e11, rel=0.1
    )
    assert 0 < found.error < found.largest_error < 0.12
    # One point that took 20 times as long counts as much as one that took a twentieth: the line goes through both.
    slow = fit(SIZES[:4], [1e-4, 1e-4, 2e-4, 1e-2])
    assert slow.bytes_per_second < 2 * SIZES[3] / 1e-2


def test_points_that_tell_no_bandwidth_are_refused():
    with pytest.raises(ShardlmError, match="need two sizes at least, there are 1; see --sizes"):
        fit([1024, 1024], [1e-5, 1e-5])
    with pytest.raises(
        ShardlmError, match=r"from 1e-05 s for 1024 bytes to 9e-06 s for 4096: no bandwidth can be told"
    ):
        fit([1024, 4096], [1e-5, 9e-6])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_products_keep_the_size_of_what_they_multiply(dtype):
    x, there, back = (machine._random(jax.devices()[:1], i, (256, 256), dtype) for i in range(3))
    before = np.asarray(x, np.float32).std()
    after = machine.matmuls(4)(x, there, back)
    assert after.dtype == dtype and 0.3 < np.asarray(after, np.float32).std() / before < 3


def test_programs_compute_what_is_counted():
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 32), (32, 64), (64, 32))]
    text = machine.matmuls(5).lower(*shapes).compile().as_text()
    assert matmul_flops(text).flops == 5 * 4 * 16 * 32 * 64
    b = np.linspace(1, 2, 64, dtype=np.float32)
    assert np.allclose(machine.streams("triad", 3)(b.copy(), b), b * (1 + 0.5 + 0.25 + 0.125))
    assert np.allclose(machine.streams("scale", 3)(b.copy(), b), b * 0.999**3)


@pytest.fixture(scope="module")
def profile():
    """Of this process, on small arrays, with made-up times of collectives."""
    patch = pytest.MonkeyPatch()
    for name, value in {"CPU_SHAPES": ((32, 64, 16),), "CPU_WORK": 1e6, "CPU_BYTES": 2**16}.items():
        patch.setattr(machine, name, value)
    mesh = MeshSpec(fsdp=4, tensor=2).build()
    layout, said = layout_of(mesh), []
    rows = [
        Row("all-gather", ("fsdp",), 4, size, 1e-5 + 0.75 * size / 1e9, 1.0, 1.0, None, None) for size in (4096, 2**20)
    ]
    collectives, missing = rates([*rows, Row("all-reduce", ("tensor",), 2, 4096, 1e-5, 1.0, 1.0, None, None)], layout)
    assert missing == (
        "all-reduce over tensor: latency and bandwidth need two sizes at least, there are 1; see --sizes",
    )
    profile = machine_profile(mesh, layout, None, collectives, said.append)
    patch.undo()
    assert said == [*profile.matmuls, *profile.memory]
    return profile


def test_a_profile_has_the_rates_of_a_device_and_between_devices(profile):
    assert [(r.m, r.k, r.n, r.dtype) for r in profile.matmuls] == [(32, 64, 16, "float32"), (32, 64, 16, "bfloat16")]
    assert [(r.operation, r.bytes) for r in profile.memory] == [("scale", 2**13), ("triad", 2**13)]
    assert profile.host == () and (profile.devices, profile.hosts, profile.nvlink_domain) == (8, 1, 1)
    assert profile.mesh == (("fsdp", 4), ("tensor", 2)) and profile.device_kind == "cpu"
    rate = profile.collective("all-gather", 4, 1)
    assert rate.axes == ("fsdp",) and rate.latency_seconds == pytest.approx(1e-5, rel=1e-3)
    assert rate.bytes_per_second == pytest.approx(1e9, rel=1e-3) and rate.points[0][0] == 4096
    assert profile.collective("all-gather", 4, 2) is None and profile.collective("all-to-all", 4, 1) is None


def test_a_profile_survives_its_file(profile, tmp_path):
    save_profile(profile, tmp_path / "machine.json")
    assert load_profile(tmp_path / "machine.json") == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.update(format=2),
            "has the format 2, and this version reads 1; measure again: python -m launch.topology",
        ),
        (lambda d: d.pop("matmuls"), "Profile needs matmuls, which is not there"),
        (lambda d: d.update(device_kid=1), "no field 'device_kid'; did you mean device_kind"),
        (lambda d: d["matmuls"][0].update(m="wide"), r"matmuls\.0\.m: expected int, got 'wide'"),
        (
            lambda d: d["memory"][0].update(bytes_per_second=-1),
            r"memory\.0\.bytes_per_second is -1\.0, and must be a rate",
        ),
        (lambda d: d["collectives"][0].update(latency_seconds=float("nan")), r"collectives\.0\.latency_seconds is nan"),
        (lambda d: d.update(devices=0), "devices is 0, and must be 1 or more"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(profile, tmp_path, change, message):
    save_profile(profile, tmp_path / "machine.json")
    data = json.loads((tmp_path / "machine.json").read_text())
    change(data)
    (tmp_path / "machine.json").write_text(json.dumps(data))
    with pytest.raises(ShardlmError, match=message):
        load_profile(tmp_path / "machine.json")


def test_a_profile_that_is_none_is_refused(tmp_path):
    with pytest.raises(ShardlmError, match=r"gone\.json: No such file or directory; measure again"):
        load_profile(tmp_path / "gone.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ShardlmError, match=r"text\.json is not JSON"):
        load_profile(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ShardlmError, match="has the format 'list'"):
        load_profile(tmp_path / "list.json")
