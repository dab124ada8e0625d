"""The context of prefill and decoding (context.py): rows of texts whose beginnings are in pages, and in slots of
memories."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from shardlm.layers.context import (
    CONVOLVED,
    INDEX,
    INDEXES,
    MEMORIES,
    ROWS,
    SLOTTED,
    START,
    Pages,
    Selection,
    heads_of,
    one_per_device,
    rates_of,
    specs_of,
)
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged_heads import OnDevice
from shardlm.layers.param import Execution
from shardlm.layers.seen import Seen
from shardlm.mesh import shard_map
from shardlm.ops import block_choice, head_choice, paged_choice
from shardlm.ops.block_choice import BlockIndex, PooledIndex
from shardlm.ops.compressed_pages import Pools, Spot, attend_pages
from shardlm.ops.delta_rows import Rows, remembered
from shardlm.ops.head_choice import HeadIndex
from shardlm.ops.kv_format import order_of, pool_names
from shardlm.ops.rope import Sines
from shardlm.ops.rotate_write import Unrotated, fits
from shardlm.ops.short_conv import short_conv
from shardlm.ops.split_pages import SplitPages
from shardlm.ops.text_rows import Use, follow
from shardlm.rules import Rules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Prefill (T > 1) and decode (T = 1): write k and v into pages, then attend to all positions so far.

    page_table int32 [B, groups * W], of each group of layers the pages of a row's tokens, page 0 is scrap; valid bool
    [B, T] is False for padding. A group with a window may have scrap where none of this step's tokens sees. `whole`:
    every row begins at position 0, and attends to k and v themselves by this implementation (ops/attention.py), which
    is for models without soft caps and latents; "": to pages. `parts`: any row may, and attends by this one to k and v
    and to what pages hold before them (ops/chunk_attention.py), in layers without windows and chunks. adapter int32
    [B]: which of several each row has (layers/lora.py); None where the model has not several. slot int32 [B]: where
    layers without pages remember each row's text; None where the model has none. `rows`: how these take tokens in
    (ops/delta_rows.py). sure int32 [B]: where in each row's text the tokens begin that may turn out wrong; None: with
    the row. until int32 [B, T]: the last position that each token sees, inside of an image one after it; None: its own.
    """

    absorbs: ClassVar[bool] = True
    page_table: jax.Array
    valid: jax.Array
    layout: PageLayout = dataclasses.field(metadata={"static": True})
    rules: Rules = dataclasses.field(metadata={"static": True})
    implementation: str = dataclasses.field(default="blocked", metadata={"static": True})
    whole: str = dataclasses.field(default="", metadata={"static": True})
    parts: str = dataclasses.field(default="", metadata={"static": True})
    weights: None = None
    adapter: jax.Array | None = None
    slot: jax.Array | None = None
    inputs: jax.Array | None = None
    selection: Selection | None = None
    rows: Rows = dataclasses.field(default="known", metadata={"static": True})
    sure: jax.Array | None = None
    tokens: jax.Array | None = None
    ngrams: tuple[jax.Array, ...] | None = None
    faster: jax.Array | None = None
    seen: Seen | None = None
    until: jax.Array | None = None
    turns: jax.Array | None = None
    sines: Sines | None = None

    @classmethod
    def make(
        cls,
        page_table: jax.Array,
        valid: jax.Array,
        layout: PageLayout,
        execution: Execution,
        whole: str = "",
        parts: str = "",
        adapter: jax.Array | None = None,
        slot: jax.Array | None = None,
        rows: Rows = "known",
        sure: jax.Array | None = None,
    ) -> "Paged":
        """The context of a batch, as a model with this execution runs it."""
        how = (layout, execution.rules, execution.paged_attention, whole, parts)
        beside = {"adapter": adapter if execution.adapters else None, "slot": slot if layout.memories else None}
        return cls(page_table, valid, *how, **beside, rows=rows, sure=sure)

    @property
    def real(self) -> jax.Array:
        return self.valid

    def of_repeat(self, index):
        del index
        return self

    def backwards(self):
        return dataclasses.replace(self, until=None)

    def kept_by(self, name):
        del name
        return None, None

    def rotates(self, pages, kv_name):
        pages, _ = _of_heads(pages)
        apart = self.implementation == "pallas" and not self.whole and not self.parts and not self._split_pages
        return apart and fits(pages) and not (kv_name == "kv_heads_whole" and self._split(pages))

    def attend(
        self,
        q,
        k,
        v,
        positions,
        pages,
        layer,
        *,
        scale,
        window,
        kv_name,
        softcap=0.0,
        sinks=None,
        value_dim=0,
        kv_heads=0,
        chunk=0,
        selection=None,
    ):
        act = self.rules.act
        heads = act.spec("batch", "whole_seq", "heads", "head_dim")
        pages, beside = _of_heads(pages)
        orders = {name: order_of(name, a.dtype, self.implementation) for name, a in pages.items()}
        tokens, scalar = act.spec("batch", "whole_seq"), jax.sharding.PartitionSpec()
        new = {name: a for name, a in (("k", k), ("v", v)) if a is not None}
        if (
            kv_name == "kv_heads_whole" and kv_heads and self._split(pages)
        ):  # other layers' heads are split, and so are the pages
            new = {name: one_per_device(a, self.rules) for name, a in new.items()}
            kv_name, kv_heads = "kv_heads", self.rules.mesh.size(*act.axes("kv_heads"))
        kv = act.spec("batch", "whole_seq", kv_name, "head_dim")
        pools = {name: act.spec(*pool_names(order, kv_name)) for name, order in orders.items()}
        page_table, place, part = self._of_layer(layer)
        heads_here = 0 if not kv_heads else kv_heads // self.rules.mesh.size(*act.axes(kv_name))
        of_q, of_choice = heads, tokens
        if head_choice.is_for_each(selection):
            of_choice = act.spec("batch", "kv_heads" if kv_name == "kv_heads" else None)
            selection = jax.tree.map(lambda a: jax.reshard(a, of_choice), selection)
        if isinstance(q, Unrotated):
            of_q = q.specs(act, kv_name)
            q = jax.tree.map(jax.reshard, q, of_q)

        of_scores = act.spec("heads"), of_choice
        axes = self._split_pages
        ways = self.rules.mesh.size(*axes)
        local = OnDevice(
            implementation=self.implementation,
            split=SplitPages(axes, ways, orders, self.implementation) if axes else None,
            whole=self.whole,
            parts=self.parts,
            num_pages=self.layout.num_pages,
            orders=orders,
            kv_heads=heads_here,
            own_head=self._own_head if kv_name == "kv_heads_whole" else None,
            scale=scale,
            window=window,
            softcap=softcap,
            value_dim=value_dim,
            chunk=chunk,
        )
        out, pages = shard_map(
            local,
            in_specs=(of_q, dict.fromkeys(new, kv), pools, *(tokens,) * 3, *(scalar,) * 2, *of_scores, tokens),
            out_specs=(heads, pools),
        )(q, new, pages, page_table, positions, self.valid, place, part, sinks, selection, self.until)
        return out, pages | beside

    def attend_compressed(self, q, kv, compressed, positions, pages, layer, sinks, *, scale, window, rows):
        act, layout = self.rules.act, self.layout
        held = {name: a for name, a in pages.items() if name in (ROWS, INDEX)}
        orders = {name: order_of(name, a.dtype, self.implementation) for name, a in held.items()}
        pools = {name: act.spec(*pool_names(order, "kv_heads_whole")) for name, order in orders.items()}
        first = jnp.asarray(layout.firsts, jnp.int32)[layer]
        spots = [self._of_layer(first + row) for row in range(rows)]
        least = max(layout.strides, default=1)  # tokens of an entry, where layers do not share places

        def local(q, kv, compressed, held, spots, positions, valid, sinks):
            where = [Spot(table, place * layout.num_pages, part) for table, place, part in spots]
            if compressed:
                last = where[-1]
                narrow, parts = -(-last.table.shape[1] // least), compressed.series.rate // least
                where[-1] = Spot(last.table[:, :narrow], last.first, last.part, parts)
            pools = Pools(held, ROWS, INDEX, self.implementation)
            how = {"scale": scale, "window": window}
            return attend_pages(q, kv, compressed, pools, where, positions, valid, sinks, **how)

        heads, tokens = act.spec("batch", "whole_seq", "heads", "head_dim"), act.spec("batch", "whole_seq")
        scalar = jax.sharding.PartitionSpec()
        of_spots = [(tokens, scalar, scalar)] * rows
        specs = (heads, tokens, specs_of(compressed, act), pools, of_spots, tokens, tokens, act.spec("heads"))
        run = shard_map(local, in_specs=specs, out_specs=(heads, pools))
        out, held = run(q, kv, compressed, held, spots, positions, self.valid, sinks)
        return out, pages | held

    def select(self, index, positions, pages, layer):
        act, scalar = self.rules.act, jax.sharding.PartitionSpec()
        held = {name: a for name, a in pages.items() if name in INDEXES}
        page_table, place, _ = self._of_layer(layer)
        orders = {name: order_of(name, a.dtype, self.implementation) for name, a in held.items()}
        pools = {name: act.spec(*pool_names(order, "kv_heads_whole")) for name, order in orders.items()}
        tokens = act.spec("batch", "whole_seq")
        of_index = jax.tree.map_with_path(lambda path, _: scalar if path[-1].name == "scale" else tokens, index)
        choose = paged_choice.choose
        if isinstance(index, HeadIndex):
            choose = head_choice.choose
        elif isinstance(index, BlockIndex | PooledIndex):
            choose = block_choice.choose

        def local(index, held, page_table, positions, valid, place):
            where = page_table, positions, valid, place * self.layout.num_pages
            return choose(index, held, INDEX, *where, self.implementation)

        run = shard_map(local, in_specs=(of_index, pools, *(tokens,) * 3, scalar), out_specs=(tokens, pools))
        selection, held = run(index, held, page_table, positions, self.valid, place)
        return selection, pages | held

    def unselected(self, positions, pages, count):
        pool = pages[INDEX]
        page_size = pool.shape[order_of(INDEX, pool.dtype, self.implementation).index("s")]
        reach = self.page_table.shape[1] // len(self.layout.windows) * page_size
        if reach <= count:
            return None
        found = paged_choice.shape_of(positions.shape, reach, count, self.implementation)
        spec = self.rules.act.spec("batch", "whole_seq")
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, out_sharding=spec), found)

    def recur(self, x, taps, log_decay, beta, positions, pages, layer):
        act, place = self.rules.act, jnp.asarray(self.layout.memory_places(), jnp.int32)[layer]
        heads, rows = heads_of(act, taps), act.spec("batch", "whole_seq")
        held = {name: a for name, a in pages.items() if name in MEMORIES}
        specs = {name: act.spec(*MEMORIES[name]) for name in held}

        def local(x, taps, log_decay, beta, sure, positions, valid, slot, place, held):
            where = place * self.layout.slots + slot  # rows of padding all have the last slot
            return remembered(self.rows, x, taps, log_decay, beta, sure, positions[:, 0], valid, held, where)

        slot, scalar = act.spec("batch"), jax.sharding.PartitionSpec()
        of_x = (heads["x"], heads["taps"], rates_of(act, log_decay), heads["each"])
        how = (slot, rows, rows, slot, scalar, specs)
        run = shard_map(local, in_specs=(*of_x, *how), out_specs=(heads["x"]["v"], specs))
        sure = positions[:, 0] if self.sure is None else self.sure
        out, held = run(x, taps, log_decay, beta, sure, positions, self.valid, self.slot, place, held)
        return out, pages | held

    def convolve_heads(self, x, taps, positions, pages, layer):
        act, place = self.rules.act, jnp.asarray(self.layout.memory_places(), jnp.int32)[layer]
        heads, rows = act.spec("batch", "whole_seq", "heads", "head_dim"), act.spec("batch", "whole_seq")
        held = {name: a for name, a in pages.items() if name in MEMORIES}
        specs = {name: act.spec(*MEMORIES[name]) for name in held}

        def local(x, taps, sure, positions, valid, slot, place, held):
            def use(x, before):
                return short_conv(x, taps, before, jnp.zeros(x.shape[:2], jnp.int32))

            slot, count = place * self.layout.slots + slot, taps.shape[-1] - 1
            kept = held[CONVOLVED], held.get("start")
            out, kept = follow(self.rows, use, count, 0, x, kept, slot, positions[:, 0], sure, valid)
            return out, {name: a for name, a in zip((CONVOLVED, "start"), kept, strict=True) if a is not None}

        slot, scalar = act.spec("batch"), jax.sharding.PartitionSpec()
        of_taps = act.spec("heads", "head_dim", None)
        run = shard_map(
            local, in_specs=(heads, of_taps, slot, rows, rows, slot, scalar, specs), out_specs=(heads, specs)
        )
        sure = positions[:, 0] if self.sure is None else self.sure
        out, held = run(x, taps, sure, positions, self.valid, self.slot, place, held)
        return out, pages | held

    def preceded(self, name, tokens, count, none, positions, pages):
        how = (lambda tokens, before: before), count, none
        before, pages = self._followed(name, *how, tokens, positions, pages, 0)
        return tokens, before, jnp.zeros_like(tokens), pages

    def convolve(self, name, x, taps, spacing, positions, pages, place):
        def use(x, before):
            return short_conv(x, taps, before, jnp.zeros(x.shape[:2], jnp.int32), spacing)

        count = (taps.shape[-1] - 1) * spacing
        return self._followed(name, use, count, 0, x, positions, pages, place)

    def _followed(self, name: str, use: Use, count: int, none: int, x, positions, pages: Pages, place: int):
        """(what `use` makes of x [B, T, ...] and the `count` tokens before each row, `none` where there are none, the
        pages with its last tokens), all whole on each device."""
        start = name + START
        slot, first = place * self.layout.slots + self.slot, positions[:, 0]
        sure = first if self.sure is None else self.sure
        kept = pages[name], pages.get(start)
        out, kept = follow(self.rows, use, count, none, x, kept, slot, first, sure, self.valid)
        new = {name: a for name, a in zip((name, start), kept, strict=True) if a is not None}
        return out, pages | new

    @property
    def _split_pages(self) -> tuple[str, ...]:
        """The axes over which positions of pages are split."""
        return self.rules.act.axes("slots")

    def _split(self, pages: Pages) -> bool:
        """Whether devices have a part of the kv heads each."""
        order = order_of("k", pages["k"].dtype, self.implementation)
        return bool(jax.typeof(pages["k"]).sharding.spec[order.index("k")])

    def _of_layer(self, layer: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The page table [B, W] of a layer, its place among the layers that share it, and its part of that."""
        layout = self.layout
        groups = len(layout.windows)
        if layout.in_order:
            return self.page_table, layer, jnp.int32(0)
        group, place = jnp.asarray(layout.places, jnp.int32)[layer]
        part = jnp.asarray(layout.parts, jnp.int32)[layer] if layout.parts else jnp.int32(0)
        width = self.page_table.shape[1] // groups
        return jax.lax.dynamic_slice_in_dim(self.page_table, group * width, width, axis=1), place, part

    def _own_head(self, num_kv_heads: int, local_heads: int) -> jax.Array:
        """Which of the kv heads, held whole, this device's query heads share."""
        axes = self.rules.act.axes("heads") or ("tensor",)
        group = self.rules.mesh.size(*axes) * local_heads // num_kv_heads  # query heads a kv head serves
        return jax.lax.axis_index(axes) * local_heads // group


def _of_heads(pages: Pages) -> tuple[Pages, Pages]:
    """(what layers that attend to tokens keep, what is beside it)."""
    beside = {name: a for name, a in pages.items() if name in SLOTTED or name in INDEXES}
    return {name: a for name, a in pages.items() if name not in beside}, beside
