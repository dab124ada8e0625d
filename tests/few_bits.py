"""Checkpoints in few bits for tests: written as files, and held against what they stand for."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np

from shardlm.hf_files import Folder, Planned, write_folder
from shardlm.hf_quantised import dequantised
from shardlm.hf_quantised.codes import FP4

REFERENCES = pathlib.Path(__file__).parent / "hf" / "references"
GROUP = 8  # inputs that share a scale
PLAIN = ("lm_head", "embed_tokens", "norm", ".gate.", "eh_proj", "shared_head", "router")


def written(path, config, arrays) -> Folder:
    shutil.rmtree(path, ignore_errors=True)
    write_folder(path, [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()], config)
    return Folder.open(path)


def opened(path, options, **arrays):
    """What is read of these tensors of module w, by their names with __ for a dot and ____ for themselves."""
    tensors = {f"w.{name.replace('____', '@').replace('__', '.').replace('@', '__')}": a for name, a in arrays.items()}
    folder = written(path, {"quantization_config": options}, tensors)
    return dequantised(folder.tensors, folder.config)


def check(found, expected) -> None:
    """Whole, and in slices, also of no rows, that begin within words and blocks."""
    O, I = expected.shape
    assert found.shape == expected.shape and found.dtype == expected.dtype == np.float32 and found.nbytes > 0
    assert np.array_equal(found.read(...), expected, equal_nan=True)
    rows = (slice(None), slice(1, O - 1), slice(O // 3, O, 3), slice(2, 2))
    columns = (slice(None), slice(3, I - 1), slice(I // 2, I), slice(I // 3, I - 2, 5))
    for part in ((r, c) for r in rows for c in columns):
        assert np.array_equal(found.read(part), expected[part], equal_nan=True), part
    if getattr(found, "kept", None):
        _check_as_it_is(found, expected)


def _check_as_it_is(found, expected) -> None:
    """Numbers, factors and zeros as they are held make the same, whole and in slices of whole groups; a group may be
    taken for several."""
    I, kept = expected.shape[1], found.kept
    group = kept.group or I
    for every in {group, group // 2} if I % group == 0 and group % 2 == 0 else ():
        for rows, first in ((slice(None), 0), (slice(1, 5), 1)):
            of_groups = slice(first, I // every)
            codes = found.codes((rows, slice(first * every, I)))
            numbers = FP4[codes & 15] if kept.numbers == "fp4" else codes.astype(np.float32)
            if kept.zeros:
                numbers = numbers - found.zeros_of((rows, of_groups), every=every).repeat(every, 1)
            factors = found.factors_of((rows, of_groups), every=every)
            assert np.array_equal(factors.astype(kept.scale).astype(np.float32), factors, equal_nan=True)
            whole, right = numbers * factors.repeat(every, 1), expected[rows, first * every :]
            if kept.whole:
                assert np.array_equal(whole, right, equal_nan=True), (every, rows)
            else:
                assert np.allclose(whole, right, rtol=1e-6, atol=1e-6 * np.nanmax(np.abs(right))), (every, rows)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [A, B] side by side in words of 32 bits along the columns, the lowest bits first, a code at a time; zeros
    fill up the last word."""
    per = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // per)), np.uint32)
    for column in range(codes.shape[1]):
        words[:, column // per] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per))
    return words.view(np.int32)


def as_bytes(told: dict) -> np.ndarray:
    return np.frombuffer(json.dumps(told).encode(), np.uint8)


def grouped(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes of 4 bits less 8, [O, I]; scales [O, I / GROUP] in float16; what they stand for)."""
    of_groups = a.reshape(len(a), -1, GROUP)
    scales = (np.abs(of_groups).max(axis=-1) / 7).astype(np.float16)
    codes = np.rint(of_groups / scales[..., None].astype(np.float32))
    return codes.reshape(a.shape).astype(int), scales, (codes * scales[..., None].astype(np.float32)).reshape(a.shape)


def gptq(a):
    """Zeros of 8, less one in the files; AutoGPTQ wrote biases beside all of them."""
    codes, scales, a = grouped(a)
    zeros = packed(np.full(scales.T.shape, 7), 4)
    found = {"qweight": packed(codes + 8, 4).T.copy(), "qzeros": zeros, "scales": scales.T.copy()}
    listed = (np.arange(codes.shape[1]) // GROUP).astype(np.int32)
    return found | {"g_idx": listed, "bias": np.zeros(len(codes), "f2")}, a


def awq(a):
    codes, scales, a = grouped(a)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    places = np.arange(len(codes)).reshape(-1, 8)[:, order].reshape(-1)
    zeros = np.full(scales.T.shape, 8)
    found = {"qweight": packed((codes + 8).T[:, places], 4), "qzeros": packed(zeros, 4), "scales": scales.T.copy()}
    return found, a


def compressed(a):
    codes, scales, a = grouped(a)
    return {"weight_packed": packed(codes + 8, 4), "weight_scale": scales, "weight_shape": np.array(codes.shape)}, a


def blocks(a):
    """8-bit floats in squares of GROUP."""
    O, I = a.shape
    cells = np.zeros((-(-O // GROUP), -(-I // GROUP)), np.float32)
    np.maximum.at(cells, (np.arange(O)[:, None] // GROUP, np.arange(I)[None] // GROUP), np.abs(a))
    scales = cells / np.float32(448)
    spread = scales.repeat(GROUP, 0)[:O].repeat(GROUP, 1)[:, :I]
    numbers = (a / spread).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.astype(np.float32) * spread


def mxfp4(a):
    """Of all experts, [E, I, O]; groups of 32 share an exponent."""
    E, I, O = a.shape
    of_groups = a.swapaxes(1, 2).reshape(E, O, I // 32, 32)
    exponents = np.floor(np.log2(np.abs(of_groups).max(-1))).astype(int) - 2
    factors = np.exp2(exponents).astype(np.float32)[..., None]
    codes = np.abs(FP4[:, None, None, None, None] * factors - of_groups).argmin(0).astype(np.uint8)
    whole = (FP4[codes] * factors).reshape(E, O, I).swapaxes(1, 2)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return {"_blocks": packed, "_scales": (exponents + 127).astype(np.uint8)}, np.ascontiguousarray(whole)


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
WAYS = {
    "deepseek_v3": (blocks, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "gpt_oss": (mxfp4, {"quant_method": "mxfp4"}),
    "llama": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "qwen3_moe": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "phi3": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        },
    ),
}


def in_few_bits(path, name) -> tuple[Folder, Folder]:
    """(what the numbers stand for in 32 bits, the same in few): a family's reference, whose experts' inner width is
    made one of whole groups where all of them are one tensor."""
    way, options = WAYS[name]
    source, rng = Folder.open(REFERENCES / name), np.random.default_rng(0)
    config = source.config | ({"intermediate_size": 64} if name == "gpt_oss" else {})
    plain, few = {}, {}
    for tensor, stored in source.tensors.items():
        a = stored.read(...).astype(np.float32)
        if ".experts." in tensor and name == "gpt_oss":
            a = 0.2 * rng.normal(size=[{48: 64, 96: 128}.get(n, n) for n in a.shape]).astype(np.float32)
        if a.ndim == (3 if name == "gpt_oss" else 2) and not any(part in tensor for part in PLAIN):
            parts, a = way(a)
            few |= {f"{tensor.removesuffix('weight')}{own}": part for own, part in parts.items()}
        else:
            few[tensor] = a
        plain[tensor] = a
    of_few = {**config, "quantization_config": options}
    return written(path / "plain", config, plain), written(path / "few", of_few, few)
