"""A mesh over hosts: groups, what they cross, the picture; and what links allow a group."""

import pytest

from shardlm import hardware
from shardlm.errors import ShardlmError
from shardlm.mesh import AXES, MeshSpec, crossing_axes
from shardlm.network.layout import Layout, Place, Span, chosen_axes, format_devices, format_mesh, layout_of
from shardlm.network.peaks import peak
from shardlm.network.survey import nvlink_domain

H100 = hardware.GPUS["h100"]


def lay(spec: MeshSpec, per_host: int, hosts_of_a_domain: int = 1, kind: str = "NVIDIA H100 80GB HBM3") -> Layout:
    count = spec.size(*AXES)
    places = [Place(i, kind, i // per_host, i // per_host // hosts_of_a_domain, H100.hbm_bytes) for i in range(count)]
    return Layout(spec.sizes(), tuple(places), tuple(f"node{i}" for i in range(count // per_host)))


@pytest.mark.parametrize(
    ("spec", "per_host"),
    [
        (MeshSpec(data=2, fsdp=4, tensor=2), 8),
        (MeshSpec(tensor=16), 8),
        (MeshSpec(fsdp=4, tensor=2), 4),
        (MeshSpec(data=4, pipeline=2, tensor=2), 1),
        (MeshSpec(data=2, expert=2, context=4), 16),
    ],
    ids=str,
)
def test_an_axis_crosses_hosts_where_the_sizes_say_so(spec, per_host):
    layout = lay(spec, per_host)
    crossing = crossing_axes(spec, per_host)
    assert {axis for axis in layout.axes if layout.span([axis]).hosts > 1} == set(crossing)


def test_groups_and_their_span():
    layout = lay(MeshSpec(data=2, fsdp=2, tensor=4), 8)
    assert [[place.id for place in group] for group in layout.groups(["data", "tensor"])] == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7, 12, 13, 14, 15],
    ]
    assert layout.span(["data", "tensor"]) == Span(8, hosts=2, domains=2, in_host=4, in_domain=4)
    assert layout.span(["fsdp"]) == Span(2, hosts=1, domains=1, in_host=2, in_domain=2)
    assert lay(MeshSpec(data=4, tensor=4), 4, hosts_of_a_domain=2).span(["data"]) == Span(4, 4, 2, 1, 2)


def test_the_picture_has_a_row_for_each_host_and_says_what_crosses():
    layout = lay(MeshSpec(data=2, tensor=4), 4)
    assert format_mesh(layout).splitlines() == [
        "mesh data=2 x tensor=4",
        "a device is shown as ID:data.tensor",
        "  host 0 | 0:0.0  1:0.1  2:0.2  3:0.3",
        "  host 1 | 4:1.0  5:1.1  6:1.2  7:1.3",
        "  data: groups of 2 cross 2 hosts (2 NVLink domains, joined by the network)",
        "  tensor: groups of 4, each within a host",
    ]
    assert format_devices(layout).splitlines()[1] == (
        "host 1 (node1): 4 x NVIDIA H100 80GB HBM3 of 79.1 GiB, NVLink domain 1, ids 4-7"
    )
    assert "cross 2 hosts (one NVLink domain)" in format_mesh(lay(MeshSpec(tensor=8), 4, hosts_of_a_domain=2))
    assert format_mesh(lay(MeshSpec(), 1)) == "mesh: one device"
    many = format_mesh(lay(MeshSpec(data=40), 2))
    assert "host 15 |" in many and "host 16 |" not in many and "... and 4 more hosts" in many


def test_the_devices_of_this_process():
    layout = layout_of(MeshSpec(fsdp=4, tensor=2).build())
    assert len(layout.hosts) == 1 and {place.kind for place in layout.places} == {"cpu"}
    assert [place.id for place in layout.places] == list(range(8)) and layout.axes == ("fsdp", "tensor")


def test_axes_of_the_command_line():
    layout = lay(MeshSpec(data=2, tensor=4), 4)
    assert chosen_axes([], layout) == [("data",), ("tensor",)]
    assert chosen_axes(["tensor+data", "tensor"], layout) == [("data", "tensor"), ("tensor",)]
    for words, message in {
        "tensr": r"no axis 'tensr'; did you mean tensor\? \(axes: data, pipeline",
        "data+fsdp": r"data\+fsdp: fsdp has one device, so nothing is sent \(larger than 1: data, tensor\)",
        "data+data": "names an axis twice",
    }.items():
        with pytest.raises(ShardlmError, match=message):
            chosen_axes([words], layout)


def bytes_per_second(kind: str, layout: Layout, axes: list[str], gpu=H100, **told) -> tuple[float, str]:
    limit = peak(kind, layout.span(axes), gpu, **told)
    return limit.bytes_per_second, limit.link


def test_what_links_allow():
    two_hosts = lay(MeshSpec(data=2, fsdp=2, tensor=4), 8)
    assert bytes_per_second("all-gather", two_hosts, ["tensor"]) == (450e9, "NVLink")
    assert bytes_per_second("all-reduce", two_hosts, ["data"]) == (50e9, "network")
    assert bytes_per_second("all-reduce", two_hosts, ["data", "tensor"]) == (
        4 * 50e9,
        "network",
    )  # four adapters a host
    assert bytes_per_second("collective-permute", two_hosts, ["data", "tensor"]) == (50e9, "network")
    # Each of 16 devices sends 15 parts, 8 of them to the other host by its own adapter.
    assert bytes_per_second("all-to-all", two_hosts, ["data", "fsdp", "tensor"]) == (50e9 * 15 / 8, "network")
    assert bytes_per_second("all-gather", lay(MeshSpec(fsdp=16), 4, 4), ["fsdp"]) == (450e9, "NVLink")  # as in NVL72
    wide = lay(MeshSpec(fsdp=32), 16)
    assert bytes_per_second("all-gather", wide, ["fsdp"], domain=16) == (450e9, "NVLink")  # 16 adapters carry more


def test_links_of_gpus_without_nvlink_or_figures():
    host = lay(MeshSpec(tensor=4), 4)
    assert bytes_per_second("all-gather", host, ["tensor"], hardware.GPUS["l40s"]) == (32e9, "PCIe")
    assert bytes_per_second("all-gather", host, ["tensor"], hardware.GPUS["a40"]) == (32e9, "PCIe")  # bridges join two
    assert bytes_per_second("all-gather", host, ["tensor"], None, nvlink=200e9, domain=8) == (200e9, "NVLink")
    assert peak("all-gather", host.span(["tensor"]), None) is None
    assert peak("all-gather", lay(MeshSpec(data=4), 1).span(["data"]), hardware.GPUS["l40s"]) is None


def test_the_nvlink_domain():
    assert nvlink_domain(lay(MeshSpec(data=2, tensor=4), 4), None) == 4
    assert nvlink_domain(lay(MeshSpec(tensor=16), 4, 4), None) == 16
    assert nvlink_domain(lay(MeshSpec(tensor=8), 8, kind="cpu"), None) == 1
