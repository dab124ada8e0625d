"""Linear attention by the gated delta rule: a matrix for each head is what a text is remembered by, however long it is.

For each token, with a key k and a query q of length 1 (q times head_dim ** -0.5), S decays, gives up what it holds for
k, and takes beta of the new value in its place (https://arxiv.org/abs/2412.06464, eq. 10):

    S <- exp(log_decay) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q

or, with a decay for each number of a key, each row of S by its own (Kimi Delta Attention,
https://arxiv.org/abs/2510.26692, eq. 1).

Chunks of tokens are computed at once (section 3.3 there, and https://arxiv.org/abs/2406.06484): inside one, what tokens
take over from each other is a triangular system of equations, and S goes from chunk to chunk.

Beside it a rule that takes nothing back, S <- S + k (beta v)^T, that of Mamba 2 (summed_states.py).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardlm.ops.channel_delta_chunks import chunked as by_channels
from shardlm.ops.gated_delta_chunks import Chunks, chunked
from shardlm.ops.gated_delta_rows import by_rows
from shardlm.ops.short_conv import last_before, last_of, short_conv, texts
from shardlm.ops.summed_rows import by_rows as summed_by_rows
from shardlm.ops.summed_states import summed

CHUNK = 64  # tokens; as flash-linear-attention has it (github.com/fla-org/flash-linear-attention, ops/gated_delta_rule)
# The same where nothing is taken back (4,096 tokens of 48 heads [128, 64], forward and back on an H100: 413 MiB of
# temporaries, of 64 tokens 437, of 256 496; compiled).
SUMMED = 128
NORM_EPS = 1e-6  # of the lengths of queries and keys, as there
SKIP = "skip"  # what is added to outputs of each head's value (Mamba 2), which a rule has that takes nothing back
BIAS = "bias_"  # before the names of convolutions that have one

Memory = dict[str, jax.Array]
"""What a text is remembered by: "state" float32 [B, N, H, V], and "conv_q", "conv_k" [B, W - 1, K, H] and "conv_v"
[B, W - 1, N, V], its last tokens before the convolutions."""


def delta_net(
    x: dict[str, jax.Array],
    taps: dict[str, jax.Array],
    log_decay: jax.Array,
    beta: jax.Array,
    memory: Memory,
    new: jax.Array,
    valid: jax.Array,
    rule: Callable | None = None,
) -> tuple[jax.Array, Memory]:
    """Convolutions, then the rule, `gated_delta` unless another is given. x: q and k [B, T, K, H], v [B, T, N, V], N a
    multiple of K; taps: of each [*, *, W], and of a rule that takes nothing back "skip" [N], and what is added to what
    was convolved, "bias_q", ... [*, *], if anything is; log_decay and beta float32 [B, T, N], or log_decay
    [B, T, N, H]; new bool [B, T], tokens that begin a text, and valid bool [B, T], False for padding at the end of
    rows. Returns ([B, T, N, V] in v's dtype, the memory after the last valid token)."""
    text = texts(new & valid)
    q, k, v = convolved(x, taps, {name: memory[f"conv_{name}"] for name in x}, text)
    counts = (valid[(..., *[None] * (a.ndim - 2))] for a in (log_decay, beta))
    rates = [jnp.where(real, a, 0.0) for real, a in zip(counts, (log_decay, beta), strict=True)]
    out, state = ruled(rule or gated_delta, taps)(q, k, v, *rates, memory["state"], text)
    kept = {f"conv_{name}": last_of(a, memory[f"conv_{name}"], text, valid) for name, a in x.items()}
    return with_skip(out, v, taps), {"state": state} | kept


def ruled(rule: Callable, taps: dict[str, jax.Array]) -> Callable:
    """A rule as it is for what has these."""
    return functools.partial(rule, takes_back=False) if SKIP in taps else rule


def with_skip(out: jax.Array, v: jax.Array, taps: dict[str, jax.Array]) -> jax.Array:
    """Outputs [B, T, N, V] and what is added of values of the same shape."""
    if SKIP not in taps:
        return out
    added = taps[SKIP].astype(jnp.float32)[:, None] * v.astype(jnp.float32)
    return (out.astype(jnp.float32) + added).astype(out.dtype)


def convolved(
    x: dict[str, jax.Array], taps: dict[str, jax.Array], before: dict[str, jax.Array], text: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the rule reads of x: q, of length head_dim ** -0.5, k, of length 1, and v, in x's shapes; where nothing is
    taken back, q and k as they are. `before` and text as short_conv.short_conv has them."""
    made = {name: short_conv(a, taps[name], before[name], text) for name, a in x.items()}
    made = {name: jax.nn.silu(a + taps[BIAS + name] if BIAS + name in taps else a) for name, a in made.items()}
    if SKIP in taps:
        return made["q"], made["k"], made["v"]
    q, k = (unit(made[name].astype(jnp.float32)) for name in ("q", "k"))
    return (q * q.shape[-1] ** -0.5).astype(made["q"].dtype), k.astype(made["k"].dtype), made["v"]


def unit(a: jax.Array) -> jax.Array:
    """Vectors of length 1."""
    return a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + NORM_EPS)


def empty_memory(x: dict[str, jax.Array], width: int) -> Memory:
    """Of rows of which nothing is known, before convolutions over `width` tokens; x as in `delta_net`."""
    (B, _, _, H), (*_, N, V) = x["k"].shape, x["v"].shape
    found = {f"conv_{name}": jnp.zeros((B, width - 1, *a.shape[2:]), a.dtype) for name, a in x.items()}
    return {"state": jnp.zeros((B, N, H, V), jnp.float32)} | found


def reference(q, k, v, log_decay, beta, state, text, takes_back: bool = True) -> tuple[jax.Array, jax.Array]:
    """The rule as it is written, a token at a time; as `gated_delta`."""
    group = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(a, group, axis=2) for a in (q, k))
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]  # all rows of a state decay alike

    def token(carry, now):
        state, before = carry
        q, k, v, log_decay, beta, text = now
        state = jnp.where((text == before)[:, None, None, None], state, 0.0) * jnp.exp(log_decay)[..., None]
        change = v - jnp.einsum("bnhv,bnh->bnv", state, k) if takes_back else v
        delta = beta[..., None] * change
        state = state + k[..., None] * delta[..., None, :]
        return (state, text), jnp.einsum("bnhv,bnh->bnv", state, q)

    each = [jnp.moveaxis(a, 1, 0) for a in (q, k, v, log_decay, beta, text)]
    (state, _), out = jax.lax.scan(token, (state, jnp.zeros_like(text[:, 0])), tuple(each))
    return jnp.moveaxis(out, 0, 1), state


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    text: jax.Array,
    chunk: int = 0,
    takes_back: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """q and k [B, T, K, H], v [B, T, N, V] with N a multiple of K, in one dtype, by which chunks are multiplied;
    log_decay [B, T, N] or [B, T, N, H], beta [B, T, N] and state [B, N, H, V] that text 0 goes on from, float32; text
    int32 [B, T] counts up where another one begins. `chunk`: tokens at once, 0: as many as is usual. Returns (out
    [B, T, N, V] in v's dtype, the last text's state)."""
    given, T = (q, k, v, log_decay, beta, state, text), q.shape[1]
    if T == 1:
        return one_token(*given, takes_back=takes_back)
    chunk = min(chunk or (CHUNK if takes_back else SUMMED), 1 << (T - 1).bit_length())
    run = by_rows if takes_back else summed_by_rows
    return run(functools.partial(in_chunks, chunk, takes_back), chunk, *given)


def in_chunks(chunk: int, takes_back: bool, q, k, v, log_decay, beta, state, text) -> tuple[jax.Array, jax.Array]:
    """As gated_delta, `chunk` tokens at once."""
    (B, T, K, _), (N, V), C = q.shape, v.shape[2:], chunk
    count = -(-T // C)
    behind = count * C - T

    def cut(a: jax.Array, *heads: int) -> jax.Array:
        """[B, T, heads, ...] -> [count, B, *heads, C, ...], tokens that are no one's behind the last."""
        mode = "edge" if jnp.issubdtype(a.dtype, jnp.integer) else "constant"
        a = jnp.pad(a, ((0, 0), (0, behind)) + ((0, 0),) * (a.ndim - 2), mode=mode)
        a = a.reshape(B, count, C, *heads, *a.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(a, 1, 0), 2, 2 + len(heads))

    q, k = cut(q, K), cut(k, K)  # [count, B, K, C, H]
    v, log_decay, beta = (cut(a, N) for a in (v, log_decay, beta))  # [count, B, N, C, ...]
    chunks = Chunks(q, k, v, log_decay, beta, cut(text), last_before(text, C).T)
    run = summed if not takes_back else chunked if log_decay.ndim == 4 else by_channels
    out, state = run(chunks, state)
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(B, count * C, N, V)
    return out[:, :T], state


def one_token(
    q, k, v, log_decay, beta, state, text, product: bool = False, takes_back: bool = True
) -> tuple[jax.Array, jax.Array]:
    """As gated_delta, of one. The state is read for key and query at once, and once more to be written: S^T q after the
    change is what it was before, decayed, and (k . q) of the change. XLA fuses that sum with what reads the state of
    many rows, in an order of dimensions of its own; as a `product` it takes the state as it lies."""
    group, dtype = v.shape[2] // q.shape[2], v.dtype
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    q, k = (jnp.repeat(a[:, 0], group, axis=1) for a in (q, k))  # [B, N, H]
    alike, by = log_decay.ndim == 3, jnp.stack([k, q], axis=-1)
    decay = log_decay[:, 0, :, None] if alike else log_decay[:, 0]
    kept = jnp.where(text[..., None] == 0, jnp.exp(decay), 0.0)  # [B, N, 1], or [B, N, H]
    by = by if alike else by * kept[..., None]
    if product:
        read = jnp.einsum("bnhv,bnhj->bnvj", state, by, precision="highest")
    else:
        read = jnp.sum(state[..., None] * by[:, :, :, None], axis=2)
    read = read * kept[..., None] if alike else read
    delta = beta[:, 0, :, None] * (v[:, 0] - read[..., 0] if takes_back else v[:, 0])
    out = read[..., 1] + jnp.sum(k * q, axis=-1, keepdims=True) * delta
    return out[:, None].astype(dtype), state * kept[..., None] + k[..., None] * delta[..., None, :]
