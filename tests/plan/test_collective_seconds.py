"""The time of collectives: arithmetic by hand, what must never get slower, and what others measured."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.clusters import FABRICS
from shardlm.hardware import GPUS
from shardlm.mesh import AXES, MeshSpec
from shardlm.plan.cluster import Cluster, Group
from shardlm.plan.constants import NETWORK, NETWORKS, NVLINK, SWITCH_SECONDS
from shardlm.plan.links import Route
from shardlm.plan.serving.ops import Exchanged
from shardlm.plan.serving.time import exchanged_seconds

H100 = Cluster.of(GPUS["h100"], 64)
MEASURED = pathlib.Path(__file__).parents[2] / "benchmarks" / "achieved.json"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def test_large_gathers_run_at_the_slower_of_both_links():
    inside = Route.of(Group(8, 8), H100)
    assert inside.seconds("all-gather", 1e12, 1) == pytest.approx(1e12 / (450e9 * NVLINK.bandwidth), rel=1e-3)
    hosts = Route.of(Group(64, 8), Cluster.of(GPUS["h100"], 64, 0, 25e9))  # eight adapters of a host together
    assert hosts.seconds("all-gather", 1e12, 1) == pytest.approx(1e12 / (200e9 * NETWORK.bandwidth), rel=1e-3)
    alone = Route.of(Group(8, 1), H100)  # one device of each host: one adapter
    assert alone.seconds("all-gather", 1e12, 1) == pytest.approx(1e12 / (50e9 * NETWORK.bandwidth), rel=1e-3)
    assert (inside.name, hosts.name, alone.name) == ("NVLink", "network", "network")


def test_small_collectives_take_a_latency_that_grows_with_the_ring():
    ll = NVLINK.protocols["LL"]
    assert Route.of(Group(8, 8), H100).seconds("all-gather", 0, 1) == pytest.approx(ll.base + 7 * ll.hop)
    far = NETWORK.protocols["LL"].hop
    assert Route.of(Group(64, 8), H100).seconds("all-gather", 0, 1) == pytest.approx(ll.base + 56 * ll.hop + 7 * far)
    # A sum over many islands takes the tree: log2 of them and not all.
    assert Route.of(Group(64, 8), H100).seconds("all-reduce", 0, 1) == pytest.approx(
        ll.base + 2 * (7 * ll.hop + 3 * far)
    )


def test_the_switch_sums_from_hopper_on():
    sent = 2 * 7 / 8 * 1e10
    assert Route.of(Group(8, 8), H100).seconds("all-reduce", sent, 1) == pytest.approx(sent / 450e9 + SWITCH_SECONDS)
    a100 = Route.of(Group(8, 8), Cluster.of(GPUS["a100"], 8))
    assert a100.seconds("all-reduce", sent, 1) == pytest.approx(sent / (300e9 * NVLINK.bandwidth), rel=0.01)


def test_point_to_point_uses_one_adapter_and_the_links_at_once():
    route = Route.of(Group(16, 8), H100)  # 8 of 15 peers are in the other host
    exchange = route.seconds("all-to-all", 15e9, 1)
    assert exchange == pytest.approx(8e9 / (50e9 * NETWORK.bandwidth), rel=0.01)
    assert route.seconds("collective-permute", 15e9, 1) == pytest.approx(15e9 / (50e9 * NETWORK.bandwidth), rel=0.01)


def test_cards_without_nvlink_share_pcie():
    route = Route.of(Group(8, 8), Cluster.of(GPUS["l40s"], 8))
    assert route.name == "PCIe"
    assert route.seconds("all-gather", 1e11, 1) == pytest.approx(1e11 / (32e9 * 0.75), rel=0.01)


@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from([(2, 2), (8, 8), (8, 1), (64, 8), (256, 4)]),
    sent=st.floats(1, 1e12),
    count=st.integers(1, 1000),
    nic=st.floats(1e9, 1e11),
)
def test_more_bandwidth_is_never_slower_and_more_bytes_never_faster(kind, size, sent, count, nic):
    group = Group(*size)

    def seconds(sent, count, nic):
        return Route.of(group, Cluster.of(GPUS["h100"], 256, 0, nic)).seconds(kind, sent, count)

    once = seconds(sent, count, nic)
    assert once > 0
    assert seconds(sent, count, 2 * nic) <= once
    assert seconds(2 * sent, count, nic) >= once
    assert seconds(sent, count + 1, nic) >= once * (1 - 1e-9)  # the same bytes in more pieces
    assert seconds(2 * sent, 2 * count, nic) == pytest.approx(2 * once)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=6, max_size=6), st.sets(st.sampled_from(AXES), min_size=1))
def test_a_group_counts_its_members_in_the_first_island(sizes, axes):
    """Against every device's coordinates."""
    mesh = MeshSpec(**dict(zip(AXES, sizes, strict=True)))
    total = mesh.size(*AXES)
    host = next(n for n in (8, 4, 3, 2, 1) if total % n == 0)
    found = Cluster.of(GPUS["h100"], total, host).group(mesh, sorted(axes))
    members = 0
    for device in range(host):
        at, rest = {}, device
        for axis in reversed(AXES):
            at[axis], rest = rest % mesh.size(axis), rest // mesh.size(axis)
        members += all(at[axis] == 0 for axis in AXES if axis not in axes)
    assert found == Group(mesh.size(*axes), members)


def test_racks_are_cut_into_equal_islands_and_hosts_are_islands():
    gb200 = GPUS["gb200"]
    assert Cluster.of(GPUS["h100"], 64, 4).island == 4
    assert [Cluster.of(gb200, n).gpus_per_host for n in (2, 4, 72)] == [2, 4, 4]  # a rack is of hosts of four
    assert [Cluster.of(gb200, n, 4).island for n in (4, 64, 72, 128, 256, 144)] == [4, 64, 72, 64, 64, 72]


def test_sums_over_each_fabric_take_what_others_measured():
    """From 1 MB over TCP, where a step between hosts is nearly all of it; over EFA the smallest and from 1 GB."""
    errors = {"tcp": [], "efa": []}
    for one in json.loads(MEASURED.read_text())["collectives"]:
        size, hosts = one["num_gpus"], one["num_gpus"] // one["gpus_per_host"]
        if one["fabric"] not in errors or (one["gpu"] == "h100" and one["fabric"] == "efa" and hosts < 4):
            continue  # two hosts exceed their network by trees
        nic = one["nic_gbit_per_second_per_gpu"] / 8 * 1e9
        route = Route.of(Group(size, 8), Cluster.of(GPUS[one["gpu"]], size, 8, nic, one["fabric"]))
        for nbytes, bus in one["bus_gbytes_per_second"]:
            if one["fabric"] == "efa" and 1e3 < nbytes < 1e9:
                continue
            sent = 2 * nbytes * (size - 1) / size
            errors[one["fabric"]].append(route.seconds("all-reduce", sent, 1) / (sent / (bus * 1e9)) - 1)
    assert len(errors["tcp"]) == 12 and max(map(abs, errors["tcp"])) < 0.30
    assert len(errors["efa"]) == 17 and max(map(abs, errors["efa"])) < 0.30


def test_a_fabric_keeps_its_share_of_the_adapters():
    def seconds(fabric, sent):
        return Route.of(Group(16, 8), Cluster.of(GPUS["h100"], 16, 8, 25e9, fabric)).seconds("all-gather", sent, 1)

    assert set(NETWORKS) == set(FABRICS)
    assert seconds("tcp", 1e12) == pytest.approx(1e12 / (8 * 25e9 * 0.66), rel=1e-3)
    assert seconds("roce", 1e12) == seconds("infiniband", 1e12)
    assert seconds("efa", 1e12) == pytest.approx(seconds("infiniband", 1e12), rel=1e-3)
    assert seconds("infiniband", 1e6) < seconds("efa", 1e6) < seconds("tcp", 1e6)


def test_large_collectives_take_what_others_measured():
    """Bus bandwidth of the largest message in each list of nccl-tests, where the file says GPUs and adapters."""
    ratios = []
    for one in json.loads(MEASURED.read_text())["collectives"]:
        nbytes, bus = one["bus_gbytes_per_second"][-1]
        if one["gpu"] not in GPUS or (
            one["num_gpus"] > one["gpus_per_host"] and not one["nic_gbit_per_second_per_gpu"]
        ):
            continue
        size, nbytes = one["num_gpus"], nbytes or 8e9
        nic = (one["nic_gbit_per_second_per_gpu"] or 400) / 8 * 1e9
        fabric = one["fabric"] if one["fabric"] in FABRICS else "infiniband"
        cluster = Cluster.of(GPUS[one["gpu"]], size, one["gpus_per_host"], nic, fabric)
        island = min(size, cluster.island)
        sent = nbytes * (size - 1) / size * (2 if one["collective"] == "all-reduce" else 1)
        if one["collective"] == "collective-permute":
            sent = nbytes
        took = Route.of(Group(size, island), cluster).seconds(one["collective"], sent, 1)
        ratios.append(sent / (bus * 1e9) / took)
    ratios.sort()
    assert len(ratios) > 15
    assert 0.9 < ratios[len(ratios) // 2] < 1.1  # measured over predicted seconds
    assert ratios[0] > 0.7 and ratios[-1] < 1.4


def test_small_sums_of_a_decode_step_take_what_others_measured():
    """KiB -> us over eight H200: NCCL in a CUDA graph (https://github.com/sgl-project/sglang/pull/22734), and by
    nccl-tests (stas00's list in achieved.json)."""
    measured = [(2, 16.84), (8, 17.23), (32, 19.63), (128, 20.13), (256, 20.31), (512, 20.86), (1024, 27.0)]
    measured += [(0, 15.2), (32, 17.9), (64, 18.3), (256, 18.6), (512, 19.0), (1024, 25.3)]
    cluster, mesh = Cluster.of(GPUS["h200"], 8), MeshSpec(tensor=8)
    ratios = [
        1e6 * exchanged_seconds(Exchanged("all-reduce", ("tensor",), 2 * 7 / 8 * kib * 1024, 1), mesh, cluster) / us
        for kib, us in measured
    ]
    assert min(ratios) > 0.79 and max(ratios) < 1.32  # 0.6 of the smallest by what NCCL assumed before
    large = Exchanged("all-reduce", ("tensor",), 1e10, 1)
    route = Route.of(cluster.group(mesh, ("tensor",)), cluster)
    assert exchanged_seconds(large, mesh, cluster) == pytest.approx(route.seconds("all-reduce", 1e10, 1), rel=1e-3)
