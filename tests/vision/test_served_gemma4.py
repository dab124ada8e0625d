"""Gemma 4 with images as an engine reads them: inputs of layers take an image's tokens for padding, and in models whose
images see ahead only layers with a window do."""

import pytest
from seeing import noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

IMAGE, BEGIN, END = 60, 61, 62
PREPARED = {"do_normalize": False, "max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}
FIRST, SECOND = noise(20, 40), noise(400, 8, 1)
ASKS = [
    ([2, 5, IMAGE, 6, 7], [FIRST]),
    ([2, 8, 9, 10, IMAGE, 15, IMAGE, 16, 17, 18, 19, 30, 31], [SECOND, FIRST]),
    ([2, 40, 41, 42], []),
]
SIZES |= {"max_model_len": 256, "max_num_batched_tokens": 96}


def images(given, ids):
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    if not given:
        return {}
    made = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4)(list(given), return_tensors="pt")
    own = {name: made[name] for name in ("pixel_values", "image_position_ids")}
    return own | {"mm_token_type_ids": (torch.tensor([ids]) == IMAGE).long()}


@pytest.fixture(scope="module", params=["inputs", "ahead"])
def family(request, tmp_path_factory):
    own = {"inputs": {"hidden_size_per_layer_input": 8}, "ahead": {"use_bidirectional_attention": "vision"}}
    config = transformers.Gemma4Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256,
        },
        text_config={
            "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 64,
            "vocab_size_per_layer_input": 64, "sliding_window": 24, "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        } | own[request.param],
        audio_config=None, image_token_id=IMAGE, boi_token_id=BEGIN, eoi_token_id=END,
    )  # fmt: skip
    model = drawn(transformers.Gemma4ForConditionalGeneration(config))
    folder = written(model, tmp_path_factory.mktemp("gemma4"), {}, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, {"<image>": IMAGE, "<begin>": BEGIN, "<end>": END})
    return Family(folder, model, images)


def test_replies_are_those_of_transformers(family):
    llm = LLM(family.folder, **SIZES)
    held_to_transformers(family, llm, ASKS)
    found = replies(asked(llm, ASKS))
    again = asked(llm, ASKS)
    assert replies(again) == found and again[1].num_cached_tokens > 40
