"""Llama 4's eyes against transformers."""

import numpy as np
import pytest
from PIL import Image
from seeing import Eyes, close, lively, noise, written

from shardlm.vision.llama4_images import canvases
from shardlm.vision.tiles import tile_sizes

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKENS = {f"<|{name}|>": 50 + i for i, name in enumerate(("image_start", "image", "image_end", "tile_x_separator"))}
TOKENS |= {"<|tile_y_separator|>": 54}
PATCH = 55
PREPARED = {"size": {"height": 16, "width": 16}, "max_patches": 4}
SIZES = [(16, 16), (40, 30), (300, 170), (9, 90), (60, 10)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Llama4Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 16, "vision_output_dim": 24, "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        text_config={
            "hidden_size": 40, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
            "num_local_experts": 2,
        },
        image_token_index=PATCH,
    )  # fmt: skip
    found = transformers.Llama4ForConditionalGeneration(config).eval()
    return lively(found)


@pytest.fixture(scope="module")
def eyes(model, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp("llama4"), TOKENS, preprocessor_config=PREPARED))


def processed(image: np.ndarray):
    """(tiles [T, 3, 16, 16], rows and columns of them), by the functions of image_processing_llama4.py, whose class
    needs torchvision."""
    ratios = {}
    for count in (4, 3, 2, 1):
        for rows in sorted({n for n in range(1, count + 1) if count % n == 0}):
            ratios.setdefault(rows / (count // rows), []).append((rows * 16, count // rows * 16))
    choices = torch.tensor([pair for pairs in ratios.values() for pair in pairs])
    height, width = image.shape[:2]
    by_width, by_height = choices[:, 1] / width, choices[:, 0] / height
    scales = torch.where(by_height > by_width, by_width, by_height)
    best = scales[scales >= 1].min() if (scales >= 1).any() else scales.max()
    chosen = choices[scales == best]
    target = chosen[torch.argmin(chosen[:, 0] * chosen[:, 1])].tolist()
    limit = [min(max(own, 16), most) for own, most in zip((height, width), target, strict=True)]
    if limit[1] / width < limit[0] / height:
        new = min(int(height * (limit[1] / width)), limit[0]), limit[1]
    else:
        new = limit[0], min(int(width * (limit[0] / height)), limit[1])
    new = max(1, new[0]), max(1, new[1])
    resize = lambda size: np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))  # noqa: E731
    filled = np.pad(resize(new), [(0, target[0] - new[0]), (0, target[1] - new[1]), (0, 0)])
    rows, columns = target[0] // 16, target[1] // 16
    tiles = [filled[r * 16 : r * 16 + 16, c * 16 : c * 16 + 16] for r in range(rows) for c in range(columns)]
    tiles += [resize((16, 16))] if rows * columns > 1 else []
    pixels = torch.tensor(np.stack(tiles)).permute(0, 3, 1, 2).to(torch.bfloat16) * (1 / 255)
    return pixels.sub(torch.tensor(0.5, dtype=torch.bfloat16)).div(torch.tensor(0.5, dtype=torch.bfloat16)), (
        rows,
        columns,
    )


@pytest.mark.parametrize("height, width", SIZES)
@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, height, width):
    image = noise(height, width)
    expected, tiles = processed(image)
    picture = eyes.sight.prepare(image)
    assert picture.tiles == tiles and picture.grid == (len(expected), 4)
    found = picture.inputs["pixels"].reshape(-1, 2, 2, 2, 2, 4, 4, 3)  # tile, square's and patch's row and column
    found = found.transpose(0, 7, 1, 3, 5, 2, 4, 6).reshape(-1, 3, 16, 16)
    np.testing.assert_array_equal(found, expected.float().numpy())
    features = model.get_image_features(expected.float()).last_hidden_state
    vectors = model.multi_modal_projector(features.reshape(-1, features.shape[-1]))
    close(eyes.vectors(picture), vectors.numpy())


def test_tokens(eyes):
    begin, image, end, beside, below = TOKENS.values()
    own = [PATCH] * 4
    one, several = (eyes.sight.prepare(noise(*size)) for size in ((16, 16), (16, 32)))
    assert eyes.sight.tokens(one) == [begin, image, *own, end]
    assert eyes.sight.tokens(several) == [begin, *own, beside, *own, below, image, *own, end]
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (image, PATCH, 4)
    tall = eyes.sight.prepare(noise(48, 16))
    assert eyes.sight.tokens(tall) == [begin, *[*own, below] * 3, image, *own, end]


def test_sizes_have_room_for_the_most_tiles(eyes):
    assert eyes.sight.sizes == (16, 48, 80)
    assert tile_sizes(16, 1) == (1, 3, 5, 9, 17) and tile_sizes(1, 1) == (1,) and tile_sizes(12, 1) == (1, 3, 5, 9, 13)
    assert max(rows * columns for rows, columns in canvases(16)) == 16 and len(canvases(16)) == 50
