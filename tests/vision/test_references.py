"""Every family that sees, as an engine reads images, against what transformers said of them."""

import pytest
import references
from served import SIZES, asked, held_to_references, replies

from shardlm import LLM

# DeepStack and three axes in a video, both directions: the others are wide.
ALWAYS = ("gemma3", "qwen3_vl-video")
WIDE = [pytest.param(name, marks=pytest.mark.wide) for name in references.EVERY if name not in ALWAYS]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*ALWAYS, *WIDE])
def test_replies_are_those_of_transformers(name, tmp_path):
    llm = LLM(references.folder(name, tmp_path), **SIZES | {"max_num_batched_tokens": 96})
    held_to_references(name, llm)
    asks = references.asks(name)
    assert replies(asked(llm, asks)) == [one["reply"] for one in references.said(name)]
