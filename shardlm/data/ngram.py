"""What a model has to beat: unigram and bigram models of the training tokens, scored on the same positions.

The bigram is interpolated modified Kneser-Ney (Chen & Goodman 1998, "An Empirical Study of Smoothing
Techniques for Language Modeling", equations 25 and 26): the strongest of the usual smoothings. Its three
discounts come from the training counts alone, by leaving one out. Counting is sparse, in numpy.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from shardlm.data.packing import Batch
from shardlm.data.shards import TokenShards
from shardlm.errors import ShardlmError

_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Mean negative log-likelihood over `num_tokens` targets, in nats a token."""

    unigram: float
    bigram: float
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Ngram:
    """Smoothed unigram and bigram probabilities; every target has a positive one.

    Attributes:
      unigram: float64[V].
      keys: int64[pairs], ascending: input * V + target of every pair seen.
      seen: float64[pairs]: the discounted probability of that target after that input.
      backoff: float64[V]: probability after that input that is left for `continuation`.
      continuation: float64[V]: by how many inputs a target follows, not how often.
    """

    unigram: np.ndarray
    keys: np.ndarray
    seen: np.ndarray
    backoff: np.ndarray
    continuation: np.ndarray

    def probabilities(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(unigram, bigram) probability of each target after its input."""
        wanted = inputs.astype(np.int64) * len(self.unigram) + targets
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        seen = np.where(self.keys[at] == wanted, self.seen[at], 0)
        return self.unigram[targets], seen + self.backoff[inputs] * self.continuation[targets]


def fit(shards: TokenShards, max_tokens: int | None = None) -> Ngram:
    """Counts the pairs of neighbours within documents, about 10 million tokens a second.

    Args:
      max_tokens: only the first so many tokens.

    Raises:
      ShardlmError: no document has two tokens.
    """
    V = shards.vocab_size
    keys, counts = _count_pairs(shards, min(shards.num_tokens, max_tokens or shards.num_tokens))
    if not len(keys):
        raise ShardlmError("no bigram to count: every training document has a single token")
    inputs, targets = np.divmod(keys, V)
    total = np.bincount(inputs, counts, V)
    discounted = np.maximum(counts - _discounts(counts)[np.minimum(counts, 3)], 0)
    kept = np.bincount(inputs, discounted, V)
    unigram = np.bincount(targets, counts, V) + 1.0  # add one, so that no token is impossible
    continuation = np.bincount(targets, minlength=V) + 1.0
    return Ngram(
        unigram=unigram / unigram.sum(),
        keys=keys,
        seen=discounted / total[inputs],
        backoff=1 - kept / np.maximum(total, 1),
        continuation=continuation / continuation.sum(),
    )


def evaluate(model: Ngram, batches: Iterable[Batch]) -> Baselines:
    """Scores the positions whose `loss_mask` is not 0, as a language model is scored on the same batches.

    Raises:
      ShardlmError: the batches score no position.
    """
    sums, tokens = np.zeros(2), 0
    for batch in batches:
        scored = batch["loss_mask"] != 0
        sums -= np.log(model.probabilities(batch["tokens"][scored], batch["targets"][scored])).sum(axis=1)
        tokens += int(scored.sum())
    if not tokens:
        raise ShardlmError("no validation token to score: every document has a single token")
    return Baselines(float(sums[0] / tokens), float(sums[1] / tokens), tokens)


def _count_pairs(shards: TokenShards, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """(input * V + target, how often), ascending."""
    keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for start in range(0, stop - 1, _CHUNK):
        ids = shards.window(start, min(_CHUNK, stop - 1 - start) + 1)
        within = np.ones(len(ids) - 1, bool)
        within[shards.document_starts(start + 1, start + len(ids)) - start - 1] = False
        pairs = ids[:-1][within].astype(np.int64) * shards.vocab_size + ids[1:][within]
        new_keys, new_counts = np.unique(pairs, return_counts=True)
        keys, place = np.unique(np.concatenate([keys, new_keys]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, new_counts]), len(keys)).astype(np.int64)
    return keys, counts


def _discounts(counts: np.ndarray) -> np.ndarray:
    """float64[4]: what is taken from pairs seen 0, 1, 2 and more times (equation 26)."""
    n1, n2, n3, n4 = (max(1, int((counts == n).sum())) for n in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    raw = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    return np.clip(raw, [0, 0.1, 0.1, 0.1], [0, 1, 2, 3])  # tiny corpora give values outside
