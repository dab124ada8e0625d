"""The programs that serve: chunks of prompts, and steps of decoding. Pure functions of fixed shapes; which are compiled
is runner.py's, and what they are called with inputs.py's."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.layers.context import HANDED, Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.layers.seen import Seen
from shardlm.models.transformer import Transformer
from shardlm.ops.batch_sampling import Edits, RowSettings, Sampled, log_normaliser, rank_of, sample_rows
from shardlm.ops.delta_rows import Rows
from shardlm.ops.penalties import TokenCounts, count_tokens, set_rows
from shardlm.serve.sampling_params import MAX_LOGPROBS
from shardlm.serve.state import ServeState, Slots, put, take
from shardlm.state import ModelDef
from shardlm.vision.encoder import Encoder

WHOLE = PartitionSpec()
SCORED_AT_ONCE = 32  # positions of each row whose logits are there at one time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """Rows that decode. Padding has the last slot and no samples.

    where   int32 [B, 3 + W + 1]: slot, position of its last token, samples, the row's pages in each group, and which
            adapter it has (layers/lora.py). Where drafts are verified the position is the slot's, and one past the last
            that the row may write stands in its place
    """

    where: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkRows:
    """Chunks of prompts, all as long as the longest bucket. Padding has the last slot and no tokens.

    where     int32 [R, 6 + W + 1]: slot, first position, tokens, samples (0 or 1), whether scores are wanted (0 or 1),
              whether the request is new in its slot (0 or 1), the row's pages in each group, and its adapter
    tokens    int32 [R, C]
    targets   int32 [R, C], the token that follows each, where scores are wanted
    settings, edits, told  of the row's request, which its slot takes over (state.py)
    seen      int32 [R, C], which of the state's vectors each token stands for, -1: none; None: the model does not see
    turns     int32 [R, C, 3], where each token is on three axes, and shift int32 [R], of the tokens after them; None:
              it has one
    until     int32 [R, C], the last position that each token sees; None: its own
    """

    where: jax.Array
    tokens: jax.Array
    targets: jax.Array
    settings: RowSettings
    edits: Edits
    told: jax.Array
    seen: jax.Array | None = None
    turns: jax.Array | None = None
    shift: jax.Array | None = None
    until: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities of given tokens: their own, their rank (1: the most likely), and those of the most likely
    [..., n]."""

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Chunks of prompts that the model has just read, for what else reads them. slot int32 [R]; fresh bool [R], where
    the request is new in its slot; tokens, positions int32 [R, C]; hidden [R, C, D], after the last norm, or the
    streams that the model hands out, where it does."""

    slot: jax.Array
    fresh: jax.Array
    ctx: Paged
    tokens: jax.Array
    positions: jax.Array
    hidden: jax.Array


def decode(
    model: ModelDef, layout: PageLayout, most: int, params, state: ServeState, rows: DecodeRows, steps: jax.Array
):
    """`steps` (int32, at most `most`) tokens for every row, each fed to the next step; a row with fewer samples idles.
    Returns (state, Sampled of [B, most, ...])."""
    slot, start, samples = rows.where[:, 0], rows.where[:, 1], rows.where[:, 2]
    table, adapter = rows.where[:, 3:-1], rows.where[:, -1]
    own = take(state.slots, slot)

    def step(i, carry):
        pages, own, found = carry
        active = i < samples
        position = start + i
        read = (table, own.last, position, active, adapter, slot)
        turns = shifted(position[:, None], own.shift)
        lm, hidden, pages = hidden_of_one(model, layout, params, pages, *read, turns=turns)
        sampled, own = sampled_of(jax.reshard(lm.logits(hidden)[:, 0], WHOLE), own, position + 1, active)
        found = jax.tree.map(lambda all, one: all.at[:, i].set(one), found, sampled)
        return pages, own, found

    start_with = (state.pages, own, none_sampled(slot.shape[0], most))
    pages, own, found = jax.lax.fori_loop(0, steps, step, start_with)
    return dataclasses.replace(state, pages=pages, slots=keep_slots(state.slots, slot, own)), found


def none_sampled(rows: int, columns: int) -> Sampled:
    """Of [rows, columns, ...], to be filled in."""
    shape = (rows, columns)
    return Sampled(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
        jnp.zeros(shape, jnp.int32),
    )


def keep_slots(slots: Slots, slot: jax.Array, own: Slots) -> Slots:
    """All slots, with what sampling has changed of rows `own`."""
    changed = {name: put(getattr(slots, name), slot, getattr(own, name)) for name in ("last", "position", "counts")}
    return dataclasses.replace(slots, **changed)


def chunk(
    model: ModelDef,
    layout: PageLayout,
    params,
    state: ServeState,
    rows: ChunkRows,
    also: Callable[[Any, Chunk], Any] = lambda drafts, chunk: drafts,
    whole: str = "",
    parts: str = "",
):
    """Writes the keys and values of chunks, and samples after those that end a prompt. Returns (state, Sampled of [R],
    Scores of [R, C], of zeros where no row wants them, the last token's vector after the last norm, float32 [R, D]).
    `also`: what a proposer of drafts makes of the chunks. `whole`: all of them begin at position 0 (Paged.whole);
    `parts`: they may (Paged.parts)."""
    positions, ctx = chunk_context(model, layout, rows.where, rows.tokens.shape[1], whole, parts)
    ctx = dataclasses.replace(ctx, seen=seen_at(state.vectors, rows.seen), turns=rows.turns, until=rows.until)
    lm = model.model(params)
    hidden, pages, aux = lm(rows.tokens, positions, ctx, state.pages)
    slots, *found = chunk_end(lm, state.slots, rows, hidden)
    handed = aux.get(HANDED, hidden)
    read = Chunk(rows.where[:, 0], rows.where[:, 5] > 0, blind(ctx), rows.tokens, positions, handed)
    drafts = also(state.drafts, read)
    return dataclasses.replace(state, pages=pages, slots=slots, drafts=drafts), *found


def blind(ctx: Paged) -> Paged:
    """For proposers, which see no images, in decoding neither."""
    return dataclasses.replace(ctx, seen=None, turns=None, until=None)


def seen_at(vectors: jax.Array, places: jax.Array | None) -> Seen | None:
    """What tokens are that stand for the vectors at places int32 [B, T], -1: for none; None: the model does not see."""
    return None if places is None else Seen(take(vectors, jnp.maximum(places, 0)), places >= 0)


def look(encoder: Encoder, params, state: ServeState, inputs: dict[str, jax.Array], count, places) -> ServeState:
    """One image, in `count` patches (int32) of what `inputs` [P, ...] hold, is read: its vectors are in these places of
    the state's, int32 [P // merged], those that are none nowhere."""
    vectors = encoder(params, inputs, count).astype(state.vectors.dtype)
    where = jnp.where(places < 0, len(state.vectors), places)
    return dataclasses.replace(state, vectors=state.vectors.at[where].set(vectors, mode="drop"))


def chunk_context(
    model: ModelDef, layout: PageLayout, where: jax.Array, count: int, whole: str = "", parts: str = ""
) -> tuple[jax.Array, Paged]:
    """(positions int32 [R, C], what the tokens attend to) of chunks padded to `count` tokens."""
    slot, start, length, table, adapter = where[:, 0], where[:, 1], where[:, 2], where[:, 6:-1], where[:, -1]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    # Padding stands at the row's last position, so that attention goes no farther than the row does.
    positions = start[:, None] + jnp.minimum(index, jnp.maximum(length - 1, 0)[:, None])
    return positions, Paged.make(table, index < length[:, None], layout, model.execution, whole, parts, adapter, slot)


def chunk_end(lm: Transformer, slots: Slots, rows: ChunkRows, hidden: jax.Array):
    """What chunks end with, from hidden [R, C, D] after the last norm: (slots, and all that `chunk` gives besides)."""
    slot, start, length, samples, scored = (rows.where[:, i] for i in range(5))
    last = jnp.take_along_axis(hidden, jnp.maximum(length - 1, 0)[:, None, None], axis=1)
    logits = jax.reshard(lm.logits(last)[:, 0], WHOLE)
    slots = dataclasses.replace(
        slots,
        settings=put(slots.settings, slot, rows.settings),
        edits=put(slots.edits, slot, rows.edits),
        told=slots.told.at[slot].set(rows.told),
        shift=None if slots.shift is None else slots.shift.at[slot].set(rows.shift),
    )
    sampled, own = sampled_of(logits, take(slots, slot), start + length, samples > 0)
    score = jax.jit(lambda: _scores(lm, hidden, rows.targets), inline=True)  # traced once for its types and the branch
    none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(score))
    scores = jax.lax.cond(jnp.any(scored > 0), score, lambda: none)
    return keep_slots(slots, slot, own), sampled, scores, jax.reshard(last[:, 0], WHOLE).astype(jnp.float32)


def _scores(lm, hidden: jax.Array, targets: jax.Array) -> Scores:
    """hidden [R, C, D], a few positions' logits at a time."""
    R, C = targets.shape
    size = math.gcd(C, SCORED_AT_ONCE)

    def some(inputs):
        hidden, targets = inputs
        logits = jax.reshard(lm.logits(hidden), WHOLE)
        return scores_of(logits, targets)

    split = (jnp.moveaxis(a.reshape(R, C // size, size, *a.shape[2:]), 1, 0) for a in (hidden, targets))
    found = jax.lax.map(some, tuple(split))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(R, C, *a.shape[3:]), found)


def scores_of(logits: jax.Array, targets: jax.Array) -> Scores:
    """Of targets int32 [...] under logits float32 [..., V], as a token that is sampled is scored."""
    normaliser = log_normaliser(logits)[..., None]
    top, ids = jax.lax.top_k(logits, MAX_LOGPROBS)
    own = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return Scores((own - normaliser)[..., 0], rank_of(logits, own), ids.astype(jnp.int32), top - normaliser)


def set_counts(state: ServeState, slot: jax.Array, prompt: jax.Array, reply: jax.Array) -> ServeState:
    """What the request in a slot has said so far: slot int32 [R], prompt [R, ceil(V / 32)], reply [R, V]."""
    counts = set_rows(state.slots.counts, slot, prompt, reply)
    return dataclasses.replace(state, slots=dataclasses.replace(state.slots, counts=counts))


def set_allowed(state: ServeState, slot: jax.Array, allowed: jax.Array) -> ServeState:
    """The tokens that grammars allow next: slot int32 [R], allowed int32 [R, ceil(V / 32)]."""
    new = state.slots.allowed.at[slot].set(allowed)
    return dataclasses.replace(state, slots=dataclasses.replace(state.slots, allowed=new))


def set_last(state: ServeState, slot: jax.Array, token: jax.Array, position: jax.Array) -> ServeState:
    """The last tokens of slots and their positions, int32 [R] each, where what was sampled after them is dropped."""
    slots = state.slots
    new = dataclasses.replace(
        slots, last=slots.last.at[slot].set(token), position=slots.position.at[slot].set(position)
    )
    return dataclasses.replace(state, slots=new)


def hidden_of_one(
    model: ModelDef,
    layout: PageLayout,
    params,
    pages: Pages,
    table,
    token,
    position,
    active,
    adapter,
    slot=None,
    rows: Rows = "known",
    sure=None,
    **images,
):
    """One token of each row: (the model with its parameters, hidden [B, 1, D], pages). `images`: the context's `seen`
    and `turns`."""
    position = jnp.where(active, position, 0)
    of_rows = {"adapter": adapter, "slot": slot, "rows": rows, "sure": sure}
    ctx = Paged.make(table, active[:, None], layout, model.execution, **of_rows)
    ctx = dataclasses.replace(ctx, **images)
    lm = model.model(params)
    hidden, pages, _ = lm(token[:, None], position[:, None], ctx, pages)
    return lm, hidden, pages


def shifted(positions: jax.Array, shift: jax.Array | None) -> jax.Array | None:
    """Where tokens after images turn, int32 [B, T], which are at positions [B, T] and so far from there, [B]."""
    return None if shift is None else positions + shift[:, None]


def sampled_of(logits, own: Slots, position, active) -> tuple[Sampled, Slots]:
    """The next token of rows with logits float32 [B, V], and their slots with it where the row is active."""
    settings = dataclasses.replace(own.settings, position=position)
    sampled = sample_rows(
        logits,
        settings,
        counts=own.counts,
        edits=own.edits,
        allowed=own.allowed,
        top_n=MAX_LOGPROBS,
        told=jnp.where(active, own.told, 0),
    )
    last, at = jnp.where(active, sampled.token, own.last), jnp.where(active, position, own.position)
    counts: TokenCounts = count_tokens(own.counts, sampled.token, active)
    return sampled, dataclasses.replace(own, last=last, position=at, counts=counts)
