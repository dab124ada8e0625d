"""Attention to the last tokens and to entries that stand for several tokens each (layers/compressed_attention.py) as
formulas see it: what one device computes of a layer in a training step and moves in its memory. Which products there
are is read from the op (ops/compressed_rows.py)."""

import dataclasses
import math
from collections.abc import Iterator

from shardlm.layers.compressed_attention import ChooserConfig, CompressedConfig
from shardlm.ops.compressed_rows import queries_at_once
from shardlm.plan.changed import changed
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

WIDE = 4  # bytes of a float32
SCORE = 30  # bytes read and written of each score by kernels of their own, forward; as much again for gradients
# Kernels of one block of queries, forward, where it is made again before its gradients, and of these; of a choice among
# entries (4,096 tokens, 4 layers, compiled for an H100: 1,372 forward, 2,437 again, 1,177 back).
OF_BLOCK, OF_BLOCK_ANEW, OF_GRADIENTS, OF_CHOICE = 9, 7, 13, 40
CHOICE = 40  # passes over an indexer's scores: two bits of a threshold at a time, and a sum of what is equal


@dataclasses.dataclass(frozen=True)
class Blocks:
    """In which a device goes through the queries of its rows.

    rows     of a device; tokens: queries of each
    heads    of a device
    size     queries of a block
    entries  of a whole row; 0: there are none
    keys     that a query is multiplied with
    anew     whether the backward pass of all makes each block once more: of several, unless all is kept
    """

    rows: float
    tokens: int
    heads: float
    size: int
    entries: int
    keys: int
    anew: bool

    @classmethod
    def of(cls, attention: CompressedConfig, sketch: Sketch) -> "Blocks":
        T, mesh = sketch.config.train.seq_len, sketch.mesh
        rows, heads, tokens = sketch.rows, attention.num_heads / mesh.tensor, T // mesh.context
        entries = math.ceil(T / attention.rate) if attention.rate else 0
        size = queries_at_once(tokens, max(1.0, rows) * heads, attention.window, entries)
        anew = size < tokens and sketch.config.remat != "none"
        return cls(rows, tokens, heads, size, entries, attention.window - 1 + size + entries, anew)

    @property
    def count(self) -> int:
        return self.tokens // self.size

    @property
    def at_once(self) -> float:
        """Scores of a block."""
        return self.rows * self.size * self.heads * self.keys

    @property
    def scores(self) -> float:
        """All of them."""
        return self.rows * self.tokens * self.heads * self.keys


def chooser_of(attention: CompressedConfig, sketch: Sketch) -> ChooserConfig | None:
    """What has to choose among the entries of a row; None where all are attended to, and XLA leaves out what would."""
    own = attention.chooser
    return own if own and math.ceil(sketch.config.train.seq_len / attention.rate) > own.top_k else None


def numbers(attention: CompressedConfig, sketch: Sketch) -> tuple[int, int]:
    """Of a token, what heads of all devices read besides queries: its key and what entries are made of; and what the
    entries are made of that an indexer chooses from, which have no gradients."""
    own = chooser_of(attention, sketch)
    of_entries = 2 * attention.series * attention.head_dim if attention.rate else 0
    return attention.head_dim + of_entries, 2 * attention.series * own.head_dim if own else 0


def operations(sketch: Sketch, attention: CompressedConfig, matmul) -> Iterator[Op]:
    """Of a layer, forward, once; `matmul` makes the operation of a product."""
    yield from _projections(sketch, attention, matmul)
    blocks = Blocks.of(attention, sketch)
    rows, H = blocks.rows * blocks.tokens * blocks.heads, attention.head_dim
    for what, n, k, gradients in (("scores", blocks.keys, H, 2 + blocks.anew), ("values", H, blocks.keys, 2)):
        yield changed(matmul("attention", what, rows, n, k), both=True, gradients=gradients, **_plain(sketch))
    nbytes, back = SCORE * blocks.scores, OF_GRADIENTS + blocks.anew * OF_BLOCK_ANEW
    how = {"host": blocks.count * OF_BLOCK * GAP, "gradient_host": blocks.count * back * GAP}
    yield Op("attention", "softmax", "memory", 0, nbytes, 1, gradient_bytes=(1 + blocks.anew) * nbytes, **how)
    turned = 4 * sketch.itemsize * rows * H  # queries, and back what is read
    yield Op("attention", "positions", "memory", 0, turned, 1, gradient_bytes=turned)
    if attention.rate:
        yield _entries(attention, sketch, blocks)
    if own := chooser_of(attention, sketch):
        yield from _choice(own, sketch, blocks)


def _plain(sketch: Sketch) -> dict[str, str]:
    """Products of activations take no 8-bit operands."""
    return {"dtype": "fp32" if sketch.config.precision == "fp32" else "bf16", "weight_dtype": ""}


def _projections(sketch: Sketch, attention: CompressedConfig, matmul) -> Iterator[Op]:
    """What reads the stream goes by tokens that tensor splits, with whole weights."""
    D, tensor, tokens = sketch.shape.embed_dim, sketch.mesh.tensor, sketch.tokens
    N, H, Q, G, R = (getattr(attention, name) for name in ("num_heads", "head_dim", "q_latent_dim", *_OUT))
    yield matmul("attention", "query latent", tokens / tensor, Q, D)
    yield matmul("attention", "queries", tokens, N * H / tensor, Q)
    yield matmul("attention", "keys", tokens / tensor, H, D)
    if attention.rate:
        yield matmul("attention", "entries' numbers", tokens / tensor, 2 * attention.series * H, D)
    if own := chooser_of(attention, sketch):  # which takes no part in the loss
        for what, rows, n, k in (
            ("index entries' numbers", tokens / tensor, 2 * attention.series * own.head_dim, D),
            ("index heads", tokens / tensor, own.num_heads, D),
            ("index queries", tokens, own.num_heads * own.head_dim, Q),
        ):
            yield changed(matmul("attention", what, rows, n, k), gradients=0, frozen=True, **_plain(sketch))
    of_group = matmul("attention", "heads together", tokens, R, N / G * H)
    copies = G / tensor
    yield changed(
        of_group,
        flops=copies * of_group.flops,
        hbm_bytes=copies * of_group.hbm_bytes,
        both=True,
        **_plain(sketch),
    )
    yield matmul("attention", "output", tokens, D, G * R / tensor)


_OUT = "out_groups", "out_latent_dim"


def _choice(own: ChooserConfig, sketch: Sketch, blocks: Blocks) -> Iterator[Op]:
    """All heads on each device; once more where blocks are made again."""
    each = blocks.rows * blocks.tokens * blocks.entries
    rows = blocks.rows * blocks.tokens * own.num_heads
    flops = 2.0 * rows * blocks.entries * (own.head_dim + 1)
    moved = each * own.num_heads * (2 * WIDE)
    dims = (rows, blocks.entries, own.head_dim)
    again = {"gradients": float(blocks.anew), "both": True, "frozen": True}
    yield Op("attention", "index scores", "matmul", flops, moved, 1, dims=dims, **_plain(sketch), **again)
    passes, host = CHOICE * WIDE * each, blocks.count * OF_CHOICE * GAP
    how = {"host": host, "gradient_host": blocks.anew * host}
    yield Op("attention", "choice of entries", "memory", 0, passes, 1, gradient_bytes=blocks.anew * passes, **how)


def _entries(attention: CompressedConfig, sketch: Sketch, blocks: Blocks) -> Op:
    """Of whole rows, on each device: their numbers are gathered, mixed by a softmax of float32, normed and turned."""
    tokens = blocks.rows * blocks.entries * attention.series * attention.rate
    own = chooser_of(attention, sketch)
    width = attention.head_dim + (own.head_dim if own else 0)
    moved = tokens * width * (4 * sketch.itemsize + 4 * WIDE)
    return Op("attention", "entries", "memory", 0, moved, 1, gradient_bytes=2 * moved)
