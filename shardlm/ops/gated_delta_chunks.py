"""The gated delta rule (gated_delta.py) of chunks of tokens at once, with a gradient of its own.

With S before a chunk, and of its tokens t and s, where D[t, s] is what is left at t of what s brought (0 for what comes
later and for other texts), h[t] the same of S, e[s] = D[last, s] and l = h[last]:

    L = beta[t] (k[t] . k[s]) D[t, s], s < t             what tokens take back of each other's changes
    U = (I + L)^-1 beta v,  W = (I + L)^-1 beta h k      their changes of an empty state, and what S takes off them
    out = h (q S) + ((q . k) D) (U - W S)
    S <- l S + (e k)^T (U - W S) = l S + P S + (e k)^T U,  P = -(e k)^T W

(https://arxiv.org/abs/2412.06464, section 3.3). So S goes from chunk to chunk by one product, and all else is products
of all chunks at once; its gradient goes back by one product with P^T. Of the forward pass inverse and states are kept,
the rest is made again. Factors are rounded to the dtype of q, k and v and summed in float32, as
flash-linear-attention has it (github.com/fla-org/flash-linear-attention, ops/gated_delta_rule); decays, the inverse and
the state that is carried are float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.ops.unit_inverse import inverse_of_unit

# Decays are summed as whole steps, in which sums of some thousand are exact, and what is left: so differences of sums
# lose nothing of what is small beside what is large. Beyond LEAST nothing is left in float32.
STEP, LEAST = 2.0**-6, -128.0


class Chunks(NamedTuple):
    """What n chunks read: q and k [n, B, K, C, H], v [n, B, N, C, V], log_decay and beta float32 [n, B, N, C], text
    int32 [n, B, C] and `before`, the text of the token before each chunk, int32 [n, B]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    text: jax.Array
    before: jax.Array

    def of_values(self) -> tuple[jax.Array, jax.Array]:
        """q and k for each head of values [n, B, N, C, H]: products of groups would turn what they make."""
        group = self.v.shape[2] // self.k.shape[2]
        return jnp.repeat(self.q, group, axis=2), jnp.repeat(self.k, group, axis=2)


class Decays(NamedTuple):
    """D float32 [n, B, N, C, C], h and e [..., C] and l [...]."""

    D: jax.Array
    h: jax.Array
    e: jax.Array
    left: jax.Array


@jax.custom_vjp
def chunked(chunks: Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """state float32 [B, N, H, V] is that which text 0 goes on from. Returns (out [n, B, N, C, V] in v's dtype, the last
    text's state)."""
    return _forward(chunks, state)[0]


def _forward(chunks: Chunks, state: jax.Array):
    (q, k), v = chunks.of_values(), chunks.v
    decays = decays_of(chunks)
    inverse = inverse_of_unit(_taken_back(chunks, decays.D))
    U, W = _changes(inverse, decays, chunks)
    into = product("nbgch,nbgcv->nbghv", k, scaled(decays.e, U))
    P = product("nbgch,nbgcj->nbghj", k, scaled(-decays.e, W))
    states, state = carried(decays.left[..., None], P.astype(k.dtype), into.astype(k.dtype), state)
    seen = (each_value(product("nbkch,nbksh->nbkcs", chunks.q, chunks.k), v) * decays.D).astype(v.dtype)
    out = product("nbgch,nbghv->nbgcv", scaled(decays.h, q), states)
    out += product("nbgcs,nbgsv->nbgcv", seen, delta_of(U, W, states))
    return (out.astype(v.dtype), state), (chunks, inverse, states)


def _backward(kept, gradients):
    chunks, inverse, states = kept
    d_out, d_state = gradients
    (q, k), v, beta = chunks.of_values(), chunks.v, chunks.beta
    decays = decays_of(chunks)
    D, h, e, left = decays
    U, W = _changes(inverse, decays, chunks)
    delta = delta_of(U, W, states)
    keys_by_keys = each_value(product("nbkch,nbksh->nbkcs", chunks.k, chunks.k), v)
    seen = each_value(product("nbkch,nbksh->nbkcs", chunks.q, chunks.k), v) * D
    # From chunk to chunk, the last first: what S before each is asked for.
    P = product("nbgch,nbgcj->nbghj", k, scaled(-e, W)).astype(k.dtype)
    by_seen = product("nbgcs,nbgcv->nbgsv", seen.astype(v.dtype), d_out)
    asks = jnp.concatenate([scaled(h, q), -W], axis=-2), jnp.concatenate([d_out, by_seen.astype(v.dtype)], axis=-2)
    after, d_state = carried(
        left[..., None], P, product("nbgch,nbgcv->nbghv", *asks).astype(k.dtype), d_state, back=True
    )
    # Inside chunks.
    dU = (by_seen + product("nbgch,nbghv->nbgcv", scaled(e, k), after)).astype(v.dtype)
    dW = -product("nbgcv,nbghv->nbgch", dU, states)
    d_seen = product("nbgcv,nbgsv->nbgcs", d_out, delta)
    d_held = product("nbgcv,nbghv->nbgch", d_out, states)  # h q
    d_keys = product("nbgcv,nbghv->nbgch", delta, after)  # e k
    whole = inverse.astype(v.dtype)
    U_back = product("nbgcs,nbgcv->nbgsv", whole, dU)
    W_back = product("nbgcs,nbgch->nbgsh", whole, dW.astype(k.dtype))
    # (I + L) U = beta v, so that L's gradient is what went back, by what came out.
    dL = -product("nbgcv,nbgsv->nbgcs", U_back.astype(v.dtype), U)
    dL -= product("nbgch,nbgsh->nbgcs", W_back.astype(k.dtype), W)
    dL = jnp.where(jnp.tri(dL.shape[-1], k=-1, dtype=bool), dL * D, 0.0)
    taken = dL * keys_by_keys  # L's gradient by L, without beta
    d_kk = _summed(dL * beta[..., None], chunks.k)
    d_qk = _summed(d_seen * D, chunks.k)
    dq = _summed(h[..., None] * d_held, chunks.k) + product("nbkcs,nbksh->nbkch", d_qk, chunks.k)
    dk = _summed(e[..., None] * d_keys + (beta * h)[..., None] * W_back, chunks.k)
    dk += product("nbkcs,nbksh->nbkch", d_kk + jnp.swapaxes(d_kk, -1, -2), chunks.k)
    dk += product("nbkcs,nbkch->nbksh", d_qk, chunks.q)
    dv = beta[..., None] * U_back
    by_k = jnp.sum(W_back * k, axis=-1)
    d_beta = jnp.sum(taken, axis=-1) + jnp.sum(U_back * v, axis=-1) + h * by_k
    # Of sums of logarithms of decays up to each token.
    inner = taken * beta[..., None] + d_seen * seen
    d_end = e * jnp.sum(d_keys * k, axis=-1)
    d_total = jnp.sum(inner, axis=-1) - jnp.sum(inner, axis=-2) - d_end
    d_total += h * (jnp.sum(d_held * q, axis=-1) + beta * by_k)
    d_left = jnp.sum(states.astype(jnp.float32) * after, axis=(-1, -2))
    d_last = jnp.sum(d_end, axis=-1) + left * d_left
    d_decay = jnp.cumsum(d_total[..., ::-1], axis=-1)[..., ::-1] + d_last[..., None]
    given = (dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_decay, d_beta)
    return Chunks(*given, None, None), d_state


chunked.defvjp(_forward, _backward)


def product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)


def each_value(a: jax.Array, v: jax.Array) -> jax.Array:
    """[n, B, K, ...] -> [n, B, N, ...]: of heads of keys, for each head of values."""
    return jnp.repeat(a, v.shape[2] // a.shape[2], axis=2)


def _summed(a: jax.Array, k: jax.Array) -> jax.Array:
    """[n, B, N, ...] -> [n, B, K, ...] in k's dtype: over heads of values that share one of keys."""
    n, B, N, *rest = a.shape
    return jnp.sum(a.reshape(n, B, k.shape[2], N // k.shape[2], *rest), axis=3).astype(k.dtype)


def scaled(scale: jax.Array, a: jax.Array) -> jax.Array:
    """Rows of `a` times numbers in float32, rounded as `a` is."""
    return (scale[..., None] * a).astype(a.dtype)


def decays_of(chunks: Chunks) -> Decays:
    C, text = chunks.text.shape[-1], chunks.text
    steps, rest = sums_of(chunks.log_decay)
    between = (steps[..., :, None] - steps[..., None, :]) + (rest[..., :, None] - rest[..., None, :])
    there = jnp.tri(C, dtype=bool) & (text[..., :, None] == text[..., None, :])
    D = jnp.exp(jnp.where(there[:, :, None], between, -jnp.inf))
    held = (text == chunks.before[..., None])[:, :, None]
    h = jnp.where(held, jnp.exp(steps + rest), 0.0)
    return Decays(D, h, D[..., -1, :], h[..., -1])


def sums_of(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> sums up to each token of a chunk: of whole steps, and of what is left."""
    decay = jnp.maximum(log_decay, LEAST)
    steps = jnp.round(decay / STEP) * STEP
    return jnp.cumsum(steps, axis=-1), jnp.cumsum(decay - steps, axis=-1)


def _taken_back(chunks: Chunks, D: jax.Array) -> jax.Array:
    """L."""
    products = each_value(product("nbkch,nbksh->nbkcs", chunks.k, chunks.k), chunks.v) * D * chunks.beta[..., None]
    return jnp.where(jnp.tri(D.shape[-1], k=-1, dtype=bool), products, 0.0)


def _changes(inverse: jax.Array, decays: Decays, chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """U [n, B, N, C, V] and W [n, B, N, C, H], of v's and k's dtype."""
    (_, k), v, beta = chunks.of_values(), chunks.v, chunks.beta
    of_v = (inverse * beta[..., None, :]).astype(v.dtype)
    of_k = (inverse * (beta * decays.h)[..., None, :]).astype(k.dtype)
    U = product("nbgcs,nbgsv->nbgcv", of_v, v).astype(v.dtype)
    return U, product("nbgcs,nbgsh->nbgch", of_k, k).astype(k.dtype)


def delta_of(U: jax.Array, W: jax.Array, states: jax.Array) -> jax.Array:
    """What tokens change."""
    return (U - product("nbgch,nbghv->nbgcv", W, states)).astype(U.dtype)


def through(left: jax.Array, P: jax.Array, into: jax.Array, state: jax.Array, back: bool = False):
    """state <- left state + P state + into, of each chunk [n, ...] after the other, with P^T from the last to the first
    if `back`; left [n, B, N, 1], or [n, B, N, H] of each row of a state [B, N, H, V]. Returns (the state that each
    chunk is given, in P's dtype; the last one made, float32)."""
    letters = "bgjh,bgjv->bghv" if back else "bghj,bgjv->bghv"

    def step(state, chunk):
        left, P, into = chunk
        given = state.astype(P.dtype)
        return left[..., None] * state + (product(letters, P, given) + into), given

    state, states = jax.lax.scan(step, state, (left, P, into), reverse=back)
    return states, state


def carried(left: jax.Array, P: jax.Array, into: jax.Array, state: jax.Array, back: bool = False):
    """`through`, on NVIDIA GPUs by a kernel where there is one."""
    from shardlm.ops import states_kernel  # Pallas takes a while to import

    here = functools.partial(through, back=back)
    if not states_kernel.fits(P, into):
        logging.vlog(1, "states from chunk to chunk: XLA's loop, for %s of %s", P.dtype, into.shape)
        return here(left, P, into, state)
    kernel = functools.partial(states_kernel.pallas, back=back)
    return jax.lax.platform_dependent(left, P, into, state, cuda=kernel, default=here)
