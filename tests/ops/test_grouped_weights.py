"""Weights in few bits: how far they are from what they were, in whole groups, on the host and on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.ops.grouped_weights import (
    STORED,
    dequantised,
    group_of,
    grouped_axis,
    packed_shape,
    quantised,
    scale_shape,
)

# Of the largest number of a group: half a step of the integers; of e4m3, the largest steps are of 32 up to 448.
ERROR = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 16 / 448}


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize(("shape", "axis"), [((192, 10), 0), ((3, 100, 7), 1), ((2, 48, 4, 5), 1), ((6, 5), 0)])
def test_numbers_are_near_what_they_were(how, shape, axis):
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.exp2(np.arange(shape[-1]) - 4)
    w.reshape(-1, shape[-1])[:, 0] = 0  # groups of zeros
    group = group_of(shape[axis], how)
    packed, scale = quantised(w, axis, group, how)
    assert packed.dtype == STORED[how] and packed.shape == packed_shape(shape, axis, how)
    assert scale.shape == scale_shape(shape, axis, how)
    if packed.shape != scale.shape:
        assert grouped_axis(packed.shape, scale.shape) == axis
    found = np.asarray(jax.jit(lambda p, s: dequantised(p, s, axis, how, jnp.float32))(packed, scale))
    split = lambda a: a.reshape(*shape[:axis], -1, group, *shape[axis + 1 :])  # noqa: E731
    largest = np.abs(split(w)).max(axis + 1, keepdims=True)
    # Scales have 8 bits of mantissa: the largest numbers may be cut by that.
    assert np.all(np.abs(split(found) - split(w)) <= largest * (ERROR[how] + 2**-8))
    assert np.max(np.abs(split(found) - split(w)) / np.maximum(largest, 1e-9)) > ERROR[how] / 2 or group < 16
    again = quantised(found, axis, group, how)
    np.testing.assert_array_equal(again[0], packed)  # the unpacking inverts the packing
    # Some of the groups alone are what they are among all.
    first = np.take(w, range(group), axis)
    for whole, part in zip((packed, scale), quantised(first, axis, group, how), strict=True):
        np.testing.assert_array_equal(np.take(whole, range(part.shape[axis]), axis), part)


def test_fp8_keeps_what_is_small_better_than_int8():
    w = np.exp2(-np.arange(64) / 8).astype(np.float32)[:, None]  # down to 1/256 of the largest
    error = {}
    for how in ("int8", "fp8"):
        found = dequantised(*map(jnp.asarray, quantised(w, 0, 64, how)), 0, how, jnp.float32)
        error[how] = np.abs(np.asarray(found) / w - 1).max()
    assert error["fp8"] < 0.07 < 0.5 < error["int8"]


def test_what_has_no_pairs_is_refused():
    with pytest.raises(ShardlmError, match="dimension of 17 has no groups of even size for int4"):
        group_of(17, "int4")
    assert group_of(17, "fp8") == 17
