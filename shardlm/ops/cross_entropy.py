"""Cross-entropy of the output head without ever holding all logits: tokens go through in chunks. Where tokens' weights
are known beforehand, gradients are computed in the same pass as the loss, so that a chunk's logits are made once and
dropped; where they follow from the tokens' losses (`token_nll`), the backward pass makes them again."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardlm.mesh import shard_map
from shardlm.rules import Rules

# Largest float32 logits chunk on one device: far below the logits of a batch (8,192 tokens of 128k: 4 GiB). Every chunk
# adds to the head's gradient, which is read and written whole in float32: of Llama 3 8B over 8 H100 in chunks of
# 128 MiB 50 of 1,066 ms a step; of 512 MiB 1,032 ms for 0.19 GiB more, of 1 GiB no less (compiled, not measured).
CHUNK_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class LogitsConfig:
    """What becomes of the head's products, with its bias: times `scale` (Granite), then softcap * tanh(x / softcap)
    (Gemma 2, https://arxiv.org/abs/2408.00118); softcap 0: nothing."""

    scale: float = 1.0
    softcap: float = 0.0


def shaped(products: jax.Array, config: LogitsConfig) -> jax.Array:
    """The logits."""
    logits = products if config.scale == 1 else products * config.scale
    return config.softcap * jnp.tanh(logits / config.softcap) if config.softcap else logits


def slope(logits: jax.Array, config: LogitsConfig) -> jax.Array | float:
    """The derivative of the logits in the products."""
    return config.scale * (1 - jnp.square(logits / config.softcap)) if config.softcap else config.scale


def reference(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    config: LogitsConfig = LogitsConfig(),
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood and log-partition of each token, all logits at once, in float32.

    hidden [B, T, D], head [D, V], targets int32 [B, T], bias [V]; returns nll and lse, both float32 [B, T].
    """
    products = jnp.einsum("btd,dv->btv", hidden, head, preferred_element_type=jnp.float32)
    logits = shaped(products if bias is None else products + bias, config)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], lse


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """How the output head rests: names of its two dimensions, ("embed", "vocab") or, tied, ("vocab", "embed"); and what
    becomes of its products."""

    names: tuple[str, str]
    rules: Rules
    logits: LogitsConfig = LogitsConfig()

    @property
    def vocab_dim(self) -> int:
        return self.names.index("vocab")

    def gathered(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(dimension, mesh axes) that are gathered before use and scattered in the gradient."""
        rest, use = self.rules.rest, self.rules.use
        return tuple(
            (dim, axes)
            for dim, name in enumerate(self.names)
            if (axes := tuple(a for a in rest.axes(name) if a not in use.axes(name)))
        )


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    layout: HeadLayout,
    z_loss: float = 0.0,
    chunk_bytes: int = CHUNK_BYTES,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted sum over tokens of nll + z_loss * lse**2 (z-loss: https://arxiv.org/abs/2204.02311, section 5).

    hidden [B, T, D] as it leaves the last block; head at rest, in its master dtype: it is cast to hidden's dtype
    here and its gradient comes back in the master dtype; targets int32 [B, T]; weights float32 [B, T], 0 for tokens
    that do not count; bias float32 [V], split as logits are. Whatever scales the loss (1/tokens, a loss scale) belongs
    in `weights`, since logits' gradients are rounded to hidden's dtype.

    Returns the sum (differentiable in hidden, head and bias) and, not differentiable, {"nll": sum of weights * nll,
    "z_loss": the z term}.
    """
    total, nll, z = _loss(hidden, head, bias, targets, weights, layout, z_loss, chunk_bytes)
    return total, {"nll": jax.lax.stop_gradient(nll), "z_loss": jax.lax.stop_gradient(z)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _loss(hidden, head, bias, targets, weights, layout, z_loss, chunk_bytes):
    return _run(hidden, head, bias, targets, weights, layout, z_loss, chunk_bytes, with_grads=False)[0]


def _forward(hidden, head, bias, targets, weights, layout, z_loss, chunk_bytes):
    return _run(hidden, head, bias, targets, weights, layout, z_loss, chunk_bytes, with_grads=True)


def _backward(layout, z_loss, chunk_bytes, grads, cotangents):
    scale = cotangents[0]
    return (*jax.tree.map(lambda d: d * scale.astype(d.dtype), grads), None, None)


_loss.defvjp(_forward, _backward)


def token_nll(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    layout: HeadLayout,
    chunk_bytes: int = CHUNK_BYTES,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Negative log-likelihood of each token, float32 [B, T], for losses that are no weighted sum of it: four matmuls
    with the head for `cross_entropy`'s three. Arguments are `cross_entropy`'s; differentiable in hidden, head, bias."""
    return _nll(hidden, head, bias, targets, layout, chunk_bytes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _nll(hidden, head, bias, targets, layout: HeadLayout, chunk_bytes):
    tokens = layout.rules.act.spec("batch", "whole_seq")
    local = functools.partial(_local_nll, layout=layout, chunk_bytes=chunk_bytes)
    return shard_map(local, in_specs=(*head_specs(layout), tokens), out_specs=tokens)(hidden, head, bias, targets)


def _nll_forward(hidden, head, bias, targets, layout, chunk_bytes):
    return _nll(hidden, head, bias, targets, layout, chunk_bytes), (hidden, head, bias, targets)


def _nll_backward(layout, chunk_bytes, kept, cotangent):
    """A token's cotangent is its weight in the sum that `cross_entropy` differentiates."""
    return (*_run(*kept, cotangent, layout, 0.0, chunk_bytes, with_grads=True)[1], None)


_nll.defvjp(_nll_forward, _nll_backward)


def head_specs(layout: HeadLayout) -> tuple[jax.sharding.PartitionSpec, ...]:
    """Of hidden, head and bias."""
    act = layout.rules.act
    return act.spec("batch", "seq", "embed"), layout.rules.rest.spec(*layout.names), act.spec("vocab")


def _run(hidden, head, bias, targets, weights, layout: HeadLayout, z_loss, chunk_bytes, with_grads):
    """Runs the chunks on every device's own tokens and vocabulary shard; ((total, nll, z), gradients or None)."""
    tokens = layout.rules.act.spec("batch", "whole_seq")
    scalars = (jax.sharding.PartitionSpec(),) * 3
    local = functools.partial(_local, layout=layout, z_loss=z_loss, chunk_bytes=chunk_bytes, with_grads=with_grads)
    return shard_map(
        local,
        in_specs=(*head_specs(layout), tokens, tokens),
        out_specs=(scalars, head_specs(layout) if with_grads else None),
    )(hidden, head, bias, targets, weights)


def _local(hidden, head, bias, targets, weights, *, layout: HeadLayout, z_loss, chunk_bytes, with_grads):
    """One device: gathers its head shard and sequence, loops over chunks, and sends the gradients back home."""
    act = layout.rules.act
    token_axes = act.axes("batch") + act.axes("whole_seq")
    x, seq_axes = whole_sequence(hidden, layout)
    own = OwnVocab.of(head.astype(hidden.dtype), bias, layout)
    w = own.w
    chunk = functools.partial(_chunk, own=own, z_loss=z_loss, with_grads=with_grads)
    inputs = in_chunks((x.reshape(-1, x.shape[-1]), targets.reshape(-1), weights.reshape(-1)), w.shape[1], chunk_bytes)
    zeros = {"w": jnp.zeros(w.shape, jnp.float32)} | ({} if bias is None else {"bias": jnp.zeros_like(bias)})
    (sums, d_own), d_flat = jax.lax.scan(chunk, (jnp.zeros(2, jnp.float32), zeros if with_grads else None), inputs)
    nll, z = jax.lax.psum(sums, token_axes) if token_axes else sums
    totals = (nll + z, nll, z)
    if not with_grads:
        return totals, None
    return totals, sent_home(d_flat, d_own, x, seq_axes, head.dtype, layout)


def sent_home(d_flat, d_own, x, seq_axes, dtype, layout: HeadLayout):
    """(gradient of hidden, of the head in `dtype` where it rests, of the bias or None), from those of the chunks of
    x [B, T, D], gathered over `seq_axes`, and of this device's "w" and "bias"."""
    act = layout.rules.act
    vocab_axes, token_axes = act.axes("vocab"), act.axes("batch") + act.axes("whole_seq")
    d_x = d_flat.reshape(-1, x.shape[-1])[: math.prod(x.shape[:2])].reshape(x.shape)
    if seq_axes:
        d_x = jax.lax.psum_scatter(d_x, seq_axes, scatter_dimension=1, tiled=True)
    elif vocab_axes:
        d_x = jax.lax.psum(d_x, vocab_axes)
    d_head = _send_home(d_own["w"].T if layout.vocab_dim == 0 else d_own["w"], layout, token_axes).astype(dtype)
    d_bias = d_own.get("bias")
    return d_x, d_head, jax.lax.psum(d_bias, token_axes) if d_bias is not None and token_axes else d_bias


def _local_nll(hidden, head, bias, targets, *, layout: HeadLayout, chunk_bytes):
    """One device's tokens; where the vocabulary is split, each of its devices gets the same sums."""
    x, _ = whole_sequence(hidden, layout)
    own = OwnVocab.of(head.astype(hidden.dtype), bias, layout)

    def chunk(_, inputs):
        found = own.softmax(*inputs)
        return None, found.lse - found.at_target

    inputs = in_chunks((x.reshape(-1, x.shape[-1]), targets.reshape(-1)), own.w.shape[1], chunk_bytes)
    return jax.lax.scan(chunk, None, inputs)[1].reshape(-1)[: targets.size].reshape(targets.shape)


def whole_sequence(hidden, layout: HeadLayout):
    """(hidden with the sequence gathered that is split between blocks alone, the axes it was gathered over)."""
    act = layout.rules.act
    axes = tuple(a for a in act.axes("seq") if a not in act.axes("whole_seq"))
    return jax.lax.all_gather(hidden, axes, axis=1, tiled=True) if axes else hidden, axes


def _send_home(d_head, layout: HeadLayout, token_axes):
    """Sums the head's gradient over the devices that saw different tokens, keeping only the resting shard."""
    remaining = token_axes
    for dim, axes in layout.gathered():
        d_head = jax.lax.psum_scatter(d_head, axes, scatter_dimension=dim, tiled=True)
        remaining = tuple(a for a in remaining if a not in axes)
    return jax.lax.psum(d_head, remaining) if remaining else d_head


class Softmax(NamedTuple):
    """Of n tokens, over the whole vocabulary but for what is [n, v], this device's part. exp is relative to the largest
    logit, partition its sum; lse and at_target [n] are logits."""

    logits: jax.Array
    exp: jax.Array
    hit: jax.Array
    partition: jax.Array
    lse: jax.Array
    at_target: jax.Array


@dataclasses.dataclass(frozen=True)
class OwnVocab:
    """This device's part w [D, v] of the head, and of its bias, if any, [v]; its first token is `first`."""

    w: jax.Array
    bias: jax.Array | None
    first: jax.Array | int
    axes: tuple[str, ...]
    config: LogitsConfig

    @classmethod
    def of(cls, w: jax.Array, bias: jax.Array | None, layout: HeadLayout) -> "OwnVocab":
        """Of the head as it rests, which is gathered here, and this device's part of the bias."""
        axes = layout.rules.act.axes("vocab")
        for dim, over in layout.gathered():
            w = jax.lax.all_gather(w, over, axis=dim, tiled=True)
        w = w.T if layout.vocab_dim == 0 else w
        return cls(w, bias, jax.lax.axis_index(axes) * w.shape[1] if axes else 0, axes, layout.logits)

    def logits(self, x: jax.Array) -> jax.Array:
        """x [n, D] -> this device's, float32 [n, v]."""
        products = jnp.einsum("nd,dv->nv", x, self.w, preferred_element_type=jnp.float32)
        return shaped(products if self.bias is None else products + self.bias, self.config)

    def softmax(self, x: jax.Array, target: jax.Array) -> Softmax:
        """x [n, D], target int32 [n]."""
        logits = self.logits(x)
        largest = logits.max(axis=-1)
        largest = jax.lax.pmax(largest, self.axes) if self.axes else largest
        exp = jnp.exp(logits - largest[:, None])
        hit = jnp.arange(self.w.shape[1]) == (target - self.first)[:, None]
        partition, at_target = exp.sum(axis=-1), jnp.where(hit, logits, 0).sum(axis=-1)
        if self.axes:
            partition, at_target = jax.lax.psum((partition, at_target), self.axes)
        return Softmax(logits, exp, hit, partition, largest + jnp.log(partition), at_target)


def _chunk(carry, inputs, *, own: OwnVocab, z_loss, with_grads):
    """Loss and gradients of n tokens against this device's vocabulary shard. x [n, D]."""
    sums, d_own = carry
    x, target, weight = inputs
    found = own.softmax(x, target)
    nll, lse = found.lse - found.at_target, found.lse
    sums = sums + jnp.stack([jnp.sum(weight * nll), jnp.sum(weight * z_loss * jnp.square(lse))])
    if not with_grads:
        return (sums, None), None
    softmax_scale = weight * (1 + 2 * z_loss * lse) / found.partition
    d_logits = found.exp * softmax_scale[:, None] - jnp.where(found.hit, weight[:, None], 0)
    d_products = d_logits * slope(found.logits, own.config)
    d_bias = {} if own.bias is None else {"bias": d_own["bias"] + d_products.sum(axis=0)}
    d_products = d_products.astype(x.dtype)
    d_w = d_own["w"] + jnp.einsum("nd,nv->dv", x, d_products, preferred_element_type=jnp.float32)
    return (sums, {"w": d_w} | d_bias), jnp.einsum("nv,dv->nd", d_products, own.w)


def in_chunks(arrays, vocab: int, chunk_bytes: int):
    """Each [n, ...] -> [chunks, ceil(n / chunks), ...], padded with zeros, which weigh nothing: so many that the logits
    of one over `vocab` tokens take `chunk_bytes` at most."""
    tokens = arrays[0].shape[0]
    chunks = math.ceil(tokens * vocab * 4 / chunk_bytes)
    size = math.ceil(tokens / chunks)

    def split(a):
        padded = jnp.pad(a, [(0, chunks * size - tokens), *[(0, 0)] * (a.ndim - 1)])
        return padded.reshape(chunks, size, *a.shape[1:])

    return tuple(map(split, arrays))
