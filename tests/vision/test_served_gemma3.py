"""Gemma 3 with images as an engine reads them: tokens of an image see all of it, however prompts are cut."""

import pytest
from seeing import noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IMAGE, BEGIN, END = 60, 61, 62
LINES = {"\n": 20, "\n\n": 21, "\n\n\n": 22, "\n\n\n\n": 23}
SQUARE = {"height": 32, "width": 32}
PREPARED = {"size": SQUARE, "do_pan_and_scan": None, "image_processor_type": "Gemma3ImageProcessor"}
FIRST, SECOND = noise(32, 40), noise(64, 20, 1)
ASKS = [
    ([2, 5, BEGIN, 6, 7], [FIRST]),
    ([2, 8, 9, 10, 11, 12, 13, 14, BEGIN, 15, BEGIN, 16, 17, 18, 19, 30, 31, 32, 33, 34, 35], [FIRST, SECOND]),
    ([2, 40, 41, 42], []),
]


def images(given, ids):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    if not given:
        return {}
    made = Gemma3ImageProcessorPil(size=SQUARE)(list(given), return_tensors="pt")
    return {"pixel_values": made["pixel_values"], "token_type_ids": (torch.tensor([ids]) == IMAGE).long()}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    config = transformers.Gemma3Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 32, "vision_use_head": False,
        },
        text_config={
            "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        mm_tokens_per_image=16, image_token_index=IMAGE, boi_token_index=BEGIN, eoi_token_index=END,
    )  # fmt: skip
    model = drawn(transformers.Gemma3ForConditionalGeneration(config))
    folder = written(model, tmp_path_factory.mktemp("gemma3"), LINES, preprocessor_config=PREPARED)
    special = {"<image>": IMAGE, "<begin>": BEGIN, "<end>": END}
    with_tokenizer(folder, 64, LINES | special)
    return Family(folder, model, images)


@pytest.fixture(scope="module")
def expected(family):
    llm = LLM(family.folder, **SIZES)
    held_to_transformers(family, llm, ASKS)
    found = replies(asked(llm, ASKS))
    again = asked(llm, ASKS)
    assert replies(again) == found
    assert again[1].num_cached_tokens > 40
    return found


@pytest.mark.parametrize("budget, rows", [(17, 1), (24, 4), (37, 4), (256, 4)])
def test_no_chunk_cuts_an_image(family, expected, budget, rows):
    """Of 16 tokens, which begin and end with others that may be in other chunks: the first has room for no more."""
    llm = LLM(family.folder, **SIZES | {"max_num_batched_tokens": budget, "max_num_seqs": rows})
    held_to_transformers(family, llm, ASKS)
    assert replies(asked(llm, ASKS)) == expected


def test_a_batch_that_no_image_fits_into_is_refused(family):
    with pytest.raises(ShardlmError, match="the 16 of an image are read at once; raise the first by 4"):
        LLM(family.folder, **SIZES | {"max_num_batched_tokens": 16})
