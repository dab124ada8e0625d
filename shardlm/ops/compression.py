"""Keys that stand for several tokens each: what the compressors of DeepSeek V4 make of every `rate` tokens of a text
(Compressed Sparse Attention and Heavily Compressed Attention, sections 2.3.1 and 2.3.2 of its report; transformers'
modeling_deepseek_v4.py is the definition).

Each token is projected to values and gates; the values of a window of `rate` tokens are mixed by the softmax of their
gates, number by number, normed, and rotated as the window's first token. With two series of them windows overlap: an
entry mixes the first series of the window before and the second of its own."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.ops.norm import rms_norm
from shardlm.ops.rope import Rope, rope_of_tail


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Series:
    """What makes entries of H numbers. raw [B, T, 2, W, H]: of each token values and gates, W series of each, one or
    two; bias float32 [rate, W, H] on the gates by their place in a window; scale [H] and eps of the norm; the last
    rope.dim numbers of an entry are rotated."""

    raw: jax.Array
    bias: jax.Array
    scale: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})
    rope: Rope = dataclasses.field(metadata={"static": True})

    @property
    def rate(self) -> int:
        return self.bias.shape[0]

    @property
    def windows(self) -> int:
        """That an entry is made of."""
        return self.raw.shape[3]

    @property
    def width(self) -> int:
        """Numbers of an entry."""
        return self.raw.shape[4]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chooser:
    """An indexer of entries (token_choice.py): its own entries, queries q [B, T, N, H], their heads' weights float32
    [B, T, N], and how many entries a query attends to."""

    series: Series
    q: jax.Array
    weights: jax.Array
    count: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressed:
    """What a layer's queries attend to besides the last tokens: entries, all that are complete or those that are
    chosen."""

    series: Series
    chooser: Chooser | None


def entries(series: Series, raw: jax.Array, first: jax.Array) -> jax.Array:
    """raw [B, J, W * rate, 2, W, H] of each entry's windows, the one before first, and the position int32 [B, J] of
    each entry's first token -> [B, J, H]. A window before position 0 counts for nothing."""
    gates = jnp.concatenate([raw[:, :, part, 1, w, :] + series.bias[:, w] for w, part in _parts(series)], axis=2)
    values = jnp.concatenate([raw[:, :, part, 0, w, :] for w, part in _parts(series)], axis=2)
    gates = gates.astype(jnp.float32)
    if series.windows > 1:
        before = jnp.arange(gates.shape[2]) < series.rate
        gates = jnp.where(before[:, None] & (first < series.rate)[:, :, None, None], -jnp.inf, gates)
    mix = jax.nn.softmax(gates, axis=2).astype(values.dtype)
    mixed = jnp.sum((values * mix).astype(jnp.float32), axis=2).astype(values.dtype)
    return rope_of_tail(rms_norm(mixed, series.scale, series.eps)[:, :, None], first, series.rope)[:, :, 0]


def _parts(series: Series):
    """(which series, the tokens whose numbers of it an entry is made of)."""
    return [(w, slice(w * series.rate, (w + 1) * series.rate)) for w in range(series.windows)]


@dataclasses.dataclass(frozen=True)
class Ends:
    """Where the windows of packed rows end. A block of `rate` tokens of a row holds the end of one window at most, as
    windows are that long. last int32 [B, J]: the index of its last token, and of a block without any 0; segment int32
    [B, J], the document's, and 0 without any; first int32 [B, J]: the position of its first token."""

    last: jax.Array
    segment: jax.Array
    first: jax.Array

    @classmethod
    def of(cls, positions: jax.Array, segment_ids: jax.Array, rate: int) -> "Ends":
        """Of rows with these positions and documents, int32 [B, T]. A window that began before its row is none."""
        B, T = positions.shape
        begins = jnp.pad(segment_ids, ((0, 0), (rate - 1, 0)))[:, :T]  # the document `rate` - 1 tokens before
        ends = (positions % rate == rate - 1) & (segment_ids > 0) & (begins == segment_ids)
        ends = jnp.pad(ends, ((0, 0), (0, -T % rate))).reshape(B, -1, rate)
        there = ends.any(axis=2)
        last = jnp.where(there, jnp.arange(ends.shape[1]) * rate + jnp.argmax(ends, axis=2), 0)
        at = lambda a: jnp.take_along_axis(a, last, axis=1)  # noqa: E731
        return cls(last, jnp.where(there, at(segment_ids), 0), jnp.where(there, at(positions) - rate + 1, 0))


def entries_of_rows(series: Series, ends: Ends) -> jax.Array:
    """The entries of packed rows, [B, J, H]; of a block without a window's end something."""
    B, J = ends.last.shape
    tokens = series.windows * series.rate
    index = ends.last[:, :, None] - tokens + 1 + jnp.arange(tokens)
    flat = series.raw.reshape(*series.raw.shape[:2], -1)
    found = jnp.take_along_axis(flat, jnp.maximum(index, 0).reshape(B, -1, 1), axis=1)
    return entries(series, found.reshape(B, J, tokens, *series.raw.shape[2:]), ends.first)
