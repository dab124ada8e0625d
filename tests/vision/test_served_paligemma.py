"""PaliGemma as an engine reads it from what transformers said: prompts whose tokens all see each other."""

import pytest
import references
from served import SIZES, asked, held_to_references, replies

from shardlm import LLM
from shardlm.chat import ChatTemplate
from shardlm.data.rendering import Chats, looked_at
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.serve.beam_search import BeamSearchParams
from shardlm.tokenizer import Tokenizer
from shardlm.train.config import RunConfig
from shardlm.train.seeing import check_images
from shardlm.vision.registry import sight_of

NAME = "paligemma-second"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return references.folder(NAME, tmp_path_factory.mktemp(NAME))


@pytest.mark.wide
def test_prompts_that_are_not_read_at_once_are_refused(folder):
    llm = LLM(folder, **SIZES)
    ids, images = references.asks(NAME)[1]
    with pytest.raises(ShardlmError, match=r"54 tokens that see each other .* has room for 48; raise the first by 6"):
        asked(llm, [(ids, images)])
    with pytest.raises(ShardlmError, match="beams are not searched with this model: all tokens of a prompt see each"):
        llm.beam_search("t5 t6", BeamSearchParams(beam_width=2, max_tokens=2))
    first = references.asks(NAME)[:1]
    assert replies(asked(llm, first)) == [references.said(NAME)[0]["reply"]]


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, {"mesh": MeshSpec(pipeline=2)}, {"mesh": MeshSpec(data=2, tensor=2)}], ids=str)
def test_replies_are_those_of_transformers(folder, options):
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    for more in ({}, {"speculative_config": drafts}):
        llm = LLM(folder, **SIZES | {"max_num_batched_tokens": 80} | options | more)
        held_to_references(NAME, llm)
        asks = references.asks(NAME)
        assert replies(asked(llm, asks)) == [one["reply"] for one in references.said(NAME)]


def test_a_token_at_a_time_is_refused(folder):
    with pytest.raises(ShardlmError, match="those of a prompt see the ones after them"):
        LLM(folder, deterministic=True, limit_mm_per_prompt={"image": 1}, **SIZES)


@pytest.mark.parametrize(
    "name, message",
    [(NAME, "all tokens of a prompt see each other"), ("ovis2", "tokens around them stand for vectors too")],
)
def test_images_to_train_on_are_refused(name, message, tmp_path):
    folder = references.folder(name, tmp_path)
    options, config = Folder.open(folder).config, RunConfig(Pretrained(str(folder)))
    sight = sight_of(folder, options)
    with pytest.raises(ShardlmError, match=f"the data have images, and .*{message}.*; train on texts"):
        check_images(config, registry.transformer(options), sight, "ulysses")
    chats = Chats(ChatTemplate("{{ messages }}"), Tokenizer.load(folder), sight)
    with pytest.raises(ShardlmError, match=f"line 3 has images, and .*{message}"):
        looked_at(["red.png"], "line 3", chats)
