"""Linear attention (gated_delta.py) of tokens that may turn out wrong: drafts, which a model reads before it is known
which of them stay.

A state goes forward only, and one for each draft would be as much memory again. So it stays behind: a text is
remembered by the state before the tokens of the last step, and by these tokens as they came in, 0.4 MiB each of a
request of Qwen 3.5 9B, whose states are 48 MiB. The next step knows how many of them stayed, by where it begins. It
reads the state once, for these tokens and its own, and writes it with those that stayed.

With S the state, of tokens t and s of both steps, D[t, s] what is left at t of what s brought and h[t] the same of S:

    L = beta[t] (k[t] . k[s]) D[t, s], s < t
    delta = (I + L)^-1 beta (v - h (k S))              what each token changes
    out = h (q S) + ((q . k) D) delta
    S <- h[m] S + sum over s <= m of D[m, s] k[s] delta[s]^T, m the last token that stayed

(gated_delta_chunks.py, of few tokens and in float32.) Where nothing is taken back (Mamba 2), L is 0 and delta is
beta v.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardlm.ops.gated_delta import Memory, convolved, ruled, with_skip
from shardlm.ops.short_conv import texts
from shardlm.ops.unit_inverse import inverse_of_unit

MOST = 24  # tokens of both steps that the kernel for GPUs takes (delta_drafts_kernel.py), each a part of its program


def delta_net_of_drafts(
    x: dict[str, jax.Array],
    taps: dict[str, jax.Array],
    log_decay: jax.Array,
    beta: jax.Array,
    memory: Memory,
    sure: jax.Array,
    position: jax.Array,
    valid: jax.Array,
    through: "Through | None" = None,
) -> tuple[jax.Array, Memory]:
    """As gated_delta.delta_net, of rows of T tokens that may turn out wrong, the first at `position` int32 [B] of its
    text; those before `sure` int32 [B] are known to be right. The memory has room for P tokens: "conv_q", "conv_k" and
    "conv_v" for so many more, their "log_decay" and "beta" float32 [B, P, N], and "start" int32 [B], where in the text
    the first of them stands; from `sure` on there may be so many now. Of a row without a valid token it stays as it
    is."""
    P, T, before = memory["beta"].shape[1], valid.shape[1], taps["q"].shape[-1] - 1
    runs, names = valid[:, 0], {name: f"conv_{name}" for name in x}
    kept, behind = (jnp.where(runs, at - memory["start"], 0) for at in (sure, position))  # of the tokens there are
    rates = {"log_decay": log_decay, "beta": beta}
    whole = {of: jnp.concatenate([memory[of], x[n].astype(memory[of].dtype)], axis=1) for n, of in names.items()}
    whole |= {name: jnp.concatenate([memory[name], a], axis=1) for name, a in rates.items()}
    order = {name: _order(behind, 0 if name in rates else before, P, T) for name in whole}
    read = {name: _at(a, order[name]) for name, a in whole.items()}
    there = (jnp.arange(P + T) < (behind + jnp.sum(valid, axis=1))[:, None])[..., None]
    inputs = {n: read[of].astype(x[n].dtype) for n, of in names.items()}
    begins, rest = ({n: a[:, part] for n, a in inputs.items()} for part in (slice(before), slice(before, None)))
    q, k, v = convolved(rest, taps, begins, texts(jnp.zeros_like(there[..., 0])))
    how = (jnp.where(_like(there[..., 0], read[name]), read[name], 0.0) for name in rates)
    q = _at(q, behind[:, None] + jnp.arange(T))
    rule = ruled(few_tokens, taps)
    out, state = rule(q, k, v, *how, memory["state"], kept, behind, through)
    out = with_skip(out, _at(v, behind[:, None] + jnp.arange(T)), taps)
    new = {"start": sure}
    for name, index in order.items():  # of what was read, from the first that is not sure on
        places = jnp.minimum(kept[:, None] + jnp.arange(memory[name].shape[1]), index.shape[1] - 1)
        new[name] = _at(whole[name], jnp.take_along_axis(index, places, axis=1))
    return out, {"state": state} | {name: jnp.where(_like(runs, a), a, memory[name]) for name, a in new.items()}


class Few(NamedTuple):
    """What few tokens of B rows take of a state [B, N, H, V] and do to it, float32; C tokens, of which the last T have
    outputs, and with heads before tokens.

    by       [B, N, C + T, H]  what reads the state: keys, then queries, times what is left of it at each
    beta     [B, N, C]
    v        [B, N, C, V]
    L        [B, N, C, C]  how much of a token's change each one before it takes back; 0 from the diagonal on
    scores   [B, N, T, C]  how much of it outputs read
    brought  [B, N, C - T, H]  by what it is added to the state; 0 for those that do not stay
    held     [B, N, 1] or [B, N, H]  what is left of the state at the end
    """

    by: jax.Array
    beta: jax.Array
    v: jax.Array
    L: jax.Array
    scores: jax.Array
    brought: jax.Array
    held: jax.Array


def few_tokens(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    kept: jax.Array,
    first: jax.Array,
    through: "Through | None" = None,
    takes_back: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """k [B, C, K, H] and v [B, C, N, V], log_decay and beta float32 [B, C, N], or log_decay [B, C, N, H], and the state
    before them float32 [B, N, H, V]; q [B, T, K, H] of the tokens from number `first` int32 [B] on, `kept` int32 [B] at
    most as large, and both at most C - T. Returns (their outputs [B, T, N, V] in v's dtype, the state after the first
    `kept` tokens). The state goes through `at_once` unless another is given."""
    N, dtype = v.shape[2], v.dtype
    q, k, v = (jnp.moveaxis(a.astype(jnp.float32), 1, 2) for a in (q, k, v))
    q, k = (jnp.repeat(a, N // a.shape[1], axis=1) for a in (q, k))  # [B, N, T | C, H]
    log_decay, beta = (jnp.moveaxis(a, 1, 2) for a in (log_decay, beta))  # [B, N, C]
    few = (_by_channel if log_decay.ndim == 4 else _alike)(q, k, v, log_decay, beta, kept, first)
    if not takes_back:
        few = few._replace(by=few.by.at[:, :, : v.shape[2]].set(0.0), L=jnp.zeros_like(few.L))
    out, state = (through or at_once)(few, state)
    return jnp.moveaxis(out, 1, 2).astype(dtype), state


Through = Callable[[Few, jax.Array], tuple[jax.Array, jax.Array]]


def at_once(few: Few, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(outputs [B, N, T, V], the state after the tokens that stayed [B, N, H, V])."""
    C = few.L.shape[-1]
    # Of S all that is read at once, as sums in which XLA reads it where it lies; a product would want a copy.
    seen = jnp.sum(state[:, :, None] * few.by[..., None], axis=3)  # [B, N, C + T, V]
    delta = _exact("bncs,bnsv->bncv", _inverse(few.L), few.beta[..., None] * (few.v - seen[:, :, :C]))
    out = seen[:, :, C:] + _exact("bnts,bnsv->bntv", few.scores, delta)
    state = state * few.held[..., None]
    for token in range(few.brought.shape[2]):  # one by one: of a sum XLA would make a product, and an array of all that
        state += few.brought[:, :, token, :, None] * delta[:, :, token, None]  # is added
    return out, state


def _alike(q, k, v, log_decay, beta, kept, first) -> Few:
    """Of decays [B, N, C], by which all of a state decays."""
    C, T = k.shape[2], q.shape[2]
    D, h = _decays(log_decay)
    L = jnp.where(jnp.tri(C, k=-1, dtype=bool), beta[..., None] * _exact("bnch,bnsh->bncs", k, k) * D, 0.0)
    own = (first[:, None] + jnp.arange(T))[:, None]  # [B, 1, T]
    scores = _exact("bnth,bnsh->bnts", q, k) * jnp.take_along_axis(D, own[..., None], axis=2)
    by = jnp.concatenate([h[..., None] * k, jnp.take_along_axis(h, own, axis=2)[..., None] * q], axis=2)
    last, stays = jnp.maximum(kept - 1, 0)[:, None, None], (jnp.arange(C) < kept[:, None])[:, None]
    left = jnp.where(stays, jnp.take_along_axis(D, last[..., None], axis=2)[:, :, 0], 0.0)  # [B, N, C]
    held = jnp.where(stays[..., :1], jnp.take_along_axis(h, last, axis=2), 1.0)  # [B, N, 1]
    return Few(by, beta, v, L, scores, (left[..., None] * k)[:, :, : C - T], held)


def _by_channel(q, k, v, log_decay, beta, kept, first) -> Few:
    """Of decays of each number of a key [B, N, C, H]: what is left of a key is no factor on products, so that of so few
    tokens products are sums."""
    C, T = k.shape[2], q.shape[2]
    own = (first[:, None] + jnp.arange(T))[:, None, :, None]  # [B, 1, T, 1]
    D, h = _decays(jnp.swapaxes(log_decay, 2, 3))
    D, h = jnp.moveaxis(D, 2, -1), jnp.moveaxis(h, 2, -1)  # [B, N, C, C, H] and [B, N, C, H]
    by = jnp.concatenate([h * k, jnp.take_along_axis(h, own, axis=2) * q], axis=2)
    L = beta[..., None] * jnp.sum(k[:, :, :, None] * k[:, :, None] * D, axis=-1)
    L = jnp.where(jnp.tri(C, k=-1, dtype=bool), L, 0.0)
    scores = jnp.sum(q[:, :, :, None] * k[:, :, None] * jnp.take_along_axis(D, own[..., None], axis=2), axis=-1)
    last, stays = jnp.maximum(kept - 1, 0)[:, None, None, None], (jnp.arange(C) < kept[:, None])[:, None, :, None]
    left = jnp.where(stays, jnp.take_along_axis(D, last[..., None], axis=2)[:, :, 0], 0.0)  # [B, N, C, H]
    held = jnp.where(stays[:, :, 0], jnp.take_along_axis(h, last, axis=2)[:, :, 0], 1.0)  # [B, N, H]
    return Few(by, beta, v, L, scores, (left * k)[:, :, : C - T], held)


def _inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of [B, N, C, C]."""
    C = lower.shape[-1]
    rest = (1 << (C - 1).bit_length()) - C
    return inverse_of_unit(jnp.pad(lower, ((0, 0), (0, 0), (0, rest), (0, rest))))[..., :C, :C]


def _decays(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of [..., C]: (D [..., C, C], 0 above the diagonal, and h [..., C]), of sums of what lies between tokens."""
    up_to = jnp.tri(log_decay.shape[-1], dtype=bool)
    between = up_to[:, None] & ~up_to[None]  # [t, s, u], s < u <= t
    D = jnp.exp(jnp.sum(jnp.where(between, log_decay[..., None, None, :], 0.0), axis=-1))
    return jnp.where(up_to, D, 0.0), jnp.exp(jnp.sum(jnp.where(up_to, log_decay[..., None, :], 0.0), axis=-1))


def _order(behind: jax.Array, before: int, P: int, T: int) -> jax.Array:
    """int32 [B, before + P + T]: of `before` tokens, P of which `behind` [B] are there, and T new ones, those that are
    read in turn, and then the last one again."""
    index, ends = jnp.arange(before + P + T), before + behind[:, None]
    return jnp.where(index < ends, index, jnp.minimum(before + P + index - ends, before + P + T - 1))


def _at(a: jax.Array, index: jax.Array) -> jax.Array:
    """a [B, T, ...] at index int32 [B, n] -> [B, n, ...]."""
    return jnp.take_along_axis(a, _like(index, a), axis=1)


def _like(a: jax.Array, other: jax.Array) -> jax.Array:
    return a.reshape(*a.shape, *(1,) * (other.ndim - a.ndim))


def _exact(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(letters, a, b, precision="highest")
