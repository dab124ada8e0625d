"""Mistral 3 and Gemma 3 with images as an engine reads them, against transformers itself (references.py)."""

import pytest
import test_served_images as mistral
from seeing import noise, written
from served import SIZES, Family, drawn, held_to_transformers, with_tokenizer

from shardlm import LLM

torch = pytest.importorskip("torch", reason="what transformers said is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers said is in references/")

OF_MISTRAL = {"[IMG]": mistral.IMG, "[IMG_BREAK]": 12, "[IMG_END]": 13}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 96}}
MISTRAL3 = mistral.ASKS

IMAGE, BEGIN, END = 60, 61, 62
LINES = {"\n": 20, "\n\n": 21, "\n\n\n": 22, "\n\n\n\n": 23}
SQUARE = {"height": 32, "width": 32}
SIGLIP = {"size": SQUARE, "do_pan_and_scan": None, "image_processor_type": "Gemma3ImageProcessor"}
FIRST, SECOND = noise(32, 40), noise(64, 20, 1)
GEMMA3 = [
    ([2, 5, BEGIN, 6, 7], [FIRST]),
    ([2, 8, 9, 10, 11, 12, 13, 14, BEGIN, 15, BEGIN, 16, 17, 18, 19, 30, 31, 32, 33, 34, 35], [FIRST, SECOND]),
    ([2, 40, 41, 42], []),
]


def mistral3_inputs(given, ids):
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    if not given:
        return {}
    processor = PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 8, "width": 8})
    made = processor(list(given), return_tensors="pt")
    return {"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]}


def mistral3(folder):
    config = transformers.Mistral3Config(
        vision_config={
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 96, "hidden_act": "silu",
        },
        text_config={
            "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
            "sliding_window": None, "tie_word_embeddings": False,
        },
        image_token_index=OF_MISTRAL["[IMG]"], tie_word_embeddings=False,
    )  # fmt: skip
    model = drawn(transformers.Mistral3ForConditionalGeneration(config))
    written(model, folder, OF_MISTRAL, preprocessor_config=PIXTRAL)
    with_tokenizer(folder, 64, OF_MISTRAL)
    return Family(folder, model, mistral3_inputs), MISTRAL3


def gemma3_inputs(given, ids):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    if not given:
        return {}
    made = Gemma3ImageProcessorPil(size=SQUARE)(list(given), return_tensors="pt")
    return {"pixel_values": made["pixel_values"], "token_type_ids": (torch.tensor([ids]) == IMAGE).long()}


def gemma3(folder):
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
    written(model, folder, LINES, preprocessor_config=SIGLIP)
    special = {"<image>": IMAGE, "<begin>": BEGIN, "<end>": END}
    with_tokenizer(folder, 64, LINES | special)
    return Family(folder, model, gemma3_inputs), GEMMA3


@pytest.mark.wide
@pytest.mark.parametrize("made", [mistral3, gemma3])
def test_replies_are_those_of_transformers(made, tmp_path):
    family, asks = made(tmp_path)
    held_to_transformers(family, LLM(tmp_path, **SIZES), asks)
