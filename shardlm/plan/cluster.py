"""The GPUs of a run and the links between them: which devices a mesh axis joins, and over what."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from shardlm.clusters import Fabric
from shardlm.errors import ShardlmError
from shardlm.hardware import Gpu
from shardlm.mesh import AXES, MeshSpec
from shardlm.network.profile import Profile
from shardlm.plan.constants import PCIE

HOST = 8  # GPUs; a larger NVLink domain is a rack of hosts
NIC = 25e9  # bytes/s a GPU where the GPU's own systems name none: a 200 Gb/s adapter


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that exchange with each other: `size` of them, `inside` of those under one NVLink switch."""

    size: int
    inside: int

    @property
    def outside(self) -> int:
        """How many such islands it spans."""
        return -(-self.size // self.inside)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`num_gpus` of one kind.

    gpus_per_host         GPUs of one host
    nic_bytes_per_second  network of one GPU, in one direction
    measured              what was measured on the machine: rates to plan with in place of the GPU's (measured.py)
    fabric                how hosts are joined
    """

    gpu: Gpu
    num_gpus: int
    gpus_per_host: int
    nic_bytes_per_second: float
    measured: Profile | None = None
    fabric: Fabric = "infiniband"

    @classmethod
    def of(
        cls,
        gpu: Gpu,
        num_gpus: int,
        gpus_per_host: int = 0,
        nic_bytes_per_second: float = 0,
        fabric: Fabric = "infiniband",
    ) -> "Cluster":
        """With 0 for what the GPU's own systems have: so many GPUs a host, its network adapters.

        Raises ShardlmError for a number of GPUs that does not fill hosts.
        """
        if num_gpus < 1 or gpus_per_host < 0 or nic_bytes_per_second < 0:
            raise ShardlmError(
                f"num_gpus={num_gpus}, gpus_per_host={gpus_per_host}, nic_bytes_per_second={nic_bytes_per_second}: "
                "GPUs are at least 1, the others at least 0 (0: as in NVIDIA's own systems)"
            )
        host = gpus_per_host or min(gpu.gpus_per_host, num_gpus)
        if num_gpus % host:
            below = num_gpus // host * host
            choices = f"{below} or {below + host}" if below else f"{host}"
            raise ShardlmError(
                f"num_gpus={num_gpus} does not fill hosts of {host}; choose {choices}, or give gpus_per_host"
            )
        return cls(gpu, num_gpus, host, nic_bytes_per_second or gpu.nic_bytes_per_second or NIC, fabric=fabric)

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are a host's CPU, as local.py describes it: all of them share its cores."""
        return self.gpu.generation == "cpu"

    @property
    def device(self) -> str:
        """What its devices are called where a GPU's name is not said."""
        return "CPU" if self.is_cpu else "GPU"

    @functools.cached_property
    def routes(self) -> dict[Group, Any]:
        """By the groups that were asked for (measured.py)."""
        return {}

    @property
    def island(self) -> int:
        """GPUs that reach each other without a network: over NVLink, or on one host's PCIe. Of a rack, as many hosts as
        divide the cluster evenly: 64 of 72 GPUs where there are 256."""
        if self.gpu.nvlink_bytes_per_second and self.gpu.nvlink_domain > max(HOST, self.gpus_per_host):
            hosts = self.num_gpus // self.gpus_per_host
            most = min(hosts, self.gpu.nvlink_domain // self.gpus_per_host)
            return self.gpus_per_host * max(n for n in range(1, most + 1) if hosts % n == 0)
        return self.gpus_per_host

    @property
    def inside_bytes_per_second(self) -> float:
        """Of one GPU to others of its island, in one direction: PCIe where NVLink does not join them all."""
        gpu = self.gpu
        joined = gpu.nvlink_domain >= min(self.gpus_per_host, self.num_gpus)
        return gpu.nvlink_bytes_per_second if joined and gpu.nvlink_bytes_per_second else gpu.pcie_bytes_per_second

    @property
    def host_bytes_per_second(self) -> float:
        """Of one GPU to its host's memory or from it: both ways at once."""
        return self.gpu.pcie_bytes_per_second * PCIE.bandwidth

    def group(self, mesh: MeshSpec, axes: Sequence[str]) -> Group:
        """The devices along these axes, in the mesh's physical order (mesh.py)."""
        return _group(self.island, mesh, tuple(axes))


@functools.lru_cache(maxsize=16384)
def _group(island: int, mesh: MeshSpec, axes: tuple[str, ...]) -> Group:
    sizes = mesh.sizes()
    strides = {axis: math.prod(sizes[later] for later in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
    outermost = sorted(((strides[axis], sizes[axis]) for axis in axes), reverse=True)
    return Group(mesh.size(*axes), _below(island, outermost))


def _below(limit: int, axes: list[tuple[int, int]]) -> int:
    """How many places under `limit` these axes reach, each (stride, size), the outermost first; within one stride lie
    all places of the axes behind it."""
    if not axes:
        return 1 if limit > 0 else 0
    (stride, size), *rest = axes
    whole = min(size, limit // stride)
    count = whole * math.prod(n for _, n in rest)
    return count + (_below(limit - whole * stride, rest) if whole < size else 0)
