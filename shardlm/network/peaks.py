"""The bus bandwidth that the links of a group allow, from the figures of hardware.py and the driver. No jax.

Bus bandwidth is the definition of nccl-tests (collectives.py), by which a ring that keeps every device's link busy in
both directions reaches the link's rate. An all-reduce that NVSwitches sum up (NVLS) may pass it.
"""

import dataclasses

from shardlm.hardware import Gpu
from shardlm.network.layout import Span


@dataclasses.dataclass(frozen=True)
class Peak:
    """bytes/s of each device in one direction, and over what."""

    bytes_per_second: float
    link: str


def peak(kind: str, span: Span, gpu: Gpu | None, nvlink: float | None = None, domain: int | None = None) -> Peak | None:
    """For a collective of `kind` in groups that span `span`; None where the link's rate is not known.

    `nvlink` and `domain` are what the driver tells of this host (links.py), which holds for GPUs that are not in the
    table too: bytes/s of one GPU, and how many GPUs NVLink joins.
    """
    inside = _inside(span, gpu, nvlink, domain)
    if span.domains == 1:
        return inside
    if gpu is None or gpu.nic_bytes_per_second is None:
        return None
    network = Peak(gpu.nic_bytes_per_second * _adapters(kind, span), "network")
    return min((network, inside), key=lambda one: one.bytes_per_second) if inside else network


def _inside(span: Span, gpu: Gpu | None, nvlink: float | None, domain: int | None) -> Peak | None:
    rate = nvlink or (gpu.nvlink_bytes_per_second if gpu else None)
    joined = domain or (gpu.nvlink_domain if gpu else 1)
    within = span.devices if span.hosts == 1 else span.in_host  # hosts of one domain are joined by NVLink themselves
    if rate and 1 < joined >= within:
        return Peak(rate, "NVLink")
    return Peak(gpu.pcie_bytes_per_second, "PCIe") if gpu else None


def _adapters(kind: str, span: Span) -> float:
    """Bus bandwidth over the rate of one adapter, with an adapter for each device: how many adapters carry what a ring
    brings from domain to domain. In an all-to-all a device sends its own adapter what is not for its own domain."""
    if kind == "collective-permute":
        return 1.0
    if kind == "all-to-all":
        return (span.devices - 1) / (span.devices - span.in_domain)
    return float(span.in_domain)
