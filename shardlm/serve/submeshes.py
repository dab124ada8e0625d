"""How the devices of a served model are cut: into replicas (mesh axis data), and those into stages (pipeline), each
with the other axes of its own."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from shardlm.errors import ShardlmError
from shardlm.mesh import AXES, MeshSpec


def of_replica(spec: MeshSpec) -> MeshSpec:
    """The mesh of one replica."""
    return dataclasses.replace(spec, data=1)


def of_stage(spec: MeshSpec) -> MeshSpec:
    """The mesh of one stage of one replica."""
    return dataclasses.replace(spec, data=1, pipeline=1)


def in_several_processes(devices: Sequence[jax.Device] | None) -> bool:
    """Whether more than one process of the job has some of these; None: of all."""
    if jax.process_count() == 1:  # devices that a plan is compiled for may be of several
        return False
    return len({device.process_index for device in (jax.devices() if devices is None else devices)}) > 1


def submeshes(spec: MeshSpec, devices: Sequence[jax.Device] | None = None) -> list[list[Mesh]]:
    """The mesh of each stage of each replica, over the first devices; of several processes the first one has the last
    stage, which samples. Raises ShardlmError where they are too few."""
    devices = jax.devices() if devices is None else devices
    several = in_several_processes(devices)
    needed = spec.size(*AXES)
    if needed > len(devices):
        raise ShardlmError(f"the mesh {spec} needs {needed} devices and there are {len(devices)}; choose fewer")
    if several:
        _check_processes(spec, needed, len(devices))
    grid = spec.build(devices[:needed]).devices
    grid = grid[:, ::-1] if several else grid
    types = (AxisType.Explicit,) * len(AXES)
    return [[Mesh(stage[None, None], AXES, axis_types=types) for stage in replica] for replica in grid]


def _check_processes(spec: MeshSpec, needed: int, there: int) -> None:
    """Raises ShardlmError for what several processes cannot serve together."""
    if needed != there:
        raise ShardlmError(
            f"the mesh {spec} takes {needed} of the {there} devices of {jax.process_count()} processes; each has to "
            f"have its part: choose sizes whose product is {there}, or start fewer processes"
        )
    if spec.data > 1:
        raise ShardlmError(
            f"data={spec.data} replicas over {jax.process_count()} processes: start a server for each replica, and "
            "launch.router before them"
        )
