"""What one device does in attention over pages of heads (paged.py): writes k and v, and attends to what pages hold, to
what is at hand, or to both."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardlm.layers.context import Pages
from shardlm.ops import block_choice, head_choice, paged_attention, paged_choice, rotate_write
from shardlm.ops.attention import of_rows
from shardlm.ops.chunk_attention import in_parts
from shardlm.ops.kv_format import SCALE, as_heads, parts_of_page
from shardlm.ops.paged_attention import PagedAttention
from shardlm.ops.split_pages import SplitPages


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """implementation, whole, parts  as Paged has them
    split      how positions of pages are split over devices; None: each has all
    num_pages  of a layer
    orders     of the dimensions of each pool (ops/kv_format.py)
    kv_heads   of the pools that this device has, where pages are shared by heads of several sizes; else 0
    own_head   (kv heads, query heads here) -> the only kv head that the query heads share; None: each has its own
    scale, window, softcap, value_dim, chunk  of the layer's scores
    """

    implementation: PagedAttention
    split: SplitPages | None
    whole: str
    parts: str
    num_pages: int
    orders: dict[str, str]
    kv_heads: int
    own_head: Callable[[int, int], jax.Array] | None
    scale: float
    window: int
    softcap: float
    value_dim: int
    chunk: int

    def __call__(self, q, new, pages: Pages, page_table, positions, valid, place, part, sinks, selection, until):
        """q [B, T, N, H] and `new` [B, T, K, H] by name, or q with these in it before their rotation and none in `new`,
        of the layer at this place and part of the pools; `until`: Paged's. Returns (out [B, T, N, Hv], pages)."""
        shapes, parts = {name: a.shape for name, a in pages.items()}, 1
        if self.kv_heads:
            parts = parts_of_page(pages["k"], self.orders["k"], self.kv_heads, q.shape[3])
            pages = {name: as_heads(a, self.orders[name], self.kv_heads, parts) for name, a in pages.items()}
        page_table, first = page_table * parts, place * self.num_pages * parts + part
        where, narrow = (page_table, positions, valid, first), 0
        if isinstance(q, rotate_write.Unrotated):
            q, pages = rotate_write.run(q, pages, *where)
        else:
            held, narrow = widened(new, q.shape[3])
            if self.split:
                here, own = self.split.place(positions, self.split.size(pages))
                where = (page_table, here, valid & own, first)
            pages = paged_attention.write(pages, held, *where, implementation=self.implementation)
        where = (page_table, positions, first)
        whole = self.whole and (not self.chunk or q.shape[1] <= self.chunk)
        if whole or (self.parts and not self.window and not self.chunk):
            assert until is None and (whole or not self.split), "over pages (serve/prefill.py)"
            out = self._at_hand(q, new, None if whole else pages, *where, sinks)
        else:
            out = self._over_pages(q, pages, *where, sinks, selection, until)
            out = out[..., :narrow] if narrow else out
        return out, {name: a.reshape(shapes[name]) for name, a in pages.items()}

    def _at_hand(self, q, new, pages: Pages | None, page_table, positions, first, sinks) -> jax.Array:
        """To these keys and values, and to what pages hold before them, if anything."""
        assert not self.softcap and not self.value_dim, "checked before (serve/prefill.py)"
        head = self.own_head and self.own_head(new["k"].shape[2], q.shape[2])
        k, v = (new[name] if head is None else jnp.take(new[name], head[None], axis=2) for name in ("k", "v"))
        if pages is None:
            return of_rows(q, k, v, self.scale, self.window, self.whole, sinks)
        before = (pages, page_table, positions[:, 0], first)
        options = {"sinks": sinks, "head": head, "held_for": self.implementation}
        return in_parts(q, k, v, *before, self.scale, self.parts, **options)

    def _over_pages(self, q, pages: Pages, page_table, positions, first, sinks, selection, until) -> jax.Array:
        heads = pages["k"].shape[self.orders["k"].index("k")]
        head = self.own_head and self.own_head(heads, q.shape[2])
        if self.split:
            assert selection is None and not self.chunk, "checked before (serving_rules.py)"
            options = {"scale": self.scale, "softcap": self.softcap, "value_dim": self.value_dim}
            where = (page_table, positions, first, sinks, head)
            return self.split.attend(q, pages, *where, options, self.window, until)
        if not head_choice.is_for_each(selection):
            return self._by(selection, q, pages, page_table, positions, first, sinks, head, until)
        where = (pages, page_table, positions, first, sinks)
        if head is not None:
            return self._by(head_choice.of_head(selection, head), q, *where, head)
        each = enumerate(jnp.split(q, heads, axis=2))
        outs = [self._by(head_choice.of_head(selection, i), part, *where, jnp.int32(i)) for i, part in each]
        return jnp.concatenate(outs, axis=2)

    def _by(self, selection, q, pages: Pages, page_table, positions, first, sinks, head, until=None) -> jax.Array:
        """To what all queries here attend to, of all kv heads or of one."""
        if isinstance(selection, block_choice.Places):
            return block_choice.attend(q, pages, selection, first, self.scale, head)
        if isinstance(selection, dict):
            held = (pages["k"], pages.get("k" + SCALE))
            return paged_choice.attend(q, *held, selection, first, self.scale, self.value_dim, sinks)
        options = {"window": self.window, "softcap": self.softcap, "sinks": sinks, "value_dim": self.value_dim}
        options |= {"chosen": selection} if selection is not None else {}
        options |= {"chunk": self.chunk} | {f"{name}_scale": pages.get(name + SCALE) for name in ("k", "v")}
        options |= {name: a for name, a in (("head", head), ("until", until)) if a is not None}
        attend = paged_attention.implementation(self.implementation)
        return attend(q, pages["k"], pages.get("v"), page_table, positions, first, scale=self.scale, **options)


def widened(new: dict[str, jax.Array], head_dim: int) -> tuple[dict[str, jax.Array], int]:
    """Keys and values [B, T, K, H] as pages have them, and how wide values were where they are narrower than keys, else
    0: pages have room for as many numbers of both, zeros behind (MiMo-V2-Flash)."""
    if "v" not in new or new["v"].shape[-1] == head_dim:
        return new, 0
    narrow = new["v"].shape[-1]
    return new | {"v": jnp.pad(new["v"], ((0, 0), (0, 0), (0, 0), (0, head_dim - narrow)))}, narrow
