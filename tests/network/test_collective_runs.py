"""Timed collectives: what they compute against numpy, what they send against the compiled program. Nothing is timed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import on_gpus
from jax.sharding import NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.hlo.collectives import collectives as read_collectives
from shardlm.mesh import AXES, MeshSpec
from shardlm.network import collectives
from shardlm.network.collectives import KINDS, bus_bytes, checked, held, measure, once, parse_sizes, repeated
from shardlm.topology import topology

SPEC = MeshSpec(fsdp=4, tensor=2)
OVER = [("fsdp",), ("tensor",), ("fsdp", "tensor")]


def arrived(kind: str, sent: np.ndarray, group: np.ndarray) -> np.ndarray:
    """What the devices of a group hold after a collective; sent is [devices, numbers]."""
    mine, n = sent[group], len(group)
    if kind == "all-gather":
        return np.stack([mine.reshape(-1)] * n)
    if kind == "reduce-scatter":
        return mine.sum(0).reshape(n, -1)
    if kind == "all-reduce":
        return np.stack([mine.sum(0)] * n)
    if kind == "all-to-all":
        return mine.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)
    return np.roll(mine, 1, axis=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", OVER, ids="+".join)
def test_numbers_arrive_as_numpy_says(kind, axes):
    mesh, spec = SPEC.build(), PartitionSpec(AXES)
    sent = np.random.default_rng(0).integers(0, 100, (8, 16)).astype(np.float32)
    move = jax.shard_map(lambda x: once(kind, axes, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    got = np.asarray(jax.jit(move)(jax.device_put(sent.reshape(-1), NamedSharding(mesh, spec)))).reshape(8, -1)
    grid = np.arange(8).reshape(4, 2)
    groups = {("fsdp",): grid.T, ("tensor",): grid, ("fsdp", "tensor"): grid.reshape(1, 8)}[axes]
    for group in groups:
        np.testing.assert_array_equal(got[group], arrived(kind, sent, group))


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_of_arrived_numbers_sees_a_wrong_one(kind, monkeypatch):
    mesh = SPEC.build()
    x, wrong = checked(mesh, kind, ("fsdp",), 4096)()
    assert int(wrong) == 0 and x.shape == (8 * held(kind, 4096, 4),)

    def faulty(kind, axes, x):
        y = once(kind, axes, x)
        return y.at[3].add(jnp.where(jax.lax.axis_index(AXES) == 5, 1, 0))

    monkeypatch.setattr(collectives, "once", faulty)
    with pytest.raises(
        ShardlmError, match=rf"{kind} over fsdp of 4.0 KiB brought 1 wrong numbers to 8 devices in groups of 4"
    ):
        list(measure(mesh, ("fsdp",), [kind], [4096]))


def compiled(mesh, kind: str, axes: tuple[str, ...], size: int, repeats: int) -> str:
    group = int(np.prod([mesh.shape[axis] for axis in axes]))
    numbers = held(kind, size, group) * mesh.size
    argument = jax.ShapeDtypeStruct((numbers,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(AXES)))
    return repeated(mesh, kind, axes, repeats).lower(argument).compile().as_text()


def check_sent(text: str, kind: str, axes: tuple[str, ...], size: int, repeats: int) -> None:
    (found,) = read_collectives(text, SPEC.sizes())
    assert (found.kind, found.axes, found.count, found.guess) == (kind, axes, repeats, "")
    assert (found.bytes, found.wire_bytes) == (size, bus_bytes(kind, size, found.group_size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", OVER[1:], ids="+".join)
def test_the_program_runs_the_collective_so_often_and_no_other(kind, axes):
    check_sent(compiled(SPEC.build(), kind, axes, 4096, 7), kind, axes, 4096, 7)


@on_gpus
@pytest.mark.parametrize("kind", KINDS)
def test_on_gpus_nothing_is_copied_between_repetitions(kind):
    size = 2**26  # small all-reduces are a kernel of XLA's own from jax 0.11 on, which does not sum in place
    text = compiled(SPEC.build(topology("h100", 1, 8)), kind, ("fsdp",), size, 7)
    check_sent(text, kind, ("fsdp",), size, 7)
    assert not [line for line in text.splitlines() if " copy(" in line and "f32[" in line.split(" copy(")[0]]


def test_bus_bandwidth_is_that_of_nccl_tests():
    # PERFORMANCE.md: 2(n-1)/n, (n-1)/n and, between two, 1
    assert [bus_bytes(kind, 1000, 4) for kind in KINDS] == [750, 750, 1500, 750, 1000]


def test_points_are_rounded_to_whole_parts_and_bandwidths_belong_to_their_times():
    points = list(measure(SPEC.build(), ("fsdp",), ["all-gather", "all-reduce"], [1, 1000, 1001]))
    assert [(p.kind, p.bytes) for p in points] == [(k, b) for k in ("all-gather", "all-reduce") for b in (16, 1008)]
    for point in points:
        assert point.group_size == 4 and point.seconds > 0
        assert point.algorithm_bandwidth * point.seconds == pytest.approx(point.bytes)
        factor = 2 * 3 / 4 if point.kind == "all-reduce" else 3 / 4
        assert point.bus_bandwidth == pytest.approx(factor * point.algorithm_bandwidth)


def test_sizes_of_the_command_line():
    assert parse_sizes(["4096", "64K", "32MiB", " 1G"], "gpu") == (4096, 65536, 2**25, 2**30)
    assert parse_sizes([], "cpu") == collectives.SIZES["cpu"] and parse_sizes([], "cuda") == collectives.SIZES["gpu"]
    for word in ("4T", "-1", "0", "4 kB", "much"):
        with pytest.raises(ShardlmError, match=f"--sizes: '{word}' is not a size; give bytes, as 4096"):
            parse_sizes([word], "cpu")


def test_a_size_beyond_the_memory_is_refused(monkeypatch):
    class Device:
        process_index, device_kind = 0, "NVIDIA L40S"

        def memory_stats(self):
            return {"bytes_limit": 3 * 2**20}

    class Mesh:
        devices = np.array([Device()])

    collectives._check_memory(Mesh(), 2**20)
    with pytest.raises(ShardlmError, match=r"of 2.0 MiB takes 6.0 MiB, and NVIDIA L40S lets 3.0 MiB .* above 1.0 MiB"):
        collectives._check_memory(Mesh(), 2**21)
