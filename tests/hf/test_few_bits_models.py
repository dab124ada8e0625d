"""Models whose checkpoints are in few bits open as their numbers, under the names of each family."""

import json
import pathlib

import jax
import numpy as np
import pytest
from few_bits import packed, written

import shardlm
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.plan.serving.case import ServedModel

REFERENCES = pathlib.Path(__file__).parent / "references"
GROUP = 8  # inputs that share a scale
PLAIN = ("lm_head", "embed_tokens", "norm", ".gate.")


def grouped(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes of 4 bits less 8, [O, I]; scales [O, I / GROUP] in float16; what they stand for)."""
    of_groups = a.reshape(len(a), -1, GROUP)
    scales = (np.abs(of_groups).max(axis=-1) / 7).astype(np.float16)
    codes = np.rint(of_groups / scales[..., None].astype(np.float32))
    return codes.reshape(a.shape).astype(int), scales, (codes * scales[..., None].astype(np.float32)).reshape(a.shape)


def gptq(codes, scales):
    """Zeros of 8, less one in the files; AutoGPTQ wrote biases beside all of them."""
    zeros = packed(np.full(scales.T.shape, 7), 4)
    found = {"qweight": packed(codes + 8, 4).T.copy(), "qzeros": zeros, "scales": scales.T.copy()}
    return found | {"g_idx": (np.arange(codes.shape[1]) // GROUP).astype(np.int32), "bias": np.zeros(len(codes), "f2")}


def awq(codes, scales):
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    places = np.arange(len(codes)).reshape(-1, 8)[:, order].reshape(-1)
    zeros = np.full(scales.T.shape, 8)
    return {"qweight": packed((codes + 8).T[:, places], 4), "qzeros": packed(zeros, 4), "scales": scales.T.copy()}


def compressed(codes, scales):
    shape = np.array(codes.shape)
    return {"weight_packed": packed(codes + 8, 4), "weight_scale": scales, "weight_shape": shape}


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
WAYS = {
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


def made(path, name) -> tuple[Folder, Folder]:
    """(what the numbers stand for in 32 bits, the same in 4)."""
    way, options = WAYS[name]
    source = Folder.open(REFERENCES / name)
    plain, few = {}, {}
    for tensor, stored in source.tensors.items():
        a = stored.read(...).astype(np.float32)
        if a.ndim == 2 and not any(part in tensor for part in PLAIN):
            codes, scales, a = grouped(a)
            few |= {f"{tensor.removesuffix('weight')}{own}": part for own, part in way(codes, scales).items()}
        else:
            few[tensor] = a
        plain[tensor] = a
    config = {**source.config, "quantization_config": options}
    return written(path / "plain", source.config, plain), written(path / "few", config, few)


@pytest.mark.parametrize("name", WAYS)
def test_a_model_in_4_bits_opens_as_its_numbers(tmp_path, name):
    """Dense, by the expert and with fused weights; in its config.json on being written it is like any."""
    plain, few = made(tmp_path, name)
    one, other = (shardlm.load(folder.path, dtype="float32") for folder in (plain, few))
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert np.array_equal(a, b)
    assert "quantization_config" not in other.source.to_hf()
    assert json.loads(other.source.config)["quantization_config"]
    of_both = (ServedModel.of_folder(folder.path) for folder in (plain, few))
    assert len({(model.shape, model.dtype) for model in of_both}) == 1


def test_a_bias_that_the_model_has_not_is_refused_unless_it_is_zero(tmp_path):
    _, few = made(tmp_path, "llama")
    tensors = {name: stored.read(...) for name, stored in few.tensors.items()}
    name = "model.layers.1.mlp.up_proj.bias"
    tensors[name] = np.ones_like(tensors[name])
    folder = written(tmp_path / "biased", few.config, tensors)
    with pytest.raises(ShardlmError, match=rf"{name} is not known$"):
        shardlm.load(folder.path)
