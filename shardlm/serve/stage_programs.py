"""The programs of pipeline stages: programs.py's, cut where the stream of one stage enters the next. A step of decoding
is a program of each stage; the token that the last one samples enters the first one again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlm.layers.context import Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.models.transformer import Transformer
from shardlm.serve import programs
from shardlm.serve.programs import ChunkRows
from shardlm.serve.speculation.programs import both
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.stages import Stage
from shardlm.serve.state import ServeState, Slots, take


class Steps(NamedTuple):
    """What decodes: functions of (parameters, what is donated, ...). `begin`, `last_step` and `end` run in the last
    stage, `step` in each of the others; what leaves a stage enters the next one, and after the last the first again."""

    begin: Callable
    step: Callable
    last_step: Callable
    end: Callable


def begin(most: int, _, kept: tuple[Slots, Any], where: jax.Array):
    """Before the steps of a decode (DecodeRows.where): (slots and the proposer's state, what the group of rows holds:
    their own slots and room for what `most` steps sample, what enters the first stage)."""
    own = take(kept[0], where[:, 0])
    return kept, (own, programs.none_sampled(where.shape[0], most)), (own.last[:, None],)


def end(_, kept: tuple[Slots, Any], where: jax.Array, own: Slots) -> tuple[Slots, Any]:
    """After the steps."""
    return programs.keep_slots(kept[0], where[:, 0], own), kept[1]


def step(stage: Stage, layout: PageLayout, params, pages: Pages, where: jax.Array, entering: tuple, i: jax.Array):
    """Step i of a decode in any stage but the last: (pages, what leaves it ([B, 1, D],)). `entering`: tokens
    (int32 [B, 1],) in the first stage, else what left the one before."""
    _, x, pages = _step(stage, layout, params, pages, where, entering, i)
    return pages, (x,)


def last_step(stage: Stage, layout: PageLayout, params, state: tuple, where, entering: tuple, i: jax.Array):
    """The same in the last stage: ((pages, the proposer's state, what the group holds), tokens (int32 [B, 1],))."""
    pages, drafts, (own, found) = state
    lm, x, pages = _step(stage, layout, params, pages, where, entering, i)
    logits = jax.reshard(lm.logits(lm.finish(x))[:, 0], programs.WHOLE)
    sampled, own = programs.sampled_of(logits, own, where[:, 1] + i + 1, i < where[:, 2])
    found = jax.tree.map(lambda all, one: all.at[:, i].set(one), found, sampled)
    return (pages, drafts, (own, found)), (own.last[:, None],)


def chunk(
    stage: Stage,
    layout: PageLayout,
    params,
    pages: Pages,
    where: jax.Array,
    entering: jax.Array,
    whole: str = "",
    parts: str = "",
):
    """Chunks (ChunkRows.where) in any stage but the last: (pages, what leaves it [R, C, D]). `entering`: tokens int32
    [R, C] in the first stage, else what left the one before."""
    positions, ctx = programs.chunk_context(stage.model, layout, where, entering.shape[1], whole, parts)
    _, x, pages = through(stage, params, pages, entering, positions, ctx)
    return pages, x


def last_chunk(
    stage: Stage,
    layout: PageLayout,
    params,
    state: ServeState,
    rows: ChunkRows,
    entering: jax.Array,
    whole: str = "",
    parts: str = "",
    proposer: Proposer | None = None,
):
    """The same in the last stage, returning as programs.chunk does; with a proposer, parameters are its own too."""
    params, proposers = both(params) if proposer else (params, None)
    positions, ctx = programs.chunk_context(stage.model, layout, rows.where, rows.tokens.shape[1], whole, parts)
    lm, x, pages = through(stage, params, state.pages, entering, positions, ctx)
    hidden, drafts = lm.finish(x), state.drafts
    slots, *found = programs.chunk_end(lm, state.slots, rows, hidden)
    if proposer:
        read = programs.Chunk(rows.where[:, 0], rows.where[:, 5] > 0, ctx, rows.tokens, positions, hidden)
        drafts = proposer.read(proposers, drafts, read)
    return ServeState(pages, slots, drafts), *found


def _step(stage: Stage, layout: PageLayout, params, pages: Pages, where: jax.Array, entering: tuple, i: jax.Array):
    active = i < where[:, 2]
    position = jnp.where(active, where[:, 1] + i, 0)
    of_rows = {"adapter": where[:, -1], "slot": where[:, 0]}
    ctx = Paged.make(where[:, 3:-1], active[:, None], layout, stage.model.execution, **of_rows)
    return through(stage, params, pages, entering[0], position[:, None], ctx)


def through(
    stage: Stage, params, pages: Pages, entering: jax.Array, positions: jax.Array, ctx: Paged
) -> tuple[Transformer, jax.Array, Pages]:
    """(the stage's layers, what leaves them [B, T, D], pages)."""
    lm = stage.lm(params)
    x = lm.embed(entering, positions) if stage.first else entering
    x, pages, _ = lm.run(x, positions, ctx, pages)
    return lm, x, pages
