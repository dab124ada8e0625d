"""GPTQ, AWQ and compressed-tensors' integers in words, written here by the owners' definitions."""

import few_bits
import ml_dtypes
import numpy as np
import pytest
from few_bits import check, opened, packed

from shardlm.errors import ShardlmError

O, I, SIZE = 40, 96, 32
RNG = np.random.default_rng(0)
SCALES = RNG.uniform(0.5, 2, (I // SIZE, O)).astype(np.float16)
IN_ORDER = (np.arange(I) // SIZE).astype(np.int32)
BY_SIZE_OF_INPUTS = RNG.permutation(IN_ORDER)  # as desc_act and actorder make it


def numbers(bits: int, zeros: np.ndarray, listed=IN_ORDER):
    """(codes [I, O], what they stand for [O, I])."""
    codes = RNG.integers(0, 1 << bits, (I, O))
    return codes, ((codes - zeros[listed]) * SCALES.astype(np.float32)[listed]).T.astype(np.float32)


def gptq(codes, zeros, bits, listed=IN_ORDER, version=1, **changes):
    """https://github.com/AutoGPTQ/AutoGPTQ/blob/main/auto_gptq/nn_modules/qlinear/qlinear_cuda.py (pack); as gptq_v2
    zeros are as they are, before that words of them less a one in each place (convert_gptq_v2_to_v1_format_module,
    https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/utils/model.py)."""
    of_zeros = packed(zeros, bits).view(np.uint32)
    if version == 1:
        of_zeros = of_zeros - np.uint32(sum(1 << place for place in range(0, 32, bits)))
    made = {"qweight": packed(codes.T, bits).T.copy(), "qzeros": of_zeros.view(np.int32), "scales": SCALES}
    return made | {"g_idx": listed} | changes


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(tmp_path, bits, version):
    zeros = RNG.integers(0, 1 << bits, (I // SIZE, O))
    assert (zeros == 0).any() or bits == 8  # of which the first version borrows a one from the next
    codes, expected = numbers(bits, zeros, BY_SIZE_OF_INPUTS)
    options = {"quant_method": "gptq", "bits": bits, "group_size": SIZE, "desc_act": True}
    options |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    found = opened(tmp_path / "f", options, **gptq(codes, zeros, bits, BY_SIZE_OF_INPUTS, version), bias=np.ones(O))
    assert set(found) == {"w.weight", "w.bias"}
    check(found["w.weight"], expected)


def test_gptq_without_a_list_and_with_bits_of_its_own(tmp_path):
    """The second as GPTQModel's `dynamic` has it for some modules."""
    zeros = np.full((I // SIZE, O), 8)
    codes, expected = numbers(4, zeros)
    tensors = gptq(codes, zeros, 4)
    options = {"quant_method": "gptq", "bits": 8, "group_size": SIZE, "format": "gptq"}
    check(opened(tmp_path / "f", options, **tensors)["w.weight"], expected)
    del tensors["g_idx"]
    check(opened(tmp_path / "g", {**options, "bits": 4}, **tensors)["w.weight"], expected)


def test_auto_round_by_its_packing_format(tmp_path):
    """GPTQ_FORMAT and GPTQ_FORMAT_NO_ZP in auto_round/inference/backend.py; modules may have bits of their own."""
    for version, form in ((1, None), (1, "auto_round:gptq"), (2, "auto_round"), (2, "auto_round:gptqmodel")):
        zeros = RNG.integers(0, 256, (I // SIZE, O))
        codes, expected = numbers(8, zeros)
        tensors = gptq(codes, zeros, 8, version=version)
        del tensors["g_idx"]
        options = {"quant_method": "auto-round", "bits": 4, "group_size": SIZE, "packing_format": form}
        options["extra_config"] = {"w": {"bits": 8}, "v": {"bits": 16}}
        check(opened(tmp_path / "f", options, **tensors)["w.weight"], expected)


def test_awq(tmp_path):
    """https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py (from_linear)."""

    def interleaved(codes):
        words = np.zeros((len(codes), O // 8), np.uint32)
        for column in range(O // 8):
            for place, own in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words[:, column] |= codes[:, column * 8 + own].astype(np.uint32) << np.uint32(4 * place)
        return words.view(np.int32)

    zeros = RNG.integers(0, 16, (I // SIZE, O))
    codes, expected = numbers(4, zeros)
    options = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "zero_point": True, "version": "GEMM"}
    tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": SCALES}
    found = opened(tmp_path / "f", options, **tensors, norm=np.ones(3))
    check(found["w.weight"], expected)
    assert set(found) == {"w.weight", "w.norm"}
    options = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "group_size": SIZE}
    check(opened(tmp_path / "g", options, **tensors)["w.weight"], expected)


def group(**weights):
    return {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}


def compressed(*groups, form="pack-quantized", **more):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {f"group_{i}": g for i, g in enumerate(groups)},
        **more,
    }


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "zeros of 8 bits", "listed", "not yet listed", "of rows"])
def test_compressed_tensors(tmp_path, bits, kind):
    """https://github.com/vllm-project/compressed-tensors/blob/main/src/compressed_tensors/compressors/pack_quantized:
    codes and zeros are half their range larger; zeros are packed along the outputs."""
    half, (O, I) = 1 << (bits - 1), (7, 96)
    codes, zeros = RNG.integers(0, 2 * half, (O, I)), RNG.integers(0, 2 * half, (O, I // SIZE))
    scales = RNG.uniform(0.5, 2, zeros.shape).astype(ml_dtypes.bfloat16)
    listed = BY_SIZE_OF_INPUTS if kind == "listed" else IN_ORDER
    weights = {"num_bits": bits, "strategy": "group", "group_size": SIZE, "symmetric": "zeros" not in kind}
    tensors = {"weight_packed": packed(codes, bits), "weight_shape": np.array([O, I])}
    if kind == "of rows":
        scales, listed, weights = scales[:, :1], np.zeros(I, int), {"num_bits": bits, "strategy": "channel"}
    if "zeros" in kind:
        of_zeros = (zeros - half).astype(np.int8) if "8 bits" in kind else packed(zeros.T, bits).T.copy()
        tensors["weight_zero_point"] = of_zeros
    else:
        zeros = np.full(scales.shape, half)
    if "listed" in kind:
        tensors["weight_g_idx"] = np.full(I, -1, np.int32) if "not" in kind else BY_SIZE_OF_INPUTS
    expected = ((codes - zeros[:, listed]) * scales.astype(np.float32)[:, listed]).astype(np.float32)
    found = opened(tmp_path / "f", compressed(group(**weights)), **tensors, weight_scale=scales)
    check(found["w.weight"], expected)
    assert set(found) == {"w.weight"}


def test_a_width_that_does_not_fill_the_last_word(tmp_path):
    codes = RNG.integers(0, 16, (5, 11))
    tensors = {"weight_packed": packed(codes, 4), "weight_shape": np.array([5, 11], np.int32)}
    scales = np.ones((5, 1), np.float32)
    found = opened(tmp_path / "f", compressed(group(num_bits=4, strategy="channel")), **tensors, weight_scale=scales)
    check(found["w.weight"], (codes - 8).astype(np.float32))


def test_each_module_is_read_by_the_group_that_names_it(tmp_path):
    """A name or a pattern comes before a class, as in find_matched_target of vLLM."""
    codes = RNG.integers(0, 16, (4, 64))
    one = {"weight_packed": packed(codes, 4), "weight_shape": np.array([4, 64])}
    tensors = {f"{module}.{name}": a for module in ("a.q", "b.up", "c") for name, a in one.items()}
    scales = RNG.uniform(0.5, 2, (4, 2)).astype(np.float32)
    tensors |= {"a.q.weight_scale": scales, "b.up.weight_scale": scales[:, :1], "c.weight_scale": scales}
    groups = [group(num_bits=4, strategy="group", group_size=32), group(num_bits=4, strategy="channel")]
    groups[1]["targets"] = ["re:.*up", "lm_head"]
    config = {"quantization_config": compressed(*groups, form="mixed-precision")}
    folder = few_bits.written(tmp_path / "f", config, tensors)
    found = few_bits.dequantised(folder.tensors, folder.config)
    check(found["a.q.weight"], ((codes - 8) * scales.repeat(32, 1)).astype(np.float32))
    check(found["b.up.weight"], ((codes - 8) * scales[:, :1]).astype(np.float32))
    groups[0]["targets"] = ["a.q"]
    with pytest.raises(ShardlmError, match=r"c is quantised, and of the config_groups group_0, group_1 .* none may"):
        few_bits.dequantised(folder.tensors, {"quantization_config": compressed(*groups)})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": SIZE}
AWQ = {"quant_method": "awq"}
WORDS, ZEROS = np.zeros((I // 8, O), np.int32), np.zeros((I // SIZE, O // 8), np.int32)
ROWS = {"weight_packed": np.zeros((O, I // 8), np.int32), "weight_shape": np.array([O, I])}
FOUR = compressed(group(num_bits=4, strategy="group", group_size=SIZE))


@pytest.mark.parametrize(
    ("options", "arrays", "message"),
    [
        (GPTQ, {"qweight": WORDS, "qzeros": ZEROS}, r"w\.qweight is there, and w\.scales is not"),
        (GPTQ, {"qweight": WORDS, "qzeros": ZEROS[:, :4], "scales": SCALES}, r"w\.qzeros is int32\[3, 4\]; needed are"),
        (GPTQ, {"qweight": WORDS, "qzeros": ZEROS[:2], "scales": SCALES[:2]}, "needed are scales of groups of 32"),
        (GPTQ, {"scales": SCALES}, r"w\.scales is there, and w\.qweight is not"),
        (AWQ, {"qweight": WORDS, "qzeros": ZEROS, "scales": SCALES}, r"needed are int32 \[I, O / 8\]"),
        (
            FOUR,
            {**ROWS, "weight_scale": np.zeros((O, 2))},
            r"weight_scale is float64\[40, 2\]; needed are \[40, 3\] sca",
        ),
        (FOUR, {"weight_packed": ROWS["weight_packed"]}, r"weight_packed is there, and w\.weight_scale is not"),
        (
            FOUR,
            {**ROWS, "weight_shape": np.array([O, I + 8]), "weight_scale": SCALES.T},
            r"needed are int32 \[O, I \* 4 / 32\] where weight_shape, \[40, 104\]",
        ),
        (
            compressed(group(num_bits=4, strategy="group", group_size=SIZE, symmetric=False)),
            {**ROWS, "weight_scale": SCALES.T, "weight_zero_point": ZEROS},
            r"w\.weight_zero_point is int32\[3, 5\] and .*; needed are one of 4 bits for each of \[40, 3\] groups",
        ),
        (
            compressed(group(num_bits=4, strategy="token")),
            {**ROWS, "weight_scale": SCALES.T},
            "w is quantised with strategy='token'.*supported are tensor, channel, group",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, options, arrays, message):
    with pytest.raises(ShardlmError, match=message):
        opened(tmp_path / "f", options, **{name: np.ascontiguousarray(a) for name, a in arrays.items()})


def test_a_list_of_groups_that_are_not_there_is_refused(tmp_path):
    tensors = {"qweight": WORDS, "qzeros": ZEROS, "scales": SCALES, "g_idx": IN_ORDER + np.int32(1)}
    with pytest.raises(ShardlmError, match="a list of groups has 1 to 3, and there are 3 groups"):
        opened(tmp_path / "f", GPTQ, **tensors)["w.weight"].read(...)
