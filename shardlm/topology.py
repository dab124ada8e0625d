"""NVIDIA GPUs that are not there: devices to compile for, on a machine without a GPU.

XLA compiles for a described target, so the real program of a thousand GPUs, its memory and its collectives
are known before any is rented. Owns the descriptions; memory size and bandwidth come from hardware.py. What
is compiled, and what is read from the result, is for the callers.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.experimental import topologies

from shardlm import hardware
from shardlm.errors import ShardlmError
from shardlm.hardware import Gpu


@dataclasses.dataclass(frozen=True)
class Chip:
    """What XLA's compiler asks about a GPU beyond hardware.py. Source: XLA's device tables,
    https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"""

    compute_capability: tuple[int, int]
    extension: str  # ACCELERATED_FEATURES compiles for sm_90a or sm_100a: WGMMA, TMA, tcgen05
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int  # the most that a kernel may opt in to
    nvlinks: int
    threads_per_core: int = 2048


_HOPPER = Chip((9, 0), "ACCELERATED_FEATURES", 132, 128, 1.98, 52_428_800, 233_472, 232_448, 18)
_AMPERE = Chip((8, 0), "NONE", 108, 64, 1.41, 41_943_040, 167_936, 166_912, 12)
_AMPERE_CARD = dataclasses.replace(_AMPERE, nvlinks=0)


def _graphics(capability: tuple[int, int], cores: int, clock_ghz: float, l2_mib: int) -> Chip:
    """Cards of 8.6, 8.9 and 12.0, alike in what a core has: table "Technical Specifications per Compute Capability" of
    https://docs.nvidia.com/cuda/cuda-c-programming-guide. Cores, clock and cache: the papers that hardware.py names."""
    return Chip(capability, "NONE", cores, 128, clock_ghz, l2_mib * 2**20, 102_400, 101_376, 0, 1536)


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "a100": _AMPERE,
        "a100-40gb": _AMPERE,
        "a100-pcie": _AMPERE_CARD,
        "a100-pcie-40gb": _AMPERE_CARD,
        "a40": _graphics((8, 6), 84, 1.74, 6),
        "h100": _HOPPER,
        "h100-pcie": dataclasses.replace(_HOPPER, cores=114, clock_ghz=1.755, nvlinks=0),
        "h200": _HOPPER,
        "b200": Chip((10, 0), "ACCELERATED_FEATURES", 148, 128, 1.965, 132_644_864, 233_472, 232_448, 18),
        "gb200": Chip((10, 0), "ACCELERATED_FEATURES", 152, 128, 2.062, 135_528_448, 233_472, 232_448, 18),
        # XLA's table says 158 cores and 1,965 MHz; kernels find 148, with which the peak rates agree, and 2,032 MHz
        # (https://github.com/sgl-project/sglang/pull/28460).
        "b300": Chip((10, 3), "ACCELERATED_FEATURES", 148, 128, 2.032, 135_528_448, 233_472, 232_448, 18),
        "gb300": Chip((10, 3), "ACCELERATED_FEATURES", 152, 128, 2.07, 135_528_448, 233_472, 232_448, 18),
        "rtx5090": _graphics((12, 0), 170, 2.407, 96),
        "rtxpro6000": _graphics((12, 0), 188, 2.6, 128),
        "l40s": _graphics((8, 9), 142, 2.52, 96),
        "rtx4090": _graphics((8, 9), 128, 2.52, 72),
    }
)

# The versions that XLA is to assume on the target; cuDNN's decides which attention kernels it may use.
_CUDA, _CUDNN = "13.0.0", (9, 28, 0)

_TARGET = """
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {chip.compute_capability[0]}.{chip.compute_capability[1]}"
  cuda_compute_capability {{
    major: {chip.compute_capability[0]} minor: {chip.compute_capability[1]} feature_extension: {chip.extension}
  }}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {gpu.hbm_bytes}
  memory_bandwidth: {gpu.hbm_bytes_per_second:.0f}
  pcie_bandwidth: {gpu.pcie_bytes_per_second:.0f}
  l2_cache_size: {chip.l2_bytes}
  shared_memory_per_core: {chip.shared_bytes_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_bytes_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {chip.threads_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  device_interconnect_info {{ active_links: {chip.nvlinks} }}
  driver_version: "{cuda}"
  runtime_version: "{cuda}"
  compile_time_toolkit_version: "{cuda}"
  dnn_version: "{cudnn[0]}.{cudnn[1]}.{cudnn[2]}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]} }}
device_description_str: "{name}"
"""


def chip_of(gpu: Gpu) -> Chip | None:
    """Of a GPU of a file (hardware_file.py) that of the one whose device kind it has."""
    known = gpu if gpu.name in CHIPS else hardware.lookup(gpu.device_kinds[0])
    return CHIPS.get(known.name) if known else None


def target_config(gpu: str | Gpu) -> str:
    """The description of a GPU in XLA's text form (GpuTargetConfigProto).

    Raises: ShardlmError for a GPU without one.
    """
    gpu = hardware.named(gpu) if isinstance(gpu, str) else gpu
    chip = chip_of(gpu)
    if not chip:
        raise ShardlmError(
            f"programs cannot be compiled for {gpu.name} without one: {gpu.device_kinds[0]!r} is the device kind of "
            f"none of {', '.join(CHIPS)}"
        )
    return _TARGET.format(name=gpu.device_kinds[0], gpu=gpu, chip=chip, cuda=_CUDA, cudnn=_CUDNN)


def topology(gpu: str | Gpu, num_hosts: int, gpus_per_host: int) -> list[jax.Device]:
    """`num_hosts * gpus_per_host` devices to compile for, host by host, in the order of their ids.

    Lower with shardings over them, then `.compile()`; they hold no arrays and run nothing.

    Raises: ShardlmError for an unknown GPU, a size that is not positive, and where jax's CUDA plugin is
    missing.
    """
    config = target_config(gpu)
    if num_hosts < 1 or gpus_per_host < 1:
        raise ShardlmError(f"{num_hosts} hosts of {gpus_per_host} GPUs: both must be positive")
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x{num_hosts}x{gpus_per_host}"
        )
    except NotImplementedError as error:
        raise ShardlmError(
            "compiling for GPUs needs jax's CUDA plugin, on a machine without a GPU too: pip install 'shardlm[cuda13]'"
        ) from error
    return list(described.devices)
