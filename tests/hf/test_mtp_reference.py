"""Modules that predict further tokens, against torch (make_mtp_reference.py): logits, losses, gradients; and
checkpoints with them, opened and written."""

import json
import logging
import pathlib
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small import mesh_of
from small_mtp import further_logits
from test_opening import change_config, change_tensors

import shardlm
from shardlm import hf_files, weights
from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.rules import Rules
from shardlm.state import ModelDef, at_rest
from shardlm.train import convert
from shardlm.train.step import NextToken, StepConfig, gradients

HERE = pathlib.Path(__file__).parent
REFERENCE = HERE / "mtp_reference"
LOGITS, GRADIENTS, OF_MEMORIES = 1e-4, 1e-3, 3e-4  # test_families.py's
COPY = "model.layers.2.shared_head.head.weight"


def test_modules_compute_what_torch_computes():
    check(REFERENCE)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
@pytest.mark.wide
def test_modules_beside_a_decoder_with_linear_attention_do_too(name, tmp_path):
    """Whether config.json tells of the module or not; experts in a tensor each, or in one. Both are written alike."""
    home = HERE / "hybrid_mtp_references" / name
    check(home, OF_MEMORIES)
    convert.to_run(home, tmp_path / "run")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    written, published = (hf_files.Folder.open(path) for path in (tmp_path / "hf", home))
    assert written.config["mtp_num_hidden_layers"] == 1
    expected = weights.own_tensors(published)
    assert set(written.tensors) == set(expected) and sum(name.startswith("mtp.") for name in expected) > 12
    for path, stored in expected.items():
        assert np.array_equal(stored.read(...).view(np.uint16), written.tensors[path].read(...).view(np.uint16)), path
    for path in (home, tmp_path / "run"):
        assert [("mtp" in shardlm.load(path, mtp=mtp).params) for mtp in (False, True)] == [False, True]


def check(home: pathlib.Path, logits_within: float = 0.0) -> None:
    facts = json.loads((home / "expected.json").read_text())
    stored = {n: a.read(...) for n, a in hf_files.header(home / "expected.safetensors.reference").items()}
    folder, tokens = hf_files.Folder.open(home), jnp.asarray(stored["tokens"])
    with jax.set_mesh(mesh := mesh_of(MeshSpec())):
        config = Pretrained(str(home), tokens.shape[1]).transformer()
        model = ModelDef.make(config, Execution(Rules.make("zero3", MeshSpec())))
        params = weights.load(model, folder, jax.tree.map(partial(at_rest, mesh=mesh), model.shapes))
        for depth, logits in enumerate(jax.jit(partial(further_logits, model))(params, tokens)):
            assert np.abs(np.asarray(logits) - stored[f"logits_{depth}"]).max() < (logits_within or LOGITS)
        ones = jnp.ones_like(tokens[:, 1:])
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ones}
        batch |= {"positions": jnp.cumsum(ones, axis=1) - 1, "loss_mask": ones.astype(jnp.float32)}
        step = StepConfig(objective=NextToken(mtp_loss=facts["weight"]))
        grads, metrics = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step))(params, batch)
    assert float(metrics["loss"]) == pytest.approx(facts["losses"][0], abs=1e-5)
    assert float(metrics["mtp_loss"]) == pytest.approx(np.mean(facts["losses"][1:]), abs=1e-5)
    names = partial(registry.names, folder.config, config)
    found = {t.name: t.make() for t in weights.planned(config, grads, names, np.dtype("float32"))}
    for path, (norm, product) in facts["gradients"].items():
        a = found[path].astype(np.float64).ravel()
        assert np.linalg.norm(a) == pytest.approx(norm, rel=GRADIENTS, abs=1e-7), path
        assert a @ np.cos(np.arange(a.size)) == pytest.approx(product, rel=GRADIENTS, abs=GRADIENTS * norm + 1e-7), path


def test_a_checkpoint_comes_back_bit_for_bit_and_loading_leaves_the_modules_alone(tmp_path, caplog):
    convert.to_run(REFERENCE, tmp_path / "run")
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    written, published = (hf_files.Folder.open(path) for path in (tmp_path / "hf", REFERENCE))
    assert written.config["num_nextn_predict_layers"] == 2 and set(written.tensors) == set(published.tensors)
    for name, stored in published.tensors.items():
        assert np.array_equal(stored.read(...).view(np.uint16), written.tensors[name].read(...).view(np.uint16)), name
    mesh = MeshSpec(fsdp=2, expert=2)
    opened = [
        shardlm.load(path, **options).params
        for path in (REFERENCE, tmp_path / "run")
        for options in ({}, {"mtp": True}, {"mtp": True, "mesh": mesh})
    ]
    assert ["mtp" in params for params in opened] == [False, True, True] * 2 and not caplog.records
    first = opened[1]
    for params in opened:
        same = jax.tree.map(
            lambda a, b: np.array_equal(*map(np.asarray, (a, b))), params, {n: first[n] for n in params}
        )
        assert jax.tree.all(same)


def test_copies_have_to_be_copies(tmp_path, monkeypatch):
    """Compared a few rows at a time; a model without the modules does not ask."""
    monkeypatch.setattr("shardlm.weight_copies.ROWS_BYTES", 500)
    folder = shutil.copytree(REFERENCE, tmp_path / "f")
    head = hf_files.Folder.open(folder).tensors[COPY].read(...)
    other = head.copy()
    other[70, 3] += ml_dtypes.bfloat16(0.5)
    largest = np.abs(other.astype(np.float32) - head.astype(np.float32)).max()
    change_tensors(folder, **{COPY: other})
    with pytest.raises(ShardlmError) as refused:
        shardlm.load(folder, mtp=True)
    assert f"{COPY} differs by up to {largest:.3g}, in row 70 from lm_head.weight" in str(refused.value)
    shardlm.load(folder)
    change_tensors(folder, **{COPY: head[:-1]})
    with pytest.raises(ShardlmError, match=r"shared_head.head.weight is \[95, 32\]"):
        shardlm.load(folder, mtp=True)
    change_tensors(folder, **{COPY: None})  # as some who quantise them publish
    assert "mtp" in shardlm.load(folder, mtp=True).params
    change_tensors(folder, **{"model.layers.2.eh_proj.weight": None})
    with pytest.raises(ShardlmError, match=r"model\.layers\.2\.eh_proj\.weight is missing"):
        shardlm.load(folder, mtp=True)


def test_what_transformers_leaves_out_is_not_promised(tmp_path, caplog):
    """It writes config.json with a module, and no tensors of it."""
    caplog.set_level(logging.INFO)
    plain = HERE / "references" / "deepseek_v3"
    opened = shardlm.load(plain, mtp=True)
    assert opened.model.config.mtp is None and opened.source.options["num_nextn_predict_layers"] == 0
    assert Pretrained(str(REFERENCE), mtp=False).transformer().mtp is None
    folder = shutil.copytree(REFERENCE, tmp_path / "f")
    change_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(ShardlmError, match=r"model\.layers\.1\.\S+ is not known"):
        shardlm.load(folder)


def test_halves_of_a_matrix_in_fp8_are_read_by_slices(tmp_path):
    """The blocks of 8 columns that hold a device's rows of one half."""
    name = "model.layers.1.eh_proj.weight"
    folder = shutil.copytree(REFERENCE, tmp_path / "f")
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(32, 64)).astype(ml_dtypes.float8_e4m3fn)
    factors = rng.normal(size=(8, 8)).astype(np.float32)
    change_tensors(folder, **{name: numbers, f"{name}_scale_inv": factors})
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [4, 8]})
    found = shardlm.load(folder, mtp=True, mesh=MeshSpec(fsdp=4)).params["mtp"]
    whole = numbers.astype(np.float32) * factors.repeat(4, 0).repeat(8, 1)
    for half, first in (("from_embedding", 0), ("from_hidden", 32)):
        assert np.array_equal(np.asarray(found[half])[0], whole[:, first : first + 32].T)


def test_a_config_alone_is_believed_about_further_modules(tmp_path):
    """As launch.plan has it; transformers keeps their number and leaves the modules out of what it saves."""
    shutil.copy(REFERENCE / "config.json", tmp_path / "config.json")
    assert Pretrained(str(tmp_path)).transformer().mtp.depth == 2
    assert Pretrained(str(tmp_path), mtp=False).transformer().mtp is None
    reference = pathlib.Path(HERE / "references" / "deepseek_v3")
    assert Pretrained(str(reference)).transformer().mtp is None  # its weights have none


def test_glm_publishes_its_modules_as_deepseek_does():
    """GLM-4.5: one more layer with the tensors of any, and those of the module."""
    options = {**hf_files.Folder.open(HERE / "references" / "glm4_moe").config, "num_nextn_predict_layers": 1}
    config = registry.transformer(options)
    with jax.set_mesh(mesh_of(MeshSpec())):
        shapes = ModelDef.make(config, Execution(Rules.make("replicated", MeshSpec()))).shapes
    found = {t.name for t in weights.planned(config, shapes, partial(registry.names, options, config), np.float32)}
    layers = [{name.split(f"layers.{n}.")[1] for name in found if f"layers.{n}." in name} for n in (2, 3)]
    own = {"eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"}
    assert layers[1] - layers[0] == {f"{name}.weight" for name in own} and layers[0] < layers[1]
