"""What a measured profile says in place of a GPU's figures: how long a kernel and a collective take on that machine.
`kernels_of` and `route_of` are what the cost model asks; without a profile they are kernels.py's and links.py's."""

import dataclasses
import functools
import math

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.network.profile import CollectiveRate, Profile
from shardlm.network.rates import MatmulRate
from shardlm.ops.grouped_matmul import block_rows
from shardlm.plan.cluster import Cluster, Group
from shardlm.plan.constants import GAP, UNFUSED_BYTES, Achieved, achieved_by
from shardlm.plan.cpu_memory import COPIES
from shardlm.plan.kernels import Kernels
from shardlm.plan.links import Route
from shardlm.plan.op import Op

CPU = "cpu"  # jax's device_kind
REACHED = Achieved(1, 1, 1, 1, 1, 1, 1)  # by a CPU of its figures, which are what was measured
NAMES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8"}
NAMES |= dict.fromkeys(("fp32", "tf32"), "float32")
ITEMSIZE = {"float32": 4, "bfloat16": 2}  # of operands and results; else 1
# What XLA:CPU makes of one kernel that only moves memory: kernels, and times the bytes. Counted in the compiled step of
# configs/bench_strategies.py on data=8 (jax 0.10.2): 1,223 kernels and 467 MB of a device besides products, where the
# formulas have 64 such kernels of 72 MB, attention's scores of 100 MB and the optimizer.
CPU_KERNELS, CPU_BYTES = 16, 5
# And of an optimizer's update: 151 kernels outside the layers move 186 MB on data=8, and 58 MB on fsdp=8, where each
# device updates an eighth; of the difference the formulas have 54 MB.
CPU_UPDATE = 2.4
# A collective between kernels takes so often what it takes back to back: devices come to it one after the other, and
# what they send has left their cores' caches. Eight devices on two cores, a loop of two products and an all-reduce of
# 1 KiB, 128 KiB, 1 MiB: 0.5, 0.9 and 2.6 ms more than without it, where back to back it takes 0.16, 0.25 and 1.2; of an
# all-gather 0.8, 0.3 and 0.8, where it takes 0.14, 0.2 and 0.4.
CPU_APART = 2
GROUPED = ("up", "down")  # of compute.py's moe: the experts' products
# Slices of rows and of the result with their bounds, copies, the loop's count and condition, besides the product: of
# fsdp=8 18,100 kernels of a device in 1,920 turns (traced).
TURN_KERNELS = 9
MEMORY_BOUND = 0.5  # of the rate that memory allows a product: from there on it says nothing of the matrix units
AGAIN = "measure again: python -m launch.topology --profile=FILE"


def kernels_of(cluster: Cluster, attention: str = "cudnn") -> Kernels:
    """Of the cluster's profile where it has one, else of its GPU."""
    if cluster.measured is None:
        return Kernels.of(cluster.gpu, attention)
    return MeasuredKernels.of_cluster(cluster, cluster.measured, attention)


def route_of(group: Group, cluster: Cluster) -> "Route | MeasuredRoute":
    """The way between the devices of a group, the same way."""
    if cluster.measured is not None:
        return MeasuredRoute(group, cluster, cluster.measured)
    if group not in cluster.routes:
        cluster.routes[group] = Route.of(group, cluster)
    return cluster.routes[group]


def share(cluster: Cluster, profile: Profile) -> float:
    """How many times as long a device takes as one of the profile: CPU devices have the cores and the memory of their
    host together, and those of the profile's host all worked when it was measured."""
    return cluster.gpus_per_host * profile.hosts / profile.devices if cluster.is_cpu else 1.0


@dataclasses.dataclass(frozen=True)
class MeasuredKernels(Kernels):
    """Kernels by a profile's rates: products by type and size, all else by the bandwidth of memory. Fused attention,
    which no profile has, keeps its share of a large product's rate; and Achieved.sustained, which is of a whole step
    and of no kernel, stays.

    slower   by how much a device is slower than one of the profile (`share`)
    """

    profile: Profile
    slower: float

    @classmethod
    def of_cluster(cls, cluster: Cluster, profile: Profile, attention: str) -> "MeasuredKernels":
        """Raises ShardlmError for a profile of collectives alone."""
        if not profile.matmuls or not profile.memory:
            raise ShardlmError(f"the profile has rates of collectives alone, and none of a device; {AGAIN}")
        gpu, slower = cluster.gpu, share(cluster, profile)
        reached = REACHED if cluster.is_cpu else achieved_by(gpu)
        best = largest_rate(profile, "bf16") * reached.sustained / slower
        return cls(
            gpu=gpu,
            achieved=reached,
            attention=attention,
            cores=0,
            memory=memory_rate(profile) / slower,
            clock=best / (gpu.peak.bf16 * reached.matmul),
            gap=least_seconds(profile) * slower if cluster.is_cpu else GAP,
            profile=profile,
            slower=slower,
        )

    def matmul_rate(self, dtype: str) -> float:
        """Of the fastest product measured. Types that were not are multiplied as bf16."""
        return largest_rate(self.profile, dtype) * self.achieved.sustained / self.slower

    def _rate(self, dtype: str, volume: float) -> float:
        return rate_at(self.profile, dtype, volume) * self.achieved.sustained / self.slower

    def _product(self, op: Op, rows: float, n: float, k: float) -> float:
        """All of them, each as large as the dimensions say (experts). What is measured holds the gap between two."""
        if self.gpu.generation == "cpu" and op.layer == "moe" and op.what in GROUPED:
            return self._in_blocks(op, op.dims[0], rows * n * k / op.dims[0])
        return max(op.flops / self._rate(op.dtype, rows * n * k), op.hbm_bytes / self.memory)

    def _moving(self, op: Op) -> float:
        """XLA:CPU leaves in many kernels, and in copies between them, what is one on a GPU."""
        if self.gpu.generation != "cpu":
            return super()._moving(op)
        if op.what in COPIES:
            return super()._moving(op)
        times = CPU_UPDATE if op.layer == "optimizer" else CPU_BYTES
        return times * op.hbm_bytes / self.memory + CPU_KERNELS * self.gap

    def _in_blocks(self, op: Op, rows: float, area: float) -> float:
        """The experts' products on a CPU: groups in turn, of each the rows in blocks (ops/grouped_matmul.py), the last
        of them half empty; each is a turn of a loop with kernels of its own."""
        groups = op.flops / (2 * rows * area)
        block = block_rows(round(rows * groups), max(1, round(groups)))
        turns = groups * (rows / block + 0.5)
        one = 2 * block * area / self._rate(op.dtype, block * area)
        return turns * (max(one, op.hbm_bytes / groups / (rows / block) / self.memory) + TURN_KERNELS * self.gap)

    def _unfused(self, op: Op) -> float:
        """Products of one head's whole square at a time."""
        positions, keys, width = op.dims
        square = op.flops * positions / keys
        products = square / self._rate(op.dtype, positions * positions * width)
        return products + square / (4 * width) * UNFUSED_BYTES / self.memory + 4 * self.gap


def rate_at(profile: Profile, dtype: str, volume: float) -> float:
    """FLOP/s of a product [m, k] x [k, n] with so much m k n: between the measured ones along their logarithms, above
    as the largest, below as they fall, though in no more time than the smallest."""
    points = _points(profile, dtype)
    volumes, rates = zip(*points, strict=True)
    at = math.log(max(volume, 1.0))
    if at >= volumes[0] or len(points) == 1:
        return math.exp(np.interp(at, volumes, rates))
    slope = (rates[1] - rates[0]) / (volumes[1] - volumes[0])
    return math.exp(rates[0] + min(1.0, max(0.0, slope)) * (at - volumes[0]))


def largest_rate(profile: Profile, dtype: str) -> float:
    return max(rate.flops_per_second for rate in _of_type(profile, dtype))


def memory_rate(profile: Profile) -> float:
    """Bytes/s of a device's memory. Of CPU devices by what reads more arrays than it writes (triad): a pass that scales
    an array in place finds much of it in its core's cache, where the pass before left it, and seems twice as fast."""
    rates = {rate.operation: rate.bytes_per_second for rate in profile.memory}
    if profile.device_kind == CPU and "triad" in rates:
        return rates["triad"]
    return max(rates.values())


def least_seconds(profile: Profile) -> float:
    """Of the smallest product measured: what a kernel takes that does next to nothing."""
    return min(2 * rate.m * rate.k * rate.n / rate.flops_per_second for rate in profile.matmuls)


@functools.lru_cache(maxsize=64)
def _points(profile: Profile, dtype: str) -> tuple[tuple[float, float], ...]:
    """(log of the volume, log of the rate) of a type's products, but for those that memory bounds."""
    found: dict[float, list[float]] = {}
    memory = max(rate.bytes_per_second for rate in profile.memory)
    rates = _of_type(profile, dtype)
    computing = [rate for rate in rates if rate.flops_per_second < MEMORY_BOUND * memory * _intensity(rate)] or rates
    for rate in computing:
        found.setdefault(math.log(rate.m * rate.k * rate.n), []).append(math.log(rate.flops_per_second))
    return tuple(sorted((volume, math.fsum(logs) / len(logs)) for volume, logs in found.items()))


def _intensity(rate: MatmulRate) -> float:
    """FLOPs for each byte, there and back."""
    m, k, n = rate.m, rate.k, rate.n
    return 2 * m * k * n / (ITEMSIZE.get(rate.dtype, 1) * (m * k + k * n + m * n))


def _of_type(profile: Profile, dtype: str) -> list[MatmulRate]:
    """Raises ShardlmError where neither the type nor bf16, as which it is multiplied then, was measured."""
    for name in (NAMES[dtype], "bfloat16"):
        found = [rate for rate in profile.matmuls if rate.dtype == name]
        if found:
            return found
    raise ShardlmError(
        f"the profile has no products of {NAMES[dtype]}, only of "
        f"{', '.join(sorted({rate.dtype for rate in profile.matmuls}))}; {AGAIN}"
    )


@dataclasses.dataclass(frozen=True)
class MeasuredRoute:
    """The way between the devices of a group, by what was measured of groups that span islands as it does, or that do
    not. Of a size that was not measured: the nearest, with a latency for each further device as in a ring. A GPU's
    collectives that were not measured at all are links.py's."""

    group: Group
    cluster: Cluster
    profile: Profile

    @property
    def name(self) -> str:
        return "memory" if self.cluster.is_cpu else self._formulas.name

    @property
    def cores(self) -> float:
        return 0.0 if self.cluster.is_cpu else self._formulas.cores

    @functools.cached_property
    def _formulas(self) -> Route:
        return Route.of(self.group, self.cluster)

    def seconds(self, kind: str, sent_bytes: float, count: float) -> float:
        """As Route.seconds. Raises ShardlmError for what was not measured between CPU devices."""
        if self.group.size == 1 or not count:
            return 0.0
        if self.cluster.is_cpu and kind == "reduce-scatter":
            kind, sent_bytes = "all-reduce", 2 * sent_bytes  # XLA:CPU sums all of it on each device, and takes a part
        rate = nearest(self.profile, kind, self.group)
        if rate is None and not self.cluster.is_cpu:
            return self._formulas.seconds(kind, sent_bytes, count)
        if rate is None:
            raise ShardlmError(
                f"the profile has no {kind} between CPU devices, and the mesh joins {self.group.size}; {AGAIN} "
                f"--cpu_devices={self.cluster.num_gpus} --mesh=data={self.cluster.num_gpus}"
            )
        latency = rate.latency_seconds * (self.group.size - 1) / (rate.group_size - 1)
        alone = count * latency + sent_bytes / rate.bytes_per_second
        return CPU_APART * alone if self.cluster.is_cpu else alone


def nearest(profile: Profile, kind: str, group: Group) -> CollectiveRate | None:
    """The rate of a kind in groups of about this size that span islands as this one does, or do not; of two as near
    the larger. None where there is none."""
    kind = kind.removeprefix("ragged-")
    found = [
        rate
        for rate in profile.collectives
        if rate.kind == kind and rate.group_size > 1 and (rate.domains > 1) == (group.outside > 1)
    ]
    far = lambda rate: (abs(math.log(rate.group_size / group.size)), -rate.group_size)  # noqa: E731
    return min(found, key=far, default=None)
