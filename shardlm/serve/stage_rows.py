"""The programs of pipeline stages in the deterministic mode: token_rows.py's, cut as stage_programs.py cuts a step of
decoding. A stage has one program, of one shape, for every token."""

from typing import Any

import jax
import jax.numpy as jnp

from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.serve import token_rows
from shardlm.serve.stage_programs import through
from shardlm.serve.stages import Stage
from shardlm.serve.state import Slots, take
from shardlm.serve.token_rows import Said

Held = tuple[Slots, Said]
Fed = tuple[jax.Array, ...]  # the token that a row sampled last int32 [M, 1], or the stream [M, 1, D]


def begin(most: int, width: int, _, kept: tuple[Slots, Any], where: jax.Array):
    """As stage_programs.begin, of TokenRows.where; `width` is the stream's."""
    own = take(kept[0], where[:, 0])
    return kept, (own, Said.none(where.shape[0], most, width)), (own.last[:, None],)


def step(stage: Stage, layout: PageLayout, params, pages, where: jax.Array, entering: Fed, i: jax.Array):
    """Step i in any stage but the last: (pages, what leaves it)."""
    _, x, pages = _read(stage, layout, params, pages, where, entering, i)
    return pages, (x,)


def last_step(stage: Stage, layout: PageLayout, params, state: tuple, where, entering: Fed, i: jax.Array):
    """The same in the last stage: ((pages, (), Held), what enters the next step)."""
    pages, drafts, (own, said) = state
    lm, x, pages = _read(stage, layout, params, pages, where, entering, i)
    own, said = token_rows.sampled(lm, lm.finish(x), where, own, said, i)
    return (pages, drafts, (own, said)), (own.last[:, None],)


def end(_, kept: tuple[Slots, Any], where: jax.Array, own: Slots) -> tuple[Slots, Any]:
    """After the last step."""
    return token_rows.kept(kept[0], where, own), kept[1]


def _read(stage: Stage, layout: PageLayout, params, pages, where: jax.Array, entering: Fed, i: jax.Array):
    [x] = entering
    last = x[:, 0] if stage.first else jnp.zeros(where.shape[0], jnp.int32)  # which other stages do not read
    read, position, active = token_rows.fed(where, last, i)
    x = read[:, None] if stage.first else x
    position = jnp.where(active, position, 0)
    of_rows = {"adapter": where[:, -1], "slot": where[:, 0], "rows": "in_turn"}
    ctx = Paged.make(where[:, 6:-1], active[:, None], layout, stage.model.execution, **of_rows)
    return through(stage, params, pages, x, position[:, None], ctx)
