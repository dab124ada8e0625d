"""Latent attention to tokens that an indexer chooses (layers/indexer.py, ops/token_choice.py) as formulas see it in a
training step, in rows longer than what is chosen: what choosing computes, moves and keeps. Attention itself is as
without: kernels go over all keys, and a bias hides those that are not chosen."""

from collections.abc import Iterator

from shardlm.layers.indexer import IndexerConfig
from shardlm.ops.token_choice import SCORES_BYTES, block_of
from shardlm.plan.changed import changed
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

WIDE = 4  # bytes of a score
# Over the scores of all tokens, once heads are summed, and kernels of a block of queries (4,096 tokens, 8 heads, 6
# layers, compiled for an H100): a threshold by two bits at a time, what is equal to it, and what is then chosen.
PASSES, OF_BLOCK = 16, 24
INSTANT = 1e-9  # seconds of the host for gradients that there are none of; 0 would stand for as many as forward


def chooser_of(attention, sketch: Sketch) -> IndexerConfig | None:
    """What chooses among the tokens of a row for a layer; None where all are attended to, which XLA leaves out, and
    where the layer shares another's choice."""
    own = getattr(attention, "indexer", None)
    chooses = isinstance(own, IndexerConfig) and not own.shared
    return own if chooses and sketch.config.train.seq_len > own.top_k else None


def chosen_bytes(attention, sketch: Sketch) -> float:
    """Of which tokens each query of a device's rows attends to; 0: all."""
    own, T = getattr(attention, "indexer", None), sketch.config.train.seq_len
    return sketch.rows * T**2 if isinstance(own, IndexerConfig) and own.top_k < T else 0.0


def operations(sketch: Sketch, own: IndexerConfig, q_latent: int, matmul) -> Iterator[Op]:
    """Of a layer, forward, once, with nothing for gradients; `matmul` makes the operation of a product. Each device has
    all heads. Queries are made of a latent, or of the stream."""
    D, T, tokens, tensor = sketch.shape.embed_dim, sketch.config.train.seq_len, sketch.tokens, sketch.mesh.tensor
    N, H = own.num_heads, own.head_dim
    plain = {"dtype": "fp32" if sketch.config.precision == "fp32" else "bf16", "weight_dtype": ""}
    for what, rows, n, k in (
        ("index queries", tokens, N * H, D if own.of_stream else q_latent),
        ("index keys", tokens / tensor, H, D),
        ("index heads", tokens / tensor, N, D),
    ):
        yield changed(matmul("attention", what, rows, n, k), gradients=0, frozen=True, **plain)
    scores = tokens * N * T
    how = {"dims": (tokens * N, T, H), "gradients": 0, "both": True, "frozen": True}
    moved = sketch.itemsize * (tokens * N * H + T * H) + WIDE * scores
    yield Op("attention", "index scores", "matmul", 2.0 * scores * H, moved, 1, **plain, **how)
    size = block_of(int(T / sketch.mesh.context), int(SCORES_BYTES // (WIDE * max(1.0, sketch.rows) * N * T)))
    blocks = T / sketch.mesh.context / size
    passes = WIDE * (scores + PASSES * tokens * T)
    how = {"host": blocks * OF_BLOCK * GAP, "gradient_bytes": 0, "gradient_host": INSTANT}
    yield Op("attention", "choice of tokens", "memory", 0, passes, 1, **how)
