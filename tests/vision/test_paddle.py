"""PaddleOCR-VL's eyes against transformers."""

import json

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

import shardlm
from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.models import registry
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 60
PREPARED = {"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 4096, "image_mean": [0.5] * 3}
IMAGES = [(40, 40), (24, 72), (90, 21), (5, 7)]


def made():
    torch.manual_seed(0)
    config = transformers.PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 20,
        },
        text_config={
            "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [2, 3, 3]},
        },
        image_token_id=TOKEN, video_token_id=59, vision_start_token_id=58, vision_end_token_id=57,
    )  # fmt: skip
    return lively(transformers.PaddleOCRVLForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def eyes(model, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp("paddleocr_vl"), {}, preprocessor_config=PREPARED))


def processed(images):
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    return PaddleOCRVLImageProcessorPil(**PREPARED)(images, input_data_format="channels_last", return_tensors="pt")


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model):
    for size in IMAGES:
        inputs = processed([noise(*size)])
        picture = eyes.sight.prepare(noise(*size))
        rows, columns = inputs["image_grid_thw"][0, 1:].tolist()
        assert picture.grid == (rows // 2, columns // 2)
        order = picture.inputs["rows"] * columns + picture.inputs["columns"]
        numbers = eyes.sight.prepare.pixels.numbers(picture.inputs["pixels"])
        expected = inputs["pixel_values"].permute(0, 2, 3, 1).numpy()[order]
        np.testing.assert_allclose(numbers, expected, atol=1 / 255)
        vectors = model.model.get_image_features(**inputs).pooler_output[0].numpy()
        for patches in {picture.patches, 256}:
            close(eyes.vectors(picture, patches), vectors)


def test_sight(eyes):
    sight = eyes.sight
    assert (sight.token, sight.vector, sight.merged, sight.axes) == (TOKEN, TOKEN, 4, True)
    assert sight.tokens(sight.prepare(noise(40, 40))) == [TOKEN] * 25 and sight.sizes == (256,)


def test_as_published(eyes, model, tmp_path):
    """With the text's options beside all others, and tensors as PaddlePaddle calls them."""
    from safetensors.numpy import load_file, save_file

    folder = written(model, tmp_path, {}, preprocessor_config=PREPARED)
    config = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in config["text_config"].items() if name != "rope_parameters"}
    beside = {"compression_ratio": 1.0, "ignored_index": -100, "rope_is_neox_style": True, "use_3d_rope": True}
    beside |= {"rope_theta": 500_000, "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default"}}
    flat = text | {name: value for name, value in config.items() if name != "text_config"} | beside
    assert registry.transformer(flat) == registry.transformer(config)
    (folder / "config.json").write_text(json.dumps(flat))
    found = {}
    for name, a in load_file(folder / "model.safetensors").items():
        name = name.replace("model.language_model.", "model.").replace("model.projector.", "mlp_AR.")
        found[name.replace("model.visual.", "visual.")] = a
    aside = {"visual.vision_model.head.probe": np.ones((1, 1, 32), np.float32)}
    aside["visual.vision_model.embeddings.packing_position_embedding.weight"] = np.ones((9, 32), np.float32)
    save_file(found | aside, folder / "model.safetensors")
    assert shardlm.load(folder).model.config == registry.transformer(config)
    picture = eyes.sight.prepare(noise(24, 32))
    np.testing.assert_array_equal(Eyes(folder).vectors(picture), eyes.vectors(picture))
    with pytest.raises(ShardlmError, match="spin=1"):
        sight_of(folder, flat | {"vision_config": flat["vision_config"] | {"spin": 1}})


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, {}, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, {"<image>": TOKEN})
    first, second = noise(24, 40), noise(60, 21, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]

    def images(given, ids):
        kinds = (torch.tensor([list(ids)]) == TOKEN).int()
        return {**processed(list(given)), "mm_token_type_ids": kinds} if given else {}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
