"""Bytes that cuDNN's attention takes beside its arrays as gradients are made (ops/cudnn_groups.py), on one device. XLA
hears of them from a GPU alone: a program that is compiled without one has none, and the formulas of temporaries.py,
which are held to such programs, neither."""

import functools
import math

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.ops.cudnn_documents import counts
from shardlm.ops.cudnn_groups import Rows
from shardlm.ops.cudnn_heads import LATENT
from shardlm.plan.sketch import CAPABILITY, Sketch

WORKSPACE = "attention workspace"  # among the kinds of memory
WITH_DOCUMENTS = (9, 0)  # the least compute capability for which these are kept apart without a bias


def workspace(attention: AttentionConfig | MlaConfig, sketch: Sketch, biased: float) -> float:
    """Of one layer, of the way to attend that takes most, with what it makes besides: a bias of so many bytes, or
    copies of a group's arrays and its log-partition by document. In a ring, of one pair of blocks, without these."""
    if sketch.execution.attention != "cudnn":
        return 0.0
    mesh, H, V = sketch.mesh, attention.head_dim, attention.value_dim
    ring = mesh.context > 1 and sketch.execution.context_attention == "ring"
    T = sketch.config.train.seq_len // (mesh.context if ring else 1)
    ways = mesh.tensor * (1 if ring else mesh.context)
    heads, kv = max(1, attention.num_heads // ways), max(1, attention.num_kv_heads // ways)
    rows = Rows(math.ceil(sketch.rows), T, heads, kv, H, V if (H, V) == LATENT else max(H, V))
    apart = biased > 0 and _capability(sketch.gpu.generation) >= WITH_DOCUMENTS
    return largest(rows, biased, apart, attention.window)


@functools.cache
def _capability(generation: str) -> tuple[int, ...]:
    return tuple(map(int, CAPABILITY.get(generation, "0.0").split(".")))


@functools.cache  # a search asks for few of them, often
def largest(rows: Rows, biased: float, apart: bool, window: int) -> float:
    """`apart`: there are ways that keep documents apart without a bias."""
    levels = rows.bounded(counts(rows.tokens, rows.key_dim, rows.value_dim, window)) if apart else ()
    return max(rows.workspace() + biased, *(_documents(rows, most) for most in levels), 0.0)


def _documents(rows: Rows, most: int) -> float:
    """Of up to `most` documents a row."""
    group = rows.group(most)
    keys = group.rows * rows.tokens * group.kv_heads
    queries = keys * group.each
    taken = rows.workspace(most, group) + 4 * queries * most  # log-partitions, each document as long as a row
    if group == rows.whole:
        return taken
    copies = 2 * 4 * (queries + keys) * rows.key_dim  # queries, output and their gradients; keys, values and theirs
    summed = 2 * 4 * rows.rows * rows.tokens * rows.kv_heads * rows.key_dim  # gradients of keys and values, in float32
    return taken + copies + (summed if group.each < rows.whole.each else 0)
