"""InternVL's eyes against transformers."""

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

CONTEXT = 60
TOKENS = {"<img>": 61, "</img>": 62}
PREPARED = {"size": {"height": 16, "width": 16}, "max_patches": 4, "crop_to_patches": True}
IMAGES = [(16, 16), (40, 30), (300, 170), (9, 90), (60, 10), (30, 30)]


def made(**vision):
    torch.manual_seed(0)
    config = transformers.InternVLConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": [4, 4], "image_size": [16, 16],
        } | vision,
        text_config={
            "model_type": "qwen2", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False,
            "eos_token_id": 1,
        },
        image_token_id=CONTEXT, image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    found = transformers.InternVLForConditionalGeneration(config).eval()
    return lively(found)


@pytest.fixture(scope="module", params=["plain", "other"])
def model(request):
    return made(**({"attention_bias": True, "use_mean_pooling": False} if request.param == "other" else {}))


@pytest.fixture(scope="module")
def eyes(model, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp("internvl"), TOKENS, preprocessor_config=PREPARED))


def processed(image: np.ndarray):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(**PREPARED)(image, return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize("height, width", IMAGES)
@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, height, width):
    image = noise(height, width)
    expected = processed(image)
    picture = eyes.sight.prepare(image)
    assert picture.grid == (len(expected), 4)
    found = picture.inputs["pixels"].reshape(-1, 2, 2, 2, 2, 4, 4, 3)  # tile, square's and patch's row and column
    found = found.transpose(0, 7, 1, 3, 5, 2, 4, 6).reshape(-1, 3, 16, 16)
    np.testing.assert_allclose(found, expected.numpy(), atol=1 / 255)
    vectors = model.model.get_image_features(expected).pooler_output
    close(eyes.vectors(picture), vectors.reshape(-1, vectors.shape[-1]).numpy())


def test_tokens(eyes):
    assert eyes.sight.tokens(eyes.sight.prepare(noise(16, 32))) == [61, *[CONTEXT] * 12, 62]
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (CONTEXT, CONTEXT, 4)
    assert eyes.sight.sizes == (16, 48, 80)


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS | {"<IMG_CONTEXT>": CONTEXT})
    first, second = noise(20, 40), noise(60, 10, 1)
    asks = [([2, 5, CONTEXT, 6], [first]), ([2, CONTEXT, 9, CONTEXT, 16], [second, first]), ([2, 40, 41], [])]

    def images(given, ids):
        return {"pixel_values": torch.cat([processed(image) for image in given])} if given else {}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
