"""Heads of EAGLE-3 against torch (make_eagle_reference.py): the streams that they read, the logits of several drafts,
and what is refused of their folders."""

import dataclasses
import functools
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
from shardlm.serve.build import _check_processes
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


@pytest.mark.parametrize("end", ["", "_normed", "_apart"])
@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_a_head_says_what_torch_says(name, end, target, tmp_path):
    """Of EAGLE 3.1 `_normed`, whose own stream goes on after its last norm, which one says as NVIDIA's files do, and
    `_apart`, with norms of each stream besides."""
    model, params, mesh = target
    folder = shutil.copytree(HERE / name, tmp_path / "head")
    if end:
        said = {"norm_output": True, "fc_norm": end == "_apart"}
        if end == "_apart":
            scales = {f"fc_norm.{i}.weight": np.linspace(0.5 + i, 1.5, 16, dtype=np.float32) for i in range(3)}
            change_tensors(folder, **scales, **({"input_norm.weight": None} if name == "speculators" else {}))
            said["norm_before_fc"] = False
        inside = {"fc_norm": said["fc_norm"], "return_hidden_post_norm": True}
        change_config(folder, **(said if name == "speculators" else {"eagle_config": inside}))
    stored = {n: a.read(...) for n, a in hf_files.header(HERE / "expected.safetensors.reference").items()}
    streams, text = stored[f"{name}_streams"], jnp.pad(jnp.asarray(stored["tokens"]), ((0, 0), (0, 4)))
    head, last = head_of(folder, model), stored["tokens"].shape[1] - 1
    with jax.set_mesh(mesh):
        model, head = head.listening(model, params)
        read = jax.jit(functools.partial(streams_of, model))(params, text[:, :last])
        np.testing.assert_allclose(read, streams, rtol=CLOSE, atol=CLOSE)
        read = jnp.pad(read, ((0, 0), (0, text.shape[1] - last), (0, 0)), constant_values=jnp.nan)
        read = jnp.nan_to_num(read, nan=7.0)  # is not looked at
        logits, drafts = jax.jit(functools.partial(drafted, head.model, count=4))(head.params, read, text, last)
    assert np.array_equal(drafts, stored[f"{name}_drafts{end}"])
    offsets = hf_files.header(HERE / name / "model.safetensors")["d2t"].read(...)
    proposed = np.arange(len(offsets)) + offsets
    assert np.abs(np.asarray(logits)[:, :, proposed] - stored[f"{name}_logits{end}"]).max() < CLOSE
    assert (np.delete(np.asarray(logits), proposed, axis=-1) < -1e29).all()


def test_numbers_of_layers_are_those_of_the_one_before_inside_of_eagle_config(tmp_path, target):
    """As SGLang counts; and without it they are what all heads read."""
    folder = shutil.copytree(HERE / "specforge", tmp_path / "head")
    assert head_of(folder, target[0]).streams == (2, 4, 5)
    change_config(folder, eagle_config={eagle.LAYERS: [0, 3, 6], "use_aux_hidden_state": True})
    assert head_of(folder, target[0]).streams == (1, 4, 7)
    change_config(folder, eagle_config=None, **{eagle.LAYERS: [1, 3, 8]})
    assert head_of(folder, target[0]).streams == (1, 3, 8)


def test_what_cannot_draft_is_refused(tmp_path, target):
    model, _, _ = target

    def refused(message: str, name: str = "specforge", shape=model.config, tensors=None, **options) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(HERE / name, folder)
        change_config(folder, **options)
        if tensors:
            change_tensors(folder, **tensors)
        with pytest.raises(ShardlmError, match=message):
            open_draft_model(asked(folder), shape, 64, MeshSpec(), "float32")

    refused("holds no head of EAGLE-3, which has the tensors fc.weight and", name="target")
    refused("is for a vocabulary of 91 tokens, and the model has one of 90", vocab_size=91)
    refused("reads streams of 24 numbers, and the model's has 16", target_hidden_size=24)
    wider = dataclasses.replace(model.config, embed_dim=24)
    refused("reads streams of 16 numbers, and the model's has 24", shape=wider)
    few = dataclasses.replace(model.config, segments=model.config.segments[:4])
    refused("behind 1, 2, 2 layers .without eagle_aux_hidden_state_layer_ids.*the model has 4", shape=few)
    refused("behind 1, 3, 9 layers .eagle_aux_hidden_state_layer_ids of its", **{eagle.LAYERS: [1, 3, 9]})
    refused("draft_vocab_size=91 and vocab_size=90; it is at most that", draft_vocab_size=91)
    refused('model_type="deepseek_v3"; in a head that drafts are supported: llama, qwen3', model_type="deepseek_v3")
    refused("speculators_model_type='peagle', which is no head of EAGLE-3", speculators_model_type="peagle")
    refused("use_aux_hidden_state=False, which is no head", eagle_config={"use_aux_hidden_state": False})
    refused("fc_norm.weight is missing", fc_norm=True)
    refused("has norm_before_fc and fc_norm; a head has one norm of what it reads", name="speculators", fc_norm=True)
    refused("input_norm.weight is missing", eagle_config={"norm_before_fc": True})
    refused("options that shardlm does not know.*norm_twice=True", norm_twice=True)
    refused("d2t is missing, and the head needs .40.", tensors={"d2t": None})
    refused("model.layers.0.mlp.up_proj.weight is missing", tensors={"midlayer.mlp.up_proj.weight": None})
    refused("lacks lm_head.weight", tensors={"lm_head.weight": None})
    lacks = {"embed_tokens.weight": None}
    refused("no embedding of its own.*has 16 numbers a token where the head has 24", name="speculators", tensors=lacks)

    refused("d2t names tokens from 0 to 0, 39 of them twice", tensors={"d2t": -np.arange(40)})


def test_a_head_that_is_given_as_a_model_is_told_how_it_drafts(target):
    asked = SpeculativeConfig.parse({"model": str(HERE / "specforge"), "num_speculative_tokens": 2})
    with pytest.raises(ShardlmError, match=r"specforge holds a head of EAGLE-3, .* add '\"method\": \"eagle3\"'"):
        open_draft_model(asked, target[0].config, 64, MeshSpec(), "float32")


def test_stages_in_several_processes_are_refused():
    with pytest.raises(ShardlmError, match="'eagle3' does not go with pipeline=2 over several processes"):
        _check_processes(asked("head"), 2)
    _check_processes(asked("head"), 1)
