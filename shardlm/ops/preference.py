"""Losses of pairs of answers from the log-probabilities of both, as TRL has them: direct preference optimisation and
its variants. In a row, segments 2k + 1 and 2k + 2 are the chosen and the rejected answer of pair k
(data/packing.py)."""

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


def hinge_loss(margin: jax.Array) -> jax.Array:
    """max(0, 1 - margin), of rewards as in `preference_loss` (SLiC-HF, https://arxiv.org/abs/2305.10425; RSO,
    https://arxiv.org/abs/2309.06657)."""
    return jax.nn.relu(1 - margin)


def identity_loss(gap: jax.Array, beta: float) -> jax.Array:
    """(gap - 1 / (2 beta))^2, of the chosen answer's log-ratio to the reference less the rejected one's (IPO,
    https://arxiv.org/abs/2310.12036, equation 17), each a mean over the answer's tokens, as its authors have it."""
    return jnp.square(gap - 1 / (2 * beta))


def prospect_loss(margin: jax.Array) -> jax.Array:
    """1 - sigmoid(margin), of an answer's reward less what the model has moved by, both with the other sign where the
    answer is not wanted (KTO, https://arxiv.org/abs/2402.01306, equation 8)."""
    return jax.nn.sigmoid(-margin)


def odds_loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """-log sigmoid of the log-ratio of both answers' odds (ORPO, https://arxiv.org/abs/2403.07691, equations 4 and 7),
    from mean log-probabilities of their tokens."""
    return -jax.nn.log_sigmoid((chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected)))


def _log_of_rest(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) of what is below 0. Of an answer that is certain, whose odds are infinite, no gradient comes."""
    x = jnp.minimum(x, -jnp.finfo(x.dtype).eps)
    far = x < -jnp.log(2.0)  # where the one form loses digits, and the other is infinite where the one is asked
    return jnp.where(far, jnp.log1p(-jnp.exp(jnp.where(far, x, -1.0))), jnp.log(-jnp.expm1(jnp.where(far, -1.0, x))))
