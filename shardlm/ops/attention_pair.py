"""A block of queries against a block of keys, the step of ring attention: its result with its log-partition, and its
gradient under the log-partition of the whole row. Which blocks meet is ring_attention.py's."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.ops import cudnn_attention
from shardlm.ops.blocked_attention import MASKED

SCORE_BYTES = 32 * 2**20  # of the float32 scores that the XLA kernel holds at once on a device
BIAS_BYTES = 512 * 2**20  # of the bias that keeps documents apart in one call of cuDNN


@dataclasses.dataclass(frozen=True)
class Pair:
    """Static facts of a pair of blocks.

    diagonal  keys come after some of the queries: the same block; else every key comes before every query
    window    positions a token sees, itself included; 0: all
    softcap   scores are softcap * tanh(scores / softcap), in XLA; 0: as they are
    """

    scale: float
    diagonal: bool
    window: int
    implementation: str
    softcap: float = 0.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """Where the tokens of a block are: index int32 [T] in the row, segment_ids int32 [B, T]."""

    index: jax.Array
    segment_ids: jax.Array

    def halves(self) -> tuple["Side", "Side"]:
        half = len(self.index) // 2
        early = Side(self.index[:half], self.segment_ids[:, :half])
        return early, Side(self.index[half:], self.segment_ids[:, half:])


def forward(pair: Pair, q, k, v, queries: Side, keys: Side) -> tuple[jax.Array, jax.Array]:
    """q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv] -> (out [B, T, N, Hv], log-partition [B, T, N]), both float32."""
    if pair.implementation != "cudnn":
        return _xla_forward(pair, q, k, v, queries, keys)
    if not _too_large(q, k):
        return _cudnn_forward(pair, q, k, v, queries, keys)
    (q0, q1), (early, late) = _halves(q), queries.halves()
    if not pair.diagonal:
        return _join(forward(pair, q0, k, v, early, keys), forward(pair, q1, k, v, late, keys))
    (k0, k1), (v0, v1) = _halves(k), _halves(v)
    before = dataclasses.replace(pair, diagonal=False)
    first = forward(pair, q0, k0, v0, early, early)
    return _join(first, merge(forward(pair, q1, k1, v1, late, late), forward(before, q1, k0, v0, late, early)))


def backward(pair: Pair, q, k, v, queries: Side, keys: Side, out, lse, d_out):
    """(d_q, d_k, d_v) of this pair, float32. out [B, T, N, Hv] and lse [B, T, N] are those of the whole row: then the
    weights exp(score - lse) are the right ones (https://arxiv.org/abs/2205.14135, appendix B.4), where the
    log-partition of the pair would be silently wrong."""
    if pair.implementation != "cudnn":
        return _xla_backward(pair, q, k, v, queries, keys, out, lse, d_out)
    if not _too_large(q, k):
        return _cudnn_backward(pair, q, k, v, queries, keys, out, lse, d_out)
    (q0, q1), (early, late) = _halves(q), queries.halves()
    first, second = zip(*map(_halves, (out, lse, d_out)), strict=True)
    if not pair.diagonal:
        a = backward(pair, q0, k, v, early, keys, *first)
        b = backward(pair, q1, k, v, late, keys, *second)
        return jnp.concatenate([a[0], b[0]], axis=1), a[1] + b[1], a[2] + b[2]
    (k0, k1), (v0, v1) = _halves(k), _halves(v)
    before = dataclasses.replace(pair, diagonal=False)
    a = backward(pair, q0, k0, v0, early, early, *first)
    b = backward(pair, q1, k1, v1, late, late, *second)
    c = backward(before, q1, k0, v0, late, early, *second)
    return _join((a[0], a[1] + c[1], a[2] + c[2]), (b[0] + c[0], b[1], b[2]))


def _too_large(q, k) -> bool:
    """Whether the pair is cut in halves, for the sake of cuDNN's bias."""
    T, S = q.shape[1], k.shape[1]
    return T % 4 == 0 and q.dtype.itemsize * q.shape[0] * T * S > BIAS_BYTES


def _halves(a):
    return jnp.split(a, 2, axis=1)


def _join(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(a, b, strict=True))


def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two results of the same queries against different keys, as one."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    return out_a * jnp.exp(lse_a - lse)[..., None] + out_b * jnp.exp(lse_b - lse)[..., None], lse


def visible(pair: Pair, queries: Side, keys: Side) -> jax.Array:
    """bool [B, T, S]: the key is in the query's document, not after it, and inside its window."""
    mask = queries.segment_ids[:, :, None] == keys.segment_ids[:, None, :]
    distance = queries.index[:, None] - keys.index[None, :]
    if pair.diagonal:
        mask &= distance >= 0
    if pair.window:
        mask &= distance < pair.window
    return mask


def _xla_forward(pair: Pair, q, k, v, queries: Side, keys: Side):
    """In chunks of queries, so that no more than SCORE_BYTES of scores exist at once."""

    def chunk(q, side: Side):
        scores = _scores(pair, q, k, side, keys)
        largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - largest)
        partition = weights.sum(axis=-1, keepdims=True)
        out = _dot("bkgts,bskh->btkgh", weights.astype(v.dtype), v)
        lse = (largest + jnp.log(partition))[..., 0]  # [B, K, G, T]
        lse, partition = lse.transpose(0, 3, 1, 2), partition[..., 0].transpose(0, 3, 1, 2)
        return out / partition[..., None], lse

    out, lse = _over_queries(chunk, q, k, queries)
    return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def _xla_backward(pair: Pair, q, k, v, queries: Side, keys: Side, out, lse, d_out):
    shift = jnp.sum(out.astype(jnp.float32) * d_out, axis=-1)
    K = k.shape[2]

    def chunk(carry, inputs):
        d_k, d_v = carry
        (q, d_out, lse, shift), side = inputs
        grouped = [_grouped(a, K) for a in (q, d_out)]
        across = [a.reshape(*a.shape[:2], K, -1).transpose(0, 2, 3, 1)[..., None] for a in (lse, shift)]
        scores = _scores(pair, q, k, side, keys)
        weights = jnp.exp(scores - across[0])
        d_weights = _dot("btkgh,bskh->bkgts", grouped[1], v)
        d_scores = weights * (d_weights - across[1]) * pair.scale
        if pair.softcap:  # where it is masked, the weight is 0
            d_scores *= jnp.where(weights > 0, 1 - jnp.square(scores / pair.softcap), 0)
        d_scores = d_scores.astype(q.dtype)
        d_v += _dot("bkgts,btkgh->bskh", weights.astype(v.dtype), grouped[1])
        d_k += _dot("bkgts,btkgh->bskh", d_scores, grouped[0])
        return (d_k, d_v), _dot("bkgts,bskh->btkgh", d_scores, k).reshape(q.shape)

    split, join = _chunks(q, k)
    start = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    inputs = (tuple(map(split, (q, d_out.astype(q.dtype), lse, shift))), _split_side(queries, split))
    (d_k, d_v), d_q = jax.lax.scan(chunk, start, inputs)
    return join(d_q), d_k, d_v


def _over_queries(chunk, q, k, queries: Side):
    split, join = _chunks(q, k)
    results = jax.lax.map(lambda a: chunk(*a), (split(q), _split_side(queries, split)))
    return tuple(map(join, results))


def _chunks(q, k):
    """(split, join) of [B, T, ...] into chunks of queries and back, for the scores of q against k."""
    B, T, N, _ = q.shape
    most = max(1, SCORE_BYTES // (4 * B * N * k.shape[1]))
    size = next(size for size in range(min(T, most), 0, -1) if T % size == 0)

    def split(a):
        return jnp.moveaxis(a.reshape(a.shape[0], T // size, size, *a.shape[2:]), 1, 0)

    def join(a):
        return jnp.moveaxis(a, 0, 1).reshape(a.shape[1], T, *a.shape[3:])

    return split, join


def _split_side(side: Side, split) -> Side:
    return Side(split(side.index[None])[:, 0], split(side.segment_ids))


def _grouped(a, K):
    """[B, T, N, H] -> [B, T, K, N / K, H]."""
    return a.reshape(*a.shape[:2], K, -1, a.shape[-1])


def _scores(pair: Pair, q, k, queries: Side, keys: Side):
    """Masked scores float32 [B, K, N / K, T, S]."""
    scores = _dot("btkgh,bskh->bkgts", _grouped(q, k.shape[2]), k) * pair.scale
    if pair.softcap:
        scores = pair.softcap * jnp.tanh(scores / pair.softcap)
    return jnp.where(visible(pair, queries, keys)[:, None, None], scores, MASKED)


def _dot(letters, a, b):
    return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)


def _cudnn_forward(pair: Pair, q, k, v, queries: Side, keys: Side):
    def run(bias):
        out, lse = cudnn_attention.forward(q, k, v, bias, scale=pair.scale, causal=pair.diagonal)
        return out.astype(jnp.float32), lse.transpose(0, 2, 1)

    return _biased_where_needed(pair, run, q.dtype, queries, keys)


def _cudnn_backward(pair: Pair, q, k, v, queries: Side, keys: Side, out, lse, d_out):
    def run(bias):
        whole = (out, lse.transpose(0, 2, 1), d_out)
        gradients = cudnn_attention.backward(q, k, v, bias, *whole, scale=pair.scale, causal=pair.diagonal)
        return tuple(a.astype(jnp.float32) for a in gradients)

    return _biased_where_needed(pair, run, q.dtype, queries, keys)


def _biased_where_needed(pair: Pair, run, dtype, queries: Side, keys: Side):
    """run(bias [B, 1, T, S]) that hides what cuDNN's own masks do not, or run(None) while all tokens are of one
    document, which needs nothing in memory."""

    def bias():
        return cudnn_attention.bias_of(visible(dataclasses.replace(pair, diagonal=False), queries, keys), dtype)

    if pair.window:
        return run(bias())
    first = queries.segment_ids[:, :1]
    one = jnp.all(queries.segment_ids == first) & jnp.all(keys.segment_ids == first)
    return jax.lax.cond(one, lambda: run(None), lambda: run(bias()))
