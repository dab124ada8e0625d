"""What attention to pages holds beside them while it answers few tokens a row (ops/paged_kernel.py): queries, results
and the parts that a row's keys are attended to in, which are written and read again. Parts are counted as
ops/paged_sizes.py has them, which imports Pallas; a test holds both together."""

import dataclasses
import math

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.models.transformer_config import TransformerConfig
from shardlm.rules import Rules

PART_BYTES, PROGRAMS = 2**20, 128
SPLIT_KEYS, SHARED, MOST_KEYS = 64, 32, 1024
WIDE = 256  # numbers of a head
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
        wide = max(self.query, self.result) > WIDE
        block = (32 if wide else 64) * 2 // self.itemsize
        latents = wide and self.latents and self.itemsize == 2
        of_head = each * self.heads // self.kv_heads
        block_rows = min(2 * block if latents else block, max(16, 1 << (of_head - 1).bit_length()))
        block_keys = 2 * block if latents and block_rows >= 32 else block
        programs = self.kv_heads * math.ceil(of_head / block_rows)
        keys = min(SPLIT_KEYS * max(1, programs * rows // SHARED), MOST_KEYS)
        window = self.window if each == 1 else 0
        turns = math.ceil((min(positions, window - 1) if window else positions) / block_keys) + (window > 0)
        most = min(
            PART_BYTES // (4 * each * self.heads * self.result),
            positions // SPLIT_KEYS,
            math.ceil(turns / max(1, keys // block_keys)),
        )
        return max(1, min(math.ceil(PROGRAMS / programs), most))


def attending_heads(shape: TransformerConfig, rules: Rules, itemsize: int) -> list[PagedHeads]:
    """Of each kind of attention, where positions are whole."""
    devices = rules.mesh.size(*rules.use.axes("heads"))
    return [PagedHeads.of(one, itemsize, devices) for one in shape.attention_kinds if isinstance(one, Paged)]
