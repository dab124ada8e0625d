"""The next token of every row of a batch, each by its own settings, on the device.

The order is vLLM's (https://docs.vllm.ai/en/latest/api/vllm/v1/sample/sampler/): the raw log-probabilities are taken;
tokens that a grammar forbids and banned tokens go, biases are added; penalties; greedy rows take the best token here;
temperature; min_p; top_k; top_p of what is left; one token by the Gumbel-max trick. transformers applies min_p last.

A row's token and log-probability depend on its logits, history, settings, seed and position alone, bit for bit: noise
comes from fold_in(key(seed), position), thresholds and sums from `row_search`. What only some rows ask for is under a
conditional on the whole batch and leaves the bits of the others as they are; a batch of greedy rows makes no noise and
searches nothing. A GPU waits for the host at each conditional: three stand in a row, on whether logits are changed,
rows drawn, and more than a token told; those on single options are within them.

Memory beside the logits and the counts: 4 arrays of 4 B V bytes, compiled for an H100 (256 rows of 262,144 tokens:
1 GiB, 64 rows of 131,072: 128 MiB); 7 on a CPU.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.ops.penalties import TokenCounts, penalise, unpack_bits
from shardlm.ops.row_search import largest_threshold, ordered_sum, sortable

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """How each row is sampled; every field is an array [B], `seed` [B, 2]. `position` moves on by one a token."""

    temperature: jax.Array  # float32; 0: the most likely token
    top_k: jax.Array  # int32; keep that many (0: all)
    top_p: jax.Array  # float32; keep the fewest most likely tokens whose probability reaches it (1: all)
    min_p: jax.Array  # float32; keep tokens at least that fraction as likely as the most likely one (0: all)
    repetition: jax.Array  # float32; 1: none
    frequency: jax.Array  # float32; 0: none
    presence: jax.Array  # float32; 0: none
    seed: jax.Array  # uint32 [B, 2]: the high and the low half of 64 bits; below 2**32 as in jax.random.key(seed)
    position: jax.Array  # int32; of the token to be sampled
    banned_until: jax.Array  # int32; `Edits.banned_ids` are forbidden at positions before this one (min_tokens)

    @classmethod
    def defaults(cls, rows: int) -> "RowSettings":
        """Greedy rows without any option, as numpy arrays that a host fills in."""
        zeros, ones = (lambda dtype: np.zeros(rows, dtype)), np.ones(rows, np.float32)
        return cls(
            temperature=zeros(np.float32),
            top_k=zeros(np.int32),
            top_p=ones,
            min_p=zeros(np.float32),
            repetition=ones.copy(),
            frequency=zeros(np.float32),
            presence=zeros(np.float32),
            seed=np.zeros((rows, 2), np.uint32),
            position=zeros(np.int32),
            banned_until=zeros(np.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Edits:
    """Tokens whose logits are changed. An id outside the vocabulary (-1) pads; the ids of a row's biases differ."""

    bias_ids: jax.Array  # int32 [B, J]
    bias: jax.Array  # float32 [B, J], added
    banned_ids: jax.Array  # int32 [B, K]; wins over a bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """A token a row, and log-probabilities of the raw distribution: before edits, penalties and temperature."""

    token: jax.Array  # int32 [B]
    logprob: jax.Array  # float32 [B]; NaN where the logits held one
    top_ids: jax.Array  # int32 [B, n], the most likely first; of equal ones the lower id
    top_logprobs: jax.Array  # float32 [B, n]
    rank: jax.Array  # int32 [B], of the token in the raw distribution (1: the most likely); 0 where no row wants it


def sample_rows(
    logits: jax.Array,
    settings: RowSettings,
    *,
    counts: TokenCounts | None = None,
    edits: Edits | None = None,
    allowed: jax.Array | None = None,
    top_n: int = 0,
    told: jax.Array | None = None,
) -> Sampled:
    """One token per row of logits float32 [B, V], whole on every device.

    Args:
      counts: what the rows have said; without it there are no penalties.
      allowed: int32 [B, ceil(V / 32)], bit t % 32 of word t // 32 set where a grammar allows token t (-1: all 32).
      top_n: how many of the most likely tokens are returned, static; 20 costs a selection over the vocabulary.
      told: int32 [B], of each row 0: neither their ranks nor those are wanted, 1: ranks, 2: both. What no row wants is
        zeros, and not made; None: nobody wants any.

    Every row must keep one allowed token. Ties at the edge of top_k and top_p are kept.
    """
    edited = _edit(logits, settings, counts, edits, allowed)
    random = settings.temperature >= GREEDY_BELOW
    token = jax.lax.cond(jnp.any(random), lambda x: _draw(x, settings, random), _best, edited)
    normaliser = log_normaliser(logits)[:, None]
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)
    top_ids, top, rank = _tell(logits, normaliser, chosen, top_n, told)
    return Sampled(token, (chosen - normaliser)[:, 0], top_ids, top, rank)


def _tell(logits: jax.Array, normaliser: jax.Array, chosen: jax.Array, top_n: int, told: jax.Array | None):
    """(top_ids, top_logprobs, rank) of Sampled; normaliser, chosen float32 [B, 1]."""
    shape = logits.shape[0], top_n
    no_top = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits.dtype))
    no_rank = jnp.zeros(shape[:1], jnp.int32)
    if told is None:
        return *no_top, no_rank

    def select(x):
        top, ids = jax.lax.top_k(x, top_n)
        return ids.astype(jnp.int32), top - normaliser

    def some(x):
        return *jax.lax.cond(jnp.any(told > 1), select, lambda x: no_top, x), rank_of(x, chosen)

    return jax.lax.cond(jnp.any(told > 0), some, lambda x: (*no_top, no_rank), logits)


def rank_of(logits: jax.Array, own: jax.Array) -> jax.Array:
    """int32 [...] of own [..., 1] among logits [..., V], 1 the largest; equal ones share the better rank."""
    return 1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32)


def log_normaliser(logits: jax.Array) -> jax.Array:
    """log(sum(exp(logits))) of each row [..., V], to the bit the same in any batch."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    return highest[..., 0] + jnp.log(ordered_sum(jnp.exp(logits - highest)))


def _best(logits: jax.Array) -> jax.Array:
    """The first of the largest. As two plain reductions, which XLA:CPU does in a seventh of its argmax's time."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits >= largest, ids, logits.shape[-1] - 1), axis=-1)


def _edit(
    logits: jax.Array,
    settings: RowSettings,
    counts: TokenCounts | None,
    edits: Edits | None,
    allowed: jax.Array | None,
) -> jax.Array:
    """Logits with forbidden tokens at -inf, biases added, and penalties."""
    rows, vocab = logits.shape
    row = jnp.arange(rows)[:, None]
    changes: list[tuple[jax.Array, Callable[[jax.Array], jax.Array]]] = []  # (whether any row asks for it, it), in turn
    if allowed is not None:
        changes.append((jnp.any(allowed != -1), lambda x: jnp.where(unpack_bits(allowed, vocab), x, -jnp.inf)))
    if edits is not None:
        banned = (settings.position < settings.banned_until)[:, None] & (edits.banned_ids >= 0)
        biased = jnp.where(edits.bias_ids < 0, vocab, edits.bias_ids)
        gone = jnp.where(banned, edits.banned_ids, vocab)
        changes += [
            (
                jnp.any(edits.bias_ids >= 0),
                lambda x: x.at[row, biased].add(edits.bias, mode="drop", unique_indices=True),
            ),
            (jnp.any(banned), lambda x: x.at[row, gone].set(-jnp.inf, mode="drop")),
        ]
    if counts is not None:
        penalties = (settings.repetition, settings.frequency, settings.presence)
        asked = (settings.repetition != 1) | (settings.frequency != 0) | (settings.presence != 0)
        changes.append((jnp.any(asked), lambda x: penalise(x, counts, *penalties)))

    def changed(x):
        for asked, change in changes:
            x = jax.lax.cond(asked, change, lambda x: x, x)
        return x

    if not changes:
        return logits
    return jax.lax.cond(jnp.any(jnp.stack([asked for asked, _ in changes])), changed, lambda x: x, logits)


def _draw(logits: jax.Array, settings: RowSettings, random: jax.Array) -> jax.Array:
    """A token of each row: drawn where random [B], the best one elsewhere."""
    scaled = logits / jnp.where(random, settings.temperature, 1.0)[:, None]
    highest = jnp.max(scaled, axis=-1, keepdims=True)
    kept = jnp.where(scaled >= highest + jnp.log(settings.min_p)[:, None], scaled, -jnp.inf)
    top_k = random & (settings.top_k > 0) & (settings.top_k < logits.shape[-1])
    top_p = random & (settings.top_p < 1)
    kept = jax.lax.cond(jnp.any(top_k), lambda x: _keep_top_k(x, settings.top_k, top_k), lambda x: x, kept)
    kept = jax.lax.cond(jnp.any(top_p), lambda x: _keep_top_p(x, settings.top_p, top_p), lambda x: x, kept)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(settings.seed, impl="threefry2x32"), settings.position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    return _best(jnp.where(random[:, None], kept + noise, logits))


def _keep_top_k(logits: jax.Array, top_k: jax.Array, asked: jax.Array) -> jax.Array:
    """The k most likely of rows asked [B]; others become -inf."""
    keys = sortable(logits)
    smallest = largest_threshold(keys, lambda mask: jnp.sum(mask, axis=-1, dtype=jnp.int32), top_k)
    return jnp.where(~asked[:, None] | (keys >= smallest[:, None]), logits, -jnp.inf)


def _keep_top_p(logits: jax.Array, top_p: jax.Array, asked: jax.Array) -> jax.Array:
    """The fewest most likely whose probability reaches p, of rows asked [B]; others become -inf."""
    keys = sortable(logits)
    weight = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # of the most likely token: 1
    target = jnp.maximum(top_p * ordered_sum(weight), 1.0)
    smallest = largest_threshold(keys, lambda mask: ordered_sum(jnp.where(mask, weight, 0.0)), target)
    return jnp.where(~asked[:, None] | (keys >= smallest[:, None]), logits, -jnp.inf)
