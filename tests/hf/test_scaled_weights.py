"""8-bit numbers and 4-bit floats with scales, as vLLM, FBGEMM, ModelOpt and compressed-tensors publish them."""

import ml_dtypes
import numpy as np
import pytest
from few_bits import check, opened, written

from shardlm.errors import ShardlmError
from shardlm.hf_files import read_config
from shardlm.hf_quantised import METHODS, codes, supported

O, I = 40, 96
RNG = np.random.default_rng(0)
FLOATS = RNG.normal(size=(O, I)).astype(ml_dtypes.float8_e4m3fn)
INTS = RNG.integers(-128, 128, (O, I)).astype(np.int8)
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def scales(*shape):
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(), (1,), (O,), (O, 1)])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt"])
def test_fp8_with_a_scale_for_all_or_for_each_row(tmp_path, method, shape):
    """https://github.com/neuralmagic/AutoFP8, https://github.com/vllm-project/vllm/blob/main/docs/features/quantization;
    scales of activations and of caches are left aside."""
    scale = np.asarray(scales(*shape))
    beside = {"input_scale": np.ones(1, np.float32), "k_scale": np.ones((), np.float32)}
    found = opened(tmp_path / "f", {"quant_method": method}, weight=FLOATS, weight_scale=scale, **beside)
    check(found["w.weight"], FLOATS.astype(np.float32) * scale.reshape(-1, 1))
    assert set(found) == {"w.weight"}


def test_fp8_as_transformers_writes_it_for_a_tensor(tmp_path):
    """FP8Linear with block_size None in transformers/integrations/finegrained_fp8.py."""
    tensors = {"weight": FLOATS, "weight_scale_inv": np.float32(0.5) * np.ones((), np.float32)}
    options = FP8 | {"weight_block_size": None}
    found = opened(tmp_path / "f", options, **tensors, activation_scale=np.ones((), np.float32))
    check(found["w.weight"], FLOATS.astype(np.float32) * np.float32(0.5))
    assert set(found) == {"w.weight"}


def test_modelopt_in_blocks_and_with_exponents(tmp_path):
    """ModelOptFp8PbWoLinearMethod and MXFP8 in vllm/model_executor/layers/quantization/modelopt.py."""
    numbers = np.tile(FLOATS, (5, 2))  # [200, 192]
    blocks, options = scales(2, 2), {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    found = opened(tmp_path / "f", options, weight=numbers, weight_scale=blocks.reshape(2, 1, 2, 1))
    of_each = blocks.repeat(128, 0)[:200].repeat(128, 1)[:, :192]
    check(found["w.weight"], numbers.astype(np.float32) * of_each)
    exponents = RNG.integers(120, 134, (O, I // 32)).astype(np.uint8)
    found = opened(tmp_path / "g", {**options, "quant_algo": "MXFP8"}, weight=FLOATS, weight_scale=exponents)
    check(found["w.weight"], FLOATS.astype(np.float32) * np.exp2(exponents - np.float32(127)).repeat(32, 1))


def test_deepseek_v4_has_exponents_and_experts_in_4_bits(tmp_path):
    """`expert_dtype` and `.scale` in transformers/quantizers/quantizer_finegrained_fp8.py. A parameter of that name
    beside a weight in 16 bits is none."""
    exponents = RNG.integers(120, 134, (O, I // 32)).astype(np.uint8)
    factors = np.exp2(exponents - np.float32(127))
    options, e8m0 = FP8 | {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}, ml_dtypes.float8_e8m0fnu
    found = opened(tmp_path / "f", options, weight=BYTES.view(np.int8), scale=exponents.view(e8m0))
    check(found["w.weight"], codes.FP4[NIBBLES] * factors.repeat(32, 1))
    block = exponents[:1, :1].view(e8m0)
    options["weight_block_size"] = [128, 128]
    found = opened(tmp_path / "g", options, weight=FLOATS, scale=block)
    check(found["w.weight"], FLOATS.astype(np.float32) * factors[:1, :1])
    found = opened(tmp_path / "h", options, weight=FLOATS.astype(np.float16), scale=factors[0])
    assert set(found) == {"w.weight", "w.scale"}


NIBBLES = RNG.integers(0, 16, (O, I))
BYTES = (NIBBLES[:, ::2] | NIBBLES[:, 1::2] << 4).astype(np.uint8)  # the first of two in the lower bits
OF_16 = RNG.uniform(1, 400, (O, I // 16)).astype(ml_dtypes.float8_e4m3fn)


def test_nvfp4_of_both_owners(tmp_path):
    """ModelOpt multiplies its scales with one for all (modelopt/torch/quantization/qtensor/nvfp4_tensor.py),
    compressed-tensors divides them by one (compressors/nvfp4)."""
    values, common = codes.FP4[NIBBLES], np.float32(3)
    options = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}
    tensors = {"weight": BYTES, "weight_scale": OF_16, "weight_scale_2": np.asarray(common)}
    found = opened(tmp_path / "f", options, **tensors, input_scale=np.ones((), np.float32))
    check(found["w.weight"], values * (OF_16.astype(np.float32) * common).repeat(16, 1))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    tensors = {"weight_packed": BYTES, "weight_scale": OF_16, "weight_global_scale": common.reshape(1)}
    found = opened(tmp_path / "g", compressed(weights, "nvfp4-pack-quantized"), **tensors)
    check(found["w.weight"], values * (OF_16.astype(np.float32) / common).repeat(16, 1))


def test_mxfp4_of_compressed_tensors(tmp_path):
    exponents = RNG.integers(120, 134, (O, I // 32)).astype(np.uint8)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    options = compressed(weights, "mxfp4-pack-quantized")
    found = opened(tmp_path / "f", options, weight_packed=BYTES, weight_scale=exponents)
    check(found["w.weight"], codes.FP4[NIBBLES] * np.exp2(exponents - np.float32(127)).repeat(32, 1))


def compressed(weights, form="float-quantized"):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }


@pytest.mark.parametrize("numbers", [FLOATS, INTS])
@pytest.mark.parametrize(
    ("strategy", "cells", "size"),
    [("tensor", (1,), (O, I)), ("channel", (O, 1), (1, I)), ("group", (O, 3), (1, 32)), ("block", (2, 3), (32, 40))],
)
def test_8_bits_of_compressed_tensors(tmp_path, numbers, strategy, cells, size):
    """compressors/naive_quantized there; zeros only where it is not symmetric."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    weights |= {"group": {"group_size": 32}, "block": {"block_structure": list(size)}}.get(strategy, {})
    scale = scales(*cells)
    whole = np.broadcast_to(scale.reshape(-1, cells[-1]).repeat(size[0], 0)[:O].repeat(size[1], 1)[:, :I], (O, I))
    expected = numbers.astype(np.float32) * whole
    found = opened(tmp_path / "f", compressed(weights), weight=numbers, weight_scale=scale)
    check(found["w.weight"], expected)
    if numbers is INTS and strategy == "channel":
        zeros = RNG.integers(-128, 128, cells).astype(np.int8)
        tensors = {"weight": numbers, "weight_scale": scale, "weight_zero_point": zeros}
        found = opened(tmp_path / "g", compressed({**weights, "symmetric": False}), **tensors)
        check(found["w.weight"], (numbers.astype(np.float32) - zeros) * whole)
        assert found["w.weight"].kept.zeros
        broken = {**tensors, "weight_zero_point": zeros.astype(ml_dtypes.float8_e4m3fn)}  # 0.5 is a zero too
        found = opened(tmp_path / "h", compressed({**weights, "symmetric": False}), **broken)
        assert found["w.weight"].kept is None


def test_what_another_file_says(tmp_path):
    """As ModelOpt wrote it at first; config.json comes before it."""
    folder = written(tmp_path / "f", {"model_type": "llama"}, {"w.weight": FLOATS}).path
    assert supported(read_config(folder)) == ""
    told = '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    (folder / "hf_quant_config.json").write_text(told)
    assert read_config(folder)["quantization_config"]["quant_algo"] == "FP8"
    assert supported(read_config(folder)) == "modelopt"
    (folder / "hf_quant_config.json").unlink()
    (folder / "quant_config.json").write_text('{"quantization": "of something else"}')
    assert supported(read_config(folder)) == ""
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "desc_act": false}')
    assert supported(read_config(folder)) == "gptq"
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert supported(read_config(folder)) == "awq"


DENSE = {"format": "dense", "global_sparsity": 0.1, "targets": []}


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"config_groups": {}, "format": "dense", "sparsity_config": DENSE}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, "modelopt"),
        *(({"quant_method": method, "file": "of gguf alone"}, method) for method in METHODS),
    ],
)
def test_methods_by_their_options(options, method):
    assert supported({"quantization_config": options}) == supported({"compression_config": options}) == method


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quant_method": "aqlm"},
            "quant_method='aqlm'; supported are auto-round, awq, bitsandbytes, compressed-tensors",
        ),
        ({"bits": 4}, "quant_method='none'; supported are"),
        ("int4", "quantization_config='int4'; an object is needed"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3; supported with quant_method='gptq' are 4, 2, 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format='marlin'; supported"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format=True; supported"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 3}, "bits=3; supported"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "'auto_round:llm_compressor'; s",
        ),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type='mx_fp'; supported"),
        ({"quant_method": "awq", "version": "GEMV"}, "version='gemv'; supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'; supported"),
        ({"quant_method": "fp8", "expert_dtype": "fp6"}, "expert_dtype='fp6'; supported"),
        (compressed({}, "marlin-24"), "format='marlin-24'; supported"),
        (compressed({"type": "int", "num_bits": 3}), "num_bits=3; supported with quant_method='compressed-tensors'"),
        ({**compressed({}), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.* packed sparsely"),
        ({**compressed({}), "transform_config": {"config_groups": {"u": 1}}}, "transform_config=.* or rotated while"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}}, r"'W8A8'\]=.* a group with"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, r"config_groups\[''\]=3; a group with"),
        (compressed({"group_size": "x"}), "group_size='x'; it needs a whole number"),
    ],
)
def test_options_that_are_not_supported_are_refused(options, message):
    with pytest.raises(ShardlmError, match=message):
        supported({"quantization_config": options})


ASYMMETRIC = compressed({"num_bits": 8, "strategy": "channel", "symmetric": False})
NVFP4 = compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})
CHANNEL = compressed({"num_bits": 8, "type": "float", "strategy": "channel"})


@pytest.mark.parametrize(
    ("options", "arrays", "message"),
    [
        (FP8, {"weight": FLOATS}, r"w\.weight is there, and w\.weight_scale is not"),
        (FP8, {"weight_scale": scales(1)}, r"w\.weight_scale is there, and w\.weight is not"),
        (
            FP8,
            {"weight": FLOATS, "weight_scale": scales(3)},
            r"needed are a factor for the tensor, or 40",
        ),
        (FP8, {"weight": INTS, "weight_scale": scales(1)}, r"w\.weight is int8\[40, 96\] .* 8-bit floats"),
        ({"quant_method": "modelopt"}, {"weight": BYTES}, r"w\.weight is there, and w\.weight_scale is not"),
        (
            {"quant_method": "modelopt"},
            {"weight": BYTES, "weight_scale": OF_16[:, :2], "weight_scale_2": scales(1)},
            r"weight_scale is float8_e4m3fn\[40, 2\]; needed are uint8 \[O, I / 2\]",
        ),
        (CHANNEL, {"weight": FLOATS}, r"w\.weight is there, and w\.weight_scale is not"),
        (
            CHANNEL,
            {"weight": FLOATS, "weight_scale": scales(3, 1)},
            r"needed are \[40, 1\] scales, by str",
        ),
        (
            ASYMMETRIC,
            {"weight": INTS, "weight_scale": scales(O, 1)},
            r"and w\.weight_zero_point is not; download",
        ),
        (
            NVFP4,
            {"weight_packed": BYTES, "weight_scale": OF_16},
            r"and w\.weight_global_scale is not; download",
        ),
        (
            compressed({**NVFP4["config_groups"]["group_0"]["weights"], "symmetric": False}),
            {"weight_packed": BYTES, "weight_scale": OF_16, "weight_global_scale": scales(1)},
            "symmetric=False; supported",
        ),
        (CHANNEL, {"weight": np.ones((O, I), np.float32), "weight_scale": scales(O, 1)}, r"needed are 8-bit numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, options, arrays, message):
    with pytest.raises(ShardlmError, match=message):
        opened(tmp_path / "f", options, **{name: np.ascontiguousarray(a) for name, a in arrays.items()})
