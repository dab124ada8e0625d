"""How long one kernel takes: every operation against the GPU's roofline (https://doi.org/10.1145/1498765.1498785), with
the tiles that a matmul is cut into and the cores that they fill."""

import dataclasses
import functools
import math
from statistics import NormalDist

from shardlm.hardware import Gpu
from shardlm.plan.changed import changed
from shardlm.plan.constants import (
    ATTENTION_KEYS,
    ATTENTION_WIDTH,
    EDGE_SECONDS,
    FLASH2,
    GAP,
    POWER,
    TILES,
    TRITON,
    UNFUSED_BYTES,
    Achieved,
    Tiles,
    achieved_by,
)
from shardlm.plan.op import Op
from shardlm.topology import chip_of

EIGHT_BITS = ("fp8", "int8")
SPLIT = (1, 2, 4, 8)  # parts of what is summed


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What a GPU's kernels reach.

    achieved   fractions of its peaks
    attention  as Execution.attention, or "flash2" or "triton"
    cores   streaming multiprocessors; 0 where they are not known, and work then fills them evenly
    memory  bytes/s
    clock   what power leaves of the rates
    gap     seconds between kernels
    """

    gpu: Gpu
    achieved: Achieved
    attention: str
    cores: int
    memory: float
    clock: float
    gap: float

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, gpu: Gpu, attention: str = "cudnn") -> "Kernels":
        reached, chip = achieved_by(gpu), chip_of(gpu)
        cores = chip.cores if chip else 0
        clock = reached.sustained * min(1.0, gpu.watts / reached.watts(gpu)) ** POWER
        return cls(gpu, reached, attention, cores, gpu.hbm_bytes_per_second * reached.memory, clock, GAP)

    @functools.cached_property
    def unhindered(self) -> "Kernels":
        """Without what a training step loses besides."""
        return dataclasses.replace(self, clock=self.clock / self.achieved.sustained)

    def forward_seconds(self, op: Op) -> float:
        """Of one execution in the forward pass."""
        if op.unit == "matmul":
            rows, n, k = op.dims
            return self._product(op, rows, n, k) + self._casts(op, op.cast_rows * rows * k + op.cast_weights * n * k)
        if op.unit == "attention":
            return self._attention(op, self._fraction(0)) if self.attention != "xla" else self._unfused(op)
        return self._moving(op)

    def gradient_seconds(self, op: Op) -> float:
        """Of all that makes one execution's gradients."""
        if op.unit == "matmul":
            rows, n, k = op.dims
            if op.gradients is not None:
                return op.gradients * self._product(op, rows, n, k)
            added = {"hbm_bytes": op.hbm_bytes + op.added_bytes, "dtype": op.weight_dtype or op.dtype}
            weight = changed(op, **added, drawn=False)
            products = self._product(changed(op, dtype=op.back_dtype or op.dtype), rows, k, n)
            products += 0.0 if op.frozen else self._product(weight, k, n, rows)
            return products + self._casts(op, op.cast_gradients * rows * n)
        if op.unit == "attention":
            return 2.5 * self._attention(op, self._fraction(1)) if self.attention != "xla" else 2 * self._unfused(op)
        if op.gradient_bytes is not None:
            return self._moving(changed(op, hbm_bytes=op.gradient_bytes, host=op.gradient_host or op.host))
        return 2 * self._moving(op)

    def one_seconds(self, op: Op, backward: bool = False) -> float:
        """Of a kernel of a compiled program, all of whose FLOPs are the operation's: 8-bit operands came as such, and
        `backward` says that attention is the gradient's."""
        if op.unit == "matmul":
            return self._product(op, *op.dims)
        if op.unit == "attention":
            return self._attention(op, self._fraction(int(backward)))
        return op.hbm_bytes / self.memory + self.gap

    def _moving(self, op: Op) -> float:
        """What only moves memory, as one fused kernel."""
        return op.hbm_bytes / self.memory + self.gap + op.host

    def _fraction(self, backward: int) -> float:
        if older := {"flash2": FLASH2, "triton": TRITON}.get(self.attention):
            return older[self.gpu.generation][backward]
        return (self.achieved.attention, self.achieved.attention_backward)[backward]

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of large products. Types without units of their own are multiplied as bf16."""
        peak = self.gpu.peak.of(dtype)
        fraction = self.achieved.matmul_8bit if dtype in EIGHT_BITS and peak else self.achieved.matmul
        return (peak or self.gpu.peak.bf16) * fraction * self.clock

    def tiled_seconds(
        self, rows: float, n: float, k: float, copies: int, dtype: str, drawn: bool = False, tiles: Tiles = TILES
    ) -> float:
        """Of `copies` products [rows, k] x [k, n] at once, by the best of `tiles`: cores work in waves, and the last
        wave, like the last tile of a row, may be mostly empty. Of rows that are `drawn` each product has its own."""
        asked = (rows, n, copies, drawn, tiles is TILES or tiles)
        best = self._filled.get(asked)
        if best is None:
            best = self._filled[asked] = self._tiled(rows, n, copies, drawn, tiles)
        return 2.0 * best * k / self.matmul_rate(dtype)

    def _tiled(self, rows: float, n: float, copies: int, drawn: bool, tiles: Tiles) -> float:
        """Numbers that a wave of cores makes of products, in all waves."""
        best = math.inf
        for height, width, worth in tiles:
            high = _drawn_tiles(rows, height) if drawn else math.ceil(rows / height)
            count = copies * high * math.ceil(n / width)
            filled = math.ceil(count / self.cores) * self.cores if self.cores else count
            best = min(best, filled * height * width / worth)
        return best

    @functools.cached_property
    def _filled(self) -> dict[tuple, float]:
        """What was asked before: a search asks the same few hundred a hundred thousand times."""
        return {}

    def _product(self, op: Op, rows: float, n: float, k: float) -> float:
        """As often at once as the operation's FLOPs are worth (experts)."""
        copies = _copies(op)
        if op.grouped and self.cores:
            k += EDGE_SECONDS * self.matmul_rate(op.dtype) / self.cores / (2 * 128 * 128)
        parts = SPLIT if op.split else (1,)
        tiled = min(self.tiled_seconds(rows, n, k / part, copies * part, op.dtype, op.drawn) for part in parts)
        return max(tiled, op.hbm_bytes / self.memory) + self.gap

    def _casts(self, op: Op, numbers: float) -> float:
        """16-bit operands are read, and written as 8 bits in the two layouts that both products need."""
        if op.dtype not in EIGHT_BITS or not numbers:
            return 0.0
        return 4 * _copies(op) * numbers / self.memory + self.gap

    def _attention(self, op: Op, fraction: float) -> float:
        """op.dims: positions of a row, keys that a query sees on average, mean width of a head."""
        _, keys, width = op.dims
        wide = (128 + ATTENTION_WIDTH) / 128 * width / (width + ATTENTION_WIDTH)
        long = keys / (keys + ATTENTION_KEYS)
        rate = self.gpu.peak.bf16 * fraction * self.clock * wide * long
        return max(op.flops / rate, op.hbm_bytes / self.memory) + self.gap

    def _unfused(self, op: Op) -> float:
        """Two products of the whole square, masked or not, or of what is seen, and in memory the scores between."""
        positions, keys, width = op.dims
        square = op.flops * (op.seen or positions) / keys
        scores = square / (4 * width)
        return square / self.matmul_rate(op.dtype) + scores * UNFUSED_BYTES / self.memory + 4 * self.gap


def _drawn_tiles(rows: float, height: int) -> float:
    """Tiles of an expert that many choose independently, on average: P(more than j tiles' rows) over all j."""
    spread = NormalDist(rows, math.sqrt(rows))
    first = max(0, math.floor(spread.inv_cdf(1e-6) / height))
    last = math.ceil(spread.inv_cdf(1 - 1e-6) / height)
    return first + sum(1 - spread.cdf(j * height) for j in range(first, last + 1))


def _copies(op: Op) -> int:
    """How many products of its dimensions an operation is: one, or those of a device's experts."""
    each = 2.0 * math.prod(op.dims)
    return max(1, round(op.flops / each)) if each else 1
