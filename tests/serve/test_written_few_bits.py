"""Folders in few bits: what is written is what reading, serving and training make of the same weights, to the bit, and
nothing is left out of config.json; what cannot be written so is refused."""

import dataclasses
import functools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from engines import CONFIG, folder_of
from flax.traverse_util import flatten_dict
from small import mesh_of

from shardlm import weights
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Planned, Stored, write_folder
from shardlm.hf_quantised import written
from shardlm.mesh import MeshSpec
from shardlm.opened import load
from shardlm.ops import schemes
from shardlm.ops.schemes import SCHEMES, as_served, on_host
from shardlm.train import convert

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"
WIDE = dataclasses.replace(CONFIG, embed_dim=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("written") / "plain", shape=WIDE)


def stands_for(found: schemes.Written) -> np.ndarray:
    O, I = found.numbers.shape
    cells = found.numbers.astype(np.float32).reshape(O, found.scale.shape[1], -1)
    return (cells * found.scale.astype(np.float32)[..., None]).reshape(O, I)


def matrices() -> list[np.ndarray]:
    """Random ones, one whose quotients lie in the middle between two numbers, very small numbers, and zeros."""
    rng = np.random.default_rng(0)
    middles = (rng.integers(-14, 15, (64, 256)) / 2).astype(np.float32)
    middles[:, ::128] = 7
    plain = rng.normal(size=(64, 256)).astype(np.float32)
    # Of a checkpoint in e4m3 numbers, whose largest is less than the largest that there is.
    eights = (plain * 60).clip(-240, 240).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.01)
    # A bit beside the middle, where a quotient is rounded into it.
    return [eights, plain, middles, np.nextafter(middles * np.float32(0.3), np.float32(9)), plain * 1e-30, plain * 0]


@pytest.mark.parametrize("name", [pytest.param("W8A16", marks=pytest.mark.wide), "W4A16", "FP8_DYNAMIC", "W8A8"])
def test_training_rounds_as_files_are_written(name):
    with jax.set_mesh(mesh_of(MeshSpec(fsdp=2, tensor=2))):
        for w in matrices():
            expected = stands_for(on_host(w, SCHEMES[name]))
            # Of a product that sums over two dimensions, of which devices have halves: groups lie across, then inside.
            for shape in ((4, 64), (1, 256)):
                for spec in (("fsdp", "tensor"), ("fsdp", None), (None, "tensor"), (None, None)):
                    if shape[0] == 1 and spec[0]:
                        continue
                    a = jax.device_put(w.T.reshape(*shape, 64), jax.NamedSharding(_mesh(), jax.P(*spec)))
                    made = jax.jit(lambda a: as_served(a, (0, 1), SCHEMES[name]))(a)
                    assert np.array_equal(np.asarray(made).reshape(256, 64).T, expected), (shape, spec)


def test_groups_across_devices_move_their_largest_numbers_alone():
    """Of a matrix of which each of four devices has 96 inputs: what is gathered is a number for each 32."""
    w = np.random.default_rng(2).normal(size=(8, 384)).astype(np.float32)
    with jax.set_mesh(mesh_of(MeshSpec(fsdp=2, tensor=2))):
        a = jax.device_put(w.T, jax.NamedSharding(_mesh(), jax.P(("fsdp", "tensor"), None)))
        run = jax.jit(lambda a: as_served(a, (0,), SCHEMES["W4A16"])).lower(a).compile()
        assert np.array_equal(np.asarray(run(a)).T, stands_for(on_host(w, SCHEMES["W4A16"])))
        found = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", run.as_text())
        assert found and all(math.prod(map(int, shape.split(","))) <= 384 // 32 * 8 for shape in found)


def _mesh():
    return jax.sharding.get_mesh()


def test_gradients_pass_as_they_come():
    with jax.set_mesh(mesh_of(MeshSpec())):
        w = jnp.asarray(matrices()[1])
        for scheme in (SCHEMES["W4A16"], SCHEMES["W8A8"]):
            value, back = jax.vjp(jax.jit(lambda w, scheme=scheme: as_served(w, (1,), scheme)), w)
            assert not np.array_equal(value, w) and np.array_equal(back(w)[0], w)


def test_searched_scales_are_nearer():
    w = np.random.default_rng(1).normal(size=(32, 256)).astype(np.float32)
    plain, searched = (stands_for(on_host(w, SCHEMES["W4A16"], way)) for way in (False, True))
    errors = [np.square(w - found).reshape(32, 2, 128).sum(-1) for found in (plain, searched)]
    assert np.all(errors[1] <= errors[0])
    assert errors[1].mean() < 0.9 * errors[0].mean()  # measured: 0.82


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_written_is_read_back(name, folder, tmp_path):
    convert.to_hf(folder, tmp_path / "few", dtype="float32", quantization=name, shard_bytes=60_000)
    assert len(list((tmp_path / "few").glob("model-*-of-*.safetensors"))) > 2
    before, after = (weights.own_tensors(Folder.open(path)) for path in (folder, tmp_path / "few"))
    assert before.keys() == after.keys()
    few = {tensor for tensor, stored in after.items() if not isinstance(stored, Stored)}
    assert few == {tensor for tensor in after if tensor.endswith("_proj.weight")}
    scheme = SCHEMES[name]
    for tensor, stored in after.items():
        w = before[tensor].read(...)
        if tensor in few:
            w = stands_for(on_host(w, scheme, searched=scheme.numbers != "int8"))
        assert np.array_equal(stored.read(...), w), tensor
    told = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    (group,) = told["config_groups"].values()
    assert told["quantization_status"] == "compressed" and told["kv_cache_scheme"] is None
    assert {"lm_head", "model.embed_tokens"} == set(told["ignore"]) and group["targets"] == ["Linear"]
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (scheme.bits, scheme.group or None)
    assert (group["input_activations"] is None) == (name in ("W4A16", "W8A16"))


def test_integers_are_packed_as_libraries_unpack_them(folder, tmp_path):
    """unpack_from_int32 of compressed-tensors, and vLLM's: the number i of a word is its bits 4 i on, less 8."""
    convert.to_hf(folder, tmp_path / "few", quantization="W4A16")
    tensors, name = Folder.open(tmp_path / "few").tensors, "model.layers.0.mlp.down_proj.weight"
    words, scale = (tensors[f"{name}_{part}"].read(...) for part in ("packed", "scale"))
    numbers = np.stack([(words >> (4 * i) & 15).astype(np.float32) - 8 for i in range(8)], -1).reshape(128, 256)
    assert words.dtype == np.int32 and scale.dtype.name == "bfloat16" and scale.shape == (128, 2)
    assert tensors[f"{name}_shape"].read(...).tolist() == [128, 256]
    found = weights.own_tensors(Folder.open(tmp_path / "few"))[name].read(...)
    assert np.array_equal(found, numbers * scale.astype(np.float32).repeat(128, 1))


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "W8A8"])
def test_a_folder_is_served_in_the_bits_that_serving_makes(name, folder, tmp_path):
    convert.to_hf(folder, tmp_path / "few", dtype="float32", quantization=name)
    for mesh in (MeshSpec(), MeshSpec(tensor=2)):
        how = {"dtype": "float32", "quantization": SCHEMES[name].served_as, "decoding": True, "mesh": mesh}
        made, read = (jax.tree.map(np.asarray, load(path, **how).params) for path in (folder, tmp_path / "few"))
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), made, read)
        assert jax.tree.all(same) and any(a.dtype.itemsize == 1 for a in jax.tree.leaves(read))


def test_scales_of_inputs_are_no_results(tmp_path):
    """GPT-2's matrices have inputs first: numbers of a folder with a scale for each row of them are made again."""
    options, planned = json.loads((REFERENCES / "gpt2" / "config.json").read_text()), []
    for name, stored in Folder.open(REFERENCES / "gpt2").tensors.items():
        w, rounds = stored.read(...).astype(np.float32), ".c_" in name and name.endswith(".weight")
        planned.append(Planned(name, w.dtype, w.shape, lambda w=w: w, rounds))
    options["quantization_config"] = written.options("int8", 0, True, [])
    round_ = functools.partial(on_host, scheme=SCHEMES["W8A8"])
    write_folder(tmp_path / "rows", written.written(planned, "int8", 0, round_), options, lambda folder: None)
    how = {"dtype": "float32", "quantization": "int8_dynamic", "decoding": True}
    made, read = (flatten_dict(load(path, **how).params) for path in (REFERENCES / "gpt2", tmp_path / "rows"))
    scales = [path for path in made if path[-1].endswith("_scale")]
    assert scales and all(np.allclose(made[path], read[path], rtol=0.02) for path in scales)


def test_routers_are_left_and_experts_are_not(tmp_path):
    convert.to_hf(REFERENCES / "deepseek_v3", tmp_path / "few", quantization="FP8_DYNAMIC")
    after = weights.own_tensors(Folder.open(tmp_path / "few"))
    plain = {tensor for tensor, stored in after.items() if isinstance(stored, Stored) and len(stored.shape) == 2}
    assert all(tensor.endswith(("gate.weight", "embed_tokens.weight", "lm_head.weight")) for tensor in plain)
    assert not isinstance(after["model.layers.1.mlp.experts.0.down_proj.weight"], Stored)
    assert not isinstance(after["model.layers.1.self_attn.kv_b_proj.weight"], Stored)
    told = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"{tensor.removesuffix('.weight')}" for tensor in plain} <= set(told)
    load(tmp_path / "few", dtype="float32")


@pytest.mark.parametrize("name", ["llama4", pytest.param("gemma4_moe", marks=pytest.mark.wide)])
def test_experts_of_one_tensor_are_written_one_by_one(name, tmp_path):
    convert.to_hf(REFERENCES / name, tmp_path / "few", quantization="W8A8")
    found = [own for own in Folder.open(tmp_path / "few").tensors if own.endswith("experts.1.gate_proj.weight_scale")]
    assert found
    before, after = (load(path, dtype="float32").params for path in (REFERENCES / name, tmp_path / "few"))
    for a, b in zip(map(np.asarray, jax.tree.leaves(before)), map(np.asarray, jax.tree.leaves(after)), strict=True):
        # Within half of 1/127 of the largest number, and what is not rounded within bfloat16.
        assert np.abs(a - b).max() <= np.abs(a).max() / 200


@pytest.mark.parametrize(
    "name,scheme,says",
    [
        ("llama", "W4A16", r"groups of 128 inputs, which do not divide those of .*k_proj\.weight \(32\).*W8A8"),
        ("llama", "INT4", r"quantization='INT4'; choose from W4A16, W8A16, FP8_DYNAMIC, W8A8"),
        ("gpt2", "W8A8", r"c_attn\.weight has its inputs in another order; serve the model from 16 bits"),
        ("gpt_oss", "W8A8", r"experts\.down_proj has the experts of a layer in one"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(name, scheme, says, tmp_path):
    with pytest.raises(ShardlmError, match=says):
        convert.to_hf(REFERENCES / name, tmp_path / "few", quantization=scheme)
    assert not (tmp_path / "few").exists()


def test_refusals_of_what_is_in_few_bits_and_of_float16(folder, tmp_path):
    convert.to_hf(folder, tmp_path / "few", quantization="W8A8")
    with pytest.raises(ShardlmError, match=r"in few bits already \(compressed-tensors\).*serve this one as it is"):
        convert.to_hf(tmp_path / "few", tmp_path / "again", quantization="W4A16")
    with pytest.raises(ShardlmError, match=r"--dtype=float16: scales are bfloat16 and float32; choose bfloat16"):
        convert.to_hf(folder, tmp_path / "again", dtype="float16", quantization="W4A16")
