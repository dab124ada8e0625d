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


def submeshes(spec: MeshSpec, devices: Sequence[jax.Device] | None = None) -> list[list[Mesh]]:
    """The mesh of each stage of each replica, over the first devices. Raises ShardlmError where they are too few."""
    devices = jax.devices() if devices is None else devices
    needed = spec.size(*AXES)
    if needed > len(devices):
        raise ShardlmError(f"the mesh {spec} needs {needed} devices and there are {len(devices)}; choose fewer")
    grid = spec.build(devices[:needed]).devices
    types = (AxisType.Explicit,) * len(AXES)
    return [[Mesh(stage[None, None], AXES, axis_types=types) for stage in replica] for replica in grid]
