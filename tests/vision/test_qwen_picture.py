"""Images as Qwen's towers read them, against transformers: sizes, patches and what stands beside each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm.errors import ShardlmError
from shardlm.vision.qwen_picture import Preparation, around, in_windows, places, resized

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = [(64, 64), (37, 90), (300, 41), (8, 8), (1, 1), (500, 333)]


def _noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([8, 28, 32]))
def test_size(height: int, width: int, factor: int):
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    limits = 4 * factor**2, 640 * factor**2
    try:
        expected = theirs(height, width, factor, *limits)
    except ValueError:
        with pytest.raises(ShardlmError, match="longer than 200 times its other side"):
            resized(height, width, factor, *limits)
    else:
        assert resized(height, width, factor, *limits) == expected


@pytest.mark.parametrize("size", SIZES)
def test_patches(size: tuple[int, int]):
    """Bytes, brought to the tower's scale as it does, are transformers' patches."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    theirs = module.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=20_000
    )
    pixels = _noise(*size)
    expected = theirs(pixels, input_data_format="channels_last", return_tensors="np")
    picture = Preparation(patch=4, merge=2, fewest=256, most=20_000)(pixels)
    _, rows, columns = expected["image_grid_thw"][0]
    assert picture.grid == (rows // 2, columns // 2)
    colours = picture.inputs["pixels"].reshape(-1, 3, 16).astype(np.float32) / 255
    ours = (colours - np.array(MEAN, np.float32)[:, None]) / np.array(STD, np.float32)[:, None]
    each = expected["pixel_values"].reshape(-1, 3, 2, 16)
    for frame in range(2):
        np.testing.assert_allclose(ours, each[:, :, frame], atol=1e-6)  # two orders of float32's additions


@pytest.mark.parametrize("grid", [(4, 6), (2, 2), (10, 4), (16, 18)])
def test_beside_patches(grid: tuple[int, int]):
    torch, utils = pytest.importorskip("torch"), pytest.importorskip("transformers.vision_utils")
    thw = torch.tensor([[1, *grid]])
    at = places(*grid, 2)
    np.testing.assert_array_equal(at, utils.get_vision_position_ids(thw, 2).numpy())
    near, shares = around(at, grid, 5)
    index, weights = utils.get_vision_interpolation_indices_and_weights(
        thw, 5, align_corners=True, spatial_merge_size=2
    )
    assert near.dtype == np.int32 and shares.dtype == np.float32
    np.testing.assert_array_equal(near, index.numpy())
    np.testing.assert_allclose(shares, weights.numpy(), atol=1e-7)
    order, ends = utils.get_vision_window_index(thw, spatial_merge_size=2, window_size=12, patch_size=2)
    made = in_windows({"at": at}, (grid[0] // 2, grid[1] // 2), 3, 4)
    np.testing.assert_array_equal(made["at"].reshape(-1, 4, 2), at.reshape(-1, 4, 2)[order.numpy()])
    np.testing.assert_array_equal(made["source"][::4], np.argsort(order.numpy()))
    starts = np.flatnonzero(np.diff(made["window"], prepend=-1))
    assert [*starts, len(at)] == ends.tolist()


def test_too_many_patches():
    with pytest.raises(ShardlmError, match="makes 256 patches and the model's encoder takes 128; send a smaller one"):
        Preparation(patch=4, merge=2, fewest=256, most=20_000, limit=128)(_noise(64, 64))


def test_what_images_are_known_by():
    prepare = Preparation(patch=4, merge=2, fewest=64, most=20_000)
    flat = np.zeros((16, 32, 3), np.uint8)
    digests = {prepare(pixels).digest for pixels in (flat, flat.transpose(1, 0, 2), flat + 1, flat[:8])}
    assert len(digests) == 4 and prepare(flat).digest == prepare(flat.copy()).digest
