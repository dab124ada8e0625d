"""Images as Qwen's towers read them, against transformers: sizes, patches and what stands beside each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm.errors import ShardlmError
from shardlm.vision.images import places
from shardlm.vision.qwen_images import QwenImages, around, in_windows, resized_to

SIZES = [(64, 64), (37, 90), (300, 41), (8, 8), (1, 1), (500, 333)]
SMALL = {"min_pixels": 256, "max_pixels": 20_000}


def _images(told: dict, **changes: int) -> QwenImages:
    return QwenImages.told(told, **{"patch": 4, "merge": 2, "frames": 2, "window": 0, "side": 0} | changes)


def _noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([8, 28, 32]))
def test_size(height: int, width: int, factor: int):
    theirs = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", reason="what transformers made is in references/"
    ).smart_resize
    limits = 4 * factor**2, 640 * factor**2
    try:
        expected = theirs(height, width, factor, *limits)
    except ValueError:
        with pytest.raises(ShardlmError, match="has one side of more than 200 times the other; crop it"):
            resized_to(height, width, factor, *limits)
    else:
        assert resized_to(height, width, factor, *limits) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "told",
    [
        SMALL,
        {"size": {"shortest_edge": 256, "longest_edge": 20_000}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3},
        {"size": {"shortest_edge": 64, "longest_edge": 128}, **SMALL, "resample": 2},
    ],
)
def test_patches(told: dict, size: tuple[int, int]):
    """Bytes, brought to the tower's scale as it does, are transformers' patches."""
    module = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", reason="what transformers made is in references/"
    )
    theirs = module.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **told)
    pixels = _noise(*size)
    expected = theirs(pixels, input_data_format="channels_last", return_tensors="np")
    images = _images(told)
    picture = images(pixels)
    _, rows, columns = expected["image_grid_thw"][0]
    assert picture.grid == (rows // 2, columns // 2)
    each = expected["pixel_values"].reshape(-1, 3, 2, 4, 4).transpose(2, 0, 3, 4, 1)
    ours = images.pixels.numbers(picture.inputs["pixels"])
    for frame in each:
        np.testing.assert_allclose(ours, frame, atol=1e-6)  # theirs rounds after every step


@pytest.mark.parametrize("grid", [(4, 6), (2, 2), (10, 4), (16, 18)])
def test_beside_patches(grid: tuple[int, int]):
    torch, utils = (
        pytest.importorskip("torch", reason="what transformers made is in references/"),
        pytest.importorskip("transformers.vision_utils", reason="what transformers made is in references/"),
    )
    thw = torch.tensor([[1, *grid]])
    at = places(*grid, 2)
    expected = utils.get_vision_position_ids(thw, 2).numpy()
    np.testing.assert_array_equal(np.stack(at, -1), expected)
    own = around(at, grid, 5)
    index, weights = utils.get_vision_interpolation_indices_and_weights(
        thw, 5, align_corners=True, spatial_merge_size=2
    )
    assert own["near"].dtype == np.int32 and own["shares"].dtype == np.float32
    np.testing.assert_array_equal(own["near"], index.numpy())
    np.testing.assert_allclose(own["shares"], weights.numpy(), atol=1e-7)
    order, ends = utils.get_vision_window_index(thw, spatial_merge_size=2, window_size=12, patch_size=2)
    made = in_windows({"at": expected}, (grid[0] // 2, grid[1] // 2), 3, 4)
    np.testing.assert_array_equal(made["at"].reshape(-1, 4, 2), expected.reshape(-1, 4, 2)[order.numpy()])
    np.testing.assert_array_equal(made["source"][::4], np.argsort(order.numpy()))
    starts = np.flatnonzero(np.diff(made["windows"], prepend=-1))
    assert [*starts, len(expected)] == ends.tolist()


def test_too_many_patches():
    """Of what is almost a line: its short side is a square, however long the other has to be for its pixels."""
    images = _images({"min_pixels": 64, "max_pixels": 1024})
    assert images.most_patches == 64
    with pytest.raises(ShardlmError, match="of 1600 x 8 makes 224 patches and the model's encoder takes 64; crop it"):
        images(_noise(8, 1600))


def test_another_towers_images():
    with pytest.raises(ShardlmError, match="with patch_size=14 and its vision_config has 4"):
        _images({"patch_size": 14})


def test_what_images_are_known_by():
    images = _images({"min_pixels": 64, "max_pixels": 20_000})
    flat = np.zeros((16, 32, 3), np.uint8)
    digests = {images(pixels).digest for pixels in (flat, flat.transpose(1, 0, 2), flat + 1, flat[:8])}
    digests.add(_images({"min_pixels": 64, "max_pixels": 256})(flat).digest)
    assert _images({"min_pixels": 64, "max_pixels": 20_001})(flat).digest in digests  # the same pixels
    assert _images({"min_pixels": 64, "max_pixels": 256, "image_mean": [0.5] * 3})(flat).digest not in digests
    assert len(digests) == 5 and images(flat).digest == images(flat.copy()).digest
