"""Attention to tokens that an indexer chooses (layers/indexer.py, ops/token_choice.py), to pools of them
(layers/pooled_indexer.py) or to blocks that each kv head chooses for itself (layers/head_indexer.py) as formulas see it
in a training step, in rows longer than what is chosen: what choosing computes, moves and keeps. Attention itself is as
without: kernels go over all keys, and a bias hides those that are not chosen."""

import math
from collections.abc import Iterator

from shardlm.layers.head_indexer import HeadIndexerConfig
from shardlm.layers.indexer import IndexerConfig
from shardlm.layers.pooled_indexer import PooledIndexerConfig
from shardlm.ops.token_choice import SCORES_BYTES, block_of
from shardlm.plan.changed import changed
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

WIDE = 4  # bytes of a score
# Over the scores of all tokens, once heads are summed, and kernels of a block of queries (4,096 tokens, 8 heads, 6
# layers, compiled for an H100): a threshold by two bits at a time, what is equal to it, and what is then chosen.
PASSES, OF_BLOCK = 16, 24
# The same of blocks of tokens, of each query and head: over blocks' scores, and over what of all tokens is chosen.
PASSES_OF_BLOCKS, PASSES_OF_TOKENS = 16, 2
INSTANT = 1e-9  # seconds of the host for gradients that there are none of; 0 would stand for as many as forward


Chooser = IndexerConfig | PooledIndexerConfig | HeadIndexerConfig


def chooser_of(attention, sketch: Sketch) -> Chooser | None:
    """What chooses among the tokens of a row for a layer; None where all are attended to, which XLA leaves out, and
    where the layer shares another's choice."""
    own = getattr(attention, "indexer", None)
    chooses = isinstance(own, Chooser) and not own.shared
    return own if chooses and sketch.config.train.seq_len > own.top_k else None


def chosen_bytes(attention, sketch: Sketch) -> float:
    """Of which tokens each query of a device's rows attends to, or each of its kv heads' queries; 0: all."""
    own, T = getattr(attention, "indexer", None), sketch.config.train.seq_len
    if not isinstance(own, Chooser) or own.top_k >= T:
        return 0.0
    return sketch.rows * T**2 * heads_apart(attention, sketch)


def heads_apart(attention, sketch: Sketch) -> float:
    """Of one device, the kv heads that choose for themselves; 1 where all choose together."""
    own = getattr(attention, "indexer", None)
    return max(1, own.num_heads / sketch.mesh.tensor) if isinstance(own, HeadIndexerConfig) else 1


def operations(sketch: Sketch, own: Chooser, attention, matmul) -> Iterator[Op]:
    """Of a layer, forward, once, with nothing for gradients; `matmul` makes the operation of a product. Each device has
    all heads. Queries are made of a latent, or of the stream."""
    T, tokens, N, H = sketch.config.train.seq_len, sketch.tokens, own.num_heads, own.head_dim
    plain = {"dtype": "fp32" if sketch.config.precision == "fp32" else "bf16", "weight_dtype": ""}
    for what, rows, n, k in _projections(sketch, own, attention):
        yield changed(matmul("attention", what, rows, n, k), gradients=0, frozen=True, **plain)
    if not isinstance(own, IndexerConfig):
        yield from _of_blocks(sketch, own, plain["dtype"])
        return
    scores = tokens * N * T
    how = {"dims": (tokens * N, T, H), "gradients": 0, "both": True, "frozen": True}
    moved = sketch.itemsize * (tokens * N * H + T * H) + WIDE * scores
    yield Op("attention", "index scores", "matmul", 2.0 * scores * H, moved, 1, **plain, **how)
    size = block_of(int(T / sketch.mesh.context), int(SCORES_BYTES // (WIDE * max(1.0, sketch.rows) * N * T)))
    blocks = T / sketch.mesh.context / size
    passes = WIDE * (scores + PASSES * tokens * T)
    how = {"host": blocks * OF_BLOCK * GAP, "gradient_bytes": 0, "gradient_host": INSTANT}
    yield Op("attention", "choice of tokens", "memory", 0, passes, 1, **how)


def _projections(sketch: Sketch, own: Chooser, attention) -> Iterator[tuple[str, float, int, int]]:
    """(name, rows, columns, summed) on one device."""
    D, tokens, N, H = sketch.shape.embed_dim, sketch.tokens, own.num_heads, own.head_dim
    if isinstance(own, HeadIndexerConfig):  # of whole rows, which attention has
        yield "index queries", tokens, N * H, D
        yield "index keys", tokens, H, D
        return
    part = tokens / sketch.mesh.tensor
    yield "index queries", tokens, N * H, D if own.of_stream else attention.q_latent_dim
    yield "index keys", part, H * (2 if isinstance(own, PooledIndexerConfig) else 1), D
    yield "index heads", part, N, D


def _of_blocks(sketch: Sketch, own: PooledIndexerConfig | HeadIndexerConfig, dtype: str) -> Iterator[Op]:
    """Scores and choice of blocks of tokens (ops/block_choice.py): of pools one key each, whose products are float32,
    of blocks all tokens' keys, of which the highest score counts."""
    T, tokens, N, H, size = sketch.config.train.seq_len, sketch.tokens, own.num_heads, own.head_dim, sketch.itemsize
    pooled, J = isinstance(own, PooledIndexerConfig), math.ceil(T / own.block)
    keys, choices = (J, 1) if pooled else (J * own.block, N)
    scores = tokens * N * keys
    how = {"dims": (tokens * N, keys, H), "dtype": "tf32" if pooled else dtype}
    how |= {"gradients": 0, "both": True, "frozen": True}
    moved = size * tokens * N * H + (WIDE if pooled else size) * keys * H + WIDE * scores
    yield Op("attention", "index scores", "matmul", 2.0 * scores * H, moved, 1, **how)
    most = int(SCORES_BYTES // (WIDE * max(1.0, sketch.rows) * (N if pooled else own.block) * J))
    blocks = T / sketch.mesh.context / block_of(int(T / sketch.mesh.context), most)
    passes = WIDE * (scores + PASSES_OF_BLOCKS * tokens * choices * J) + PASSES_OF_TOKENS * tokens * choices * T
    how = {"host": choices * blocks * OF_BLOCK * GAP, "gradient_bytes": 0, "gradient_host": INSTANT}
    yield Op("attention", "choice of blocks", "memory", 0, passes, 1, **how)
