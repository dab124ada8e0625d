"""Mistral 3's eyes against transformers."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from seeing import Eyes, close, lively, noise, written

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.mesh import MeshSpec
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

SEEING = pathlib.Path(__file__).parent.parent / "hf" / "seeing"
TOKENS = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
PREPARED = {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 96}}
SIZES = [(40, 64), (24, 24), (300, 170), (9, 50), (96, 96)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Mistral3Config(
        vision_config={
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 96, "hidden_act": "silu",
        },
        text_config={
            "model_type": "mistral", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
        },
    )  # fmt: skip
    found = transformers.Mistral3ForConditionalGeneration(config).eval()
    return lively(found)


@pytest.fixture(scope="module")
def eyes(model, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp("mistral3"), TOKENS, preprocessor_config=PREPARED))


def processed(image: np.ndarray):
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    processor = PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 8, "width": 8})
    return processor(image, return_tensors="pt")


@pytest.mark.parametrize("height, width", SIZES)
def test_images_are_prepared_as_by_transformers(eyes, height, width):
    image = noise(height, width)
    expected = processed(image)["pixel_values"][0].numpy().transpose(1, 2, 0)
    found = eyes.sight.prepare(image)
    back = np.zeros_like(expected)
    for patch, row, column in zip(*found.inputs.values(), strict=True):
        back[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = patch
    assert found.grid == (expected.shape[0] // 8, expected.shape[1] // 8)
    np.testing.assert_allclose(back, expected, atol=1 / 255)


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_vectors_are_those_of_transformers(eyes, model, height, width):
    image = noise(height, width, seed=1)
    inputs = processed(image)
    sizes = [tuple(map(int, size)) for size in inputs["image_sizes"]]
    expected = model.model.get_image_features(inputs["pixel_values"], image_sizes=sizes).pooler_output[0].numpy()
    picture = eyes.sight.prepare(image)
    assert picture.vectors == len(expected)
    close(eyes.vectors(picture), expected)
    close(eyes.vectors(picture, 640), expected)  # padding is seen by none


def test_rows_of_tokens_end_in_breaks(eyes):
    picture = eyes.sight.prepare(noise(24, 32))
    assert picture.grid == (3, 4) and picture.vectors == 12
    assert eyes.sight.tokens(picture) == [10, 10, 10, 10, 12] * 2 + [10, 10, 10, 10, 13]
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (10, 10, 4)


def test_images_are_known_by_their_pixels(eyes):
    first, second = noise(24, 32), noise(24, 32, seed=1)
    digest = [eyes.sight.prepare(image).digest for image in (first, first.copy(), second, first.reshape(32, 24, 3))]
    assert digest[0] == digest[1] and len({*digest}) == 3


def test_an_image_of_one_pixel_a_row_is_refused(eyes):
    with pytest.raises(ShardlmError, match="no pixel left in one direction once its longest side is 96; crop it"):
        eyes.sight.prepare(np.zeros((1, 200, 3), np.uint8))


def test_on_several_devices(eyes, model, tmp_path):
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    picture = eyes.sight.prepare(noise(40, 64))
    close(Eyes(folder, MeshSpec(data=2, tensor=2)).vectors(picture), eyes.vectors(picture), 1e-6)


def test_what_does_not_fit_is_named(model, tmp_path):
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"num_hidden_layers": 4, "intermediate_size": 40}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShardlmError) as told:
        Eyes(folder)
    assert "vision_tower.transformer.layers.0.feed_forward" in str(told.value)
    config["vision_config"] |= {"num_hidden_layers": 2, "intermediate_size": 48}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShardlmError, match=r"vision_tower.transformer.layers.2.\S+ is not known"):
        Eyes(folder)


def test_a_tower_in_few_bits_is_read_as_numbers(eyes, model, tmp_path):
    """FP8 in blocks, as Ministral 3 is published in, though its tower is not."""
    folder, name = (
        written(model, tmp_path, TOKENS, preprocessor_config=PREPARED),
        "layers.0.feed_forward.up_proj.weight",
    )
    tensors = load_file(folder / "model.safetensors")
    [found] = [key for key in tensors if key.endswith(name)]
    few = (tensors[found] / 2**-8).astype(ml_dtypes.float8_e4m3fn)
    vectors = []
    for own in (few.astype(np.float32) * 2**-8, few):
        scale = {f"{found}_scale_inv": np.full((1, 1), 2**-8, np.float32)} if own is few else {}
        save_file(tensors | {found: own} | scale, folder / "model.safetensors")
        if own is few:
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
            (folder / "config.json").write_text(json.dumps(config))
        vectors.append(Eyes(folder).vectors(eyes.sight.prepare(noise(40, 64))))
    np.testing.assert_array_equal(*vectors)
    assert np.abs(vectors[0] - eyes.vectors(eyes.sight.prepare(noise(40, 64)))).max() > 1e-4


def test_unknown_options_and_missing_tokens_are_refused(model, tmp_path):
    folder = written(model, tmp_path, {}, preprocessor_config=PREPARED)
    config = Folder.open(folder).config
    with pytest.raises(ShardlmError, match=r"no token \[IMG_BREAK\], \[IMG_END\]"):
        sight_of(folder, config)
    config = config | {"vision_config": config["vision_config"] | {"use_registers": 4}}
    with pytest.raises(ShardlmError, match="use_registers=4"):
        sight_of(folder, config)


@torch.no_grad()
def test_mistral_large_4(tmp_path):
    """Whose files have Mistral's own names, and rotated pairs side by side."""
    folder = shutil.copytree(SEEING / "mistral_large4", tmp_path / "own")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    eyes = Eyes(written(None, folder, TOKENS, preprocessor_config=PREPARED))
    picture = eyes.sight.prepare(noise(20, 32))
    whole = np.zeros((*(2 * np.array(picture.grid) * 2), 3), np.float32)
    for patch, row, column in zip(*picture.inputs.values(), strict=True):
        whole[row * 2 : row * 2 + 2, column * 2 : column * 2 + 2] = patch
    pixels = torch.tensor(whole.transpose(2, 0, 1))[None]
    expected = model.model.get_image_features(pixels, image_sizes=[whole.shape[:2]]).pooler_output[0]
    close(eyes.vectors(picture), expected.numpy())


def test_text_models_do_not_see(tmp_path):
    assert sight_of(tmp_path, {"model_type": "mistral"}) is None
    assert sight_of(tmp_path, {"model_type": "mistral3", "vision_config": None}) is None
