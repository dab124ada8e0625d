"""The context of training and scoring (context.py): packed rows, in which each document attends to itself."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from shardlm.layers.context import Selection, heads_of, one_group_each, one_per_device, rates_of, specs_of
from shardlm.layers.param import Execution
from shardlm.layers.seen import TURNS, UNTIL, Seen
from shardlm.mesh import shard_map
from shardlm.ops import block_choice, head_choice
from shardlm.ops.attention import packed_attention
from shardlm.ops.block_choice import BlockIndex, PooledIndex
from shardlm.ops.compressed_rows import attend_rows
from shardlm.ops.gated_delta import delta_net, empty_memory
from shardlm.ops.head_choice import HeadIndex
from shardlm.ops.rope import Sines
from shardlm.ops.short_conv import from_device_before, short_conv, texts
from shardlm.ops.token_choice import chosen_in_rows
from shardlm.ops.ulysses import by_heads, by_tokens, own_heads
from shardlm.rules import Rules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Training and scoring: attention inside the batch, within each segment. segment_ids int32 [B, T]; held bool
    [repeats], False for the empty slots of a pipeline's stage, in which experts get no tokens: by a router of zeros all
    would go to the same few. `kept`: by name, the keys and values "k" and "v" [B, T, K, H] that later layers read.
    `until` int32 [B, T]: the place in its row of the last token that each sees, inside of an image one after it; None:
    its own."""

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
    tokens: jax.Array | None = None
    ngrams: tuple[jax.Array, ...] | None = None
    faster: jax.Array | None = None
    seen: Seen | None = None
    turns: jax.Array | None = None
    sines: Sines | None = None
    until: jax.Array | None = None

    @classmethod
    def make(cls, segment_ids: jax.Array, weights: jax.Array | None, execution: Execution) -> "Packed":
        """The context of a batch, as a model with this execution runs it."""
        return cls(segment_ids, execution.rules, execution.attention, weights, execution.context_attention)

    @classmethod
    def of_rows(cls, rows: Mapping[str, jax.Array], weights: jax.Array | None, execution: Execution) -> "Packed":
        """The same of a batch's rows by name, with the images that stand in them: "turns" int32 [B, T, 3], where tokens
        are on three axes, "until", where they see those after them, and what `Seen.of_rows` wants."""
        ctx = cls.make(rows["segment_ids"], weights, execution)
        return dataclasses.replace(ctx, seen=Seen.of_rows(rows), turns=rows.get(TURNS), until=rows.get(UNTIL))

    def rows(self, width: int) -> dict[str, jax.Array]:
        """What a stage of a pipeline is to know of rows whose stream has this width, behind where images enter it."""
        found = {"segment_ids": self.segment_ids, "weights": self.weights}
        found |= {name: a for name, a in ((TURNS, self.turns), (UNTIL, self.until)) if a is not None}
        return found | (self.seen.rows(width) if self.seen else {})

    def within(self, rows: Mapping[str, jax.Array]) -> "Packed":
        """The context of some of them."""
        own = {name: rows[name] for name in ("segment_ids", "weights")}
        return dataclasses.replace(self, **own, seen=Seen.of_rows(rows), turns=rows.get(TURNS), until=rows.get(UNTIL))

    @property
    def real(self) -> jax.Array:
        real = self.segment_ids > 0
        return real if self.held is None else real & self.held

    def of_repeat(self, index):
        if self.held is None:
            return self
        return dataclasses.replace(self, held=jax.lax.dynamic_index_in_dim(self.held, index, keepdims=False))

    def backwards(self):
        return dataclasses.replace(self, until=None)

    def kept_by(self, name):
        return self.kept[name]["k"], self.kept[name]["v"]

    def rotates(self, pages, kv_name):
        del pages, kv_name
        return False

    def select(self, index, positions, pages, layer):
        del layer
        act = self.rules.act
        if self.segment_ids.shape[1] <= index.count:
            return None, pages
        over = act.axes("whole_seq")
        assert not over or self.context != "ring", "checked before (train/check.py)"
        rows = act.spec("batch", "whole_seq")
        how, out = {"over": over[0] if over else ""}, act.spec("batch", None, None)
        whole = jax.sharding.PartitionSpec()
        parts = jax.tree.map_with_path(lambda path, _: whole if path[-1].name == "scale" else rows, index)
        if isinstance(index, BlockIndex | PooledIndex | HeadIndex):
            choice = head_choice if isinstance(index, HeadIndex) else block_choice
            run = partial(choice.chosen_in_rows, **how)
            run = shard_map(run, in_specs=(parts, rows, rows), out_specs=out)
            return run(index, positions, self.segment_ids), pages
        run = shard_map(partial(chosen_in_rows, **how), in_specs=(parts, rows), out_specs=out)
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
            if head_choice.is_for_each(selection):
                ways = self.rules.mesh.size(*self.rules.act.axes("kv_heads"))
                selection = jnp.repeat(selection, ways // k.shape[2], axis=1)
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
            until=self.until,
        )
        return out, pages

    def attend_compressed(self, q, kv, compressed, positions, pages, layer, sinks, *, scale, window, rows):
        del layer, rows
        act = self.rules.act
        over = act.axes("whole_seq")
        assert not over or self.context != "ring", "checked before (train/check.py)"
        heads, whole = act.spec("batch", "whole_seq", "heads", "head_dim"), act.spec("batch", "whole_seq")
        how = {"scale": scale, "window": window, "over": over[0] if over else ""}
        specs = (heads, whole, specs_of(compressed, act), whole, whole, act.spec("heads"))
        run = shard_map(partial(attend_rows, **how), in_specs=specs, out_specs=heads)
        return run(q, kv, compressed, positions, self.segment_ids, sinks), pages

    def recur(self, x, taps, log_decay, beta, positions, pages, layer):
        del positions, layer
        act = self.rules.act
        over = act.axes("whole_seq")
        heads, rows = heads_of(act, taps), act.spec("batch", "whole_seq")

        def local(x, taps, log_decay, beta, segment_ids):
            if over:  # whole rows of a share of the heads, and back
                x, taps = one_group_each(x, taps, jax.lax.axis_size(over[0]))
                x, log_decay, beta = (by_heads(a, over[0]) for a in (x, log_decay, beta))
                taps = own_heads(taps, over[0])
                segment_ids = jax.lax.all_gather(segment_ids, over[0], axis=1, tiled=True)
            new = _begins(segment_ids)
            memory = empty_memory(x, taps["q"].shape[-1])
            out, _ = delta_net(x, taps, log_decay, beta, memory, new, jnp.ones_like(new))
            return by_tokens(out, over[0]) if over else out

        specs = (heads["x"], heads["taps"], rates_of(act, log_decay), heads["each"], rows)
        run = shard_map(local, in_specs=specs, out_specs=heads["x"]["v"])
        return run(x, taps, log_decay, beta, self.segment_ids), pages

    def convolve_heads(self, x, taps, positions, pages, layer):
        """Of rows that are split a device has the last tokens of the one before it."""
        del positions, layer
        act = self.rules.act
        over = act.axes("whole_seq")
        heads, rows = act.spec("batch", "whole_seq", "heads", "head_dim"), act.spec("batch", "whole_seq")

        def local(x, taps, segment_ids):
            begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            count = taps.shape[-1] - 1
            if over:
                before = from_device_before(x, segment_ids, count, over[0])
            else:
                before = jnp.zeros_like(x, shape=(len(x), count, *x.shape[2:]))
            return short_conv(x, taps, before, texts(begins))

        run = shard_map(local, in_specs=(heads, act.spec("heads", "head_dim", None), rows), out_specs=heads)
        return run(x, taps, self.segment_ids), pages

    def preceded(self, name, tokens, count, none, positions, pages):
        del name, positions
        rows = self.rules.act.spec("batch", None)
        tokens, segment_ids = (jax.reshard(a, rows) for a in (tokens, self.segment_ids))
        text = shard_map(lambda ids: texts(_begins(ids)), in_specs=rows, out_specs=rows)(segment_ids)
        return tokens, jnp.full((len(tokens), count), none, tokens.dtype, out_sharding=rows), text, pages

    def convolve(self, name, x, taps, spacing, positions, pages, place):
        """Whole rows of a share of each stream's numbers, and back."""
        del name, positions, place
        act = self.rules.act
        split, shares = act.spec("batch", "seq", None, None), act.axes("seq") or None
        rows = jax.sharding.PartitionSpec(split[0], None, None, shares)

        def local(x, taps, segment_ids):
            before = jnp.zeros_like(x, shape=(len(x), (taps.shape[-1] - 1) * spacing, *x.shape[2:]))
            return short_conv(x, taps, before, texts(_begins(segment_ids)), spacing)

        specs = (rows, jax.sharding.PartitionSpec(None, shares, None), act.spec("batch", None))
        given = (x, taps, self.segment_ids)
        out = shard_map(local, in_specs=specs, out_specs=rows)(*map(jax.reshard, given, specs))
        return jax.reshard(out, split), pages

    def _chunked(self, positions: jax.Array, chunk: int) -> jax.Array:
        """Segments of which each chunk is one of its own, int32 [B, T]."""
        count = -(-positions.shape[1] // chunk)
        positions = jax.reshard(positions, jax.typeof(self.segment_ids).sharding.spec)
        return jnp.where(self.segment_ids > 0, self.segment_ids * count + positions // chunk, 0)


def _begins(segment_ids: jax.Array) -> jax.Array:
    """The first tokens of texts, and of padding, bool [B, T]."""
    return jnp.diff(segment_ids, axis=1, prepend=-1) != 0
