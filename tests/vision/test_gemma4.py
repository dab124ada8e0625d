"""Gemma 4's eyes against transformers."""

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

IMAGE, BEGIN, END = 60, 61, 62
PREPARED = {"do_normalize": False, "max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}
SIZES = [(96, 100), (40, 64), (300, 170), (9, 250), (400, 8)]


def made(**vision):
    torch.manual_seed(0)
    config = transformers.Gemma4Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256,
        } | vision,
        text_config={
            "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "vocab_size_per_layer_input": 64,
        },
        audio_config=None, image_token_id=IMAGE, boi_token_id=BEGIN, eoi_token_id=END,
    )  # fmt: skip
    found = transformers.Gemma4ForConditionalGeneration(config).eval()
    return lively(found)


@pytest.fixture(scope="module", params=["plain", "clipped"])
def model(request):
    more = {"use_clipped_linears": True, "standardize": True, "num_key_value_heads": 1}
    return made(**more if request.param == "clipped" else {})


@pytest.fixture(scope="module")
def eyes(model, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp("gemma4"), {}, preprocessor_config=PREPARED))


def processed(image: np.ndarray):
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4)(image, return_tensors="pt")


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, height, width):
    image = noise(height, width)
    inputs = processed(image)
    picture = eyes.sight.prepare(image)
    expected = {
        (int(x), int(y)): 2 * patch.reshape(4, 4, 3).numpy() - 1
        for (x, y), patch in zip(inputs["image_position_ids"][0], inputs["pixel_values"][0], strict=True)
        if x >= 0
    }
    assert picture.patches == len(expected)
    for patch, row, column in zip(*picture.inputs.values(), strict=True):
        np.testing.assert_allclose(patch, expected[int(column), int(row)], atol=1 / 255)
    vectors = model.model.get_image_features(
        inputs["pixel_values"], image_position_ids=inputs["image_position_ids"]
    ).pooler_output[0]
    close(eyes.vectors(picture), vectors.numpy())


def test_tokens(eyes):
    picture = eyes.sight.prepare(noise(96, 100))
    assert picture.vectors == 64 and picture.grid == (8, 8)
    assert eyes.sight.tokens(picture) == [BEGIN, *[IMAGE] * 64, END]
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.sizes, eyes.sight.merged) == (IMAGE, IMAGE, (630,), 9)


def test_other_patches_are_refused(eyes, tmp_path):
    folder = written(made(), tmp_path, {}, preprocessor_config=PREPARED | {"pooling_kernel_size": 2})
    with pytest.raises(ShardlmError, match="pooling_kernel_size=2, and its model has 3"):
        sight_of(folder, Folder.open(folder).config)
