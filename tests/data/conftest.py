"""Shards of given documents, so that tests know every token."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from shardlm.data.shards import TokenShards
from shardlm.data.writer import ShardWriter
from shardlm.tokenizer import Tokenizer, train_bpe

BYTES = train_bpe([], 257)  # one token a byte, token 0 ends a document


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return BYTES


@pytest.fixture(scope="session")
def make_shards():
    """Documents of tokens (each with its end) -> shards in a fresh directory."""
    roots = []

    def make(documents: list[list[int]], shard_tokens: int = 1 << 28) -> TokenShards:
        roots.append(tempfile.TemporaryDirectory())
        with ShardWriter(Path(roots[-1].name), BYTES, shard_tokens) as writer:
            for document in documents:
                writer.add(np.array(document), np.array([len(document)]), len(document) - 1)
            writer.finish()
        return TokenShards.open(roots[-1].name)

    yield make
    for root in roots:
        root.cleanup()
