"""Losses of pairs of answers, from the log-probabilities of both: direct preference optimisation and its variants. In a
row, segments 2k + 1 and 2k + 2 are the chosen and the rejected answer of pair k (data/packing.py)."""

import jax
import jax.numpy as jnp


def pair_sums(values: jax.Array, segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Sums of values float32 [B, T] over each segment, of the chosen and of the rejected one of each pair: two [B, P],
    P the lesser of `most` and T // 2, since a segment has at least one token; 0 where a row has fewer pairs. No row may
    have more.

    A comparison with each segment's number instead of a scatter, for [B, T, P] numbers of temporary memory.
    """
    chosen = 2 * jnp.arange(min(most, segment_ids.shape[1] // 2)) + 1

    def over(segments):
        return jnp.sum(jnp.where(segment_ids[..., None] == segments, values[..., None], 0), axis=1)

    return over(chosen), over(chosen + 1)


def preference_loss(margin: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """-log sigmoid(margin), of the chosen answer's reward less the rejected one's (https://arxiv.org/abs/2305.18290,
    equation 7). With label_smoothing each label is wrong with this probability (conservative DPO,
    https://ericmitchell.ai/cdpo.pdf). Any shape."""
    right, wrong = -jax.nn.log_sigmoid(margin), -jax.nn.log_sigmoid(-margin)
    return (1 - label_smoothing) * right + label_smoothing * wrong if label_smoothing else right
