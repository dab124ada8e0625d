"""benchmarks/achieved.json: rates that others measured, against the peaks that hardware.py knows."""

import json
import pathlib

import pytest

from shardlm.hardware import GPUS

DATA = json.loads((pathlib.Path(__file__).parent.parent / "benchmarks" / "achieved.json").read_text())
KEYS = {
    "matmul": {"gpu", "dtype", "m", "n", "k", "tflops_per_second", "software"},
    "attention": {"gpu", "dtype", "direction", "kernel", "head_dim", "causal", "seq_len", "tflops_per_second"},
    "collectives": {
        *("collective", "gpu", "num_gpus", "gpus_per_host", "nic_gbit_per_second_per_gpu", "fabric", "algorithm"),
        *("bus_gbytes_per_second", "small_microseconds"),
    },
    "latency_microseconds": {"link", "algorithm", "ll", "ll128", "simple", "what"},
    "memory": {"gpu", "kernel", "gbytes_per_second"},
    "point_to_point": {"gpu", "gbytes_per_second", "what"},
}


@pytest.mark.parametrize("name", KEYS)
def test_every_row_has_all_fields_a_source_and_no_twin(name):
    rows = DATA[name]
    for row in rows:
        assert set(row) - {"note"} == KEYS[name] | {"source"}, row
        assert row["source"].startswith("https://")
        assert row.get("gpu", "h100") in GPUS
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)
    assert set(DATA) == {"about", *KEYS}


def test_rates_are_below_the_peaks():
    for row in DATA["matmul"]:
        assert 0.05 < row["tflops_per_second"] * 1e12 / GPUS[row["gpu"]].peak.of(row["dtype"]) < 1, row
    for row in DATA["attention"]:
        assert 0.1 < row["tflops_per_second"] * 1e12 / GPUS[row["gpu"]].peak.of(row["dtype"]) < 0.8, row
        assert row["direction"] in ("forward", "backward")
    for row in DATA["memory"]:
        assert 0.75 < row["gbytes_per_second"] * 1e9 / GPUS[row["gpu"]].hbm_bytes_per_second < 1, row
    for row in DATA["point_to_point"]:
        assert 0 < row["gbytes_per_second"] * 1e9 < GPUS[row["gpu"]].nvlink_bytes_per_second, row


def test_collectives_grow_with_size_and_stay_near_their_links():
    for row in DATA["collectives"]:
        gpu, table = GPUS[row["gpu"]], row["bus_gbytes_per_second"]
        sizes = [size for size, _ in table]
        assert sizes == [None] or (sizes == sorted(sizes) and min(sizes) > 0), row
        assert all(rate > 0 for _, rate in table)
        # Reduction in the switch, and trees between two hosts, exceed what a ring could: by at most a fifth here.
        assert max(rate for _, rate in table) * 1e9 < 1.2 * gpu.nvlink_bytes_per_second, row
        nic = row["nic_gbit_per_second_per_gpu"]
        if nic:
            hosts = row["num_gpus"] // row["gpus_per_host"]
            limit = nic / 8 * row["gpus_per_host"] * (1.2 if hosts == 2 else 1)
            assert hosts > 1 and max(rate for _, rate in table) < limit, row
        assert row["small_microseconds"] is None or 5 < row["small_microseconds"] < 100


def test_each_generation_is_covered():
    assert {"a100", "h100", "h200", "b200", "gb200", "b300"} <= {row["gpu"] for row in DATA["matmul"]}
    both = {(row["gpu"], row["direction"]) for row in DATA["attention"]}
    assert {(gpu, way) for gpu in ("a100", "h100", "b200") for way in ("forward", "backward")} <= both
    assert {"a100", "h100", "h200", "b200", "gb200"} <= {row["gpu"] for row in DATA["collectives"]}
    assert {"a100", "h100", "h200", "b200"} <= {row["gpu"] for row in DATA["memory"]}
