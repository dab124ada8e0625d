"""Meshes: sizes, physical order, and the refusal of what does not fit."""

import jax
import pytest

from shardlm.errors import ShardlmError
from shardlm.mesh import AXES, MeshSpec, crossing_axes, physical_order


def test_the_rest_goes_to_the_free_axis():
    assert MeshSpec(data=-1, tensor=2).resolve(8) == MeshSpec(data=4, tensor=2)
    assert dict(MeshSpec(fsdp=-1, tensor=2).build().shape) == dict(zip(AXES, (1, 1, 4, 1, 1, 2), strict=True))


@pytest.mark.parametrize(
    "spec,devices,message",
    [
        (MeshSpec(data=2, fsdp=3), 8, r"data=2 x fsdp=3 .* needs 6 devices and there are 8; change one axis: fsdp=4"),
        (MeshSpec(data=16), 8, r"needs 16 devices and there are 8; change one axis: data=8"),
        (
            MeshSpec(tensor=3, data=-1),
            8,
            r"8 devices cannot be divided by the fixed axes, whose product is 3; .*tensor=8",
        ),
        (MeshSpec(fsdp=3, tensor=3), 8, r"needs 9 devices and there are 8; change more than one axis"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_choices(spec, devices, message):
    with pytest.raises(ShardlmError, match=message):
        spec.resolve(devices)


def test_sizes_are_checked():
    with pytest.raises(ShardlmError, match=r"mesh\.tensor=0: an axis size is a positive number"):
        MeshSpec(tensor=0)
    with pytest.raises(ShardlmError, match="only one axis may take the rest"):
        MeshSpec(data=-1, fsdp=-1)


def test_a_mesh_in_words():
    assert MeshSpec.parse(["fsdp=4", " tensor=-1"]) == MeshSpec(fsdp=4, tensor=-1) and MeshSpec.parse([]) == MeshSpec()
    for words, message in {
        ("tensr=4",): r"no axis 'tensr'; did you mean tensor\? \(axes: data, pipeline, fsdp, expert, context, tensor\)",
        ("fsdp",): "'fsdp' gives fsdp no size; write fsdp=NUMBER, or fsdp=-1 for the rest",
        ("fsdp=two",): "'fsdp=two' gives fsdp no size",
        ("fsdp=2", "fsdp=4"): "fsdp is given twice, as 2 and 4",
        ("fsdp=0",): r"mesh\.fsdp=0: an axis size is a positive number",
    }.items():
        with pytest.raises(ShardlmError, match=message):
            MeshSpec.parse(words)


class Device:
    def __init__(self, id, process_index, slice_index=None):
        self.id, self.process_index, self.slice_index = id, process_index, slice_index


def test_neighbours_share_a_host_and_hosts_share_a_domain():
    devices = [Device(i, process_index=i % 4, slice_index=i % 2) for i in range(8)]
    ordered = [(d.slice_index, d.process_index) for d in physical_order(devices)]
    assert ordered == [(0, 0), (0, 0), (0, 2), (0, 2), (1, 1), (1, 1), (1, 3), (1, 3)]


def test_tensor_is_innermost_and_data_outermost():
    grid = MeshSpec(data=2, fsdp=2, tensor=2).build().devices
    flat = [d.id for d in grid.reshape(2, 2, 2)[0, 0]]
    assert flat == [d.id for d in physical_order(jax.devices())[:2]]


def test_axes_that_cross_hosts():
    assert crossing_axes(MeshSpec(data=2, fsdp=4, tensor=2), 8) == ("data",)
    assert crossing_axes(MeshSpec(tensor=16), 8) == ("tensor",)
    assert crossing_axes(MeshSpec(fsdp=2, tensor=3), 8) == ("tensor", "fsdp")
    assert crossing_axes(MeshSpec(fsdp=2, tensor=4), 8) == ()
