"""Which GPU has which place in the mesh, and which of them share a host and an NVLink domain."""

from typing import Any

import numpy as np

from shardlm.mesh import MeshSpec
from shardlm.plan.cluster import Cluster

MOST_GPUS = 128  # that are told one by one


def placement(mesh: MeshSpec, cluster: Cluster) -> dict[str, Any]:
    """The first hosts of the cluster. A GPU's place follows from its number: meshes are laid over the devices host by
    host (MeshSpec.build). GPUs behind the mesh's last have none."""
    sizes = mesh.sizes()
    host = cluster.gpus_per_host
    shown = min(cluster.num_gpus // host, max(1, MOST_GPUS // host))
    used = min(shown * host, mesh.size(*sizes))
    places = np.stack(np.unravel_index(np.arange(used), tuple(sizes.values())), 1).tolist()
    split = [axis for axis, size in sizes.items() if size > 1]
    hosts = []
    for i in range(shown):
        gpus = [
            {"gpu": n, "place": {axis: places[n][at] for at, axis in enumerate(sizes) if n < used and axis in split}}
            for n in range(i * host, (i + 1) * host)
        ]
        hosts.append({"host": i, "island": i * host // cluster.island, "gpus": gpus})
    return {
        "axes": [{"axis": axis, "size": sizes[axis], **_spread(mesh, axis, cluster)} for axis in split],
        "hosts": hosts,
        "hosts_left_out": cluster.num_gpus // host - shown,
    }


def _spread(mesh: MeshSpec, axis: str, cluster: Cluster) -> dict[str, Any]:
    """Over how many islands the devices of one group of this axis lie, and how far apart neighbours are."""
    group = cluster.group(mesh, (axis,))
    return {"islands": group.outside, "inside": group.inside}
