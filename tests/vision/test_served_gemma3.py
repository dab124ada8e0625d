"""Gemma 3 with images as an engine reads them: tokens of an image see all of it, however prompts are cut."""

import pytest
import references
from served import SIZES, asked, held_to_references, replies

from shardlm import LLM
from shardlm.errors import ShardlmError

NAME = "gemma3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return references.folder(NAME, tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="module")
def expected(folder):
    llm, asks = LLM(folder, **SIZES), references.asks(NAME)
    held_to_references(NAME, llm)
    found = replies(asked(llm, asks))
    again = asked(llm, asks)
    assert replies(again) == found
    assert again[1].num_cached_tokens > 40
    return found


@pytest.mark.parametrize(
    "budget, rows",
    [*(pytest.param(*one, marks=pytest.mark.wide) for one in ((17, 1), (24, 4), (37, 4))), (256, 4)],
)
def test_no_chunk_cuts_an_image(folder, expected, budget, rows):
    """Of 16 tokens, which begin and end with others that may be in other chunks: the first has room for no more."""
    llm = LLM(folder, **SIZES | {"max_num_batched_tokens": budget, "max_num_seqs": rows})
    held_to_references(NAME, llm)
    assert replies(asked(llm, references.asks(NAME))) == expected


def test_a_batch_that_no_image_fits_into_is_refused(folder):
    with pytest.raises(ShardlmError, match="the 16 of an image are read at once; raise the first by 4"):
        LLM(folder, **SIZES | {"max_num_batched_tokens": 16})
