"""Aya Vision's eyes against transformers."""

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

IMAGE, PATCH = 59, 60
TOKENS = {"<|START_OF_IMG|>": 56, "<|END_OF_IMG|>": 57, "<|IMG_LINE_BREAK|>": 58, "<image>": IMAGE}
TOKENS |= {f"TILE_{number}": 50 + number for number in range(1, 5)} | {"TILE_GLOBAL": 55}
PREPARED = {"size": {"height": 16, "width": 16}, "max_patches": 4}
IMAGES = [(16, 16), (40, 30), (300, 170), (9, 90)]


def made():
    torch.manual_seed(0)
    config = transformers.AyaVisionConfig(
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "vision_use_head": False,
        },
        text_config={
            "model_type": "cohere2", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "eos_token_id": 1,
            "logit_scale": 1.0,  # which transformers 5.24 leaves out where it sees
            "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
        },
        image_token_index=PATCH, vision_feature_layer=-2,
    )  # fmt: skip
    return lively(transformers.AyaVisionForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("aya_vision"), TOKENS, preprocessor_config=PREPARED)


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(image: np.ndarray):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    how = PREPARED | {"crop_to_patches": True}
    return GotOcr2ImageProcessorPil(**how)(image, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model):
    for size in IMAGES:
        expected = processed(noise(*size))
        picture = eyes.sight.prepare(noise(*size))
        assert picture.grid == (len(expected), 4)
        found = picture.inputs["pixels"].reshape(-1, 2, 2, 2, 2, 4, 4, 3)  # tile, square's and patch's row and column
        found = found.transpose(0, 7, 1, 3, 5, 2, 4, 6).reshape(-1, 3, 16, 16)
        np.testing.assert_allclose(found, expected.numpy(), atol=1 / 255)
        vectors = model.model.get_image_features(expected).pooler_output
        close(eyes.vectors(picture), vectors.reshape(-1, vectors.shape[-1]).numpy())


def test_tokens(eyes, folder, tmp_path):
    """Those of the processor: a token with its number before each tile, and another before that which shows all."""
    own = [PATCH] * 4
    assert eyes.sight.tokens(eyes.sight.prepare(noise(16, 32))) == [56, 51, *own, 52, *own, 55, *own, 57]
    assert eyes.sight.tokens(eyes.sight.prepare(noise(16, 16))) == [56, 55, *own, 57]
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (IMAGE, PATCH, 4)
    without = {name: id for name, id in TOKENS.items() if name != "<image>"}
    written(None, tmp_path, without, preprocessor_config=PREPARED)
    assert sight_of(tmp_path, json.loads((folder / "config.json").read_text())).token == PATCH


def test_what_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"downsample_factor": 3}, "downsample_factor=3 of tiles of 4 patches"),
        ({"vision_feature_layer": [0, 1]}, "supported: a single one"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy='default'"),
        ({"vision_config": config["vision_config"] | {"spin": 1}}, "spin=1"),
        ({"adapter_layer_norm_eps": "small"}, "a value that nothing can be made of"),
    ):
        with pytest.raises(ShardlmError, match=message):
            sight_of(folder, config | changes)


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS | {"<|IMG_PATCH|>": PATCH})
    first, second = noise(20, 40), noise(60, 10, 1)
    asks = [([2, 5, IMAGE, 6], [first]), ([2, IMAGE, 9, IMAGE, 16], [second, first]), ([2, 40, 41], [])]

    def images(given, ids):
        return {"pixel_values": torch.cat([processed(image) for image in given])} if given else {}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
