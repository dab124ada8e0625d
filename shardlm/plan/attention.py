"""Attention over tokens as formulas see it: what one device computes of it in a training step, and what its kernels
execute for that. Linear attention is linear_attention.py's."""

from collections.abc import Iterator

from shardlm.flops import attention_pairs
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.ops.blocked_attention import LEAST_BLOCK
from shardlm.ops.cudnn_heads import LATENT
from shardlm.plan.changed import changed
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch


def dtype(sketch: Sketch) -> str:
    """Of products whose operands are not made 8-bit."""
    return "fp32" if sketch.config.precision == "fp32" else "bf16"


def operations(sketch: Sketch, attention: AttentionConfig | MlaConfig, matmul, ours: bool) -> Iterator[Op]:
    """Of a layer, forward, once; `matmul` makes the operation of a product, `ours` is compute.operations'."""
    for what, n, k in _projections(attention, sketch.shape.embed_dim, sketch.mesh.tensor):
        yield matmul("attention", what, sketch.tokens, n, k)
    scores = _scores(sketch, attention)
    yield changed(scores, seen=_seen(sketch), anew=not keeps_heads(sketch)) if ours else scores
    if ours and (turned := _turned(sketch, attention)):
        yield Op("attention", "heads turned", "memory", 0, turned, 1, gradient_bytes=turned)


def keeps_heads(sketch: Sketch) -> bool:
    """Whether remat=dots keeps what cuDNN's attention gives (layers/stack.py); a ring gives it block by block."""
    ring = sketch.mesh.context > 1 and sketch.execution.context_attention == "ring"
    return sketch.config.remat == "dots" and sketch.execution.attention == "cudnn" and not ring


def heads_given(sketch: Sketch, attention: AttentionConfig | MlaConfig) -> float:
    """Bytes of that on one device: values, which are as wide as keys where cuDNN has no kernel for their own width, and
    a log-partition of each query."""
    H, V = attention.head_dim, attention.value_dim
    width = V if H == V or (H, V) == LATENT else H
    return sketch.tokens * attention.num_heads / sketch.mesh.tensor * (sketch.itemsize * width + 4)


def gates_of(attention: AttentionConfig | MlaConfig) -> int:
    """Numbers of a token that open the outputs of all heads."""
    return attention.gates * (attention.num_heads if isinstance(attention, MlaConfig) else 1)


def _projections(attention: AttentionConfig | MlaConfig, D: int, tensor: int) -> Iterator[tuple[str, float, float]]:
    """(name, columns, summed) on one device."""
    N = attention.num_heads / tensor
    if isinstance(attention, MlaConfig):
        Q, R, H = attention.q_latent_dim, attention.kv_latent_dim, attention.head_dim
        if Q:
            yield "query latent", Q / tensor, D  # of tokens that tensor splits, as the other
            yield "queries", N * H, Q
        else:
            yield "queries", N * H, D
        yield "latent", (R + attention.rope_dim) / tensor, D
        yield "keys and values", N * (attention.nope_dim + attention.value_dim), R
        if attention.gates:
            yield "gate", N * attention.gates, D
        yield "output", D, N * attention.value_dim
        return
    K = attention.num_kv_heads / (1 if attention.num_kv_heads % tensor else tensor)  # too few are whole everywhere
    keys, values = (
        K * width * (letter in attention.made)
        for letter, width in (("k", attention.projected_dim), ("v", attention.value_dim))
    )
    columns = N * attention.projected_dim + keys + values
    yield "queries, keys and values", columns + attention.gates / tensor, D
    yield "output", D, N * attention.value_dim


def _scores(sketch: Sketch, attention: AttentionConfig | MlaConfig) -> Op:
    """Softmax attention over whole rows: of one device's rows and heads, its part of the sequence."""
    T, N = sketch.config.train.seq_len, attention.num_heads / sketch.mesh.tensor
    pairs = sketch.rows * attention_pairs([T], attention.window or None) / sketch.mesh.context
    width = N * (attention.head_dim + attention.value_dim)
    moved = sketch.itemsize * sketch.tokens * 2 * width
    keys = attention_pairs([T], attention.window or None) / T
    how = {"dims": (T, keys, (attention.head_dim + attention.value_dim) / 2), "wide": attention.head_dim}
    return Op("attention", "scores", "attention", 2.0 * pairs * width, moved, 1, dtype=dtype(sketch), **how)


def _turned(sketch: Sketch, attention: AttentionConfig | MlaConfig) -> float:
    """Bytes read and written, forward or for gradients, of what our program does to queries, keys and values besides:
    latent attention puts the parts of a head together, and Ulysses' exchange takes them, and the output, head by
    head."""
    tokens, tensor, size = sketch.tokens, sketch.mesh.tensor, sketch.itemsize
    heads, kv = attention.num_heads / tensor, max(1, attention.num_kv_heads / tensor)
    width = heads * attention.head_dim + kv * (attention.head_dim + attention.value_dim)
    joined = width if isinstance(attention, MlaConfig) else 0
    exchanged = sketch.mesh.context > 1 and sketch.execution.context_attention == "ulysses"
    return 2 * size * tokens * (joined + (width + heads * attention.value_dim if exchanged else 0))


def attended(op: Op, forward: float, gradients: float, sketch: Sketch) -> float:
    """What attention computes for each of its FLOPs.

    cuDNN skips what the mask hides, and multiplies values as wide as keys where it has no kernel for their own size;
    of its five matmuls for gradients three are as wide as keys. XLA's own (ops/blocked_attention.py) goes in
    blocks of queries, an eighth of a row, over all keys before their end, in a ring (ops/attention_pair.py) over all
    keys, and makes gradients in five matmuls, three as wide as keys; one of them makes the scores again, which XLA
    takes from the layer's own repetition where there is one.
    """
    keys, mean = op.dims[1:]
    wide = op.wide / mean
    if sketch.execution.attention == "cudnn":
        if (op.wide, 2 * mean - op.wide) != LATENT:
            return wide
        return (forward + (4 + wide) / 5 * gradients) / (forward + gradients)
    worth = (4 + wide) / 5 if sketch.config.remat == "none" else 4 / 5
    return _seen(sketch) / keys * (forward + worth * gradients) / (forward + gradients)


def _seen(sketch: Sketch) -> float:
    """Keys that XLA's own attention computes for a query, on average."""
    T, parts = sketch.config.train.seq_len, sketch.mesh.context
    if parts > 1 and sketch.execution.context_attention == "ring":
        return T / parts * (1 + parts) / 2
    blocks = next((n for n in (8, 4, 2) if T % n == 0 and T // n >= LEAST_BLOCK), 1)
    return T * (1 + 1 / blocks) / 2
