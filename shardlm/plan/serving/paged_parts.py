"""What attention to pages holds beside them while it answers few tokens a row (ops/paged_kernel.py): queries, results
and the parts that a row's keys are attended to in (ops/paged_sizes.py), which are written and read again."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.paged_sizes import sizes_of
from shardlm.rules import Rules

Paged = AttentionConfig | MlaConfig


@dataclasses.dataclass(frozen=True)
class PagedHeads:
    """Of one device.

    heads, kv_heads  of queries and of pages
    query, result  numbers of a head
    latents     whether values lie in the keys
    window      positions that a token sees of those that the device has, 0: all
    itemsize    of an activation
    asked       numbers of a query before it is put among latents, which are there beside it
    """

    heads: int
    kv_heads: int
    query: int
    result: int
    latents: bool
    window: int
    itemsize: int
    asked: int = 0

    @classmethod
    def of(cls, attention: Paged, itemsize: int, devices: int, ways: int = 1) -> "PagedHeads":
        """Where heads are split over so many devices, and positions over so many of them, whose queries it answers."""
        heads = attention.num_heads // devices * ways
        if isinstance(attention, MlaConfig):
            latent = attention.kv_latent_dim
            return cls(heads, 1, latent + attention.rope_dim, latent, True, 0, itemsize, attention.head_dim)
        # Of whole kv heads that devices have copies of, one uses that of its own queries.
        kv_heads = attention.num_kv_heads if ways > 1 else max(1, attention.num_kv_heads // devices)
        return cls(heads, kv_heads, attention.head_dim, attention.value_dim, False, attention.window // ways, itemsize)

    def held(self, rows: int, each: int, positions: int) -> float:
        """Bytes, of rows of few tokens whose page tables have room for so many positions of the device."""
        parts, part = self.parts(rows, each, positions), 4 * each * self.heads * self.result
        return self.of_tokens(rows * each) + (rows * parts * part if parts > 1 else 0)

    def of_tokens(self, tokens: int) -> float:
        """Bytes of queries and results; of chunks no more."""
        return tokens * self.heads * (self.asked + self.query + self.result) * self.itemsize

    def parts(self, rows: int, each: int, positions: int) -> int:
        """Those that the keys of a row are attended to in."""
        dtype = jnp.dtype("bfloat16" if self.itemsize == 2 else "float32")
        pool = jax.ShapeDtypeStruct((1, positions, self.kv_heads, self.query), dtype)  # of one page
        queries, seen = (rows, each, self.heads, self.query), self.window if each == 1 else 0
        return sizes_of(queries, dtype, pool, self.kv_heads, self.result, self.latents, 1, True, seen=seen).splits


def attending_heads(shape: TransformerConfig, rules: Rules, itemsize: int) -> list[PagedHeads]:
    """Of each kind of attention, where positions are whole."""
    devices = rules.mesh.size(*rules.use.axes("heads"))
    return [PagedHeads.of(one, itemsize, devices) for one in shape.attention_kinds if isinstance(one, Paged)]
