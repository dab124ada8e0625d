"""LightOnOCR's eyes against transformers: Pixtral's, with Mistral 3's merger and no tokens between rows."""

import json

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 60
PREPARED = {"size": {"longest_edge": 48}, "patch_size": 4}  # patches: those that are no whole square are read too
IMAGES = [(24, 32), (44, 20), (90, 37), (100, 17)]


def made():
    torch.manual_seed(0)
    config = transformers.LightOnOcrConfig(
        vision_config={
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 48, "head_dim": 16, "hidden_act": "silu",
        },
        text_config={
            "model_type": "qwen3", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "eos_token_id": 1,
        },
        image_token_id=TOKEN,
    )  # fmt: skip
    return lively(transformers.LightOnOcrForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def eyes(model, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp("lighton_ocr"), {}, preprocessor_config=PREPARED))


def processed(images):
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    found = PixtralImageProcessorPil(**PREPARED | {"patch_size": {"height": 4, "width": 4}})(
        images, return_tensors="pt"
    )
    return {**found, "image_sizes": [tuple(map(int, size)) for size in found["image_sizes"]]}


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model):
    for size in IMAGES:
        inputs = processed([noise(*size)])
        expected = inputs["pixel_values"][0].numpy().transpose(1, 2, 0)
        picture = eyes.sight.prepare(noise(*size))
        back = np.full_like(expected, np.nan)
        for patch, row, column in zip(*picture.inputs.values(), strict=True):
            back[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = patch
        assert picture.grid == (expected.shape[0] // 8, expected.shape[1] // 8)
        np.testing.assert_allclose(back, expected, atol=1 / 255)
        close(eyes.vectors(picture), model.model.get_image_features(**inputs).pooler_output[0].numpy())
        assert eyes.sight.tokens(picture) == [TOKEN] * picture.vectors


def test_what_is_refused(model, eyes, tmp_path):
    assert eyes.sight.sizes == (144,)
    with pytest.raises(
        ShardlmError, match="an image becomes 48 x 4 pixels, and the model makes vectors of squares of 8"
    ):
        eyes.sight.prepare(noise(4, 60))
    folder = written(model, tmp_path, {}, preprocessor_config=PREPARED | {"patch_size": 6})
    with pytest.raises(ShardlmError, match="patch_size=6, and its encoder has patches of 4 and squares of 8 pixels"):
        sight_of(folder, json.loads((folder / "config.json").read_text()))


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, {}, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, {"<image>": TOKEN})
    first, second = noise(24, 32), noise(44, 20, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]
    llm = LLM(folder, **SIZES)
    family = Family(folder, model, lambda given, ids: processed(list(given)) if given else {})
    held_to_transformers(family, llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
