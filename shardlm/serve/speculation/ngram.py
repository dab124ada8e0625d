"""Drafts from the text itself: what followed the last tokens when they stood there before (prompt lookup decoding,
https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's method "ngram"). All on the device."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class NgramProposer:
    """most, least: last tokens that are looked up. The state is the known tokens of each slot and of the one for
    padding, int32 [max_rows + 1, max_model_len]."""

    remembers: ClassVar[bool] = False
    reads_text: ClassVar[bool] = True
    drafts: int
    most: int
    least: int
    max_rows: int
    max_model_len: int

    def empty(self):
        return jnp.zeros((self.max_rows + 1, self.max_model_len), jnp.int32)

    def pages(self, state):
        return {}

    def begin(self, state, slot, tokens):
        return state.at[slot].set(tokens)

    def read(self, params, state, chunk):
        return state

    def propose(self, params, state, rows):
        # The last token may be one that a chunk sampled.
        text = state[rows.slot].at[jnp.arange(rows.slot.shape[0]), rows.position].set(rows.own.last, mode="drop")
        drafts, found = look_up(text, rows.position + 1, self.drafts, self.most, self.least)
        return drafts, jnp.where(found, self.drafts, 0), state.at[rows.slot].set(text)

    def observe(self, params, state, rows, tokens, accepted, hidden):
        place = jnp.arange(1 + self.drafts)
        new = (place <= accepted[:, None]) & (rows.room > 0)[:, None]
        positions = jnp.where(new, rows.position[:, None] + 1 + place, self.max_model_len)
        return state.at[rows.slot[:, None], positions].set(tokens, mode="drop")


def look_up(text: jax.Array, length: jax.Array, count: int, most: int, least: int) -> tuple[jax.Array, jax.Array]:
    """What may follow the first `length` int32 [B] tokens of text int32 [B, L]: (int32 [B, count], whether there is
    something bool [B]).

    The longest run of last tokens, `most` to `least`, that stood there before, and the latest place of it: what
    followed there follows again. Where that reaches the end it goes round, so that a text which repeats a short period
    is continued by `count` tokens.
    """
    start = jnp.arange(text.shape[1])[None]  # of what followed
    same, matched = (start > 0) & (start < length[:, None]), jnp.zeros(text.shape, jnp.int32)
    for back in range(1, most + 1):
        tail = jnp.take_along_axis(text, jnp.maximum(length - back, 0)[:, None], axis=1)
        before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, : text.shape[1]]
        same = same & (before == tail)
        matched = matched + same
    longest = jnp.where(matched >= least, matched, 0)
    best = jnp.max(longest, axis=1)
    place = jnp.max(jnp.where(longest == best[:, None], start, 0), axis=1)
    period = jnp.maximum(length - place, 1)[:, None]
    index = place[:, None] + jnp.arange(count)[None] % period
    return jnp.take_along_axis(text, index, axis=1), best > 0
