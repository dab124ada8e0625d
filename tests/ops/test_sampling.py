"""Sampling keeps exactly the tokens its options say, with their probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops.sampling import sample

PROBABILITY = np.array([0.4, 0.3, 0.2, 0.1], np.float32)


def frequencies(draws=4000, **options):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
    logits = jnp.broadcast_to(jnp.log(PROBABILITY), (draws, 4))
    return np.bincount(np.asarray(sample(logits, jax.random.key(0), **options)), minlength=4) / draws


@pytest.mark.parametrize(
    "options,expected",
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, np.square(PROBABILITY) / np.square(PROBABILITY).sum()),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),  # of 4/9, 3/9, 2/9 the first two reach a half
    ],
)
def test_frequencies(options, expected):
    # Four standard deviations of 4,000 draws are at most 0.032.
    np.testing.assert_allclose(frequencies(**options), expected, atol=0.032)
    assert (frequencies(**options)[np.asarray(expected) == 0] == 0).all()
