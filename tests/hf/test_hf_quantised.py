"""Checkpoints in 8 and 4 bits are read as the numbers they stand for, slice by slice."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest

import shardlm
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Planned, write_folder
from shardlm.hf_quantised import dequantised

REFERENCES = pathlib.Path(__file__).parent / "references"
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 8]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def opened(path, config, **arrays):
    planned = [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()]
    write_folder(path, planned, config)
    return dequantised(Folder.open(path).tensors, config)


def test_fp8_in_blocks(tmp_path):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(10, 20)).astype(ml_dtypes.float8_e4m3fn)
    factors = rng.normal(size=(3, 3)).astype(np.float32)
    found = opened(tmp_path / "f", FP8, **{"w.weight": numbers, "w.weight_scale_inv": factors, "n": np.ones(3)})
    assert set(found) == {"w.weight", "n"}
    expected = numbers.astype(np.float32) * factors.repeat(4, 0)[:10].repeat(8, 1)[:, :20]
    assert np.array_equal(found["w.weight"].read(...), expected)
    assert np.array_equal(found["w.weight"].read((slice(3, 9), slice(1, 20, 3))), expected[3:9, 1:20:3])
    with pytest.raises(ShardlmError, match=r"w\.weight is there, and w\.weight_scale_inv is not"):
        opened(tmp_path / "g", FP8, **{"w.weight": numbers})


def e2m1(code: int) -> float:
    """A 4-bit float by its definition: sign, two exponent bits of bias 1, one bit of mantissa."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def test_mxfp4_by_its_definition(tmp_path):
    E, O, G = 2, 6, 3
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (E, O, G, 16)).astype(np.uint8)
    scales = rng.integers(120, 134, (E, O, G)).astype(np.uint8)
    found = opened(tmp_path / "f", MXFP4, e_blocks=blocks, e_scales=scales)["e"]
    expected = np.zeros((E, G * 32, O), np.float32)
    for e, o, g, byte in np.ndindex(blocks.shape):
        for half, code in enumerate((blocks[e, o, g, byte] & 15, blocks[e, o, g, byte] >> 4)):
            value = e2m1(int(code)) * 2.0 ** (int(scales[e, o, g]) - 127)
            expected[e, g * 32 + 2 * byte + half, o] = value
    assert found.shape == expected.shape and np.array_equal(found.read(...), expected)
    part = (slice(1, 2), slice(20, 70), slice(1, 6, 2))
    assert np.array_equal(found.read(part), expected[part])
    with pytest.raises(ShardlmError, match=r"e_blocks is there, and e_scales is not"):
        opened(tmp_path / "g", MXFP4, e_blocks=blocks)


def test_a_model_in_8_bits_opens_as_its_numbers(tmp_path):
    """The weights of a reference whose matrices have been brought to fp8 with a factor of 2 a block."""
    source = Folder.open(REFERENCES / "llama")
    plain, packed = {}, {}
    for name, stored in source.tensors.items():
        a = stored.read(...).astype(np.float32)
        if a.ndim == 2 and "proj" in name:
            numbers = (a / 2).astype(ml_dtypes.float8_e4m3fn)
            blocks = tuple(-(-n // b) for n, b in zip(a.shape, (4, 8), strict=True))
            packed |= {name: numbers, f"{name}_scale_inv": np.full(blocks, 2, np.float32)}
            plain[name] = numbers.astype(np.float32) * 2
        else:
            plain[name] = packed[name] = a
    for folder, arrays, more in (("plain", plain, {}), ("packed", packed, FP8)):
        planned = [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()]
        write_folder(tmp_path / folder, planned, {**source.config, **more})
    one, other = (shardlm.load(tmp_path / folder) for folder in ("plain", "packed"))
    import jax

    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert np.array_equal(a, b)
    assert "quantization_config" not in other.source.to_hf()
    shutil.rmtree(tmp_path / "packed")
    assert json.loads(other.source.config)["quantization_config"]  # the run knows where it came from
