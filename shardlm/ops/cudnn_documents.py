"""cuDNN's flash attention to documents that lie side by side in rows: each is a sequence of its own to the kernel,
which reads where it begins and how long it is, and computes nothing between two of them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

LEAST_TOKENS = 1024  # of a row: a bias of fewer is small
TOKENS_EACH = (512, 128)  # of a row's tokens for each document that there may be: prose, and chats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """Where at most `most` documents a row lie, of B rows of T tokens. The kernel counts documents through all rows.

    lengths  int32 [B, most], -1 where a row has fewer
    starts   int32 [B, most], in their rows; -1 where a row has fewer
    first    int32 [B * most], the first token of each document among those of all rows; beyond them where it is none
    number   int32 [B, T], of each token's document, through all rows
    place    int32 [B, T], of each token in its document
    """

    lengths: jax.Array
    starts: jax.Array
    first: jax.Array
    number: jax.Array
    place: jax.Array

    @classmethod
    def of(cls, segment_ids: jax.Array, most: int) -> "Documents":
        """segment_ids int32 [B, T]; a run of equal ones is a document, padding too. What is said of a row that has more
        than `most` is wrong."""
        (B, T), begins = segment_ids.shape, _begins(segment_ids)
        in_row = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
        index = jnp.arange(most, dtype=jnp.int32)[None, :, None]
        starts = jnp.sum(in_row[:, None] < index, axis=2, dtype=jnp.int32)  # [B, most]: T where there are fewer
        lengths = jnp.diff(starts, axis=1, append=T)
        there = index[..., 0] <= in_row[:, -1:]
        counts = in_row[:, -1] + 1
        number = in_row + (jnp.cumsum(counts) - counts)[:, None]
        first = jnp.sum(number.reshape(1, -1) < jnp.arange(B * most)[:, None], axis=1, dtype=jnp.int32)
        place = jnp.arange(T, dtype=jnp.int32) - jax.lax.cummax(jnp.where(begins, jnp.arange(T, dtype=jnp.int32), 0), 1)
        return cls(jnp.where(there, lengths, -1), jnp.where(there, starts, -1), first, number, place)

    def few(self, most: int) -> "Documents":
        """The same where no row has more than so many."""
        own = self.lengths[:, :most], self.starts[:, :most], self.first[: len(self.lengths) * most]
        return Documents(*own, self.number, self.place)

    @property
    def named(self) -> dict[str, jax.Array]:
        """As jax takes them, in the order of its arguments."""
        starts = jnp.pad(self.starts, [(0, 0), (0, 1)], constant_values=-1)
        lengths = self.lengths
        return {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": starts, "kv_offsets": starts}


def _begins(segment_ids: jax.Array) -> jax.Array:
    """bool [B, T]: where a document begins."""
    first = jnp.ones((segment_ids.shape[0], 1), bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def most_documents(segment_ids: jax.Array) -> jax.Array:
    """Of a row, in any of segment_ids int32 [B, T]."""
    return jnp.max(jnp.sum(_begins(segment_ids), axis=1, dtype=jnp.int32))


def counts(tokens: int, key_dim: int, value_dim: int, window: int) -> tuple[int, ...]:
    """For how many documents a row of so many tokens the kernel is called, the fewest first: without windows, and with
    keys as wide as values, as it was measured. A document that is not there takes it 6 us (8 rows of 4,096 tokens,
    heads of 64, with gradients) to 21 us (4 of 8,192, of 128), and its log-partition is kept: with a document for each
    128 tokens and 64 heads that is as large as a bias."""
    alike = key_dim == value_dim and not window and tokens >= LEAST_TOKENS
    return tuple(tokens // each for each in TOKENS_EACH) if alike else ()


def levels(tokens: int, key_dim: int, value_dim: int, window: int) -> tuple[int, ...]:
    """The same for the device that is traced for: from Hopper on (jax)."""
    found = counts(tokens, key_dim, value_dim, window)
    return found if found and fused_attention_stablehlo.check_compute_capability("9.0") else ()


def of_rows(by_document: jax.Array, where: Documents) -> jax.Array:
    """[documents, N, T] -> [B, N, T]: what the kernel gives of each query of each document, as tokens lie."""
    return by_document[where.number, :, where.place].transpose(0, 2, 1)


def by_document(of_tokens: jax.Array, where: Documents) -> jax.Array:
    """The inverse: [B, N, T] -> [B * most, N, T], with some other token's at places that a document does not have."""
    B, N, T = of_tokens.shape
    token = jnp.minimum(where.first[:, None] + jnp.arange(T, dtype=jnp.int32), B * T - 1)  # [documents, T]
    return of_tokens.transpose(1, 0, 2).reshape(N, B * T)[:, token].transpose(1, 0, 2)
