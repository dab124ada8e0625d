"""The loss of a student beside a teacher, token by token over the whole vocabulary, without ever holding all logits:
both models' output heads go through their tokens in the same chunks (cross_entropy.py), and the student's gradients are
made in the pass that makes the loss. The teacher has none."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from shardlm.mesh import shard_map
from shardlm.ops.cross_entropy import (
    CHUNK_BYTES,
    HeadLayout,
    OwnVocab,
    head_specs,
    in_chunks,
    sent_home,
    slope,
    whole_sequence,
)

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Between the teacher's distribution t of a token and the student's s, their logits divided by `temperature`.

    kind  "forward_kl" KL(t || s), "reverse_kl" KL(s || t), "jsd" beta KL(t || m) + (1 - beta) KL(s || m), m being
          beta t + (1 - beta) s (GKD, https://arxiv.org/abs/2306.13649, equation 1)
    """

    kind: Kind = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5


class Head(NamedTuple):
    """What an output head reads and is: hidden [B, T, D], w at rest, bias float32 [V] or None."""

    hidden: jax.Array
    w: jax.Array
    bias: jax.Array | None


class Shares(NamedTuple):
    """What a token's losses weigh: (1 - teacher) (nll + z_loss lse^2) + teacher divergence."""

    teacher: float
    z_loss: float = 0.0


def reference(student: jax.Array, teacher: jax.Array, of: Divergence) -> jax.Array:
    """The divergence of each token, float32 [...], from all logits [..., V] of both."""
    s, t = (jax.nn.log_softmax(logits.astype(jnp.float32) / of.temperature) for logits in (student, teacher))
    return _divergence(s, t, of, lambda a: jnp.sum(a, axis=-1, keepdims=True))[0][..., 0]


def distillation(
    student: Head,
    teacher: Head,
    targets: jax.Array,
    weights: jax.Array,
    *,
    layouts: tuple[HeadLayout, HeadLayout],
    of: Divergence,
    shares: Shares,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted sum over tokens of both losses, as `shares` has them; weights float32 [B, T] as in `cross_entropy`,
    which says how heads rest. `layouts` are the student's and the teacher's, whose vocabularies are the same.

    Returns the sum (differentiable in the student) and, not differentiable, weighted sums of "nll", "divergence" and
    what "z_loss" adds.
    """
    total, *parts = _loss(student, teacher, targets, weights, layouts, of, shares, chunk_bytes)
    return total, dict(zip(("nll", "z_loss", "divergence"), map(jax.lax.stop_gradient, parts), strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _loss(student, teacher, targets, weights, layouts, of, shares, chunk_bytes):
    return _run(student, teacher, targets, weights, layouts, of, shares, chunk_bytes, with_grads=False)[0]


def _forward(student, teacher, targets, weights, layouts, of, shares, chunk_bytes):
    return _run(student, teacher, targets, weights, layouts, of, shares, chunk_bytes, with_grads=True)


def _backward(layouts, of, shares, chunk_bytes, grads, cotangents):
    return Head(*jax.tree.map(lambda d: d * cotangents[0].astype(d.dtype), grads)), None, None, None


_loss.defvjp(_forward, _backward)


def _run(student, teacher, targets, weights, layouts, of, shares, chunk_bytes, with_grads):
    """Runs the chunks on every device's own tokens and vocabulary shard; (sums, the student's gradients or None)."""
    tokens = layouts[0].rules.act.spec("batch", "whole_seq")
    how = {"layouts": layouts, "of": of, "shares": shares, "chunk_bytes": chunk_bytes, "with_grads": with_grads}
    own, taught = (Head(*head_specs(layout)) for layout in layouts)
    return shard_map(
        functools.partial(_local, **how),
        in_specs=(own, taught, tokens, tokens),
        out_specs=((jax.sharding.PartitionSpec(),) * 4, tuple(own) if with_grads else None),
    )(student, teacher, targets, weights)


def _local(student: Head, teacher: Head, targets, weights, *, layouts, of, shares, chunk_bytes, with_grads):
    """One device: as `cross_entropy` does, with both heads gathered."""
    act = layouts[0].rules.act
    token_axes = act.axes("batch") + act.axes("whole_seq")
    x, seq_axes = whole_sequence(student.hidden, layouts[0])
    taught, _ = whole_sequence(teacher.hidden, layouts[1])
    heads = tuple(
        OwnVocab.of(one.w.astype(one.hidden.dtype), one.bias, layout)
        for one, layout in zip((student, teacher), layouts, strict=True)
    )
    inputs = (
        x.reshape(-1, x.shape[-1]),
        taught.reshape(-1, taught.shape[-1]),
        targets.reshape(-1),
        weights.reshape(-1),
    )
    inputs = in_chunks(inputs, 2 * heads[0].w.shape[1], chunk_bytes)  # logits of both
    d_own = {"w": jnp.zeros(heads[0].w.shape, jnp.float32)}
    d_own |= {} if student.bias is None else {"bias": jnp.zeros_like(student.bias)}
    chunk = functools.partial(_chunk, heads=heads, of=of, shares=shares, with_grads=with_grads)
    start = jnp.zeros(3, jnp.float32), d_own if with_grads else None
    (sums, d_own), d_flat = jax.lax.scan(chunk, start, inputs)
    nll, z, divergence = jax.lax.psum(sums, token_axes) if token_axes else sums
    sums = ((1 - shares.teacher) * (nll + z) + shares.teacher * divergence, nll, z, divergence)
    return sums, sent_home(d_flat, d_own, x, seq_axes, student.w.dtype, layouts[0]) if with_grads else None


def _chunk(carry, inputs, *, heads: tuple[OwnVocab, OwnVocab], of: Divergence, shares: Shares, with_grads):
    """Losses and gradients of n tokens against this device's vocabulary shard; x [n, D], taught [n, D'] of the
    teacher."""
    (sums, d_own), (x, taught, target, weight), (own, teacher) = carry, inputs, heads
    found = own.softmax(x, target)
    lse = found.lse
    gap, d_gap = _divergence(
        _log_softmax(found.logits / of.temperature, own.axes),
        _log_softmax(teacher.logits(taught) / of.temperature, own.axes),
        of,
        functools.partial(_over_vocabulary, axes=own.axes),
    )
    each = (lse - found.at_target, shares.z_loss * jnp.square(lse), gap[:, 0])
    sums = sums + jnp.stack([jnp.sum(weight * one) for one in each])
    if not with_grads:
        return (sums, None), None
    data = (1 - shares.teacher) * weight
    d_logits = found.exp * (data * (1 + 2 * shares.z_loss * lse) / found.partition)[:, None]
    d_logits = d_logits - jnp.where(found.hit, data[:, None], 0) + (shares.teacher * weight)[:, None] * d_gap
    d_products = d_logits * slope(found.logits, own.config)
    d_bias = {} if own.bias is None else {"bias": d_own["bias"] + d_products.sum(axis=0)}
    d_products = d_products.astype(x.dtype)
    d_w = d_own["w"] + jnp.einsum("nd,nv->dv", x, d_products, preferred_element_type=jnp.float32)
    return (sums, {"w": d_w} | d_bias), jnp.einsum("nv,dv->nd", d_products, own.w)


def _divergence(s: jax.Array, t: jax.Array, of: Divergence, total) -> tuple[jax.Array, jax.Array]:
    """(the divergence [..., 1], its gradient in the student's logits [..., v]), from logarithms of both distributions;
    `total` sums over the vocabulary."""
    student, teacher = jnp.exp(s), jnp.exp(t)
    if of.kind == "forward_kl":
        return total(teacher * (t - s)), (student - teacher) / of.temperature
    if of.kind == "reverse_kl":
        value = total(student * (s - t))
        return value, student * (s - t - value) / of.temperature
    middle = jnp.logaddexp(s + jnp.log1p(-of.beta), t + jnp.log(of.beta))
    of_student = total(student * (s - middle))
    value = of.beta * total(teacher * (t - middle)) + (1 - of.beta) * of_student
    return value, (1 - of.beta) * student * (s - middle - of_student) / of.temperature


def _over_vocabulary(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    sums = jnp.sum(a, axis=-1, keepdims=True)
    return jax.lax.psum(sums, axes) if axes else sums


def _log_softmax(logits: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[n, v], over all devices' parts of the vocabulary."""
    largest = logits.max(axis=-1, keepdims=True)
    largest = jax.lax.pmax(largest, axes) if axes else largest
    return logits - largest - jnp.log(_over_vocabulary(jnp.exp(logits - largest), axes))
