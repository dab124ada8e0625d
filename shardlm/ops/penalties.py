"""What every row has said so far, on the device, and the penalties that follow from it.

A prompt is a bit a token, a reply a 16-bit count a token: V / 8 + 2 V bytes a row, which is 17 MiB for 64 rows of
131,072 tokens and 136 MiB for 256 rows of 262,144. Keeping token ids instead would be a scatter of whole histories at
every step. An engine none of whose requests asks for penalties need not make this state.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_MOST = np.iinfo(np.int16).max  # counts stop here


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """prompt: int32 [B, ceil(V / 32)], bit t % 32 of word t // 32 for a token of the prompt; reply: int16 [B, V]."""

    prompt: jax.Array
    reply: jax.Array


def empty_counts(rows: int, vocab: int) -> TokenCounts:
    """Counts of rows that have said nothing; donate them to the programs that change them."""
    return TokenCounts(jnp.zeros((rows, -(-vocab // 32)), jnp.int32), jnp.zeros((rows, vocab), jnp.int16))


def counts_of(prompt: Sequence[int], reply: Sequence[int], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """One row's (prompt [ceil(V / 32)], reply [V]), made on the host: `set_rows` has one shape for all lengths."""
    seen = np.zeros(-(-vocab // 32) * 32, bool)
    seen[np.asarray(prompt, np.int64)] = True
    counts = np.bincount(np.asarray(reply, np.int64), minlength=vocab)
    return np.packbits(seen, bitorder="little").view("<i4"), np.minimum(counts, _MOST).astype(np.int16)


def set_rows(counts: TokenCounts, rows: jax.Array, prompt: jax.Array, reply: jax.Array) -> TokenCounts:
    """Replaces rows int32 [R] by prompt [R, ceil(V / 32)] and reply [R, V]; a row number of B or more is dropped."""
    return TokenCounts(counts.prompt.at[rows].set(prompt, mode="drop"), counts.reply.at[rows].set(reply, mode="drop"))


def count_tokens(counts: TokenCounts, tokens: jax.Array, active: jax.Array) -> TokenCounts:
    """Adds one new token of the reply, int32 [B], where active bool [B]."""
    at = (jnp.arange(tokens.shape[0]), tokens)
    now = counts.reply[at]
    more = jnp.where(active & (now < _MOST), now + jnp.int16(1), now)
    return dataclasses.replace(counts, reply=counts.reply.at[at].set(more, unique_indices=True))


def unpack_bits(words: jax.Array, vocab: int) -> jax.Array:
    """int32 [B, ceil(V / 32)] -> bool [B, V]."""
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] == 1


def penalise(
    logits: jax.Array, counts: TokenCounts, repetition: jax.Array, frequency: jax.Array, presence: jax.Array
) -> jax.Array:
    """float32 [B, V] with penalties [B] applied; 1, 0 and 0 change no bit.

    repetition divides positive and multiplies negative logits of tokens of the prompt or the reply
    (https://arxiv.org/abs/1909.05858, transformers' RepetitionPenaltyLogitsProcessor); then frequency is subtracted
    for each time that the reply has a token and presence once (OpenAI's API; vLLM's order).
    """
    said = counts.reply > 0
    factor = jnp.where(unpack_bits(counts.prompt, logits.shape[-1]) | said, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency[:, None] * counts.reply.astype(jnp.float32)
    return logits - jnp.where(said, presence[:, None], 0.0)
