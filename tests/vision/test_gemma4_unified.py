"""Gemma 4 12B, which sees without layers for it, against transformers, whose image processor needs torchvision: what it
has beside Gemma 4's is taken from its file."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from seeing import Eyes, close, functions_of, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

IMAGE, BEGIN, END = 60, 61, 62
PREPARED = {"do_normalize": False, "max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}
IMAGES = [(96, 100), (40, 64), (300, 170), (9, 250), (400, 8)]


def made():
    torch.manual_seed(0)
    config = transformers.Gemma4UnifiedConfig(
        vision_config={
            "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 80,
            "output_proj_dims": 32,
        },
        text_config={
            "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 64, "sliding_window": 72,
            "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
        },
        audio_config=None, image_token_id=IMAGE, boi_token_id=BEGIN, eoi_token_id=END,
    )  # fmt: skip
    return transformers.Gemma4UnifiedForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def model():
    return lively(made())


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("gemma4_unified"), {}, preprocessor_config=PREPARED)


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(image: np.ndarray):
    """(pixels of squares, [1, P, numbers], and their columns and rows, [1, P, 2])."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    [merge] = functions_of("gemma4_unified/modular_gemma4_unified.py", "patches_merge", torch=torch)
    own = {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}
    inputs = Gemma4ImageProcessorPil(**own)(image, return_tensors="pt")
    there = inputs["image_position_ids"][0, :, 0] >= 0
    pixels, at = (inputs[name][:, there] for name in ("pixel_values", "image_position_ids"))
    return merge(pixels, at, pixels.shape[1] // 4)


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model):
    for size in IMAGES:
        pixels, at = processed(noise(*size))
        picture = eyes.sight.prepare(noise(*size))
        np.testing.assert_allclose(picture.inputs["pixels"].reshape(pixels[0].shape), pixels[0], atol=1 / 255)
        places = np.stack([picture.inputs[name] for name in ("columns", "rows")], axis=-1)
        np.testing.assert_array_equal(places, at[0])
        close(eyes.vectors(picture), model.model.get_image_features(pixels, at).pooler_output[0].numpy())


def test_tokens(eyes):
    picture = eyes.sight.prepare(noise(40, 64))
    assert eyes.sight.tokens(picture) == [BEGIN, *[IMAGE] * picture.patches, END]
    assert (eyes.sight.sizes, eyes.sight.merged, eyes.sight.whole) == ((70,), 1, True)


def test_what_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"output_proj_dims": 16}, "output_proj_dims=16"),
        ({"spin": 1}, "spin=1"),
        ({"mm_posemb_size": 60}, "up to 70 squares of an image, and its model has mm_posemb_size=60"),
        ({"pooling_kernel_size": 3}, "pooling_kernel_size=2, and its model has 3"),
    ):
        with pytest.raises(ShardlmError, match=message):
            sight_of(folder, config | {"vision_config": config["vision_config"] | changes})


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, {}, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, {"<image>": IMAGE, "<begin>": BEGIN, "<end>": END})
    first, second = noise(20, 40), noise(400, 8, 1)
    asks = [([2, 5, IMAGE, 6], [first]), ([2, IMAGE, 9, IMAGE, 16], [second, first]), ([2, 40, 41], [])]

    def images(given: Sequence[np.ndarray], ids: Sequence[int]) -> dict:
        if not given:
            return {}
        made = [processed(image) for image in given]
        most = max(pixels.shape[1] for pixels, _ in made)
        both = [
            torch.cat([torch.nn.functional.pad(one[i], (0, 0, 0, most - one[i].shape[1]), value=-i) for one in made])
            for i in range(2)
        ]
        seen = (torch.tensor([list(ids)]) == IMAGE).long()
        return {"pixel_values": both[0], "image_position_ids": both[1], "mm_token_type_ids": seen}

    llm = LLM(folder, **SIZES | {"max_num_batched_tokens": 96})
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
