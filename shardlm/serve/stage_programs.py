"""The programs of pipeline stages: programs.py's, cut where the stream of one stage enters the next. A step of decoding
is a program of each stage; the token that the last one samples enters the first one again."""

import jax
import jax.numpy as jnp

from shardlm.layers.context import Paged, Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.models.transformer import Transformer
from shardlm.ops.batch_sampling import Sampled
from shardlm.serve import programs
from shardlm.serve.programs import ChunkRows
from shardlm.serve.stages import Stage
from shardlm.serve.state import ServeState, Slots, take


def begin(most: int, _, slots: Slots, where: jax.Array) -> tuple[Slots, Slots, Sampled]:
    """Before the steps of a decode (DecodeRows.where), in the last stage: (slots, those of the rows, and room for what
    `most` steps sample)."""
    return slots, take(slots, where[:, 0]), programs.none_sampled(where.shape[0], most)


def end(_, slots: Slots, where: jax.Array, own: Slots) -> tuple[Slots]:
    """After the steps."""
    return (programs.keep_slots(slots, where[:, 0], own),)


def step(stage: Stage, layout: PageLayout, params, pages: Pages, where: jax.Array, entering: jax.Array, i: jax.Array):
    """Step i of a decode in any stage but the last: (pages, what leaves it [B, 1, D]). `entering`:
    tokens int32 [B] in the first stage, else what left the one before."""
    _, x, pages = _step(stage, layout, params, pages, where, entering[:, None] if stage.first else entering, i)
    return pages, x


def last_step(
    stage: Stage, layout: PageLayout, params, held: tuple[Pages, Slots, Sampled], where, entering, i: jax.Array
):
    """The same in the last stage: ((pages, the rows' own slots, what was sampled so far), tokens int32 [B])."""
    pages, own, found = held
    lm, x, pages = _step(stage, layout, params, pages, where, entering, i)
    logits = jax.reshard(lm.logits(lm.finish(x))[:, 0], programs.WHOLE)
    sampled, own = programs.sampled_of(logits, own, where[:, 1] + i + 1, i < where[:, 2])
    found = jax.tree.map(lambda all, one: all.at[:, i].set(one), found, sampled)
    return (pages, own, found), own.last


def chunk(stage: Stage, layout: PageLayout, params, pages: Pages, where: jax.Array, entering: jax.Array):
    """Chunks (ChunkRows.where) in any stage but the last: (pages, what leaves it [R, C, D]). `entering`: tokens int32
    [R, C] in the first stage, else what left the one before."""
    positions, ctx = programs.chunk_context(stage.model, layout, where, entering.shape[1])
    _, x, pages = _through(stage, params, pages, entering, positions, ctx)
    return pages, x


def last_chunk(stage: Stage, layout: PageLayout, params, state: ServeState, rows: ChunkRows, entering: jax.Array):
    """The same in the last stage, returning as programs.chunk does."""
    positions, ctx = programs.chunk_context(stage.model, layout, rows.where, rows.tokens.shape[1])
    lm, x, pages = _through(stage, params, state.pages, entering, positions, ctx)
    slots, *found = programs.chunk_end(lm, state.slots, rows, lm.finish(x))
    return ServeState(pages, slots), *found


def _step(stage: Stage, layout: PageLayout, params, pages: Pages, where: jax.Array, entering: jax.Array, i: jax.Array):
    active = i < where[:, 2]
    position = jnp.where(active, where[:, 1] + i, 0)
    ctx = Paged.make(where[:, 3:], active[:, None], layout, stage.model.execution)
    return _through(stage, params, pages, entering, position[:, None], ctx)


def _through(
    stage: Stage, params, pages: Pages, entering: jax.Array, positions: jax.Array, ctx: Paged
) -> tuple[Transformer, jax.Array, Pages]:
    """(the stage's layers, what leaves them [B, T, D], pages)."""
    lm = stage.lm(params)
    x = lm.embed(entering, positions) if stage.first else entering
    x, pages, _ = lm.run(x, positions, ctx, pages)
    return lm, x, pages
