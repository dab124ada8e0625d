"""The GPU table: what jax calls each GPU, figures that must agree with one another, and sources."""

import pathlib
import re
import subprocess
import sys

import pytest

from shardlm import hardware
from shardlm.errors import ShardlmError

DEVICE_KINDS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": "gb300",
    "NVIDIA L40S": "l40s",
    "NVIDIA A40": "a40",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
}
OTHERS = [
    "cpu",
    "",
    "NVIDIA A4",
    "NVIDIA H100 NVL",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
]
ULTRA = ("b300", "gb300")  # which gave up int8 for fp4
each_gpu = pytest.mark.parametrize("gpu", hardware.GPUS.values(), ids=lambda gpu: gpu.name)


@pytest.mark.parametrize(("device_kind", "name"), DEVICE_KINDS.items())
def test_device_kinds_of_jax_are_found(device_kind, name):
    assert hardware.lookup(device_kind).name == name
    assert hardware.named(name) is hardware.named(device_kind) is hardware.lookup(device_kind)


def test_the_kinds_above_are_the_whole_table():
    assert set(DEVICE_KINDS.values()) == set(hardware.GPUS)


def test_the_readme_names_the_whole_table():
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    said = re.search(r"`--gpu` is one of ([^(]+) \(`shardlm/hardware.py`", text)[1]
    assert set(re.split(r",\s|\sand\s", said)) == set(hardware.GPUS)


@pytest.mark.parametrize("device_kind", OTHERS)
def test_other_devices_are_not_mistaken_for_one_in_the_table(device_kind):
    assert hardware.lookup(device_kind) is None


@pytest.mark.parametrize(
    ("said", "name"),
    [("h100-sxm", "h100"), ("A100-80GB", "a100"), ("a100 40gb", "a100-40gb"), ("rtx-4090", "rtx4090")],
)
def test_names_are_found_however_they_are_spelled(said, name):
    assert hardware.named(said).name == name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ShardlmError, match=r"for a GPU 'h10'; did you mean h100\? \(known: a100, a100-40gb"):
        hardware.named("h10")


@each_gpu
def test_figures_agree_with_one_another(gpu):
    # Dense rates double with each halving of the operand; a sparse figure among them would be twice off. The
    # sheets round to 3%. Game cards halve what accumulates in 32 bits, so their int8 is out of line.
    peak = gpu.peak
    assert peak.bf16 == peak.fp16
    assert peak.bf16 == pytest.approx(2 * peak.tf32, rel=0.03)
    assert peak.fp32 <= peak.tf32
    if gpu.name in ULTRA:
        assert peak.int8 < peak.tf32 / 5
    elif not gpu.device_kinds[0].startswith("NVIDIA GeForce"):
        assert peak.int8 == pytest.approx(2 * peak.bf16, rel=0.03)
    if peak.fp8:
        assert peak.fp8 == pytest.approx(2 * peak.bf16, rel=0.03)
    if peak.fp4 and peak.fp8:
        assert peak.fp4 == pytest.approx((3 if gpu.name in ULTRA else 2) * peak.fp8, rel=0.03)


@each_gpu
def test_formats_and_links_are_those_of_the_generation(gpu):
    assert gpu.peak.fp8 is None or gpu.generation != "ampere"
    assert gpu.peak.fp4 is None or gpu.generation == "blackwell"
    assert (gpu.nvlink_bytes_per_second == 0) == (gpu.nvlink_domain == 1)
    assert 20e9 < gpu.hbm_bytes < 300e9


@each_gpu
def test_every_figure_has_a_source(gpu):
    assert gpu.datasheet.startswith("https://")
    assert gpu.memory_source.startswith("https://")
    assert (gpu.nic_bytes_per_second is None) == (gpu.nic_source is None)


def test_blackwells_differ_in_what_their_systems_give_them():
    """Clocks and power of B200 and B300 by those of the same chip in a rack, with the host on NVLink-C2C."""
    for plain, rack in (("b200", "gb200"), ("b300", "gb300")):
        one, other = hardware.GPUS[plain], hardware.GPUS[rack]
        assert other.peak.bf16 == pytest.approx(one.peak.bf16 * 10 / 9) and other.watts > one.watts
        assert (one.nvlink_domain, other.nvlink_domain) == (8, 72) and other.gpus_per_host == 4
        assert other.nvlink_bytes_per_second == one.nvlink_bytes_per_second == 900e9
        # NVLink-C2C: 201 GB/s measured (Azure ND GB200 v6)
        assert one.pcie_bytes_per_second == 64e9 < 201e9 < other.pcie_bytes_per_second < 250e9
    for old, ultra in (("b200", "b300"), ("gb200", "gb300")):
        assert hardware.GPUS[ultra].hbm_bytes == pytest.approx(1.5 * hardware.GPUS[old].hbm_bytes, rel=0.04)
        assert hardware.GPUS[ultra].nic_bytes_per_second == 2 * hardware.GPUS[old].nic_bytes_per_second


def test_a_peak_is_found_by_the_names_of_jax():
    peak = hardware.GPUS["h100"].peak
    assert peak.of("bfloat16") == peak.of("bf16") == peak.bf16
    assert peak.of("float8_e4m3fn") == peak.fp8
    assert hardware.GPUS["a100"].peak.of("float8_e4m3fn") is None
    with pytest.raises(ShardlmError, match="no peak rate is defined for the type 'complex64'; use one of fp32"):
        peak.of("complex64")


def test_the_table_does_not_import_jax():
    code = "import shardlm.hardware, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
