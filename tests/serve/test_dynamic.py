"""Served models whose projections multiply 8-bit numbers: what was trained so is served so, on every mesh, in every
kind of block, and a reply is the same bits whatever else runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_moe
from engines import CONFIG, folder_of

import shardlm
from shardlm.layers.context import Packed
from shardlm.mesh import MeshSpec
from shardlm.opened import load
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
def scores(folder, how: str, mesh: MeshSpec = ONE) -> np.ndarray:
    found = shardlm.LLM(folder, quantization=how, mesh=mesh, **SIZES).score(ROWS)
    return np.concatenate([np.asarray(row, np.float64) for row in found])


def test_what_was_trained_in_int8_is_served(folder):
    """The trainer's forward pass with matmul=int8 and the engine's, chunked and cached: numbers that lie between two
    of 8 bits may fall to either side where sums are added in another order."""
    opened = load(folder)
    with jax.set_mesh(opened.mesh):
        execution = dataclasses.replace(opened.model.execution, matmul="int8")
        model = ModelDef.make(opened.model.config, execution)

        @jax.jit
        def run(params, tokens):
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            lm = model.model(params)
            hidden, _, _ = lm(tokens, positions, Packed(jnp.ones_like(tokens), execution.rules))
            return jax.nn.log_softmax(lm.logits(hidden))[0]

        expected = []
        for row in ROWS:
            found = np.asarray(run(opened.params, np.array([row], np.int32)))
            expected += [found[i, token] for i, token in enumerate(row[1:])]
    served = scores(folder, "int8_dynamic")
    assert np.median(np.abs(served - expected)) < 2e-6 and np.abs(served - expected).max() < 2e-3
    plain = scores(folder, None)
    assert np.median(np.abs(plain - expected)) > 2e-3  # what 8 bits do


@pytest.mark.parametrize(
    ("kind", "how", "mesh"),
    [
        ("dense", "fp8_dynamic", MeshSpec(tensor=4)),
        ("dense", "int8_dynamic", MeshSpec(tensor=2, pipeline=2)),
        ("latent", "int8_dynamic", MeshSpec(expert=2, tensor=2)),
    ],
    ids=str,
)
def test_any_mesh_gives_the_same_numbers(kind, how, mesh, folder, latent):
    """Latents with experts: what each head multiplies and routed experts are in groups of 8 bits."""
    path = {"dense": folder, "latent": latent}[kind]
    one, found = scores(path, how), scores(path, how, mesh)
    assert np.median(np.abs(found - one)) < 2e-6 and np.abs(found - one).max() < 2e-2  # measured: all within 1e-6
