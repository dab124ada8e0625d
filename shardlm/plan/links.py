"""How long a collective takes: NCCL's algorithms and protocols over an island's links and the network between islands,
the fastest of them as NCCL itself chooses (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc)."""

import dataclasses
import functools
import math

from shardlm.plan.cluster import Cluster, Group
from shardlm.plan.constants import NETWORK, NETWORKS, NVLINK, PCIE, SWITCH_SECONDS, TREE, Link

POINT_TO_POINT = ("collective-permute", "all-to-all", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class Route:
    """The way between the devices of a group.

    inside, network  what joins the devices of an island, and islands
    near, far        bytes/s of a device over each
    switch           bytes/s of sums made in the switch; 0: it makes none
    """

    group: Group
    inside: Link
    near: float
    far: float
    switch: float
    network: Link = NETWORK

    @classmethod
    def of(cls, group: Group, cluster: Cluster) -> "Route":
        gpu, raw = cluster.gpu, cluster.inside_bytes_per_second
        inside = NVLINK if raw > gpu.pcie_bytes_per_second else PCIE
        sums = gpu.generation in ("hopper", "blackwell") and group.outside == 1 and group.size >= 4
        network = NETWORKS[cluster.fabric]
        far = cluster.nic_bytes_per_second * network.bandwidth
        return cls(group, inside, raw * inside.bandwidth, far, raw * inside.switch if sums else 0.0, network)

    @property
    def name(self) -> str:
        """Of the slowest link on the way, as a reader knows it."""
        return self.network.name if self.group.outside > 1 else self.inside.name

    @property
    def cores(self) -> float:
        """Share of a device's cores that a collective keeps from kernels beside it."""
        within = self.inside.cores if self.group.inside > 1 else 0.0
        return max(within, self.network.cores if self.group.outside > 1 else 0.0)

    @functools.cached_property
    def rate(self) -> float:
        """Bytes/s of a ring. Rings enter and leave an island through all the adapters of its members in the group, so
        that the slower of both links sets the pace
        (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""
        if self.group.outside == 1:
            return self.near
        return min(self.near, self.far * self.group.inside) if self.group.inside > 1 else self.far

    def seconds(self, kind: str, sent_bytes: float, count: float) -> float:
        """Of `count` collectives of which each device sends `sent_bytes` together, as a ring does (traffic.py)."""
        if self.group.size == 1 or not count:
            return 0.0
        if kind in POINT_TO_POINT:
            return self._point_to_point(kind, sent_bytes, count)
        sent = sent_bytes / count
        if kind != "all-reduce":
            return count * self._ring(sent, 1)
        return count * min(self._ring(sent, 2), self._tree(sent), self._in_switch(sent))

    def _ring(self, sent: float, rounds: int) -> float:
        """Once round the ring, or twice for a sum."""
        between = rounds * (self.group.outside - 1)
        within = rounds * (self.group.size - 1) - between
        return min(
            sent / (self.rate * share) + base + within * near + between * far
            for share, base, near, far in self._protocols
        )

    def _tree(self, sent: float) -> float:
        """A sum along a chain in each island and up and down trees of islands
        (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4): fewer steps, less rate."""
        depth = math.ceil(math.log2(self.group.outside)) if self.group.outside > 1 else 0
        return min(
            sent / (self.rate * share * TREE) + base + 2 * ((self.group.inside - 1) * near + depth * far)
            for share, base, near, far in self._protocols
        )

    def _in_switch(self, sent: float) -> float:
        return sent / self.switch + SWITCH_SECONDS if self.switch else math.inf

    @functools.cached_property
    def _protocols(self) -> list[tuple[float, float, float, float]]:
        """(share of the rate, base, seconds of a step inside, of one between islands) of each that both links have."""
        inside = self.inside.protocols
        if self.group.outside == 1:
            return [(one.share, one.base, one.hop, 0.0) for one in inside.values()]
        both = [(inside[name], one) for name, one in self.network.protocols.items() if name in inside]
        return [(min(n.share, f.share), max(n.base, f.base), n.hop, f.hop) for n, f in both]

    def _point_to_point(self, kind: str, sent_bytes: float, count: float) -> float:
        """Each device has its own adapter for what leaves the island; all else crosses the island's links at once. A
        permutation over islands is as slow as its slowest pair."""
        group, spans = self.group, self.group.outside > 1
        leaves = float(spans) if kind == "collective-permute" else (group.size - group.inside) / (group.size - 1)
        busy = max(sent_bytes * (1 - leaves) / self.near, sent_bytes * leaves / self.far)
        simple = (self.network if spans else self.inside).protocols["Simple"]
        return busy + count * (simple.base + simple.hop)
