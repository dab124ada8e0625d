"""Command A Vision's eyes against transformers, whose image processor needs torchvision: what it has beside that of
InternVL is taken from its file."""

import json

import numpy as np
import pytest
from seeing import Eyes, close, functions_of, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 60
TOKENS = {"<|START_OF_IMG|>": 61, "<|IMG_LINE_BREAK|>": 62, "<end>": 63}
PREPARED = {"size": {"height": 16, "width": 16}, "max_patches": 4}
NAMED = {"eoi_token": "<end>", "boi_token": {"content": "<|START_OF_IMG|>"}}
IMAGES = [(16, 16), (40, 30), (300, 170), (9, 90), (60, 10), (30, 30)]


def made():
    torch.manual_seed(0)
    config = transformers.Cohere2VisionConfig(
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "vision_use_head": False,
        },
        text_config={
            "model_type": "cohere2", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "eos_token_id": 1,
            "logit_scale": 1.0,  # which transformers 5.24 leaves out where it sees
            "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
        },
        image_token_id=TOKEN, alignment_intermediate_size=72,
    )  # fmt: skip
    return lively(transformers.Cohere2VisionForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = written(model, tmp_path_factory.mktemp("cohere2_vision"), TOKENS, preprocessor_config=PREPARED)
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED))
    return folder


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(image: np.ndarray):
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as module

    file = "cohere2_vision/image_processing_cohere2_vision.py"
    with pytest.MonkeyPatch.context() as patch:
        canvas, _ = functions_of(file, "get_optimal_tiled_canvas", "get_all_supported_aspect_ratios")
        patch.setattr(module, "get_optimal_tiled_canvas", canvas)
        how = PREPARED | {"crop_to_patches": True}
        return module.GotOcr2ImageProcessorPil(**how)(image, return_tensors="pt")["pixel_values"]


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


def test_canvases_are_those_of_transformers(eyes):
    file = "cohere2_vision/image_processing_cohere2_vision.py"
    canvas, _ = functions_of(file, "get_optimal_tiled_canvas", "get_all_supported_aspect_ratios")
    rng = np.random.default_rng(0)
    for height, width in rng.integers(1, 100, (200, 2)).tolist():
        assert eyes.sight.prepare.tiles(height, width)[::-1] == canvas((height, width), (16, 16), 1, 4)


def test_tokens(eyes):
    own = [*[TOKEN] * 4, 62]
    assert eyes.sight.tokens(eyes.sight.prepare(noise(16, 32))) == [61, *own * 3, 63]
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (TOKEN, TOKEN, 4)
    assert eyes.sight.sizes == (16, 48, 80)


def test_what_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ShardlmError, match="downsample_factor=3 of tiles of 4 patches"):
        sight_of(folder, config | {"downsample_factor": 3})
    with pytest.raises(ShardlmError, match="spin=1"):
        sight_of(folder, config | {"vision_config": config["vision_config"] | {"spin": 1}})


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS | {"<|IMG_PATCH|>": TOKEN})
    own = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(own | NAMED))
    first, second = noise(20, 40), noise(60, 10, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]

    def images(given, ids):
        return {"pixel_values": torch.cat([processed(image) for image in given])} if given else {}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
