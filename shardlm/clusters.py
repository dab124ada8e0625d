"""How GPUs are built into hosts and joined by a network, by name: NVIDIA's systems and what clouds rent. No jax.

Owns what a host has of GPUs and network; the GPUs themselves and their NVLink are hardware.py's. A figure is what is
sold, in one direction; what collectives achieve of it is for whoever plans or measures.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from shardlm.errors import ShardlmError

Fabric = Literal["infiniband", "roce", "efa", "tcp"]
"""How hosts are joined.

infiniband  RDMA over InfiniBand
roce        RDMA over Ethernet
efa         Amazon's Elastic Fabric Adapter
tcp         Google's GPUDirect-TCPX and TCPXO, which carry GPU memory over TCP
"""
FABRICS: tuple[Fabric, ...] = get_args(Fabric)


@dataclass(frozen=True)
class ClusterKind:
    """A kind of cluster.

    gpu                   a name of hardware.py
    gpus_per_host         that share one operating system; an NVLink domain may span several hosts
    nic_bytes_per_second  of the network between hosts, per GPU and direction
    """

    name: str
    gpu: str
    gpus_per_host: int
    nic_bytes_per_second: float
    fabric: Fabric
    source: str


_DGX_A100 = "https://developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100"
_BASEPOD = (
    "https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/"
    "latest/core-components.html"
)
_GB200_RACK = (
    "https://github.com/mlcommons/inference_results_v6.1/blob/main/closed/Crusoe/systems/"
    "GB200-NVL72_GB200-186GB_aarch64x16_Dynamo.json"
)
_DGX_B300 = "https://dev.to/aicplight/b300-architecture-and-infiniband-xdr-networking-explained-5645"
_GB300_RACK = "https://docs.nvidia.com/enterprise-reference-architectures/nvl72-ai-factory/latest/components.html"
_MOSAIC = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
_TRAINY = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
_META = "https://arxiv.org/abs/2407.21783"
_AWS = "https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html"
_GCP = "https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth"
_AZURE = "https://learn.microsoft.com/en-us/azure/virtual-machines/sizes/gpu-accelerated/nd-family"
_OCI = "https://docs.oracle.com/en-us/iaas/Content/Compute/References/computeshapes.htm"

_GBIT = 1e9 / 8

_ALL = (
    # NVIDIA's own: one adapter a GPU, 200, 400 or 800 Gb/s.
    ClusterKind("dgx-a100", "a100", 8, 200 * _GBIT, "infiniband", _DGX_A100),
    ClusterKind("dgx-h100", "h100", 8, 400 * _GBIT, "infiniband", _BASEPOD),
    ClusterKind("dgx-h200", "h200", 8, 400 * _GBIT, "infiniband", _BASEPOD),
    ClusterKind("dgx-b200", "b200", 8, 400 * _GBIT, "infiniband", _BASEPOD),
    ClusterKind("gb200-nvl72", "gb200", 4, 400 * _GBIT, "infiniband", _GB200_RACK),
    ClusterKind("dgx-b300", "b300", 8, 800 * _GBIT, "infiniband", _DGX_B300),
    ClusterKind("gb300-nvl72", "gb300", 4, 800 * _GBIT, "infiniband", _GB300_RACK),
    # Of published measurements.
    ClusterKind("a100-roce", "a100", 8, 200 * _GBIT, "roce", _MOSAIC),
    ClusterKind("a100-40gb-roce", "a100-40gb", 8, 200 * _GBIT, "roce", _MOSAIC),
    ClusterKind("h200-rdma", "h200", 8, 400 * _GBIT, "infiniband", _TRAINY),
    ClusterKind("meta-h100-roce", "h100", 8, 400 * _GBIT, "roce", _META),
    # Amazon: 400, 3,200 and 3,200 Gb/s a host.
    ClusterKind("aws-p4d", "a100-40gb", 8, 50 * _GBIT, "efa", _AWS),
    ClusterKind("aws-p4de", "a100", 8, 50 * _GBIT, "efa", _AWS),
    ClusterKind("aws-p5", "h100", 8, 400 * _GBIT, "efa", _AWS),
    ClusterKind("aws-p5en", "h200", 8, 400 * _GBIT, "efa", _AWS),
    ClusterKind("aws-p6-b200", "b200", 8, 400 * _GBIT, "efa", _AWS),
    # Google: 800 and 1,600 Gb/s a host over TCP, then 400 Gb/s a GPU over RoCE.
    ClusterKind("gcp-a2-ultra", "a100", 8, 12.5 * _GBIT, "tcp", _GCP),
    ClusterKind("gcp-a3-high", "h100", 8, 100 * _GBIT, "tcp", _GCP),
    ClusterKind("gcp-a3-mega", "h100", 8, 200 * _GBIT, "tcp", _GCP),
    ClusterKind("gcp-a3-ultra", "h200", 8, 400 * _GBIT, "roce", _GCP),
    ClusterKind("gcp-a4", "b200", 8, 400 * _GBIT, "roce", _GCP),
    ClusterKind("gcp-a4x", "gb200", 4, 400 * _GBIT, "roce", _GCP),
    # Microsoft: one InfiniBand adapter a GPU.
    ClusterKind("azure-nd-a100-v4", "a100-40gb", 8, 200 * _GBIT, "infiniband", _AZURE),
    ClusterKind("azure-ndm-a100-v4", "a100", 8, 200 * _GBIT, "infiniband", _AZURE),
    ClusterKind("azure-nd-h100-v5", "h100", 8, 400 * _GBIT, "infiniband", _AZURE),
    ClusterKind("azure-nd-h200-v5", "h200", 8, 400 * _GBIT, "infiniband", _AZURE),
    # Oracle: 1,600 and 3,200 Gb/s a host.
    ClusterKind("oci-gpu-a100-v2", "a100", 8, 200 * _GBIT, "roce", _OCI),
    ClusterKind("oci-gpu-h100", "h100", 8, 400 * _GBIT, "roce", _OCI),
    ClusterKind("oci-gpu-h200", "h200", 8, 400 * _GBIT, "roce", _OCI),
    ClusterKind("oci-gpu-b200", "b200", 8, 400 * _GBIT, "roce", _OCI),
)
CLUSTERS: Mapping[str, ClusterKind] = MappingProxyType({kind.name: kind for kind in _ALL})


def named(name: str, known: Mapping[str, ClusterKind] = CLUSTERS) -> ClusterKind:
    """The cluster that a user calls `name`. Raises: ShardlmError for another, with the nearest."""
    kind = known.get(name.lower())
    if kind is None:
        near = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ShardlmError(f"no cluster is known as {name!r}{hint} (known: {', '.join(known)})")
    return kind
