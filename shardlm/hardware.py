"""Facts about NVIDIA GPUs, each with its source: peak rates, memory, links. No measurements, no jax.

Owns the table and the mapping from jax's `device_kind` to it. What a figure is worth in practice (achieved
fractions, overlap) is for whoever plans or measures.

Conventions: FLOP/s and bytes/s in plain units. Peaks are *dense*: NVIDIA prints many with 2:4 sparsity,
which is twice as much. 16-bit and 8-bit peaks are with 32-bit accumulation, as XLA asks for. Links are
counted in one direction, half of what datasheets print as bidirectional. None is "not found in a source", 0
is "has none".
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from shardlm.errors import ShardlmError

Generation = Literal["ampere", "ada", "hopper", "blackwell"]
GIB = 2**30


@dataclass(frozen=True)
class Peak:
    """Dense peak in FLOP/s (int8: OP/s) by the type of the operands. None: no such unit, or no source.

    `fp32` is the plain rate of the CUDA cores; on a GPU jax multiplies float32 through `tf32` unless told
    otherwise.
    """

    fp32: float
    tf32: float
    bf16: float
    fp16: float
    int8: float | None = None
    fp8: float | None = None
    fp4: float | None = None

    def of(self, dtype: str) -> float | None:
        """The peak for a name of jax ("bfloat16", "float8_e4m3fn") or of this class ("bf16").

        Raises: ShardlmError for a name that is neither.
        """
        short = dtype if dtype in vars(self) else JAX_DTYPES.get(dtype)
        if short is None:
            known = ", ".join((*vars(self), *JAX_DTYPES))
            raise ShardlmError(f"no peak rate is defined for the type {dtype!r}; use one of {known}")
        return getattr(self, short)


JAX_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "float32": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16",
        "int8": "int8",
        "float8_e4m3fn": "fp8",
        "float8_e5m2": "fp8",
        "float4_e2m1fn": "fp4",
    }
)


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    device_kinds             what jax (and nvidia-smi) call it
    hbm_bytes                memory that CUDA reports in all: a few per cent less than the name on the box
    nvlink_bytes_per_second  per direction and GPU; for PCIe cards, with the optional bridge between two
    nvlink_domain            how many GPUs reach each other over NVLink
    pcie_bytes_per_second    to the host, per direction; over NVLink-C2C where that is how the host is joined
    nic_bytes_per_second     network per direction and GPU in NVIDIA's own systems; None: the host decides
    gpus_per_host            of NVIDIA's own systems
    watts                    the limit the GPU is sold with (TDP); it draws less where memory or links limit it
    """

    name: str
    generation: Generation
    device_kinds: tuple[str, ...]
    peak: Peak
    hbm_bytes: int
    hbm_bytes_per_second: float
    nvlink_bytes_per_second: float
    nvlink_domain: int
    pcie_bytes_per_second: float
    nic_bytes_per_second: float | None
    watts: float
    datasheet: str  # of the peaks, memory bandwidth, links and power
    memory_source: str
    nic_source: str | None = None
    gpus_per_host: int = 8

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the matrix units take fp8: from compute capability 8.9 (Ada) on."""
        return self.generation != "ampere"

    def joined(self, count: int) -> int:
        """Of a host's so many GPUs, how many reach each other over NVLink: all, or each itself alone."""
        return count if self.nvlink_bytes_per_second and self.nvlink_domain >= count else 1


# Peaks, bandwidths and links: NVIDIA's documents. Where one prints sparse figures only, half of them.
_A100_SHEET = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_HOPPER_PAPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_H200_PAGE = "https://www.nvidia.com/en-us/data-center/h200/"
_BLACKWELL_SHEET = "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
# Of each GPU, without sparsity.
_ULTRA_PAGE = "https://verda.com/blog/gb300-nvl72-architecture"
_L40S_SHEET = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_A40_SHEET = "https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
_ADA_PAPER = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_RTX_PAPER = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_RTX_PRO_PAGE = "https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/"

# Memory that CUDA reports: XLA's device tables, else the capacity in an out-of-memory message of PyTorch.
_XLA_TABLES = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"

# Network of NVIDIA's own systems: one adapter a GPU, 200 or 400 Gb/s.
_DGX_A100 = "https://developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100"
_DGX_HOPPER_AND_B200 = (
    "https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/"
    "latest/core-components.html"
)
_GB200_RACK = (
    "https://github.com/mlcommons/inference_results_v6.1/blob/main/closed/Crusoe/systems/"
    "GB200-NVL72_GB200-186GB_aarch64x16_Dynamo.json"
)

_GB300_RACK = (
    "https://docs.nvidia.com/enterprise-reference-architectures/nvl72-ai-factory/latest/components.html"  # ConnectX-8
)
_DGX_B300 = "https://dev.to/aicplight/b300-architecture-and-infiniband-xdr-networking-explained-5645"  # XDR, 800 Gb/s

_PCIE4, _PCIE5 = 32e9, 64e9  # 16 lanes, one direction
# NVLink-C2C, 900 GB/s of a Grace both ways, for two GPUs. Azure's ND GB200 v6 copies 201 GB/s to a GPU and 193 back
# (https://github.com/Azure/AI-benchmarking-guide/blob/main/Azure_Results/ND_GB200_v6_results.md).
_GRACE = 225e9

_A100 = Gpu(
    name="a100",
    generation="ampere",
    device_kinds=("NVIDIA A100-SXM4-80GB",),
    peak=Peak(fp32=19.5e12, tf32=156e12, bf16=312e12, fp16=312e12, int8=624e12),
    hbm_bytes=85_100_068_864,
    hbm_bytes_per_second=2.039e12,
    nvlink_bytes_per_second=300e9,
    nvlink_domain=8,
    pcie_bytes_per_second=_PCIE4,
    nic_bytes_per_second=25e9,
    watts=400,
    datasheet=_A100_SHEET,
    memory_source=_XLA_TABLES,
    nic_source=_DGX_A100,
)
_A100_40GB = replace(
    _A100,
    name="a100-40gb",
    device_kinds=("NVIDIA A100-SXM4-40GB",),
    hbm_bytes=42_331_013_120,
    hbm_bytes_per_second=1.555e12,
)
_A100_PCIE = replace(
    _A100,
    name="a100-pcie",
    device_kinds=("NVIDIA A100 80GB PCIe",),
    hbm_bytes_per_second=1.935e12,
    nvlink_domain=2,
    watts=300,
    nic_bytes_per_second=None,
    nic_source=None,
)
_A100_PCIE_40GB = replace(
    _A100_PCIE,
    name="a100-pcie-40gb",
    device_kinds=("NVIDIA A100-PCIE-40GB",),
    hbm_bytes=42_331_013_120,
    watts=250,
    hbm_bytes_per_second=1.555e12,
)
_H100 = Gpu(
    name="h100",
    generation="hopper",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    peak=Peak(fp32=66.9e12, tf32=494.7e12, bf16=989.4e12, fp16=989.4e12, int8=1978.9e12, fp8=1978.9e12),
    hbm_bytes=84_942_979_072,
    hbm_bytes_per_second=3.35e12,
    nvlink_bytes_per_second=450e9,
    nvlink_domain=8,
    pcie_bytes_per_second=_PCIE5,
    nic_bytes_per_second=50e9,
    watts=700,
    datasheet=_HOPPER_PAPER,
    memory_source=_XLA_TABLES,
    nic_source=_DGX_HOPPER_AND_B200,
)
_H100_PCIE = replace(
    _H100,
    name="h100-pcie",
    device_kinds=("NVIDIA H100 PCIe",),
    peak=Peak(fp32=51e12, tf32=378e12, bf16=756.5e12, fp16=756.5e12, int8=1513e12, fp8=1513e12),
    hbm_bytes_per_second=2.0e12,
    nvlink_bytes_per_second=300e9,
    nvlink_domain=2,
    watts=350,
    nic_bytes_per_second=None,
    nic_source=None,
)
_H200 = replace(
    _H100,
    name="h200",
    device_kinds=("NVIDIA H200",),
    hbm_bytes=150_000_000_000,  # 139.7 to 139.8 GiB in the messages; XLA's table has the nominal 141 GiB
    hbm_bytes_per_second=4.8e12,
    datasheet=_H200_PAGE,
    memory_source=_H200_PAGE,
)
_B200 = Gpu(
    name="b200",
    generation="blackwell",
    device_kinds=("NVIDIA B200",),
    peak=Peak(fp32=75e12, tf32=1100e12, bf16=2250e12, fp16=2250e12, int8=4500e12, fp8=4500e12, fp4=9000e12),
    hbm_bytes=191_514_411_008,
    hbm_bytes_per_second=7.672e12,
    nvlink_bytes_per_second=900e9,
    nvlink_domain=8,
    pcie_bytes_per_second=_PCIE5,
    nic_bytes_per_second=50e9,
    watts=1000,
    datasheet=_BLACKWELL_SHEET,
    memory_source=_XLA_TABLES,
    nic_source=_DGX_HOPPER_AND_B200,
)
_GB200 = replace(
    _B200,
    name="gb200",
    device_kinds=("NVIDIA GB200",),
    peak=Peak(fp32=80e12, tf32=1250e12, bf16=2500e12, fp16=2500e12, int8=5000e12, fp8=5000e12, fp4=10_000e12),
    hbm_bytes=197_897_748_480,
    hbm_bytes_per_second=7.928e12,
    watts=1200,
    nvlink_domain=72,
    pcie_bytes_per_second=_GRACE,
    gpus_per_host=4,
    nic_source=_GB200_RACK,
)
# Blackwell Ultra: more memory and fp4, hardly any int8. Of fp4 HGX B300 has 105 PFLOP/s without sparsity
# (https://glennklockwood.com/garden/processors/B300); others round it to 14 a GPU.
_B300 = replace(
    _B200,
    name="b300",
    device_kinds=("NVIDIA B300 SXM6 AC", "NVIDIA B300"),
    peak=Peak(fp32=75e12, tf32=1125e12, bf16=2250e12, fp16=2250e12, int8=150e12, fp8=4500e12, fp4=13_125e12),
    hbm_bytes=297_021_865_984,
    hbm_bytes_per_second=7.936e12,
    nic_bytes_per_second=100e9,
    watts=1100,
    datasheet=_ULTRA_PAGE,
    nic_source=_DGX_B300,
)
_GB300 = replace(
    _GB200,
    name="gb300",
    device_kinds=("NVIDIA GB300",),
    peak=Peak(fp32=80e12, tf32=1250e12, bf16=2500e12, fp16=2500e12, int8=165e12, fp8=5000e12, fp4=15_000e12),
    hbm_bytes=297_021_079_552,
    nic_bytes_per_second=100e9,
    watts=1400,
    datasheet=_ULTRA_PAGE,
    nic_source=_GB300_RACK,
)
_L40S = Gpu(
    name="l40s",
    generation="ada",
    device_kinds=("NVIDIA L40S",),
    peak=Peak(fp32=91.6e12, tf32=183e12, bf16=362.05e12, fp16=362.05e12, int8=733e12, fp8=733e12),
    hbm_bytes=int(44.39 * GIB),
    hbm_bytes_per_second=864e9,
    nvlink_bytes_per_second=0.0,
    nvlink_domain=1,
    pcie_bytes_per_second=_PCIE4,
    nic_bytes_per_second=None,
    watts=350,
    datasheet=_L40S_SHEET,
    memory_source="https://github.com/stepfun-ai/Step-Video-T2V/issues/8",
)
_A40 = Gpu(
    name="a40",
    generation="ampere",
    device_kinds=("NVIDIA A40",),
    peak=Peak(fp32=37.4e12, tf32=74.8e12, bf16=149.7e12, fp16=149.7e12, int8=299.3e12),
    hbm_bytes=int(44.34 * GIB),  # as the L40S: nvidia-smi shows 46,068 MiB for both
    hbm_bytes_per_second=696e9,
    nvlink_bytes_per_second=56.25e9,
    nvlink_domain=2,
    pcie_bytes_per_second=_PCIE4,
    nic_bytes_per_second=None,
    watts=300,
    datasheet=_A40_SHEET,
    memory_source="https://github.com/chatdoc-com/OCRFlux/issues/64",
)
_RTX_4090 = replace(
    _L40S,
    name="rtx4090",
    device_kinds=("NVIDIA GeForce RTX 4090",),
    peak=Peak(fp32=82.6e12, tf32=82.6e12, bf16=165.2e12, fp16=165.2e12, int8=660.6e12, fp8=330.3e12),
    hbm_bytes=int(23.64 * GIB),
    hbm_bytes_per_second=1.008e12,
    watts=450,
    datasheet=_ADA_PAPER,
    memory_source="https://github.com/ali-vilab/VGen/issues/104",
)
_RTX_5090 = replace(
    _L40S,
    name="rtx5090",
    generation="blackwell",
    device_kinds=("NVIDIA GeForce RTX 5090",),
    # fp8 is left out: measurements (773 TFLOP/s) exceed the printed rate with 32-bit accumulation (419)
    peak=Peak(fp32=104.8e12, tf32=104.8e12, bf16=209.5e12, fp16=209.5e12, int8=838e12, fp4=1676e12),
    hbm_bytes=int(31.34 * GIB),
    hbm_bytes_per_second=1.792e12,
    pcie_bytes_per_second=_PCIE5,
    watts=575,
    datasheet=_RTX_PAPER,
    memory_source="https://github.com/TrajectoryCrafter/TrajectoryCrafter/issues/20",
)
_RTX_PRO_6000 = replace(
    _RTX_5090,
    name="rtxpro6000",
    device_kinds=("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
    peak=Peak(fp32=125e12, tf32=251.9e12, bf16=503.8e12, fp16=503.8e12, int8=1007.6e12, fp8=1007.6e12, fp4=2015e12),
    hbm_bytes=96_000_000_000,  # the figure on the box; what CUDA reports has no source here
    watts=600,
    datasheet=_RTX_PRO_PAGE,
    memory_source=_RTX_PRO_PAGE,
)

_ALL = (
    *(_A100, _A100_40GB, _A100_PCIE, _A100_PCIE_40GB, _A40),
    *(_H100, _H100_PCIE, _H200),
    *(_B200, _GB200, _B300, _GB300, _RTX_5090, _RTX_PRO_6000),
    *(_L40S, _RTX_4090),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
# What else a GPU of the table is called, without its punctuation.
_CALLED = {
    **dict.fromkeys(("a10080gb", "a100sxm", "a100sxm4", "a100sxm80gb"), "a100"),
    **dict.fromkeys(("a100pcie80gb",), "a100-pcie"),
    **dict.fromkeys(("h10080gb", "h100sxm", "h100sxm5", "h100sxm80gb"), "h100"),
    **dict.fromkeys(("h100pcie80gb",), "h100-pcie"),
    **dict.fromkeys(("h200sxm", "h200141gb"), "h200"),
    "4090": "rtx4090",
    "5090": "rtx5090",
}


def lookup(device_kind: str) -> Gpu | None:
    """The GPU that jax's `device.device_kind` names; None for a CPU, a slice of a GPU (MIG), or a GPU not
    listed.

    The whole name must agree: "NVIDIA H100 NVL" and "NVIDIA GeForce RTX 4090 D" are other GPUs with other
    rates.
    """
    wanted = _plain(device_kind)
    return next((gpu for gpu in _ALL if wanted in map(_plain, gpu.device_kinds)), None)


def multiplies_fp8(device: Any) -> bool:
    """Whether the matrix units of a GPU, as jax describes it, take fp8."""
    gpu = lookup(device.device_kind)
    capability = str(getattr(device, "compute_capability", None) or "0").split(".")
    return gpu.multiplies_fp8 if gpu else tuple(map(int, capability)) >= (8, 9)


def named(name: str, known: Mapping[str, Gpu] = GPUS) -> Gpu:
    """The GPU that a user calls `name`: a key of `known`, with any punctuation, or what jax calls it. Raises:
    ShardlmError for another."""
    bare = _bare(name)
    spelled = {_bare(key): gpu for key, gpu in known.items()}
    gpu = known.get(name.lower()) or lookup(name) or spelled.get(bare) or known.get(_CALLED.get(bare, ""))
    if gpu is None:
        near = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ShardlmError(f"no figures are known for a GPU {name!r}{hint} (known: {', '.join(known)})")
    return gpu


def _bare(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _plain(kind: str) -> str:
    return kind.lower().removeprefix("nvidia ").strip()
