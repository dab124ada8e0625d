"""How attention over pages is divided on a GPU (paged_kernel.py): rows and keys of a program and of a turn of its loop,
the pieces that keys and values are read in, and which turns a block of rows takes."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from shardlm.ops.cudnn_heads import traced_is
from shardlm.ops.kv_format import numbers_each

PROGRAMS = 128  # that a sequence is split into, about a GPU's multiprocessors
PART_BYTES = 2**20  # of the parts of one sequence, which are written and read again
# The least that are worth a part, for each SHARED programs that there are without parts, up to MOST_KEYS. Of 640
# positions and 8 kv heads 2 rows take 6.2 us with 64 keys a part and 10.8 with 256, 16 rows 21.6 in one part and 17.3
# with 256, and 64 rows 42 in one and 52 with 256, of which their sum takes 5 (H200, measured).
SPLIT_KEYS, SHARED, MOST_KEYS = 64, 32, 1024
# Compute capabilities where two blocks of 64 latents as wide as this fit in shared memory beside the queries: 225 of
# Hopper's 227 KB. For Blackwell Triton wants 281 KB.
ROOMY, WIDEST = ("8.0", "9.0"), 576

Piece = tuple[int, int, int]  # of a head's elements: the first, how many, and how many of these are real


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known when compiling.

    tokens, heads, kv_heads  of the queries, and of the pools that they share
    pack          numbers in an element of the pools (kv_format.py)
    key_columns   the pieces that a key's elements are read in
    value_columns the same of a value; of values inside keys, they are the first of key_columns
    block_rows, block_keys  of one program and of one turn of its loop
    splits, least of the keys of a sequence, and the turns that are worth a part
    warps, stages of a program
    compiled      for a GPU, or else interpreted
    """

    tokens: int
    heads: int
    kv_heads: int
    page_size: int
    pack: int
    key_columns: tuple[Piece, ...]
    value_columns: tuple[Piece, ...]
    value_dim: int
    block_rows: int
    block_keys: int
    splits: int
    least: int
    warps: int
    stages: int
    compiled: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Of a sequence and kv head."""
        return self.tokens * self.group

    @property
    def row_blocks(self) -> int:
        return math.ceil(self.rows / self.block_rows)

    @property
    def branches(self) -> bool:
        """Whether blocks that all rows see whole are not compared. With few rows that saves nothing, and of bytes the
        registers it takes are those of a third program on a multiprocessor."""
        return self.block_rows >= 64 and self.pack == 1

    def spread(self, pieces: tuple[Piece, ...]) -> list[Piece]:
        """The numbers that `tiles` finds in each piece, by the first: every `pack`-th one."""
        return [(self.pack * first + i, size, real) for first, size, real in pieces for i in range(self.pack)]


def pieces(width: int, first: int = 0) -> tuple[Piece, ...]:
    """Powers of two of at least 16, as Triton wants its matmuls; the last may be padded."""
    found = []
    while width > 0:
        size = max(16, 1 << (width.bit_length() - 1))
        found.append((first, size, min(size, width)))
        first, width = first + size, width - size
    return tuple(found)


def sizes_of(
    shape,
    dtype,
    k_pool,
    kv_heads: int,
    value_dim: int,
    values_inside: bool,
    row_pages: int,
    alone: bool,
    compiled: bool = True,
    seen: int = 0,
) -> Sizes:
    """For queries of this shape and dtype, of which each block sees at most so many positions of its row; 0: all."""
    B, T, N, key_dim = shape
    pack = numbers_each(k_pool)
    wide = max(key_dim, value_dim) > 256
    block = (32 if wide else 64) * 2 // dtype.itemsize  # more of float32 does not fit in registers
    rows = T * N // kv_heads
    latents = wide and values_inside and dtype.itemsize == 2
    # 64 rows share what 32 read twice. Bytes have no registers left for it.
    block_rows = min(2 * block if latents and pack == 1 else block, max(16, 1 << (rows - 1).bit_length()))
    more_keys = latents and block_rows >= 32 and (pack > 1 or (key_dim <= WIDEST and traced_is(*ROOMY)))
    of_value = pieces(value_dim // pack)
    beyond = pieces((key_dim - value_dim) // pack, value_dim // pack)
    block_keys = 2 * block if more_keys else block
    programs = kv_heads * math.ceil(rows / block_rows)
    keys = min(SPLIT_KEYS * max(1, programs * B // SHARED), MOST_KEYS)
    least, positions = max(1, keys // block_keys), row_pages * k_pool.shape[1]
    turns = math.ceil((min(positions, seen - 1) if seen else positions) / block_keys) + (seen > 0)
    # Of more there would be none, of any row: a part has `least` turns.
    most = min(PART_BYTES // (4 * T * N * value_dim), positions // SPLIT_KEYS, math.ceil(turns / least))
    return Sizes(
        tokens=T,
        heads=N,
        kv_heads=kv_heads,
        page_size=k_pool.shape[1],
        pack=pack,
        key_columns=of_value + beyond if values_inside else pieces(key_dim // pack),
        value_columns=of_value,
        value_dim=value_dim,
        block_rows=block_rows,
        block_keys=block_keys,
        splits=max(1, min(math.ceil(PROGRAMS / (programs * (1 if alone else B))), most)),
        least=least,
        warps=8 if block_rows * value_dim > 8192 else 4,
        stages=2 if dtype.itemsize > 2 or (block_rows == 16 and not wide and pack == 1) else 3,
        compiled=compiled,
    )


def turns_of(
    positions: jax.Array, sizes: Sizes, window: int, chunk: int = 0, until: jax.Array | None = None
) -> jax.Array:
    """int32 [B, row_blocks, 5]: the first block of keys that a block of rows sees, the one after its last, its last
    position, and the same two of the blocks that each of its rows sees whole. `until`: as paged_attention.blocked has
    it."""
    token = jnp.minimum(jnp.arange(sizes.row_blocks * sizes.block_rows) // sizes.group, sizes.tokens - 1)
    each, ends = (
        a[:, token].reshape(-1, sizes.row_blocks, sizes.block_rows)
        for a in (positions, positions if until is None else until)
    )
    least, last = each.min(axis=2), ends.max(axis=2)

    def begin(position):
        """The first position that a query at this one sees."""
        if chunk:
            return position // chunk * chunk
        return jnp.maximum(position - window + 1, 0) if window else jnp.zeros_like(position)

    seen = begin(least) // sizes.block_keys, last // sizes.block_keys + 1
    behind = begin(each.max(axis=2)) + (sizes.block_keys - 1)
    whole = jax.lax.div(behind, jnp.int32(sizes.block_keys)), (ends.min(axis=2) + 1) // sizes.block_keys
    return jnp.stack([*seen, last, *whole], axis=2)
