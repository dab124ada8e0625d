"""Gemma 3's eyes against transformers."""

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKENS = {"\n": 20, "\n\n": 21, "\n\n\n": 22, "\n\n\n\n": 23}
IMAGE, BEGIN, END = 60, 61, 62
PREPARED = {
    "size": {"height": 32, "width": 32},
    "do_pan_and_scan": None,
    "image_processor_type": "Gemma3ImageProcessor",
}
SIZES = [(32, 32), (40, 64), (300, 170), (9, 50)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 32, "vision_use_head": False,
        },
        text_config={
            "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
        },
        mm_tokens_per_image=16, image_token_index=IMAGE, boi_token_index=BEGIN, eoi_token_index=END,
    )  # fmt: skip
    found = transformers.Gemma3ForConditionalGeneration(config).eval()
    return lively(found)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("gemma3"), TOKENS, preprocessor_config=PREPARED)


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(image: np.ndarray):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size=PREPARED["size"])(image, return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, height, width):
    image = noise(height, width)
    expected = processed(image)
    picture = eyes.sight.prepare(image)
    back = np.zeros((32, 32, 3), np.float32)
    for patch, place in zip(*picture.inputs.values(), strict=True):
        row, column = divmod(int(place), 8)
        back[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = patch
    np.testing.assert_allclose(back, expected[0].numpy().transpose(1, 2, 0), atol=1 / 255)
    vectors = model.model.get_image_features(expected).pooler_output[0].numpy()
    assert picture.grid == (4, 4)
    close(eyes.vectors(picture), vectors)


def test_line_ends_beside_an_image_are_one_token(eyes):
    """As the tokenizer makes of them where the text is written out."""
    image = [BEGIN, *[IMAGE] * 16, END]
    one, two = (eyes.sight.prepare(noise(8, 8, seed)) for seed in (0, 1))
    ids, placed = eyes.sight.expanded([5, BEGIN, 6], [one])
    assert ids == [5, 21, *image, 21, 6]
    assert (placed[0].start, placed[0].end, placed[0].takes.tolist()) == (1, 21, list(range(3, 19)))
    ids, placed = eyes.sight.expanded([5, 20, BEGIN, BEGIN, 21, 6, 20, 20], [one, two])
    assert ids == [5, 22, *image, 23, *image, 23, 6, 20, 20]
    assert [p.takes.tolist() for p in placed] == [list(range(3, 19)), list(range(22, 38))]
    assert [ids[t] for p in placed for t in p.takes] == [IMAGE] * 32
    ids, _ = eyes.sight.expanded([23, BEGIN], [one])
    assert ids == [23, 21, *image, 21]  # no token of six


def test_its_tokens_see_all_of_an_image(eyes):
    sight = eyes.sight
    assert sight.whole and not sight.axes and not sight.deep
    assert (sight.token, sight.vector, sight.sizes, sight.merged) == (BEGIN, IMAGE, (64,), 4)


def test_another_size_is_refused(folder, model, tmp_path):
    other = written(model, tmp_path, TOKENS, preprocessor_config={"size": {"height": 64, "width": 64}})
    with pytest.raises(ShardlmError, match="its encoder reads 32 x 32 pixels"):
        sight_of(other, Folder.open(other).config)
    written(model, other, {}, preprocessor_config=PREPARED)
    with pytest.raises(ShardlmError, match="no token of two line ends"):
        sight_of(other, Folder.open(other).config)
    written(model, other, TOKENS, preprocessor_config=PREPARED | {"do_normalize": False})
    with pytest.raises(ShardlmError, match="do_normalize=false"):
        sight_of(other, Folder.open(other).config)


def test_names_as_published(folder, model, eyes, tmp_path):
    """Which the Gemma 3 folders on the hub have before transformers 5."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, a in tensors.items():
        name = name.removeprefix("model.")
        published = name.replace("vision_tower.", "vision_tower.vision_model.") if "vision_model" not in name else name
        found[published] = a
    other = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    save_file(found, other / "model.safetensors")
    picture = eyes.sight.prepare(noise(20, 20))
    np.testing.assert_array_equal(Eyes(other).vectors(picture), eyes.vectors(picture))
