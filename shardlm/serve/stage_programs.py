"""The programs of pipeline stages: programs.py's, cut where the stream of one stage enters the next. A step of decoding
is a program of each stage; the token that the last one samples enters the first one again.

The vectors of images are in the first stage. Where layers of later ones add some of their own (layers/seen.py), what is
left of them is handed on beside the stream.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlm.layers.context import HANDED, Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.layers.seen import Seen
from shardlm.models.transformer import Transformer
from shardlm.serve import programs
from shardlm.serve.programs import ChunkRows
from shardlm.serve.speculation.programs import both
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.stages import Stage
from shardlm.serve.state import ServeState, Slots, take

Entering = tuple[jax.Array, ...]  # tokens int32 in the first stage, else the stream, the streams that were handed out
# before, where there are any, and what is left of vectors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageRows:
    """What describes rows to every stage.

    where  int32 [B, ...], of DecodeRows, ChunkRows or token_rows.TokenRows
    seen, turns, until  as those have them
    shift  int32 [B], how far rotations are from the places of tokens that follow; None: tokens have one axis
    """

    where: jax.Array
    seen: jax.Array | None = None
    turns: jax.Array | None = None
    until: jax.Array | None = None
    shift: jax.Array | None = None

    @classmethod
    def of(cls, rows: ChunkRows) -> "StageRows":
        return cls(rows.where, rows.seen, rows.turns, rows.until)


class Steps(NamedTuple):
    """What decodes: functions of (parameters, what is donated, ...). `begin`, `last_step` and `end` run in the last
    stage, `step` in each of the others; what leaves a stage enters the next one, and after the last the first again."""

    begin: Callable
    step: Callable
    last_step: Callable
    end: Callable


def begin(most: int, _, kept: tuple[Slots, Any], rows: StageRows):
    """Before the steps of a decode: (slots and the proposer's state, what the group of rows holds:
    their own slots and room for what `most` steps sample, what enters the first stage)."""
    own = take(kept[0], rows.where[:, 0])
    return kept, (own, programs.none_sampled(rows.where.shape[0], most)), (own.last[:, None],)


def end(_, kept: tuple[Slots, Any], rows: StageRows, own: Slots) -> tuple[Slots, Any]:
    """After the steps."""
    return programs.keep_slots(kept[0], rows.where[:, 0], own), kept[1]


def step(stage: Stage, layout: PageLayout, params, state: ServeState, rows: StageRows, entering: Entering, i):
    """Step i (int32) of a decode in any stage but the last: (the state, what leaves it ([B, 1, D],)). `entering`:
    tokens (int32 [B, 1],) in the first stage, else what left the one before."""
    _, x, pages, _ = _step(stage, layout, params, state.pages, rows, entering, i)
    return dataclasses.replace(state, pages=pages), (x,)


def last_step(stage: Stage, layout: PageLayout, params, state: tuple, rows: StageRows, entering: Entering, i):
    """The same in the last stage: ((pages, the proposer's state, what the group holds), tokens (int32 [B, 1],))."""
    (pages, drafts, (own, found)), where = state, rows.where
    lm, x, pages, _ = _step(stage, layout, params, pages, rows, entering, i)
    logits = jax.reshard(lm.logits(lm.finish(x))[:, 0], programs.WHOLE)
    sampled, own = programs.sampled_of(logits, own, where[:, 1] + i + 1, i < where[:, 2])
    found = jax.tree.map(lambda all, one: all.at[:, i].set(one), found, sampled)
    return (pages, drafts, (own, found)), (own.last[:, None],)


def chunk(
    stage: Stage,
    layout: PageLayout,
    params,
    state: ServeState,
    rows: StageRows,
    entering: Entering,
    whole: str = "",
    parts: str = "",
):
    """Chunks in any stage but the last: (the state, what leaves it, each [R, C, ...]). `entering`: tokens (int32
    [R, C],) in the first stage, else what left the one before."""
    positions, ctx = _chunk_context(stage, layout, state, rows, entering, whole, parts)
    _, x, pages, handed = through(stage, params, state.pages, entering[0], positions, ctx, heard_of(stage, entering))
    return dataclasses.replace(state, pages=pages), x, *handed, *left_of(stage, ctx.seen)


def last_chunk(
    stage: Stage,
    layout: PageLayout,
    params,
    state: ServeState,
    rows: ChunkRows,
    entering: Entering,
    whole: str = "",
    parts: str = "",
    proposer: Proposer | None = None,
):
    """The same in the last stage, returning as programs.chunk does; with a proposer, parameters are its own too."""
    params, proposers = both(params) if proposer else (params, None)
    positions, ctx = _chunk_context(stage, layout, state, rows, entering, whole, parts)
    lm, x, pages, handed = through(stage, params, state.pages, entering[0], positions, ctx, heard_of(stage, entering))
    hidden, drafts = lm.finish(x), state.drafts
    slots, *found = programs.chunk_end(lm, state.slots, rows, hidden)
    if proposer:
        plain = programs.blind(ctx)
        [hidden] = handed or [hidden]
        read = programs.Chunk(rows.where[:, 0], rows.where[:, 5] > 0, plain, rows.tokens, positions, hidden)
        drafts = proposer.read(proposers, drafts, read)
    return ServeState(pages, slots, drafts), *found


def _chunk_context(
    stage: Stage, layout, state, rows: StageRows | ChunkRows, entering: Entering, whole: str, parts: str
):
    count = entering[0].shape[1]
    positions, ctx = programs.chunk_context(stage.model, layout, rows.where, count, whole, parts)
    seen = seen_in(stage, state.vectors, rows.seen, entering)
    return positions, dataclasses.replace(ctx, seen=seen, turns=rows.turns, until=rows.until)


def seen_in(stage: Stage, vectors: jax.Array | None, places: jax.Array | None, entering: Entering) -> Seen | None:
    """As programs.seen_at, for a stage: of the first one's vectors, or of what is left of them."""
    if places is None or stage.first:
        return programs.seen_at(vectors, places)
    left = entering[1 + len(heard_of(stage, entering)) :]
    return Seen(left[0], places >= 0) if left else None


def heard_of(stage: Stage, entering: Entering) -> Entering:
    """Of what enters a stage with chunks, the streams that those before it handed out."""
    return entering[1:2] if stage.heard else ()


def left_of(stage: Stage, seen: Seen | None) -> Entering:
    """What is left of vectors for the stages behind."""
    left = seen and seen.past(stage.count, stage.model.config.embed_dim)
    return () if left is None else (left,)


def _step(stage: Stage, layout: PageLayout, params, pages: Pages, rows: StageRows, entering: Entering, i: jax.Array):
    where = rows.where
    active = i < where[:, 2]
    position = jnp.where(active, where[:, 1] + i, 0)
    of_rows = {"adapter": where[:, -1], "slot": where[:, 0]}
    ctx = Paged.make(where[:, 3:-1], active[:, None], layout, stage.model.execution, **of_rows)
    ctx = dataclasses.replace(ctx, turns=programs.shifted(position[:, None], rows.shift))
    return through(stage, params, pages, entering[0], position[:, None], ctx)


def through(
    stage: Stage, params, pages: Pages, entering: jax.Array, positions: jax.Array, ctx: Paged, heard: Entering = ()
) -> tuple[Transformer, jax.Array, Pages, Entering]:
    """(the stage's layers, what leaves them [B, T, D], pages, the streams that this stage and those before it, which
    `heard` holds, hand out, side by side; () where there are none)."""
    lm = stage.lm(params)
    x = lm.enter(entering, positions, ctx) if stage.first else entering
    x, pages, aux = lm.run(x, positions, ctx, pages)
    handed = (*heard, aux[HANDED]) if HANDED in aux else heard
    return lm, x, pages, (jnp.concatenate(handed, axis=-1),) if len(handed) > 1 else handed
