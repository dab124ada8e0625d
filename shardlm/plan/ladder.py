"""Numbers of GPUs of one kind, one after another, until one is fast enough: the search behind advice.py.

Numbers are whole hosts: powers of two of them, and below the first that is fast enough 9 to 15 sixteenths of it. The
global batch is the configuration's as long as that reaches the rate; else it has a row for each GPU.
"""

import dataclasses
from collections.abc import Iterator

from shardlm.clusters import ClusterKind
from shardlm.errors import ShardlmError
from shardlm.flops import attention_pairs, training_flops
from shardlm.hardware import GIB, Gpu
from shardlm.plan.alike import Shared
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.search import search
from shardlm.plan.sketch import multiplied
from shardlm.train.config import RunConfig

MOST_GPUS = 2**15  # twice what Llama 3 405B was trained on
CLOSE = 1.5  # times the configuration's batch, where that only has to be made even


@dataclasses.dataclass(frozen=True)
class Point:
    """The fastest plan that fits on a number of GPUs at a global batch; None where there is none, `because` of what."""

    num_gpus: int
    global_batch: int
    plan: Plan | None
    because: str | ShardlmError = ""

    @property
    def why(self) -> str:
        return str(self.because)

    @property
    def rate(self) -> float:
        """Tokens/s; 0 without a plan."""
        return self.plan.cost.tokens_per_second if self.plan else 0.0


class Ladder:
    """Searches on one kind of hardware, each made once.

    rate        tokens/s to reach
    most_rows   of a global batch
    shared      with ladders of other kinds, for the same configuration and constraints
    """

    def __init__(
        self,
        config: RunConfig,
        kind: ClusterKind,
        gpu: Gpu,
        constraints: Constraints,
        rate: float,
        most_rows: int,
        shared: Shared | None = None,
    ):
        self._config, self._kind, self._gpu, self._constraints = config, kind, gpu, constraints
        self._rate, self._most_rows, self._shared = rate, most_rows, shared
        self._points: dict[tuple[int, int], Point] = {}
        self.considered = 0

    @property
    def least(self) -> float:
        """How many GPUs' peak rates the target takes: no number below can reach it."""
        config = self._config
        shape, length = config.model.transformer(), config.train.seq_len
        macs = shape.attention_macs(attention_pairs([length]) / length, 1)
        flops = training_flops(shape.parameters_per_token(), 1, macs, frozen=config.lora.rank > 0)
        products = map(multiplied, self._constraints.choices("matmul", [config.matmul]))
        peaks = [self._gpu.peak.of(name) or 0.0 for name in products if name != "dtype"]
        return self._rate * flops / max([self._gpu.peak.bf16, *peaks])

    @property
    def tried(self) -> tuple[Point, ...]:
        """By the number of GPUs, then by the batch."""
        return tuple(self._points[key] for key in sorted(self._points))

    def fewest(self) -> Point | None:
        """The fewest GPUs that reach the rate; where none do, the fastest of all; None where nothing fits."""
        for count in self._doubled():
            point = self.at(count)
            if point.rate >= self._rate:
                return self._between(point)
        return self._fastest()

    def _fastest(self) -> Point | None:
        """Of all numbers that were tried and fewer ones, as far down as they get faster."""
        count = self.tried[0].num_gpus // 2
        best = max(self.tried, key=lambda point: point.rate)
        while count >= self._kind.gpus_per_host:
            fewer = self.at(count)
            if fewer.rate < best.rate:
                break
            best, count = fewer, count // 2
        return best if best.plan else None

    def at(self, count: int) -> Point:
        """With the configuration's batch where it reaches the rate, else the faster of that and the raised one."""
        kept = self._search(count, self._config.train.global_batch)
        if kept.rate >= self._rate:
            return kept
        return max(kept, self._search(count, self._rows(count)), key=lambda point: point.rate)

    def beyond(self, point: Point) -> Point | None:
        """Twice as many GPUs as a point's, at its batch; None above MOST_GPUS or where nothing fits."""
        if 2 * point.num_gpus > MOST_GPUS:
            return None
        twice = self._search(2 * point.num_gpus, point.global_batch)
        return twice if twice.plan else None

    def _doubled(self) -> Iterator[int]:
        count = self._kind.gpus_per_host
        while 2 * count <= MOST_GPUS and count < self.least:
            count *= 2
        while count <= MOST_GPUS:
            yield count
            count *= 2

    def _between(self, point: Point) -> Point:
        """Fewer than this but more than half as many."""
        fastest = max(one.rate / one.num_gpus for one in self.tried)
        for sixteenths in range(9, 16):
            count, over = divmod(point.num_gpus * sixteenths, 16)
            hopeless = count < self.least or count * fastest * 1.05 < self._rate
            if over or count % self._kind.gpus_per_host or hopeless:
                continue
            fewer = self.at(count)
            if fewer.rate >= self._rate:
                return fewer
        return point

    def _rows(self, count: int) -> int:
        """Of the raised batch: the next whole number for each GPU, where that is CLOSE to what the configuration has
        or the least; one for each 2, 3, ... GPUs where more are not allowed."""
        rows = self._config.train.global_batch
        if rows >= count:
            even = -(-rows // count) * count
            return even if even <= min(CLOSE * rows, self._most_rows) else rows
        share = 1
        while count / share > self._most_rows or count % share:
            share += 1
        return max(rows, count // share)

    def _search(self, count: int, rows: int) -> Point:
        if (count, rows) not in self._points:
            self._points[count, rows] = self._searched(count, rows)
        return self._points[count, rows]

    def _searched(self, count: int, rows: int) -> Point:
        train = dataclasses.replace(self._config.train, global_batch=rows)
        config = dataclasses.replace(self._config, train=train)
        host = min(self._kind.gpus_per_host, count)
        cluster = Cluster.of(self._gpu, count, host, self._kind.nic_bytes_per_second, self._kind.fabric)
        try:
            found = search(config, cluster, self._constraints, every=False, shared=self._shared)
        except ShardlmError as error:
            return Point(count, rows, None, error.with_traceback(None))
        self.considered += found.considered
        if found.plans:
            return Point(count, rows, found.plans[0])
        needs, has = found.smallest.memory.total / GIB, self._gpu.hbm_bytes / GIB
        return Point(count, rows, None, f"the smallest plan on {count} GPUs needs {needs:.1f} of {has:.1f} GiB")
