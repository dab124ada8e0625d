"""LFM2-VL's eyes against transformers, whose image processor needs torchvision: what it does is written down here."""

import json
import math

import numpy as np
import pytest
from PIL import Image
from seeing import Eyes, close, functions_of, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.lfm2_images import spread
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 60
PLACES = {f"<|img_row_{r}_col_{c}|>": 39 + 4 * r + c for r in range(1, 5) for c in range(1, 5) if r * c <= 4}
TOKENS = {"<|image_start|>": 61, "<|image_end|>": 62, "<|img_thumbnail|>": 63} | PLACES
PREPARED = {"min_image_tokens": 4, "max_image_tokens": 12, "encoder_patch_size": 4, "tile_size": 24, "max_tiles": 4}
IMAGES = [(24, 24), (40, 30), (120, 70), (9, 90), (60, 60), (33, 32)]
OTHER = {"projector_bias": False, "projector_use_layernorm": False}


def made(**options):
    torch.manual_seed(0)
    config = transformers.Lfm2VlConfig(
        vision_config={
            "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 4, "num_patches": 25, "vision_use_head": False,
        },
        text_config={
            "model_type": "lfm2", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 1,
            "block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv"],
        },
        image_token_id=TOKEN, projector_hidden_size=48, **options,
    )  # fmt: skip
    return lively(transformers.Lfm2VlForConditionalGeneration(config).eval())


def processed(image: np.ndarray):
    """(parts [part, patches, 48], (rows, columns) of each, (rows, columns) of tiles)."""
    names = "_is_image_too_large", "smart_resize", "find_closest_aspect_ratio", "round_by_factor"
    too_large, smart_resize, closest, _ = functions_of("lfm2_vl/image_processing_lfm2_vl.py", *names)
    height, width = image.shape[:2]
    own = {"downsample_factor": 2, "encoder_patch_size": 4, "max_image_tokens": 12}
    large = too_large(None, height, width, max_pixels_tolerance=2.0, **own)
    size = smart_resize(None, height, width, min_image_tokens=4, **own)
    resized = lambda *size: np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))  # noqa: E731
    parts, columns, rows = [], 1, 1
    if large:
        ratios = [(w, h) for n in range(2, 5) for w in range(1, n + 1) for h in range(1, n + 1) if 2 <= w * h <= 4]
        ratios = sorted(set(ratios), key=lambda x: x[0] * x[1])
        columns, rows = closest(width / height, ratios, width, height, 24)
        whole = resized(24 * columns, 24 * rows)
        parts = [whole[r : r + 24, c : c + 24] for r in range(0, 24 * rows, 24) for c in range(0, 24 * columns, 24)]
    parts.append(resized(*size))
    sizes, cut = [], []
    for part in parts:
        r, c = part.shape[0] // 4, part.shape[1] // 4
        numbers = torch.tensor((part / 255 - 0.5) / 0.5, dtype=torch.float32)
        cut.append(numbers.reshape(r, 4, c, 4, 3).permute(0, 2, 1, 3, 4).reshape(r * c, 48))
        sizes.append((r, c))
    return cut, sizes, (rows, columns)


def inputs(images):
    """What transformers' model is called with, of images."""
    cut, sizes = zip(*(part for image in images for part in zip(*processed(image)[:2], strict=True)), strict=True)
    most = max(map(len, cut))
    mask = torch.tensor([[1] * len(part) + [0] * (most - len(part)) for part in cut])
    pixels = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, most - len(part))) for part in cut])
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(sizes)}


@pytest.fixture(scope="module", params=["plain", "other"])
def model(request):
    return made(**(OTHER if request.param == "other" else {}))


@pytest.fixture(scope="module")
def eyes(model, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp("lfm2_vl"), TOKENS, preprocessor_config=PREPARED))


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model):
    for size in IMAGES:
        cut, sizes, tiles = processed(noise(*size))
        picture = eyes.sight.prepare(noise(*size))
        assert picture.tiles == tiles and picture.patches == sum(map(len, cut)) <= eyes.sight.sizes[-1]
        back, start = [], 0
        for rows, columns in sizes:
            part = picture.inputs["pixels"][start : start + rows * columns]
            part = part.reshape(rows // 2, columns // 2, 2, 2, 48).transpose(0, 2, 1, 3, 4)
            back.append(part.reshape(-1, 48))
            start += rows * columns
        np.testing.assert_allclose(np.concatenate(back), np.concatenate(cut), atol=1 / 255)
        vectors = torch.cat(model.model.get_image_features(**inputs([noise(*size)])).pooler_output)
        close(eyes.vectors(picture), vectors.numpy())


def test_tokens(eyes):
    own = [TOKEN] * 9
    assert eyes.sight.tokens(eyes.sight.prepare(noise(24, 24))) == [61, *own, 62]
    found = eyes.sight.tokens(eyes.sight.prepare(noise(30, 80)))
    assert found == [61, 44, *own, 45, *own, 46, *own, 63, *[TOKEN] * 10, 62]
    assert (eyes.sight.token, eyes.sight.merged, eyes.sight.sizes) == (TOKEN, 4, (192,))


def test_shares_of_positions():
    """As PyTorch's interpolation has them, of more and of fewer."""
    for count in (2, 3, 5, 8):
        table = torch.eye(5)[None, :, :, None].expand(1, 5, 5, 5).contiguous()  # the same in each column
        expected = torch.nn.functional.interpolate(table, (count, 5), mode="bilinear", antialias=True)[0, :, :, 0]
        np.testing.assert_allclose(spread(count, 5), expected.T.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "file, told, message",
    [
        ("preprocessor_config.json", {"tile_size": 20}, "tiles of 20 pixels"),
        ("preprocessor_config.json", {"max_tiles": 1}, "cuts images into 2 to 1 tiles"),
        ("preprocessor_config.json", {"max_tiles": 2**20}, "at most 67108864 pixels"),
        ("preprocessor_config.json", {"encoder_patch_size": 16}, "encoder_patch_size=16 and its config.json has 4"),
        ("config.json", {"num_patches": 26}, "num_patches=26"),
        ("config.json", {"spin": 1}, "spin=1"),
    ],
)
def test_what_is_refused(file, told, message, tmp_path):
    folder = written(made(), tmp_path, TOKENS, preprocessor_config=PREPARED)
    config = json.loads((folder / "config.json").read_text())
    if file == "config.json":
        config["vision_config"] |= told
    else:
        (folder / file).write_text(json.dumps(PREPARED | told))
    with pytest.raises(ShardlmError, match=message):
        sight_of(folder, config)


def test_an_image_that_is_almost_a_line(eyes):
    with pytest.raises(ShardlmError, match="encoder takes 48 patches of 4 x 4; crop it"):
        eyes.sight.prepare(noise(1, 3000))
    assert math.prod(eyes.sight.prepare(noise(1, 12)).grid)


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS | {"<image>": TOKEN})
    first, second = noise(30, 80), noise(24, 30, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]
    llm = LLM(folder, **SIZES)
    family = Family(folder, model, lambda given, ids: inputs(given) if given else {})
    held_to_transformers(family, llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
