"""Layers whose queries attend to entries that stand for several tokens (layers/compressed_attention.py) in a served
model: what a pass through one computes and reads (ops/compressed_pages.py, ops/paged_choice.py, compiled). Every query
reads its own rows, of the last tokens and of entries."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.plan.op import Op
from shardlm.plan.serving import sparse_attention as sparse
from shardlm.plan.serving.weights import InUse
from shardlm.rules import Rules

WIDE = 4  # bytes of a float32
# Kernels of a layer besides its products, the attention and those that make entries, for each kind of row that is
# written, and where entries are chosen (compiled for an H100, 256 rows: 8, 11 and 22 with what any layer has).
OF_CHOICE = 8
OF_ENTRIES = 4  # kernels that make entries of one series


@dataclasses.dataclass(frozen=True)
class Seen:
    """What all rows of a pass attend to together.

    pairs    of a query and a row of numbers that it reads: of tokens and of entries
    scored   of a query and an entry that an indexer scores; 0: it does not
    near, far  rows of tokens and of entries that at least one query of a row reads, of all rows
    scanned  entries whose index keys are read, of all rows
    """

    pairs: float
    scored: float
    near: float
    far: float
    scanned: float

    @classmethod
    def of(cls, attention: CompressedConfig, tokens: float, rows: float, attended) -> "Seen":
        """`attended`: positions that a row reads and the pairs of all rows, by a window (ops.attended); 0: all."""
        near, pairs = attended(attention.window)
        if not (rate := attention.rate):
            return cls(pairs, 0.0, rows * near, 0.0, 0.0)
        every, of_all = (n / rate for n in attended(0))
        if not (chooser := attention.chooser):
            return cls(pairs + of_all, 0.0, rows * near, rows * every, 0.0)
        chosen = attended(chooser.top_k * rate)[1] / rate
        far = min(every, chooser.top_k * tokens / rows)
        return cls(pairs + chosen, of_all, rows * near, rows * far, rows * every)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Bytes in the pages of one device: of a row of numbers, and of a chooser's entry."""

    row: float
    key: float

    @classmethod
    def of(cls, attention: CompressedConfig, place: float) -> "Rows":
        """`place`: bytes of both together, which each place has room for."""
        numbers = attention.head_dim + attention.index_dim
        return cls(*(place * width / numbers for width in (attention.head_dim, attention.index_dim)))

    def least(self, seen: Seen) -> float:
        """Bytes that any engine has to read."""
        return (seen.near + seen.far) * self.row + seen.scanned * self.key


def operations(
    attention: CompressedConfig, weights: Sequence[InUse], rules: Rules, held: Rows, seen: Seen, one
) -> Iterator[Op]:
    """Of a layer's attention but its projections; `one` as ops.Pass."""
    N = attention.num_heads / rules.mesh.size(*rules.use.axes("heads"))
    G = attention.out_groups / rules.mesh.size(*rules.use.axes("heads"))
    H, R, own = attention.head_dim, attention.out_latent_dim, "attention"
    (together,) = (held for held in weights if held.name == "wo_down")
    moved = together.nbytes + one.itemsize * one.tokens * (N * H + G * R)
    dims = (one.tokens, R, N / G * H)
    yield Op(own, "wo_down", "matmul", 2.0 * one.tokens * N * H * R, moved, 1, dims=dims, dtype=_dtype(one))
    moved = seen.pairs * held.row + one.tokens * N * 2 * H * one.itemsize  # each query reads its own
    dims = (one.each, seen.pairs / one.tokens, H)
    yield Op(own, "pages", "attention", seen.pairs * N * 2 * H, moved / 2, 2, dims=dims)
    if chooser := attention.chooser:
        (heads,) = (held for held in weights if held.name == "heads")
        D = heads.numbers / chooser.num_heads
        moved = heads.nbytes + one.tokens * (one.itemsize * D + WIDE * chooser.num_heads)
        dims = (one.tokens, chooser.num_heads, D)
        flops = 2.0 * one.tokens * heads.numbers
        yield Op(own, "heads of the indexer", "matmul", flops, moved, 1, dims=dims, dtype=_dtype(one))
        scored = (one.tokens, seen.scored, seen.scanned, one.itemsize)
        yield from sparse.choosing(chooser.num_heads, chooser.head_dim, held.key, *scored)
    kinds = len(attention.rows) + bool(chooser)
    written = one.tokens * (len(attention.rows) * held.row + (held.key if chooser else 0))
    small = 1 + kinds + OF_CHOICE * bool(chooser)
    yield Op(own, "rows written", "memory", 0, 2 * written / small, small)
    if attention.rate:
        yield from _entries(attention, one)


def _entries(attention: CompressedConfig, one) -> Iterator[Op]:
    """As many as could end in a step are made of what pages hold, whether they end or not: gates are gathered and
    written in float32, read for their largest, their sum and the mix, and values are gathered for that."""
    made = one.rows * (math.ceil((one.each - 1) / attention.rate) + 1)
    of_tokens = made * attention.series * attention.rate
    for width in (attention.head_dim, *([attention.chooser.head_dim] if attention.chooser else [])):
        moved = of_tokens * width * (4 * one.itemsize + 4 * WIDE)
        yield Op("attention", "entries", "memory", 0, moved / OF_ENTRIES, OF_ENTRIES)


def _dtype(one) -> str:
    return {2: "bf16", 4: "fp32"}[one.itemsize]
