"""The programs of pipeline stages in the deterministic mode: token_rows.py's, cut as stage_programs.py cuts a step of
decoding. A stage has one program, of one shape, for every token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.serve import token_rows
from shardlm.serve.stage_programs import StageRows, left_of, seen_in, through
from shardlm.serve.stages import Stage
from shardlm.serve.state import ServeState, Slots, take
from shardlm.serve.token_rows import Said

Held = tuple[Slots, Said]
Fed = tuple[jax.Array, ...]  # the token that a row sampled last int32 [M, 1]; or the stream [M, 1, D] and, where the
# stage's layers add vectors of images, what is left of these [M, 1, ...]


def begin(most: int, width: int, _, kept: tuple[Slots, Any], rows: StageRows):
    """As stage_programs.begin, of TokenRows; `width` is the stream's."""
    own = take(kept[0], rows.where[:, 0])
    return kept, (own, Said.none(rows.where.shape[0], most, width)), (own.last[:, None],)


def step(stage: Stage, layout: PageLayout, params, state: ServeState, rows: StageRows, entering: Fed, i: jax.Array):
    """Step i in any stage but the last: (the state, what leaves it)."""
    _, x, pages, left = _read(stage, layout, params, state.pages, state.vectors, rows, entering, i)
    return dataclasses.replace(state, pages=pages), (x, *left)


def last_step(stage: Stage, layout: PageLayout, params, state: tuple, rows: StageRows, entering: Fed, i: jax.Array):
    """The same in the last stage: ((pages, (), Held), what enters the next step)."""
    pages, drafts, (own, said) = state
    lm, x, pages, _ = _read(stage, layout, params, pages, None, rows, entering, i)
    own, said = token_rows.sampled(lm, lm.finish(x), rows.where, own, said, i)
    return (pages, drafts, (own, said)), (own.last[:, None],)


def end(_, kept: tuple[Slots, Any], rows: StageRows, own: Slots) -> tuple[Slots, Any]:
    """After the last step."""
    return token_rows.kept(kept[0], rows.where, own), kept[1]


def _read(
    stage: Stage, layout: PageLayout, params, pages, vectors: jax.Array | None, rows: StageRows, entering: Fed, i
):
    x, where = entering[0], rows.where
    last = x[:, 0] if stage.first else jnp.zeros(where.shape[0], jnp.int32)  # which other stages do not read
    read, position, active = token_rows.fed(where, last, i)
    x = read[:, None] if stage.first else x
    position = jnp.where(active, position, 0)
    of_rows = {"adapter": where[:, -1], "slot": where[:, 0], "rows": "in_turn"}
    ctx = Paged.make(where[:, 6:-1], active[:, None], layout, stage.model.execution, **of_rows)
    places, turns = token_rows.of_images(rows, position, rows.shift, i)
    seen = seen_in(stage, vectors, places, entering)
    ctx = dataclasses.replace(ctx, seen=seen, turns=turns)
    return *through(stage, params, pages, x, position[:, None], ctx)[:3], left_of(stage, seen)
