"""The tokens before each row, out of slots: whichever way rows come, each token sees those before it in its text."""

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.ops.text_rows import follow

BEFORE, NONE, SLOTS, UNSURE = 3, -5, 4, 4
TEXT = np.random.default_rng(0).integers(1, 100, (2, 40)).astype(np.int32)


def use(x, before):
    """Of each token those before it, [B, T, BEFORE]."""
    whole = jnp.concatenate([before, x], axis=1)
    return jnp.stack([whole[:, back : back + x.shape[1]] for back in range(BEFORE)], axis=2)


def wanted(text: int, first: int, count: int) -> np.ndarray:
    whole = np.concatenate([np.full(BEFORE, NONE), TEXT[text]])
    return np.array([whole[at : at + BEFORE] for at in range(first, first + count)])


@jax.jit(static_argnums=0)
def run(rows, x, kept, slot, position, sure, valid):
    return follow(rows, use, BEFORE, NONE, x, kept, slot, position, sure, valid)


def step(rows, kept, texts, positions, count, real=None, sure=None):
    """Rows of `count` tokens, of which the first `real` are there, each text in the slot behind its number."""
    real = [count] * len(texts) if real is None else real
    x = np.stack([np.resize(TEXT[t][p : p + count], count) for t, p in zip(texts, positions, strict=True)])
    position, slot = (np.array(a, np.int32) for a in (positions, [t + 1 for t in texts]))
    valid = np.arange(count) < np.array(real)[:, None]
    out, kept = run(rows, x, kept, slot, position, position if sure is None else np.array(sure, np.int32), valid)
    for row, (text, first, n) in enumerate(zip(texts, positions, real, strict=True)):
        assert out[row, :n].tolist() == wanted(text, first, n).tolist()
    return kept


def empty(unsure: int = 0):
    """Slots in which others' tokens lie."""
    last = jnp.full((SLOTS, BEFORE + unsure), 77, jnp.int32)
    return last, (jnp.full((SLOTS,), 9, jnp.int32) if unsure else None)


def test_chunks_of_any_length_and_single_tokens():
    kept = step("known", empty(), [0, 1], [0, 0], 1)  # a text may begin with a chunk of one token
    kept = step("known", kept, [0, 1], [1, 1], 5, real=[5, 2])
    kept = step("known", kept, [1, 0], [3, 6], 1)
    step("known", kept, [1], [4], 5)


def test_rows_of_one_token_in_turn():
    """Several of one text, beside padding, which has no tokens."""
    kept = step("in_turn", empty(), [0, 0, 1, 0, 0], [0, 1, 0, 2, 3], 1)
    kept = step("in_turn", kept, [1, 1, 0], [1, 2, 4], 1, real=[1, 1, 0])
    step("in_turn", kept, [1, 0], [3, 4], 1)


def test_drafts_of_which_some_stay():
    """A row reads the last token that is sure and drafts, and the next row goes on behind those that stayed."""
    kept, rng = step("known", empty(UNSURE), [0, 1], [0, 0], 4, real=[4, 3]), np.random.default_rng(1)
    place = [4, 3]
    for _ in range(6):
        kept = step("drafts", kept, [0, 1], place, UNSURE, real=[UNSURE, int(rng.integers(1, UNSURE + 1))])
        place = [p + int(rng.integers(1, UNSURE + 1)) for p in place]
    step("drafts", kept, [1, 0], place[::-1], UNSURE, real=[2, 4])


def test_what_drafts_is_sure_of_a_text_up_to_a_place():
    """A draft model reads tokens of its own one by one, none of which may stay."""
    kept = step("known", empty(UNSURE), [0, 1], [0, 0], 4, real=[4, 3])
    for ahead in range(UNSURE):
        kept = step("drafts", kept, [0, 1], [4 + ahead, 3 + ahead], 1, sure=[4, 3])
    for ahead in range(2):
        kept = step("drafts", kept, [0, 1], [6 + ahead, 3 + ahead], 1, sure=[6, 3])
