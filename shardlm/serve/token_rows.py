"""The program of the deterministic mode: rows of one token each, those of prompts and those that decode alike. One
executable of one shape computes every token, so that its bits do not depend on what else is there, on how a prompt was
cut, or on whether a token was generated or read again (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/
keeps kernels and makes each invariant; here nothing is asked of them but that a row's place does not matter)."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.layers.page_layout import PageLayout
from shardlm.ops.batch_sampling import Edits, RowSettings, Sampled
from shardlm.serve.programs import WHOLE, Scores, hidden_of_one, sampled_of, scores_of
from shardlm.serve.sampling_params import MAX_LOGPROBS
from shardlm.serve.state import ServeState, put, take
from shardlm.state import ModelDef


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of a token each. Of a prompt, a row before another of the same request has the smaller position. Padding has
    the last slot, no samples and no token.

    where   int32 [M, 6 + W]: slot, position, samples, the token or -1 for the slot's last one, the token whose score is
            wanted, whether it is (0 or 1), and the row's pages in each group
    """

    where: jax.Array


def run(model: ModelDef, layout: PageLayout, most: int, params, state: ServeState, rows: TokenRows, steps: jax.Array):
    """`steps` (int32, at most `most`) tokens for every row that samples, each fed to the next step; a row with fewer
    samples idles. Returns (state, Sampled of [M, most, ...], Scores of [M], float32 [M, D] of the first step after the
    last norm)."""
    slot, start, samples, token, target, scored = (rows.where[:, i] for i in range(6))
    table = rows.where[:, 6:]
    M = slot.shape[0]
    own = take(state.slots, slot)

    def step(i, carry):
        pages, own, found, scores, first = carry
        given = (i == 0) & (token >= 0)
        sampling = i < samples
        position = start + i
        read = jnp.where(given, token, own.last)
        lm, hidden, pages = hidden_of_one(model, layout, params, pages, table, read, position, given | sampling)
        logits = jax.reshard(lm.logits(hidden)[:, 0], WHOLE)
        sampled, own = sampled_of(logits, own, position + 1, sampling)
        found = jax.tree.map(lambda all, one: all.at[:, i].set(one), found, sampled)
        wanted = (i == 0) & jnp.any(scored > 0)
        scores = jax.lax.cond(wanted, lambda: scores_of(logits, target), lambda: scores)
        whole = jax.reshard(hidden[:, 0], WHOLE).astype(jnp.float32)
        return pages, own, found, scores, jnp.where(i == 0, whole, first)

    none = lambda shape, dtype: jnp.zeros((M, *shape), dtype)  # noqa: E731
    n, integer, real = MAX_LOGPROBS, jnp.int32, jnp.float32
    found = Sampled(none((most,), integer), none((most,), real), none((most, n), integer), none((most, n), real))
    scores = Scores(none((), real), none((), integer), none((n,), integer), none((n,), real))
    first = none((model.config.embed_dim,), real)
    pages, own, found, scores, first = jax.lax.fori_loop(0, steps, step, (state.pages, own, found, scores, first))
    slots, padding = state.slots, state.slots.last.shape[0] - 1
    kept = jnp.where(samples > 0, slot, padding)  # several rows may read a slot; one at most samples
    last, counts = slots.last.at[kept].set(own.last), put(slots.counts, kept, own.counts)
    return ServeState(pages, dataclasses.replace(slots, last=last, counts=counts)), found, scores, first


def begin(state: ServeState, slot: jax.Array, settings: RowSettings, edits: Edits, top: jax.Array) -> ServeState:
    """The requests that slots int32 [R] serve from now on."""
    slots = state.slots
    new = dataclasses.replace(
        slots,
        settings=put(slots.settings, slot, settings),
        edits=put(slots.edits, slot, edits),
        top=slots.top.at[slot].set(top),
    )
    return dataclasses.replace(state, slots=new)
