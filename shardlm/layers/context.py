"""What a block attends to. Blocks do not know training from serving: they call `ctx.attend`, and the context is
either the packed batch itself or a paged cache of what came before."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.mesh import shard_map
from shardlm.ops import paged_attention, paged_choice
from shardlm.ops.attention import of_rows, packed_attention
from shardlm.ops.delta_rows import Rows, remembered
from shardlm.ops.gated_delta import delta_net, empty_memory
from shardlm.ops.kv_format import SCALE, as_heads, order_of, parts_of_page, pool_names
from shardlm.ops.token_choice import Index, chosen_in_rows
from shardlm.ops.ulysses import by_heads, by_tokens, own_heads
from shardlm.rules import Rules, Table

Pages = dict[str, jax.Array]  # entry name -> [layers of a page * num_pages, page_size, K, H] (kv_format.order_of)
# What layers without pages remember a text by (ops/gated_delta.py, Memory), [layers * slots, ...]: the names of its
# dimensions. The last three are there where drafts are verified (ops/delta_drafts.py).
MEMORIES = {
    "state": (None, "heads", "head_dim", "head_dim"),
    "conv_q": (None, None, "kv_heads", "head_dim"),
    "conv_k": (None, None, "kv_heads", "head_dim"),
    "conv_v": (None, None, "heads", "head_dim"),
    "log_decay": (None, None, "heads"),
    "beta": (None, None, "heads"),
    "start": (None,),
}

INDEX = "i"  # the pages' entry that indexers' keys are in
INDEXES = (INDEX, INDEX + SCALE)
SELECTION = "selection"  # and the name, among a block's auxiliary values, of the tokens that one chose
Selection = Any  # as a context has it: of packed rows bool [B, T, T], of pages what ops/paged_choice.py says

KEPT = "kept "  # before the names of keys and values that later layers read, among a block's auxiliary values


class Context(Protocol):
    absorbs: ClassVar[bool]  # whether attention over latents (layers/mla.py) stays in the space of the latents
    weights: jax.Array | None  # float32 [B, T], of each token in the loss; None outside training
    inputs: jax.Array | None  # [L, B, T, P], what each layer takes of each token besides the stream
    selection: Selection | None  # what the last indexer chose, where layers share choices; None elsewhere

    @property
    def real(self) -> jax.Array:
        """bool [B, T], False for padding."""

    def of_repeat(self, index: jax.Array) -> "Context":
        """As the blocks of one repeat of a scanned pattern see it."""

    def kept_by(self, name: str) -> tuple[jax.Array | None, jax.Array | None]:
        """The keys and values [B, T, K, H] of the last layer that keeps some under a name; None where they are in
        pages."""

    def attend(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        positions: jax.Array,
        pages: Pages | None,
        layer: jax.Array,
        *,
        scale: float,
        window: int,
        kv_name: str,
        softcap: float = 0.0,
        sinks: jax.Array | None = None,
        value_dim: int = 0,
        kv_heads: int = 0,
        chunk: int = 0,
        selection: Selection | None = None,
    ) -> tuple[jax.Array, Pages | None]:
        """q [B, T, N, H], k and v [B, T, K, H], positions int32 [B, T], layer int32 scalar. A token sees `window`
        positions, 0 for all before it, or those of its own `chunk`; `softcap` and `sinks` [N] are ops/attention.py's;
        `kv_name` names how the K dimension is split. Where v is None, values are the first `value_dim` of keys; where k
        is too, the `kv_heads` of another layer are in its pages. `selection`: the tokens that each query attends to,
        None: all. Returns the heads' output [B, T, N, H] and the pages
        with k and v written."""

    def select(
        self, index: Index, positions: jax.Array, pages: Pages | None, layer: jax.Array
    ) -> tuple[Selection | None, Pages | None]:
        """The tokens that each query attends to, None: all before it, since there are no more than it may; and the
        pages with the index's keys written."""

    def unselected(self, positions: jax.Array, pages: Pages | None, count: int) -> Selection | None:
        """What `select` gives for `count` tokens, of nothing yet."""

    def recur(
        self,
        x: dict[str, jax.Array],
        taps: dict[str, jax.Array],
        log_decay: jax.Array,
        beta: jax.Array,
        positions: jax.Array,
        pages: Pages | None,
        layer: jax.Array,
    ) -> tuple[jax.Array, Pages | None]:
        """Linear attention (ops/gated_delta.py, delta_net, with its shapes) to the text so far. Returns the heads'
        output [B, T, N, V] and the pages with what the text is remembered by."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Training and scoring: attention inside the batch, within each segment. segment_ids int32 [B, T]; held bool
    [repeats], False for the empty slots of a pipeline's stage, in which experts get no tokens: by a router of zeros all
    would go to the same few. `kept`: by name, the keys and values "k" and "v" [B, T, K, H] that later layers read."""

    absorbs: ClassVar[bool] = False
    segment_ids: jax.Array
    rules: Rules = dataclasses.field(metadata={"static": True})
    implementation: str = dataclasses.field(default="xla", metadata={"static": True})
    weights: jax.Array | None = None
    context: str = dataclasses.field(default="ring", metadata={"static": True})  # where rows are split
    held: jax.Array | None = None
    inputs: jax.Array | None = None
    kept: dict[str, dict[str, jax.Array]] | None = None
    selection: Selection | None = None

    @classmethod
    def make(cls, segment_ids: jax.Array, weights: jax.Array | None, execution: Execution) -> "Packed":
        """The context of a batch, as a model with this execution runs it."""
        return cls(segment_ids, execution.rules, execution.attention, weights, execution.context_attention)

    @property
    def real(self) -> jax.Array:
        real = self.segment_ids > 0
        return real if self.held is None else real & self.held

    def of_repeat(self, index):
        if self.held is None:
            return self
        return dataclasses.replace(self, held=jax.lax.dynamic_index_in_dim(self.held, index, keepdims=False))

    def kept_by(self, name):
        return self.kept[name]["k"], self.kept[name]["v"]

    def select(self, index, positions, pages, layer):
        del positions, layer
        act = self.rules.act
        if self.segment_ids.shape[1] <= index.count:
            return None, pages
        over = act.axes("whole_seq")
        if over and self.context == "ring":
            raise ShardlmError(
                "context_attention=ring: a ring's devices see a part of the keys at a time, and sparse attention "
                "chooses among all; choose ulysses, or context=1"
            )
        rows = act.spec("batch", "whole_seq")
        parts = {name: act.spec("batch", "whole_seq", *[None] * n) for name, n in (("q", 2), ("weights", 1), ("k", 1))}
        run = shard_map(
            partial(chosen_in_rows, over=over[0] if over else ""),
            in_specs=(Index(**parts, count=index.count), rows),
            out_specs=act.spec("batch", None, None),
        )
        return run(index, self.segment_ids), pages

    def unselected(self, positions, pages, count):
        del positions, pages
        B, T = self.segment_ids.shape
        if count >= T:
            return None
        return jnp.zeros((B, T, T), bool, out_sharding=self.rules.act.spec("batch", None, None))

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
        kv_heads=0,
        chunk=0,
        selection=None,
    ):
        del layer, kv_heads  # rows are in order, so the index is the position
        if kv_name == "kv_heads_whole":
            k, v = (one_per_device(a, self.rules) for a in (k, v))
        out = packed_attention(
            q,
            k,
            v,
            self._chunked(positions, chunk) if chunk else self.segment_ids,
            scale=scale,
            rules=self.rules,
            implementation=self.implementation,
            window=window,
            softcap=softcap,
            sinks=sinks,
            context=self.context,
            chosen=selection,
        )
        return out, pages

    def recur(self, x, taps, log_decay, beta, positions, pages, layer):
        del positions, layer
        act = self.rules.act
        over = act.axes("whole_seq")
        heads, rows = _heads_of(act), act.spec("batch", "whole_seq")

        def local(x, taps, log_decay, beta, segment_ids):
            if over:  # whole rows of a share of the heads, and back
                x, log_decay, beta = (by_heads(a, over[0]) for a in (x, log_decay, beta))
                taps = own_heads(taps, over[0])
                segment_ids = jax.lax.all_gather(segment_ids, over[0], axis=1, tiled=True)
            new = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
            memory = empty_memory(x, taps["q"].shape[-1])
            out, _ = delta_net(x, taps, log_decay, beta, memory, new, jnp.ones_like(new))
            return by_tokens(out, over[0]) if over else out

        specs = (heads["x"], heads["taps"], _rates_of(act, log_decay), heads["each"], rows)
        run = shard_map(local, in_specs=specs, out_specs=heads["x"]["v"])
        return run(x, taps, log_decay, beta, self.segment_ids), pages

    def _chunked(self, positions: jax.Array, chunk: int) -> jax.Array:
        """Segments of which each chunk is one of its own, int32 [B, T]."""
        count = -(-positions.shape[1] // chunk)
        positions = jax.reshard(positions, jax.typeof(self.segment_ids).sharding.spec)
        return jnp.where(self.segment_ids > 0, self.segment_ids * count + positions // chunk, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Prefill (T > 1) and decode (T = 1): write k and v into pages, then attend to all positions so far.

    page_table int32 [B, groups * W], of each group of layers the pages of a row's tokens, page 0 is scrap; valid bool
    [B, T] is False for padding. A group with a window may have scrap where none of this step's tokens sees. `whole`:
    every row begins at position 0, and attends to k and v themselves by this implementation (ops/attention.py), which
    is for models without soft caps and latents; "": to pages. adapter int32 [B]: which of several each row has
    (layers/lora.py); None where the model has not several. slot int32 [B]: where layers without pages remember each
    row's text; None where the model has none. `rows`: how these take tokens in (ops/delta_rows.py). sure int32 [B]:
    where in each row's text the tokens begin that may turn out wrong; None: with the row.
    """

    absorbs: ClassVar[bool] = True
    page_table: jax.Array
    valid: jax.Array
    layout: PageLayout = dataclasses.field(metadata={"static": True})
    rules: Rules = dataclasses.field(metadata={"static": True})
    implementation: str = dataclasses.field(default="blocked", metadata={"static": True})
    whole: str = dataclasses.field(default="", metadata={"static": True})
    weights: None = None
    adapter: jax.Array | None = None
    slot: jax.Array | None = None
    inputs: jax.Array | None = None
    selection: Selection | None = None
    rows: Rows = dataclasses.field(default="known", metadata={"static": True})
    sure: jax.Array | None = None

    @classmethod
    def make(
        cls,
        page_table: jax.Array,
        valid: jax.Array,
        layout: PageLayout,
        execution: Execution,
        whole: str = "",
        adapter: jax.Array | None = None,
        slot: jax.Array | None = None,
        rows: Rows = "known",
        sure: jax.Array | None = None,
    ) -> "Paged":
        """The context of a batch, as a model with this execution runs it."""
        how = (layout, execution.rules, execution.paged_attention, whole)
        beside = {"adapter": adapter if execution.adapters else None, "slot": slot if layout.memories else None}
        return cls(page_table, valid, *how, **beside, rows=rows, sure=sure)

    @property
    def real(self) -> jax.Array:
        return self.valid

    def of_repeat(self, index):
        del index
        return self

    def kept_by(self, name):
        del name
        return None, None

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
        beside = {name: a for name, a in pages.items() if name in MEMORIES or name in INDEXES}
        pages = {name: a for name, a in pages.items() if name not in beside}
        orders = {name: order_of(name, a.dtype, self.implementation) for name, a in pages.items()}
        tokens, scalar = act.spec("batch", "whole_seq"), jax.sharding.PartitionSpec()
        new = {name: a for name, a in (("k", k), ("v", v)) if a is not None}
        over = jax.typeof(pages["k"]).sharding.spec[orders["k"].index("k")]
        if kv_name == "kv_heads_whole" and kv_heads and over:  # other layers' heads are split, and so are the pages
            new = {name: one_per_device(a, self.rules) for name, a in new.items()}
            kv_name, kv_heads = "kv_heads", self.rules.mesh.size(*act.axes("kv_heads"))
        kv = act.spec("batch", "whole_seq", kv_name, "head_dim")
        pools = {name: act.spec(*pool_names(order, kv_name)) for name, order in orders.items()}
        page_table, place, part = self._of_layer(layer)
        heads_here = 0 if not kv_heads else kv_heads // self.rules.mesh.size(*act.axes(kv_name))

        def local(q, new, pages, page_table, positions, valid, place, part, sinks, selection):
            shapes, parts = {name: a.shape for name, a in pages.items()}, 1
            if heads_here:
                parts = parts_of_page(pages["k"], orders["k"], heads_here, q.shape[3])
                pages = {name: as_heads(a, orders[name], heads_here, parts) for name, a in pages.items()}
            page_table, first = page_table * parts, place * self.layout.num_pages * parts + part
            where = (page_table, positions, valid, first)
            pages = paged_attention.write(pages, new, *where, implementation=self.implementation)
            if self.whole and (not chunk or q.shape[1] <= chunk):
                assert not softcap and not value_dim, "checked before (serve/prefill.py)"
                if kv_name == "kv_heads_whole":
                    head = self._own_head(new["k"].shape[2], q.shape[2])
                    new = {name: jnp.take(a, head[None], axis=2) for name, a in new.items()}
                pages = {name: a.reshape(shapes[name]) for name, a in pages.items()}
                return of_rows(q, new["k"], new["v"], scale, window, self.whole, sinks), pages
            if isinstance(selection, dict):
                out = paged_choice.attend(q, pages["k"], pages.get("k" + SCALE), selection, first, scale, value_dim)
                return out, pages
            options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "value_dim": value_dim}
            options |= {"chosen": selection} if selection is not None else {}
            options |= {"chunk": chunk} | {f"{name}_scale": pages.get(name + SCALE) for name in ("k", "v")}
            if kv_name == "kv_heads_whole":
                options["head"] = self._own_head(pages["k"].shape[orders["k"].index("k")], q.shape[2])
            where = (page_table, positions, first)
            attend = paged_attention.implementation(self.implementation)
            out = attend(q, pages["k"], pages.get("v"), *where, **options)
            return out, {name: a.reshape(shapes[name]) for name, a in pages.items()}

        out, pages = shard_map(
            local,
            in_specs=(heads, dict.fromkeys(new, kv), pools, *(tokens,) * 3, *(scalar,) * 2, act.spec("heads"), tokens),
            out_specs=(heads, pools),
        )(q, new, pages, page_table, positions, self.valid, place, part, sinks, selection)
        return out, pages | beside

    def select(self, index, positions, pages, layer):
        act, scalar = self.rules.act, jax.sharding.PartitionSpec()
        held = {name: a for name, a in pages.items() if name in INDEXES}
        page_table, place, _ = self._of_layer(layer)
        orders = {name: order_of(name, a.dtype, self.implementation) for name, a in held.items()}
        pools = {name: act.spec(*pool_names(order, "kv_heads_whole")) for name, order in orders.items()}
        tokens = act.spec("batch", "whole_seq")

        def local(index, held, page_table, positions, valid, place):
            where = page_table, positions, valid, place * self.layout.num_pages
            return paged_choice.choose(index, held, INDEX, *where, self.implementation)

        run = shard_map(local, in_specs=(tokens, pools, *(tokens,) * 3, scalar), out_specs=(tokens, pools))
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
        act, place = self.rules.act, jnp.asarray(self.layout.places, jnp.int32)[layer, 1]
        heads, rows = _heads_of(act), act.spec("batch", "whole_seq")
        held = {name: a for name, a in pages.items() if name in MEMORIES}
        specs = {name: act.spec(*MEMORIES[name]) for name in held}

        def local(x, taps, log_decay, beta, sure, positions, valid, slot, place, held):
            where = place * self.layout.slots + slot  # rows of padding all have the last slot
            return remembered(self.rows, x, taps, log_decay, beta, sure, positions[:, 0], valid, held, where)

        slot, scalar = act.spec("batch"), jax.sharding.PartitionSpec()
        of_x = (heads["x"], heads["taps"], _rates_of(act, log_decay), heads["each"])
        how = (slot, rows, rows, slot, scalar, specs)
        run = shard_map(local, in_specs=(*of_x, *how), out_specs=(heads["x"]["v"], specs))
        sure = positions[:, 0] if self.sure is None else self.sure
        out, held = run(x, taps, log_decay, beta, sure, positions, self.valid, self.slot, place, held)
        return out, pages | held

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


def one_per_device(kv: jax.Array, rules: Rules) -> jax.Array:
    """Whole kv heads [B, T, K, H], fewer than the devices that split heads, repeated so that each holds its own one."""
    ways = rules.mesh.size(*rules.act.axes("kv_heads"))
    split = rules.act.spec("batch", "whole_seq", "kv_heads", "head_dim")
    return jax.reshard(jnp.repeat(kv, ways // kv.shape[2], axis=2), split)


def _rates_of(act: Table, log_decay: jax.Array) -> jax.sharding.PartitionSpec:
    """How decays are split, which are of heads [B, T, N] or of each number of their keys [B, T, N, H]."""
    return act.spec(*("batch", "whole_seq", "heads", "head_dim")[: log_decay.ndim])


def _heads_of(act: Table) -> dict[str, Any]:
    """How what linear attention reads is split: as heads are."""
    names = {"q": "kv_heads", "k": "kv_heads", "v": "heads"}
    return {
        "x": {name: act.spec("batch", "whole_seq", of, "head_dim") for name, of in names.items()},
        "taps": {name: act.spec(of, "head_dim", None) for name, of in names.items()},
        "each": act.spec("batch", "whole_seq", "heads"),
    }
