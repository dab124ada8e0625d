"""Heads of EAGLE-3 against torch (make_eagle_reference.py): the streams that they read, the logits of several drafts,
and what is refused of their folders."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_eagle import drafted, streams_of
from test_opening import change_config, change_tensors

import shardlm
from shardlm import hf_files
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models import eagle
from shardlm.serve.layers import taken_apart
from shardlm.serve.speculation.build import open_draft_model
from shardlm.serve.speculation.config import SpeculativeConfig

HERE = pathlib.Path(__file__).parent / "eagle_references"
CLOSE = 1e-4


def asked(folder) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 4})


@pytest.fixture(scope="module")
def target():
    opened = shardlm.load(HERE / "target", dtype="float32", decoding=True)
    with jax.set_mesh(opened.mesh):
        return *taken_apart(opened.model, opened.params), opened.mesh


def head_of(folder, model, dtype="float32"):
    return open_draft_model(asked(folder), model.config, 64, MeshSpec(), dtype)


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_a_head_says_what_torch_says(name, target):
    model, params, mesh = target
    stored = {n: a.read(...) for n, a in hf_files.header(HERE / "expected.safetensors.reference").items()}
    streams, text = stored[f"{name}_streams"], jnp.pad(jnp.asarray(stored["tokens"]), ((0, 0), (0, 4)))
    head, last = head_of(HERE / name, model), stored["tokens"].shape[1] - 1
    with jax.set_mesh(mesh):
        model, head = head.listening(model, params)
        read = jax.jit(functools.partial(streams_of, model))(params, text[:, :last])
        np.testing.assert_allclose(read, streams, rtol=CLOSE, atol=CLOSE)
        read = jnp.pad(read, ((0, 0), (0, text.shape[1] - last), (0, 0)), constant_values=jnp.nan)
        read = jnp.nan_to_num(read, nan=7.0)  # is not looked at
        logits, drafts = jax.jit(functools.partial(drafted, head.model, count=4))(head.params, read, text, last)
    assert np.array_equal(drafts, stored[f"{name}_drafts"])
    offsets = hf_files.header(HERE / name / "model.safetensors")["d2t"].read(...)
    proposed = np.arange(len(offsets)) + offsets
    assert np.abs(np.asarray(logits)[:, :, proposed] - stored[f"{name}_logits"]).max() < CLOSE
    assert (np.delete(np.asarray(logits), proposed, axis=-1) < -1e29).all()
