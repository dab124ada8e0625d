"""LLaVA's eyes against transformers: CLIP's encoder, and Pixtral's without a merger."""

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 60
TOKENS = {"[IMG_BREAK]": 61, "[IMG_END]": 62}
CLIP = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
PIXTRAL = {"patch_size": 4, "size": {"longest_edge": 32}}
IMAGES = [(16, 16), (40, 30), (300, 170), (9, 50)]
SIDES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4}


def made(kind: str):
    torch.manual_seed(0)
    towers = {
        "clip": {"model_type": "clip_vision_model", "image_size": 16, **SIDES},
        "pixtral": {"model_type": "pixtral", "image_size": 32, "hidden_act": "silu", **SIDES},
    }
    features = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} if kind == "pixtral" else {}
    config = transformers.LlavaConfig(
        vision_config=towers[kind],
        text_config={
            "model_type": "llama" if kind == "clip" else "mistral", "hidden_size": 40, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "vocab_size": 64,
        },
        image_token_index=TOKEN, image_seq_length=16, **features,
    )  # fmt: skip
    found = transformers.LlavaForConditionalGeneration(config).eval()
    return lively(found)


def processed(kind: str, image: np.ndarray):
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    of = {"clip": (LlavaImageProcessorPil, CLIP), "pixtral": (PixtralImageProcessorPil, PIXTRAL)}
    cls, how = of[kind]
    how = how | ({"patch_size": {"height": 4, "width": 4}} if kind == "pixtral" else {})
    return cls(**how)(image, return_tensors="pt")


def prepared(kind: str):
    return {"clip": CLIP, "pixtral": PIXTRAL}[kind]


@pytest.fixture(scope="module", params=["clip", "pixtral"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return made(kind)


@pytest.fixture(scope="module")
def eyes(model, kind, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp(kind), TOKENS, preprocessor_config=prepared(kind)))


@pytest.mark.parametrize("height, width", IMAGES)
@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, kind, height, width):
    image = noise(height, width)
    inputs = processed(kind, image)
    sizes = {"image_sizes": [tuple(map(int, s)) for s in inputs["image_sizes"]]} if kind == "pixtral" else {}
    [vectors] = model.model.get_image_features(inputs["pixel_values"], **sizes).pooler_output
    picture = eyes.sight.prepare(image)
    rows, columns = picture.grid
    found = picture.inputs["pixels"].reshape(rows, columns, 4, 4, 3).transpose(4, 0, 2, 1, 3)
    expected = inputs["pixel_values"][0].numpy()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1 / 255)
    close(eyes.vectors(picture), vectors.numpy())


def test_a_square_of_the_mean_colour(tmp_path):
    folder = written(model := made("clip"), tmp_path, {}, preprocessor_config=CLIP | {"do_pad": True})
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    for size in ((16, 30), (50, 20)):
        expected = LlavaImageProcessorPil(**CLIP, do_pad=True)(noise(*size), return_tensors="pt")["pixel_values"][0]
        found = sight_of(folder, Folder.open(folder).config).prepare(noise(*size)).inputs["pixels"]
        found = found.reshape(4, 4, 4, 4, 3).transpose(4, 0, 2, 1, 3).reshape(3, 16, 16)
        np.testing.assert_allclose(found, expected.numpy(), atol=1 / 255)
    written(model, folder, {}, preprocessor_config=CLIP | {"do_center_crop": False})
    with pytest.raises(ShardlmError, match="do_center_crop=False; supported: a shortest_edge of at least 16"):
        sight_of(folder, Folder.open(folder).config)


def test_tokens(eyes, kind):
    own = eyes.sight.tokens(eyes.sight.prepare(noise(16, 16)))
    row = [TOKEN] * 4
    assert own == ([TOKEN] * 16 if kind == "clip" else [*row, 61, *row, 61, *row, 61, *row, 62])
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (TOKEN, TOKEN, 1)


@pytest.mark.wide
def test_replies_are_those_of_transformers(kind, tmp_path):
    model = drawn(made(kind))
    folder = written(model, tmp_path, TOKENS, preprocessor_config=prepared(kind))
    with_tokenizer(folder, 64, TOKENS | {"<image>": TOKEN})
    first, second = noise(20, 32), noise(32, 10, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]

    def images(given, ids):
        if not given:
            return {}
        made = processed(kind, list(given))
        return {name: made[name] for name in ("pixel_values", "image_sizes") if name in made}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
