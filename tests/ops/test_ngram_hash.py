"""Rows of n-grams, by the definition in integers of any size."""

import jax
import numpy as np

from shardlm.ops.ngram_hash import NgramHash, _modulo, _times, ngram_rows, primes


def by_the_definition(own: NgramHash, row: list[int]) -> np.ndarray:
    """Of one text."""
    heads = len(own.sizes) // own.before
    found = np.zeros((len(row), len(own.sizes)), np.int64)
    for t in range(len(row)):
        mixed, ended = row[t] * own.multipliers[0], False
        for back in range(1, own.before + 1):
            ended = ended or t < back or row[t - back] == own.eos
            mixed ^= (own.eos if ended else row[t - back]) * own.multipliers[back]
            for head in range((back - 1) * heads, back * heads):
                found[t, head] = mixed % own.sizes[head] + own.firsts[head]
    return found


def test_rows_are_those_of_integers_of_64_bits():
    """With the sizes that are published; texts that follow each other in a row, and one that goes on."""
    own = NgramHash.of_layer(1, 3, 248_320, 8, 20_000_000, 1234, eos=5)
    assert len(own.sizes) == 16 and len(set(own.sizes)) == 16 and min(own.sizes) > 20_000_000
    assert max(own.multipliers) * 248_320 < 2**63 and max(own.multipliers) > 2**40
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 248_320, n).tolist() for n in (9, 14, 6)]
    texts[1][4] = texts[1][8] = 5
    first, second, third = texts
    tokens = np.array([first + second, third + first + second[:8]], np.int32)
    before = np.array([[0, 0], second[4:6]], np.int32)  # of which the first row sees nothing
    text = np.array([[1] * 9 + [2] * 14, [0] * 6 + [1] * 9 + [2] * 8], np.int32)
    found = np.asarray(jax.jit(ngram_rows, static_argnums=0)(own, tokens, before, text))
    went_on = by_the_definition(own, second[4:6] + third)[2:]
    np.testing.assert_array_equal(found[0], np.concatenate([by_the_definition(own, t) for t in (first, second)]))
    expected = [went_on, by_the_definition(own, first), by_the_definition(own, second[:8])]
    np.testing.assert_array_equal(found[1], np.concatenate(expected))


def test_words_of_32_bits_multiply_and_divide_as_integers_do():
    rng = np.random.default_rng(1)
    tokens = np.array([0, 1, 2**31 - 1, *rng.integers(0, 2**31, 200)], np.int32)
    for by, size in ((1, 2), (2**63 - 1, 2**31 - 1), (int(rng.integers(2**62)), 20_000_003), (2**32 + 1, 65_537)):
        words = _times(tokens, by)
        exact = [int(t) * by % 2**64 for t in tokens]
        assert [(int(a) << 32) + int(b) for a, b in zip(*words, strict=True)] == exact
        assert np.asarray(_modulo(words, size)).tolist() == [n % size for n in exact]
    assert primes(20, 4) == (23, 29, 31, 37)
