"""How long a collective takes: NCCL's algorithms over an island's links and the network between islands."""

import math

from shardlm.plan.cluster import Cluster, Group
from shardlm.plan.constants import INSIDE, NETWORK

POINT_TO_POINT = ("collective-permute", "all-to-all", "ragged-all-to-all")


def collective_seconds(kind: str, sent_bytes: float, count: float, group: Group, cluster: Cluster) -> float:
    """Of `count` collectives of which each device sends `sent_bytes` together, by the ring algorithm (traffic.py).

    Rings enter and leave an island through all the adapters of its members in the group, so that the slower of both
    links sets the pace (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); point to point, each
    device has its own adapter for what leaves the island.
    """
    if group.size == 1:
        return 0.0
    inside, network = _rates(cluster)
    if kind in POINT_TO_POINT:
        share = (group.size - group.inside) / (group.size - 1) if kind != "collective-permute" else group.outside > 1
        busy = max(sent_bytes * (1 - share) / inside, sent_bytes * share / network)
        return busy + count * (NETWORK.seconds if group.outside > 1 else INSIDE.seconds)
    rate = inside if group.outside == 1 else min(inside, network * group.inside)
    hops = (2 if kind == "all-reduce" else 1) * (math.log2(group.size) if kind == "all-reduce" else group.size - 1)
    between = min(hops, group.outside - 1)
    return sent_bytes / rate + count * ((hops - between) * INSIDE.seconds + between * NETWORK.seconds)


def _rates(cluster: Cluster) -> tuple[float, float]:
    """Bytes/s that a device sends inside its island and over the network."""
    return cluster.inside_bytes_per_second * INSIDE.bandwidth, cluster.nic_bytes_per_second * NETWORK.bandwidth
