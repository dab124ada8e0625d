"""What is read of a checkpoint's tensors, side by side."""

import itertools

import numpy as np
import pytest

from shardlm.models.naming import Tensor, read, shape_of, stacked, write


@pytest.mark.parametrize("shape", [(150, 130), (3, 150, 130), (2, 3, 70, 90), (5, 4)])
def test_stacked_arrays_in_any_order(shape):
    rng = np.random.default_rng(0)
    for order in itertools.permutations(range(len(shape))):
        whole = rng.integers(0, 1 << 16, [2 * n for n in shape]).astype(np.uint16).transpose(order)
        some = [whole[tuple(slice(i, n, 2) for n in whole.shape)] for i in (0, 1)]
        np.testing.assert_array_equal(stacked(2, iter(some)), np.stack(some))


def test_a_dimension_of_theirs_that_ours_lacks():
    tensor, theirs = Tensor("bias", "1 E -> E"), np.arange(6.0)[None]
    np.testing.assert_array_equal(read(tensor, (6,), (slice(2, 5),), theirs.__getitem__), theirs[0, 2:5])
    assert shape_of([(tensor, (6,))]) == write(tensor, theirs[0]).shape == (1, 6)


def test_stacked_heads():
    """As an output projection lies in a file, [D, N * H], and here, [N, H, D]."""
    theirs = np.random.default_rng(1).normal(size=(160, 3 * 40)).astype(np.float32)
    ours = read(
        Tensor("o", "D (N H) -> N H D"), (3, 40, 160), (slice(1, 3), slice(None), slice(5, 160)), theirs.__getitem__
    )
    expected = theirs.reshape(160, 3, 40)[5:, 1:].transpose(1, 2, 0)
    np.testing.assert_array_equal(stacked(1, [ours])[0], expected)
