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
from shardlm.hf_quantised import dequantised, mxfp4

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


def test_mxfp4_of_every_byte_and_exponent(tmp_path, monkeypatch):
    """In chunks that end within a row; 2 to the 128th is infinite in float32, and zero times that is no number."""
    monkeypatch.setattr(mxfp4, "CHUNK", 7)
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 1, 1))
    scales = np.arange(256, dtype=np.uint8)[None, :, None].repeat(16, axis=2)
    found = opened(tmp_path / "f", MXFP4, e_blocks=blocks, e_scales=scales)["e"].read(...)[0].T
    numbers = np.array([e2m1(code) for byte in range(256) for code in (byte & 15, byte >> 4)])
    with np.errstate(over="ignore"):
        expected = (numbers * 2.0 ** (np.arange(256)[:, None] - 127.0)).astype(np.float32)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("of_scales", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_fp8_of_every_byte_with_any_floats_as_scales(tmp_path, kind, of_scales):
    numbers = np.arange(256, dtype=np.uint8).reshape(16, 16).view(kind)
    factors = (2.0 ** np.arange(-4, 4)).reshape(4, 2).astype(of_scales)
    found = opened(tmp_path / "f", FP8, **{"w.weight": numbers, "w.weight_scale_inv": factors})["w.weight"]
    expected = numbers.astype(np.float32) * factors.astype(np.float32).repeat(4, 0).repeat(8, 1)
    assert np.array_equal(found.read(...), expected, equal_nan=True)
    part = (slice(3, 5), slice(7, 9))
    assert np.array_equal(found.read(part), expected[part], equal_nan=True)


BLOCKS, SCALES = np.zeros((2, 6, 3, 16), np.uint8), np.zeros((2, 6, 3), np.uint8)
NUMBERS, FACTORS = np.zeros((10, 20), ml_dtypes.float8_e4m3fn), np.zeros((3, 3), np.float32)


@pytest.mark.parametrize(
    "config,arrays,message",
    [
        (
            MXFP4,
            {"e_blocks": BLOCKS, "e_scales": SCALES[:1]},
            r"e_scales is uint8\[1, 6, 3\]; needed are uint8",
        ),
        (MXFP4, {"e_blocks": BLOCKS[..., :8], "e_scales": SCALES}, r"e_blocks is uint8\[2, 6, 3, 8\] and"),
        (MXFP4, {"e_blocks": BLOCKS, "e_scales": SCALES.view(np.int8)}, r"e_scales is int8\[2, 6, 3\]"),
        (MXFP4, {"e_scales": SCALES}, "e_scales is there, and e_blocks is not"),
        (
            FP8,
            {"w.weight": NUMBERS, "w.weight_scale_inv": FACTORS[:2]},
            r"scale_inv is float32\[2, 3\]; .*: \(3, 3\)",
        ),
        (
            FP8,
            {"w.weight": NUMBERS, "w.weight_scale_inv": np.zeros((3, 4), np.float32)},
            r"scale_inv is float32\[3, 4\]",
        ),
        (
            FP8,
            {"w.weight": NUMBERS, "w.weight_scale_inv": FACTORS.view(np.int32)},
            r"scale_inv is int32\[3, 3\]",
        ),
        (
            FP8,
            {"w.weight": np.zeros((10, 20), np.float16), "w.weight_scale_inv": FACTORS},
            r"weight is float16\[10, 20\] and",
        ),
        (FP8, {"w.weight_scale_inv": FACTORS}, "w.weight_scale_inv is there, and w.weight is not; download"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            {},
            "a list of two whole",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path, config, arrays, message):
    with pytest.raises(ShardlmError, match=message):
        opened(tmp_path / "f", config, **arrays)


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
