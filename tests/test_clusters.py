"""Named clusters, and files that add GPUs and clusters."""

import json

import pytest

from shardlm import clusters, hardware
from shardlm.clusters import CLUSTERS
from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED, load_hardware

TOML = """
[[gpus]]
base = "h100"
name = "h100-500w"
watts = 500
peak.bf16 = 700e12

[[clusters]]
name = "ours"
gpu = "h100-500w"
gpus_per_host = 4
nic_bytes_per_second = 12.5e9
fabric = "roce"
source = "https://example.org"
"""


def test_every_cluster_has_known_gpus_a_sane_network_and_a_source():
    for kind in CLUSTERS.values():
        gpu = hardware.named(kind.gpu)
        assert gpu.nvlink_domain % kind.gpus_per_host == 0 or kind.gpus_per_host % gpu.nvlink_domain == 0
        assert 1e9 < kind.nic_bytes_per_second <= 100e9
        assert kind.source.startswith("https://") and kind.name == kind.name.lower()
    assert {kind.fabric for kind in CLUSTERS.values()} == {"infiniband", "roce", "efa", "tcp"}


def test_nvidias_systems_agree_with_the_gpu_table():
    for name in ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "dgx-b300", "gb300-nvl72"):
        kind = CLUSTERS[name]
        assert kind.nic_bytes_per_second == hardware.GPUS[kind.gpu].nic_bytes_per_second


def test_an_unknown_cluster_is_refused_with_the_nearest():
    assert clusters.named("DGX-H100") is CLUSTERS["dgx-h100"]
    with pytest.raises(
        ShardlmError, match=r"no cluster is known as 'aws-p55'; did you mean aws-p5\? \(known: dgx-a100"
    ):
        clusters.named("aws-p55")


def test_a_file_adds_gpus_and_clusters_from_known_ones(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(TOML)
    found, known = load_hardware(path), hardware.GPUS["h100"]
    ours = found.gpu("h100-500w")
    assert (ours.watts, ours.peak.bf16, ours.peak.fp8) == (500, 700e12, known.peak.fp8)
    assert found.cluster("ours").gpu == "h100-500w" and found.gpu("a100") is SHIPPED.gpu("a100")
    assert "h100-500w" not in hardware.GPUS and "ours" not in CLUSTERS
    as_json = tmp_path / "ours.json"
    as_json.write_text(json.dumps({"gpus": [{"base": "h100", "name": "h100-500w", "watts": 500}]}))
    assert load_hardware(as_json).gpu("h100-500w").watts == 500


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("watts", "wats", r"gpus.0: wats: Gpu has no field 'wats'; did you mean watts\?"),
        ("watts = 500", "watts = 'much'", "gpus.0: watts: expected float, got 'much'"),
        ("watts = 500", "watts = -500", "gpus.0: watts=-500.0 must not be negative"),
        ("watts = 500", "peak.tf32 = -1.0", r"gpus.0: peak.tf32=-1.0 must not be negative"),
        ("watts = 500", "peak.tf32 = nan", r"gpus.0: peak.tf32=nan must not be negative, and must be finite"),
        ("watts = 500", "peak.tf32 = 494.7", r"gpus.0: peak.tf32=494.7 must be at least 1e\+09: it is in FLOP/s"),
        ("watts = 500", "hbm_bytes_per_second = inf", "_second=inf must not be negative, and must be finite"),
        ("watts = 500", "hbm_bytes_per_second = 3350", r"must be at least 1e\+06: it is in bytes a second"),
        ("watts = 500", "pcie_bytes_per_second = 0", r"pcie_bytes_per_second=0.0 must be at least 1e\+06"),
        ("watts = 500", "hbm_bytes = 80", r"gpus.0: hbm_bytes=80 must be at least 1e\+08: it is in bytes, as 85e9"),
        ("watts = 500", "nvlink_domain = 0", "gpus.0: nvlink_domain=0 must be at least 1"),
        ("watts = 500", "gpus_per_host = 0", "gpus.0: gpus_per_host=0 must be at least 1: a host has one at least"),
        ('base = "h100"', 'base = "h10"', r"gpus.0: .*GPU 'h10'; did you mean h100\?"),
        ('base = "h100"', "", "gpus.0: configuration.peak.*needs|gpus.0: .* needs"),
        ('name = "h100-500w"', "", "gpus.0: give it a name of its own, besides base='h100'"),
        ("watts = 500", "device_kinds = []", "gpus.0: device_kinds is empty; name what jax or nvidia-smi"),
        ('gpu = "h100-500w"', 'gpu = "h100-600w"', r"GPU 'h100-600w'; did you mean h100-500w\?"),
        ('"roce"', '"rocee"', r"clusters.0: fabric: expected one of .* did you mean roce\?"),
        ("[[clusters]]", "[[cluster]]", r"unknown table 'cluster'; did you mean clusters\?"),
        ("[[clusters]]", "[clusters]", r"clusters: expected a list of tables \(\[\[clusters\]\] in TOML\)"),
        ("[[gpus]]", "[[gpus", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path, before, after, message):
    path = tmp_path / "ours.toml"
    path.write_text(TOML.replace(before, after, 1))
    with pytest.raises(ShardlmError, match=message):
        load_hardware(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ShardlmError, match=r"the name must end in .toml or .json"):
        load_hardware(tmp_path / "ours.yaml")
    with pytest.raises(ShardlmError, match="does not exist"):
        load_hardware(tmp_path / "ours.toml")
