"""What rates are worth in practice: the few constants of the cost model, a GPU generation or a kind of link each.
Peaks are hardware.py's. Nothing here belongs to one model, one mesh or one published point.

Measurements of single kernels and collectives, with their sources, are in benchmarks/achieved.json; where a comment
names no other source, it is that file. Achieved.sustained of each generation was chosen with the runs that validate.py
calls chosen. POWER, GAP, what small TILES lose, the bandwidth of PCIe and all of Ada are estimates without a source.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from shardlm.clusters import Fabric
from shardlm.hardware import Gpu


@dataclasses.dataclass(frozen=True)
class Achieved:
    """Fractions of a GPU's peaks that kernels reach.

    matmul, matmul_8bit  the best products of 16 and of 8 bits, every core busy
    attention            of the 16-bit peak: a fused forward kernel on long rows, heads of 128
    attention_backward   and its gradient
    memory               a kernel that only moves memory
    sustained            what of these rates a training step holds: power and clocks under load on all GPUs of a host,
                         operands' layouts, jitter
    watts_per_peak       of the GPUs that `sustained` is of, by 1e12 FLOP/s of 16-bit peak
    """

    matmul: float
    matmul_8bit: float
    attention: float
    attention_backward: float
    memory: float
    sustained: float
    watts_per_peak: float

    def watts(self, gpu: Gpu) -> float:
        """The power at which a GPU of this generation runs as those that were measured."""
        return self.watts_per_peak * gpu.peak.bf16 / 1e12

    def lifted(self, watts_per_peak: float) -> "Achieved":
        """Of the same chip with more power: what it sustains rises as it falls with less (POWER)."""
        sustained = self.sustained * (watts_per_peak / self.watts_per_peak) ** POWER
        return dataclasses.replace(self, sustained=min(1.0, sustained), watts_per_peak=watts_per_peak)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One of NCCL's, which trade latency for bandwidth.

    share  of the link's rate that it leaves
    base   seconds of any collective
    hop    seconds of each step of a ring
    """

    share: float
    base: float
    hop: float


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins devices.

    bandwidth  fraction of the peak that large collectives reach
    switch     the same of sums inside the switch (NVLS), counted as by a ring; 0: none
    cores      share of a GPU's cores that a running collective takes from kernels beside it
    """

    name: str
    bandwidth: float
    switch: float
    cores: float
    protocols: Mapping[str, Protocol]


POWER = 0.5  # rates fall as the root of the power limit: power goes with the clock and the square of the voltage

# Matmul: the best of many shapes: A100 271 of 312 TFLOP/s, H100 794.5 of 989, fp8 1,403 to 1,453 of 1,979; B200 1,745
# of 2,250, fp8 3,433 of 4,500; B300 1,769 and 3,353 of the same; GB200 1,822 of 2,500, fp8 3,616 of 5,000. Large
# products of random operands are within 5% of that on A100 and Hopper, and 0.80 of it on GB200. Ada is taken as Ampere,
# GB300 as B300, which its chip is; A100's int8 and Ada's fp8 have no source. B300 and GB300 sustain more than B200 by
# the power that they are sold with (POWER): 1,100 W of 2,250 TFLOP/s, 1,400 W of 2,500.
# Attention, heads of 128, on long rows: H100 616 TFLOP/s forward (FlashAttention-3; cuDNN of that time 539), 518
# backward (cuDNN); A100 228 and 197 (FlashAttention-2); B200 1,418 and 1,209 (FlashAttention-4). Ada: no source. cuDNN
# on GB200 1,574 and 1,332 at 8k causal tokens, as B200's fractions say (1,553 and 1,317); on GB300, whose exponentials
# are twice as fast, 1,856 and 1,435, and 1,703 and 1,248 at 4k; B300 is taken as GB300, which has its chip.
# Memory: copies and triads, A100 1,610 to 1,700 GB/s of 2,039, H100 2,900 to 2,970 of 3,350, B200 6,000 of 7,672.
_BLACKWELL = Achieved(0.776, 0.763, 0.66, 0.56, 0.80, 0.70, 1000 / 2250)
_ULTRA = {"matmul": 0.786, "matmul_8bit": 0.745, "attention": 0.78, "attention_backward": 0.59}
_B300 = dataclasses.replace(_BLACKWELL, **_ULTRA).lifted(1100 / 2250)
ACHIEVED: Mapping[str, Achieved] = MappingProxyType(
    {
        "ampere": Achieved(0.869, 0.80, 0.73, 0.63, 0.82, 0.85, 400 / 312),
        "ada": Achieved(0.869, 0.75, 0.60, 0.50, 0.87, 0.85, 350 / 362.05),
        "hopper": Achieved(0.803, 0.72, 0.64, 0.53, 0.87, 0.80, 700 / 989.4),
        "blackwell": _BLACKWELL,
        "gb200": dataclasses.replace(_BLACKWELL, matmul=0.729, matmul_8bit=0.723, watts_per_peak=1200 / 2500),
        "b300": _B300,
        "gb300": _B300.lifted(1400 / 2500),
    }
)
# FlashAttention-2, forward and backward, where newer kernels exist: 335 and 322 on an H100, about 380 and 334 (heads of
# 64) on a B200.
FLASH2: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"ampere": (0.73, 0.63), "ada": (0.60, 0.50), "hopper": (0.35, 0.33), "blackwell": (0.23, 0.20)}
)
# The first FlashAttention in Triton: FlashAttention-2 is 1.3 to 2.5 times as fast, the less in the forward and the more
# in the backward pass (https://arxiv.org/abs/2307.08691, section 4.1).
TRITON: Mapping[str, tuple[float, float]] = MappingProxyType(
    {generation: (forward / 1.4, backward / 2) for generation, (forward, backward) in FLASH2.items()}
)


def achieved_by(gpu: Gpu) -> Achieved:
    """Of the GPU itself where it was measured apart, else of its generation."""
    return ACHIEVED.get(gpu.name) or ACHIEVED[gpu.generation]


GAP = 2e-6  # seconds between kernels: the last blocks of one, the first loads of the next
# Seconds of the host for an operation that PyTorch runs by itself, the least of 5 to 25 us from Python to the launch
# (https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html).
HOST = 5e-6
# The same of modules in Python (Transformer Engine's): Qwen3-30B on eight B200, a row of 4,096 tokens at a time, in 8
# bits and with nothing captured takes 9.2 ms a layer, of which kernels are a quarter: 790 operations. Megatron Bridge's
# table of 25.11, 9,299 tokens/s a GPU; no point of benchmarks/published.json.
MODULE = 11.6e-6
# A Grace is taken as those Xeons. Its clock is 1.16 times as slow (3.44 GHz for 4.0), and PyTorch's Linear took one 37
# us and a DGX H100's Xeon 13 (https://github.com/NVIDIA/TransformerEngine/issues/2053, 2025-08), but Megatron Bridge's
# runs do not settle it: taken 1.0, 1.25, 1.5 and 1.75 times as slow, nine mixtures on GB200 that rules were chosen with
# are off by 6.4, 6.4, 8.0 and 10.7% on average, 53 held out on GB200 and GB300 by 11.0, 10.5, 10.0 and 9.5%.

# Where the mask's edge crosses a tile, what is masked is computed all the same, and cores idle at the ends of short
# rows: keys / (keys + 256), and by the width of a head width / (width + 64). H100 forward by FlashAttention-3, causal
# rows of 512, 1k, 2k, 4k, 8k, 16k tokens: 292, 423, 521, 579, 602, 616; not causal, heads of 64 and 128: 497, 648.
ATTENTION_KEYS = 256
ATTENTION_WIDTH = 64
# cuDNN on Blackwell gains nothing from wider ones, and with 192 and values of 128 loses 0.03 forward and 0.12 backward
# (achieved.json). Not counted: DeepSeek V3's steps there are predicted right on average as it is, by -0.3%.
UNFUSED_BYTES = 12  # read and written of each score by separate kernels: product, mask, softmax, dropout, product

# What the products of experts lose where little is summed: seconds of a core for each 128 x 128 of an output, its first
# loads and its way out. DeepGEMM on an H800, 8 bits: 590 TFLOP/s with 512 summed, 990 with 1,536, 1,099 with 2,048,
# 1,297 with 7,168 and 1,358 with 16,384: as if 600 more were summed, at 10.7 TFLOP/s a core
# (https://github.com/deepseek-ai/DeepGEMM, README of 2025-02).
EDGE_SECONDS = 1.8e-6

# Tiles of an output that a core makes at once, and what smaller ones lose by loading operands more often
# (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication, section 4).
Tiles = tuple[tuple[int, int, float], ...]
TILES: Tiles = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 64, 0.6))
# Of products of some hundred rows, as batches that decode have, cuBLAS has further ones (cublasLtMatmulTile_t,
# https://docs.nvidia.com/cuda/cublas). Without them 129 rows took as long as 256: Llama 3.3 70B with 129 requests on an
# H200 was 30% behind TensorRT-LLM's, and 7% with 108. What they lose is between their neighbours, an estimate, and what
# those of 16 and 32 rows do.
FEW_ROWS: Tiles = (*TILES, (96, 128, 0.88), (160, 128, 0.95), (192, 128, 0.97))
FEW_ROWS += ((32, 128, 0.7), (32, 64, 0.55), (16, 64, 0.5))
# A product of some hundred rows takes longer than its arithmetic alone and than reading its weights alone: as a power
# mean of both. Twelve of 64 and 128 rows in fp8 on an H800 (DeepGEMM's README of 2025-02, 206 to 645 TFLOP/s at 1,509
# to 2,668 GB/s) by this take 1.01 of what they did by the median, 0.73 to 1.23, by the longer of the two 0.79, 0.52 to
# 0.92: first tokens after 128 tokens were predicted 20 to 40% too early. With 8 bits at the rate of the kernel, not of
# a training step (Achieved.sustained): the largest, 4,096 x 7,168 x 16,384, by this 1.01; with a training step's rate
# 1.5 suits the twelve as well, and the largest takes 1.22.
BOTH = 1.25
# Latencies: what NCCL assumes of a ring by its three protocols, baseLat and hwLat of
# https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc. LL128 carries 120 of 128 bytes, LL half of them in
# messages of 8; a tree has 0.92 of a ring's rate.
# Bandwidth: H100 gathers 360 and scatters 370 of 450 GB/s, sums 472 to 480 in the switch (NVLS); B200 668, 693 and 840
# of 900; A100 sums 230 of 300. Over networks sums of 357 to 366 GB/s through eight adapters of 50, gathers of 323.
# Cores: https://github.com/calculon-ai/calculon/blob/main/systems/a100_80g.json, processor_usage.
LL, LL128, SIMPLE = "LL", "LL128", "Simple"
NVLINK = Link(
    *("NVLink", 0.78, 1.0, 0.15),
    {LL: Protocol(0.25, 3.6e-6, 0.47e-6), LL128: Protocol(0.92, 10e-6, 1.9e-6), SIMPLE: Protocol(1, 8.4e-6, 3.4e-6)},
)
PCIE = Link(*("PCIe", 0.75, 0, 0.15), {LL: Protocol(0.25, 3.6e-6, 1e-6), SIMPLE: Protocol(1, 8.4e-6, 5.7e-6)})
NETWORK = Link(
    *("network", 0.88, 0, 0.02),
    {LL: Protocol(0.25, 3.6e-6, 2.7e-6), LL128: Protocol(0.92, 10e-6, 4e-6), SIMPLE: Protocol(1, 8.4e-6, 9.6e-6)},
)
# Between hosts, by what joins them. Ethernet with RDMA as InfiniBand: gathers of 325 GB/s through eight adapters of 50.
# EFA: the same rate of large messages, 355 GB/s; the smallest sum of two hosts takes 54 us, and steps are 8 times as
# long as InfiniBand's. Sums of 32 to 256 MB on 16 and 32 hosts still take up to twice as long as that.
# TCP: GPUDirect-TCPX sums 66 of 100 GB/s between two hosts, and takes 1.5 ms for 1 MB: 0.65 ms for each of the two
# steps between hosts. Google's settings leave it rings and the Simple protocol, and eight channels, a core each of 132.
# Of TCPXO no figures were found; it is taken as TCPX.
NETWORKS: Mapping[Fabric, Link] = MappingProxyType(
    {
        "infiniband": NETWORK,
        "roce": NETWORK,
        "efa": dataclasses.replace(
            NETWORK,
            protocols={name: dataclasses.replace(one, hop=8 * one.hop) for name, one in NETWORK.protocols.items()},
        ),
        "tcp": Link(*("network", 0.66, 0, 8 / 132), {SIMPLE: Protocol(1, 8.4e-6, 0.65e-3)}),
    }
)
# What NCCL has assumed of the same since 2.11 (ncclTunerConstantsDefaults; 2.32's src/tuning/cost_model.cc still), and
# small sums take: of 2, 32, 256, 512 and 1,024 KiB over eight H200 in a CUDA graph 16.8, 19.6, 20.3, 20.9 and 27.0 us
# (https://github.com/sgl-project/sglang/pull/22734, its pynccl), 15.2, 17.9, 18.6, 19.0 and 25.3 in achieved.json;
# with these 15.0, 15.6, 20.1, 25.0 and 27.1, with those above 10.2, 10.8, 15.4, 20.6 and 27.1. A decode step has two
# of them a layer (plan/serving). Training's steps, whose sums are large, were fitted with those above.
SMALL_SUMS: Mapping[str, Mapping[str, Protocol]] = MappingProxyType(
    {
        "NVLink": {LL: Protocol(0.25, 6.6e-6, 0.6e-6), LL128: Protocol(0.92, 14e-6, 1.9e-6)},
        "PCIe": {LL: Protocol(0.25, 6.6e-6, 1e-6)},
    }
)
TREE = 0.92
SWITCH_SECONDS = 23e-6
