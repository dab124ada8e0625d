"""What pages take whose positions are split over devices (ops/split_pages.py): of few tokens a row queries go to all
devices, and results back; of chunks what pages hold comes whole to each."""

from collections.abc import Iterator
from typing import NamedTuple

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.ops.split_pages import FEW_TOKENS
from shardlm.rules import Rules

LSE_BYTES = 4


class Sent(NamedTuple):
    """In a layer: kind as in links.py, bytes that one device sends."""

    kind: str
    nbytes: float


def axes_of(rules: Rules) -> tuple[str, ...]:
    """Over which positions are split."""
    return rules.act.axes("slots")


def whole_bytes(rules: Rules, each: float, cache_bytes: float) -> float:
    """Of one position, as a device reads it that keeps `cache_bytes`: with more than few tokens a row, all of it."""
    return cache_bytes if each <= FEW_TOKENS else cache_bytes * rules.mesh.size(*axes_of(rules))


def sent(
    attention: AttentionConfig | MlaConfig,
    rules: Rules,
    tokens: float,
    rows: float,
    seen: float,
    cache_bytes: float,
    itemsize: int,
) -> Iterator[Sent]:
    """Of so many tokens in all rows, each of which sees `seen` positions; nothing where positions are whole."""
    ways = rules.mesh.size(*axes_of(rules))
    if ways == 1:
        return
    if tokens / rows > FEW_TOKENS:
        yield Sent("all-gather", (ways - 1) * rows * seen * cache_bytes)
        return
    N = attention.num_heads / rules.mesh.size(*rules.use.axes("heads")) * ways
    latents = isinstance(attention, MlaConfig)
    query = attention.kv_latent_dim + attention.rope_dim if latents else attention.head_dim
    result = attention.kv_latent_dim if latents else attention.value_dim
    share = (ways - 1) / ways * tokens * N
    yield Sent("all-gather", share * query * itemsize)
    yield Sent("all-to-all", share * (result * itemsize + LSE_BYTES))
