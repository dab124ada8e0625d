"""The programs of pipeline stages that verify drafts: a step of speculation/programs.py, cut as stage_programs.py cuts
one of decoding. What proposes is in the last stage, with its own weights and pages; the drafts it makes for the next
step leave that stage with the last token, and go through all stages with where they stand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.ops.batch_sampling import Sampled
from shardlm.serve import programs
from shardlm.serve.speculation.programs import Tally, both, nothing_yet, places, proposed, rows_of, verified
from shardlm.serve.speculation.proposer import Proposer, Rows
from shardlm.serve.stage_programs import StageRows, through
from shardlm.serve.stages import Stage
from shardlm.serve.state import ServeState, Slots, take

Held = tuple[Slots, Sampled, Tally]  # the rows' own slots, what was sampled so far, what came of drafts
Fed = tuple[jax.Array, ...]  # tokens int32 [B, 1 + K] or the stream [B, 1 + K, D]; the tokens; how many drafts count,
# the last token's position, and how many tokens the row may still sample, int32 [B] each; and in stages but the first
# the streams that those before handed out, where there are any


def begin(proposer: Proposer, most: int, params, kept: tuple[Slots, Any], rows: StageRows):
    """As stage_programs.begin; `params` are the proposer's."""
    (slots, drafts), where = kept, rows.where
    own, out = take(slots, where[:, 0]), nothing_yet(proposer, where.shape[0], most)
    drafts, entering = _proposed(proposer, params, drafts, where, (own, *out), True)
    return (slots, drafts), (own, *out), entering


def step(stage: Stage, layout: PageLayout, params, state: ServeState, rows: StageRows, entering: Fed, left: jax.Array):
    """A step in any stage but the last: (the state, what leaves it)."""
    _, x, pages, handed = _read(stage, layout, params, state.pages, rows, entering)
    return dataclasses.replace(state, pages=pages), (x, *entering[1:5], *handed)


def last_step(
    proposer: Proposer, stage: Stage, layout: PageLayout, params, state: tuple, rows, entering: Fed, left: jax.Array
):
    """The same in the last stage: ((pages, the proposer's state, Held), what enters the next step). `left`: steps after
    this one; there are no drafts for one that does not come."""
    (pages, drafts, (own, found, tally)), (own_params, proposers), where = state, both(params), rows.where
    lm, x, pages, handed = _read(stage, layout, own_params, pages, rows, entering)
    hidden = lm.finish(x)
    logits = jax.reshard(lm.logits(hidden), programs.WHOLE)
    [hidden] = handed or [hidden]
    _, fed, count, position, room, *_ = entering
    read = Rows(where[:, 0], where[:, 3:-1], position, room, own, where[:, -1])
    own, drafts, *out = verified(proposer, proposers, drafts, read, fed, count, hidden, logits, found, tally)
    drafts, entering = _proposed(proposer, proposers, drafts, where, (own, *out), left > 0)
    return (pages, drafts, (own, *out)), entering


def _proposed(proposer: Proposer, params, drafts: Any, where: jax.Array, held: Held, wanted) -> tuple[Any, Fed]:
    own, _, tally = held
    rows = rows_of(where, own, tally)
    rows = dataclasses.replace(rows, room=jnp.where(wanted, rows.room, 0))
    fed, count, drafts = proposed(proposer, params, drafts, rows)
    return drafts, (fed, fed, count, rows.position, rows.room)


def _read(stage: Stage, layout: PageLayout, params, pages, rows: StageRows, entering: Fed):
    (x, fed, count, position, room, *heard), where = entering, rows.where
    positions, valid = places(position, room, count, fed.shape[1])
    of_rows = {"adapter": where[:, -1], "slot": where[:, 0], "rows": "drafts"}
    ctx = Paged.make(where[:, 3:-1], valid, layout, stage.model.execution, **of_rows)
    ctx = dataclasses.replace(ctx, turns=programs.shifted(positions, rows.shift))
    return through(stage, params, pages, x, positions, ctx, tuple(heard))
