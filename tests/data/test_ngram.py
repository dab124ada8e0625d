import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_documents import documents_of

from shardlm.data import ngram
from shardlm.data.loader import validation_batches
from shardlm.errors import ShardlmError


def random_documents(rng, documents, length=80):
    """A chain over ten tokens that mostly counts upwards: entropy far below that of its unigrams."""
    made = []
    for _ in range(documents):
        tokens = [int(rng.integers(1, 11))]
        for _ in range(length):
            tokens.append(tokens[-1] % 10 + 1 if rng.random() < 0.9 else int(rng.integers(1, 11)))
        made.append([*tokens, 0])
    return made


@pytest.fixture(scope="module")
def fitted(make_shards):
    return ngram.fit(make_shards(random_documents(np.random.default_rng(0), 400)))


@pytest.mark.parametrize("context", [0, 1, 5, 10, 200])  # ends documents, frequent, never seen
def test_probabilities_sum_to_one(fitted, context):
    unigram, bigram = fitted.probabilities(np.full(257, context), np.arange(257))
    assert unigram.sum() == pytest.approx(1) and bigram.sum() == pytest.approx(1)
    assert unigram.min() > 0 and bigram.min() > 0


def test_it_finds_the_structure_of_the_text(fitted, make_shards):
    validation = make_shards(random_documents(np.random.default_rng(1), 40))
    found = ngram.evaluate(fitted, validation_batches(validation, seq_len=32, global_batch=4))
    # A document ends after 81 tokens; before that, 0.91 counts upwards and 0.01 goes to each other token.
    ends, step = np.array([1, 80]) / 81, np.array([0.91, *[0.01] * 9])
    entropy = -(ends * np.log(ends)).sum() - 80 / 81 * (step * np.log(step)).sum()
    assert found.unigram == pytest.approx(np.log(10), rel=0.05)
    assert found.bigram == pytest.approx(entropy, rel=0.03)  # sampling of 3,240 tokens, smoothing of 32,400
    assert found.num_tokens == validation.num_tokens - validation.num_documents


def test_only_scored_positions_count(fitted):
    tokens = np.array([[1, 2, 3, 4]])
    batch = {"tokens": tokens, "targets": tokens + 1, "loss_mask": np.array([[1, 0, 1, 0]], np.float32)}
    _, bigram = fitted.probabilities(np.array([1, 3]), np.array([2, 4]))
    found = ngram.evaluate(fitted, [batch])
    assert found.num_tokens == 2 and found.bigram == pytest.approx(-np.log(bigram).mean())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=10), st.integers(1, 50), st.integers(1, 30))
def test_pairs_are_counted_within_documents_whatever_the_chunks(make_shards, lengths, shard_tokens, chunk):
    documents = documents_of(lengths)
    expected: dict[int, int] = {}
    for document in documents:
        for a, b in itertools.pairwise(document):
            expected[a * 257 + b] = expected.get(a * 257 + b, 0) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_CHUNK", chunk)
        shards = make_shards(documents, shard_tokens)
        keys, counts = ngram._count_pairs(shards, shards.num_tokens)
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected
    _, bigram = ngram.fit(shards).probabilities(np.full(257, documents[0][0]), np.arange(257))
    assert bigram.sum() == pytest.approx(1)


def test_nothing_to_count_or_score_is_refused(make_shards, fitted):
    single = make_shards([[0], [0], [0]])
    with pytest.raises(ShardlmError, match="no bigram to count"):
        ngram.fit(single)
    with pytest.raises(ShardlmError, match="no validation token to score"):
        ngram.evaluate(fitted, validation_batches(single, seq_len=4, global_batch=1))
