"""Served models whose projections multiply 8-bit numbers: what was trained so is served so, on every mesh, in every
kind of block, and a reply is the same bits whatever else runs."""

import dataclasses
import functools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small_moe
from engines import CONFIG, folder_of

import shardlm
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Planned, copy_beside, write_folder
from shardlm.layers.packed import Packed
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.opened import Opened, load
from shardlm.rules import Rules
from shardlm.serve.build import grown
from shardlm.state import ModelDef

ONE = MeshSpec()
SIZES = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 16, "decode_steps": 1}
DENSE = dataclasses.replace(CONFIG, num_layers=2)
LATENT = dataclasses.replace(small_moe.DEEPSEEK, vocab_size=CONFIG.vocab_size)
ROWS = [[int(t) for t in np.random.default_rng(n).integers(0, 256, n)] for n in (9, 30, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("dynamic") / "dense", shape=DENSE)


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("dynamic") / "latent", shape=LATENT)


@functools.cache
def scores(folder, how: str, mesh: MeshSpec = ONE) -> list[np.ndarray]:
    return [np.array(row) for row in shardlm.LLM(folder, quantization=how, mesh=mesh, **SIZES).score(ROWS)]


def test_what_was_trained_in_int8_is_served(folder):
    """The trainer's forward pass with matmul=int8 and the engine's, chunked and cached: numbers that lie between two
    of 8 bits may fall to either side where sums are added in another order."""
    opened = load(folder)
    with jax.set_mesh(opened.mesh):
        execution = dataclasses.replace(opened.model.execution, matmul="int8")
        model = ModelDef.make(opened.model.config, execution)

        @jax.jit
        def run(params, tokens, length):
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            lm = model.model(params)
            hidden, _, _ = lm(tokens, positions, Packed((positions < length).astype(jnp.int32), execution.rules))
            return jax.nn.log_softmax(lm.logits(hidden))[0]

        expected = []
        for row in ROWS:
            tokens = np.zeros((1, 32), np.int32)
            tokens[0, : len(row)] = row
            found = np.asarray(run(opened.params, tokens, len(row)))
            expected += [found[i, token] for i, token in enumerate(row[1:])]
    served = np.concatenate(scores(folder, "int8_dynamic"))
    assert np.median(np.abs(served - expected)) < 2e-6 and np.abs(served - expected).max() < 2e-3
    plain = np.concatenate(scores(folder, None))
    assert np.median(np.abs(plain - expected)) > 2e-3  # what 8 bits do


def test_the_numbers_of_a_published_checkpoint_are_multiplied(folder, tmp_path):
    """As llm-compressor writes FP8_DYNAMIC: what is multiplied is what is in the file, on a mesh too."""
    plain, told = Folder.open(folder), {}
    for name, stored in plain.tensors.items():
        told[name] = stored.read(...)
        if name.endswith("_proj.weight"):
            scale = np.abs(told[name]).max(1, keepdims=True) / np.float32(448)
            told[name] = (told[name] / scale).astype(ml_dtypes.float8_e4m3fn)
            told[f"{name}_scale"] = scale
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    told_of = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    planned = [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in told.items()]
    write_folder(
        tmp_path / "fp8",
        planned,
        {**plain.config, "quantization_config": told_of},
        functools.partial(copy_beside, folder),
    )
    found = load(tmp_path / "fp8", decoding=True, quantization="fp8_dynamic", mesh=MeshSpec(tensor=2)).params
    for layer in range(DENSE.num_layers):
        block = jax.tree.map(lambda a, layer=layer: np.asarray(a[layer]), found["segments"][0]["blocks"][0])
        for ours, theirs in (
            ("attention.wq", "self_attn.q_proj"),
            ("attention.wo", "self_attn.o_proj"),
            ("mlp.down", "mlp.down_proj"),
        ):
            room, name = ours.split(".")
            expected = told[f"model.layers.{layer}.{theirs}.weight"]
            values = block[room][name]
            np.testing.assert_array_equal(values.reshape(expected.shape).view(np.uint8), expected.view(np.uint8))
            scale = told[f"model.layers.{layer}.{theirs}.weight_scale"]
            np.testing.assert_allclose(block[room][f"{name}_scale"].reshape(scale.shape), scale, rtol=2e-7)


@pytest.mark.parametrize(("how", "mesh"), [("fp8_dynamic", MeshSpec(tensor=2)), ("int4", ONE)])
def test_what_is_trained_is_put_into_few_bits_while_it_is_served(folder, how, mesh, tmp_path):
    other = folder_of(tmp_path / "other", 1, DENSE)
    llm = shardlm.LLM(other, quantization=how, mesh=mesh, **SIZES)
    before = llm.score(ROWS)
    trained = load(folder, dtype="float32", rules="replicated")
    llm.update_weights(trained.params)
    for found, expected in zip(llm.score(ROWS), scores(folder, how, mesh), strict=True):
        assert np.array_equal(found, expected)
    llm.update_weights(other)
    assert llm.score(ROWS) == before
    narrower = folder_of(tmp_path / "narrower", 0, dataclasses.replace(DENSE, mlp_dim=32))
    with pytest.raises(ShardlmError, match=r"mlp\.down is \[1, 32, 32\], served is \[1, 64, 32\]"):
        llm.update_weights(load(narrower, dtype="float32").params)


def test_a_checkpoint_in_few_bits_that_is_served_in_more_says_so():
    execution = Execution(Rules.make("zero3", ONE), jnp.bfloat16)
    source = Pretrained("x", config=json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    opened = Opened(types.SimpleNamespace(execution=execution), None, None, source, pathlib.Path("x"))
    assert "(fp8); they are served in bfloat16" in grown(opened, None) and not grown(opened, "fp8_dynamic")
    assert not grown(dataclasses.replace(opened, source=Pretrained("x", config="{}")), None)
    assert not grown(dataclasses.replace(opened, folder=pathlib.Path("run")), None)  # its own weights, in full


@pytest.mark.parametrize(
    ("kind", "how", "mesh"),
    [
        pytest.param("dense", "fp8_dynamic", MeshSpec(tensor=4), marks=pytest.mark.wide),
        ("dense", "int8_dynamic", MeshSpec(tensor=2, pipeline=2)),
        pytest.param("latent", "int8_dynamic", MeshSpec(expert=2, tensor=2), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_any_mesh_gives_the_same_numbers(kind, how, mesh, folder, latent):
    """Latents with experts: what each head multiplies and routed experts are in groups of 8 bits. All were within 1e-6
    (measured); a number in thousands may fall to the other side, and moves what comes after it in its row."""
    path = {"dense": folder, "latent": latent}[kind]
    off = [np.abs(a - b) for a, b in zip(scores(path, how), scores(path, how, mesh), strict=True)]
    assert sum(np.median(row) < 2e-6 for row in off) >= len(ROWS) - 1 and max(row.max() for row in off) < 2e-2
