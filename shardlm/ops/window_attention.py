"""Attention in both directions inside of windows that patches of one image stand in, one after the other: queries in
blocks as long as the longest window, to the keys of their block and of the ones before and after it, which hold every
window that the block has a part of."""

import jax
import jax.numpy as jnp

from shardlm.ops.attention import attend

AT_ONCE_BYTES = 2**27  # of scores


def window_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, count: jax.Array, windows: jax.Array, longest: int
) -> jax.Array:
    """`full_attention.reference` of windows int32 [P] whose numbers ascend over the first `count` patches, and of which
    none has more than `longest`. Shapes as there."""
    P = q.shape[0]
    q, k, v = (_in_blocks(a, longest) for a in (q, k, v))
    windows = jnp.where(jnp.arange(P) < count, windows, -1)
    windows = jnp.pad(windows, (0, -P % longest), constant_values=-1).reshape(-1, longest)

    def block(at):
        seen = at["windows"][:, None] == at["of_keys"][None]
        return attend(at["q"][None], at["k"][None], at["v"][None], seen[None], scale)[0]

    at = {"q": q, "windows": windows, "k": _beside(k), "v": _beside(v), "of_keys": _beside(windows, -2)}
    together = max(1, AT_ONCE_BYTES // (4 * 3 * longest**2 * q.shape[2]))
    out = jax.lax.map(block, at, batch_size=min(together, len(q)))
    return out.reshape(-1, *out.shape[2:])[:P]


def _in_blocks(a: jax.Array, longest: int) -> jax.Array:
    """[P, ...] -> [blocks, longest, ...]."""
    a = jnp.pad(a, [(0, -a.shape[0] % longest)] + [(0, 0)] * (a.ndim - 1))
    return a.reshape(-1, longest, *a.shape[1:])


def _beside(a: jax.Array, beyond: int = 0) -> jax.Array:
    """[blocks, L, ...] -> [blocks, 3 L, ...]: with the block before and the one after, `beyond` the ends."""
    wider = jnp.pad(a, [(1, 1)] + [(0, 0)] * (a.ndim - 1), constant_values=beyond)
    return jnp.concatenate([wider[:-2], a, wider[2:]], axis=1)
