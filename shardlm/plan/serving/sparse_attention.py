"""Layers whose queries attend to chosen tokens (layers/indexer.py), to chosen blocks or pools of them
(layers/block_indexer.py, pooled_indexer.py) or to blocks that each kv head chooses (layers/head_indexer.py): what a
pass through a served one computes and reads (ops/paged_choice.py, block_choice.py). Keys of the indexer are read of all
tokens before a query, keys and values or latents of the chosen ones alone."""

import dataclasses
from collections.abc import Iterator

from shardlm.layers.block_indexer import BlockIndexerConfig
from shardlm.layers.head_indexer import HeadIndexerConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.pooled_indexer import PooledIndexerConfig
from shardlm.plan.op import Op

SCORE = 4  # bytes
# How often a program goes over a query's scores (ops/choice_kernel.py: twice eight bits a pass, then to count and to
# list), and how many of a GPU's programs work at it at least: one for each query, and few queries leave others idle.
PASSES, PROGRAMS = 18, 128
CACHED = 0.5  # of the time that as many bytes would take from memory: scores are in a GPU's cache


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of a position: of the latent, and of the indexer's key."""

    latent: float
    key: float

    @classmethod
    def of(cls, attention: MlaConfig, cache_bytes: float) -> "Share":
        latent = attention.kv_latent_dim + attention.rope_dim
        key = attention.indexer.kept_dim
        return cls(*(cache_bytes * width / (latent + key) for width in (latent, key)))


def operations(
    attention: MlaConfig, share: Share, tokens: float, pairs: float, scanned: float, itemsize: int
) -> Iterator[Op]:
    """Of queries that could attend to so many `pairs` of query and key, and rows in which so many positions are
    `scanned` by them together; none where the layer shares what another chose."""
    indexer = attention.indexer
    if isinstance(indexer, PooledIndexerConfig):
        yield from choosing_blocks(indexer, share.key, tokens, pairs, scanned, itemsize)
    elif not indexer.shared:
        yield from choosing(indexer.num_heads, indexer.head_dim, share.key, tokens, pairs, scanned, itemsize)


def choosing(N: int, H: int, key: float, tokens: float, pairs: float, scanned: float, itemsize: int) -> Iterator[Op]:
    """By an indexer of N heads of H numbers, whose keys have so many bytes."""
    moved = scanned * key + tokens * N * H * itemsize + SCORE * pairs
    dims = (1, pairs / tokens, H / 2)
    yield Op("attention", "index scores", "attention", 2.0 * pairs * N * H, moved, 1, dims=dims)
    gone_over = PASSES * SCORE * pairs / tokens * max(tokens, PROGRAMS)
    yield Op("attention", "choice of tokens", "memory", 0, CACHED * gone_over, 1)


# Of blocks' keys, which are made anew of all tokens' in each step: gathered, averaged, normed and turned in float32.
KEYS_ANEW, OF_BLOCKS = 4, 12


def choosing_blocks(
    own: BlockIndexerConfig | PooledIndexerConfig,
    key: float,
    tokens: float,
    pairs: float,
    scanned: float,
    itemsize: int,
) -> Iterator[Op]:
    """Of blocks of tokens, or pools of them (ops/block_choice.py), by XLA."""
    N, H, scored = own.num_heads, own.head_dim, pairs / own.block
    moved = KEYS_ANEW * scanned * key + tokens * N * H * itemsize + SCORE * (N + 1) * scored
    yield Op("attention", "keys of blocks", "memory", 0, moved / OF_BLOCKS, OF_BLOCKS)
    dims = (1, max(1.0, scored / tokens), H / 2)
    yield Op("attention", "index scores", "attention", 2.0 * scored * N * H, SCORE * N * scored, 1, dims=dims)
    yield Op("attention", "choice of blocks", "memory", 0, PASSES * SCORE * scored / OF_BLOCKS, OF_BLOCKS)


def choosing_by_heads(
    own: HeadIndexerConfig, key: float, tokens: float, pairs: float, scanned: float, itemsize: int
) -> Iterator[Op]:
    """Of blocks of tokens by each kv head (ops/head_choice.py), one head after the other, each over all tokens' keys,
    of which the highest score of a block counts."""
    N, H, scored = own.num_heads, own.head_dim, pairs / own.block
    moved = N * (scanned * key + tokens * H * itemsize + SCORE * pairs)
    yield Op("attention", "keys of blocks", "memory", 0, moved / (N * OF_BLOCKS), N * OF_BLOCKS)
    dims = (1, max(1.0, pairs / tokens), H / 2)
    yield Op("attention", "index scores", "attention", 2.0 * pairs * N * H, SCORE * N * scored, 1, dims=dims)
    yield Op("attention", "choice of blocks", "memory", 0, PASSES * SCORE * scored / OF_BLOCKS, N * OF_BLOCKS)
