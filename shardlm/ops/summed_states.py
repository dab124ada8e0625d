"""Linear attention whose states take up values and give nothing back: the state space models of Mamba 2
(https://arxiv.org/abs/2405.21060, eq. 16 to 18), beside the gated delta rule (gated_delta.py). For each token, with a
key k (their B), a query q (their C), a value v (their x) and a step beta (their dt), S decays and takes up the value:

    S <- exp(log_decay) S + k (beta v)^T;  out = S^T q

With S before a chunk, D[t, s] what is left at t of what s brought, h[t] the same of S, e[s] = D[last, s] and l =
h[last] (section 6 there):

    out = h (q S) + ((q . k) D beta) v;  S <- l S + (e beta k)^T v

No tokens take anything of each other's, so that there is no system of equations to solve, and S goes from chunk to
chunk by numbers alone. Factors are rounded to the dtype of q, k and v and summed in float32; decays and the state that
is carried are float32. Rows of tokens, on GPUs too: summed_rows.py."""

import jax

from shardlm.ops.gated_delta_chunks import Chunks, decays_of, each_value, product, scaled


@jax.checkpoint
def summed(chunks: Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As gated_delta_chunks.chunked. All is made again for its gradient, as that is."""
    (q, k), v, beta = chunks.of_values(), chunks.v, chunks.beta
    D, h, e, left = decays_of(chunks)
    into = product("nbgch,nbgcv->nbghv", scaled(e * beta, k), v).astype(k.dtype)
    states, state = _through(left, into, state)
    seen = each_value(product("nbkch,nbksh->nbkcs", chunks.q, chunks.k), v) * D * beta[..., None, :]
    out = product("nbgch,nbghv->nbgcv", scaled(h, q), states.astype(q.dtype))
    out += product("nbgcs,nbgsv->nbgcv", seen.astype(v.dtype), v)
    return out.astype(v.dtype), state


def _through(left: jax.Array, into: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """state <- left state + into, of each chunk after the other: left [n, B, N], into [n, B, N, H, V]. Returns (the
    state that each chunk is given, in into's dtype; the last one made, float32)."""

    def step(state, chunk):
        left, into = chunk
        return left[..., None, None] * state + into, state.astype(into.dtype)

    state, states = jax.lax.scan(step, state, (left, into))
    return states, state
