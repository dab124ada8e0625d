"""Checkpoints in few bits that are served as their files have them: number for number, on every mesh, in every kind of
block, and what is not of such a kind in the dtype that is computed in."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
from engines import TOKENIZER
from few_bits import REFERENCES, WAYS, in_few_bits, written
from flax.traverse_util import flatten_dict

import shardlm
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.held_weights import of_scale, of_zero
from shardlm.hf_files import read_config
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.opened import load
from shardlm.ops.grouped_weights import Grouped, dequantised, grouped_axis
from shardlm.ops.weight_format import AsPublished
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.change import _choices
from shardlm.plan.serving.drafts import drafter_of
from shardlm.plan.serving.memory import serving_memory
from shardlm.published_weights import as_published, kinds_told
from shardlm.serve.build import grown
from shardlm.serve.engine_config import EngineConfig
from shardlm.serving_rules import serving_rules
from shardlm.train.convert import to_run

ONE = MeshSpec()
SIZES = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8, "decode_steps": 1}
ROWS = [[int(t) for t in np.random.default_rng(n).integers(0, 96, n)] for n in (9, 30, 4)]
KINDS = {"deepseek_v3": "fp8", "gpt_oss": "fp4"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("published")

    @functools.cache
    def made(name: str):
        both = in_few_bits(at / name, name)
        for folder in both:
            TOKENIZER.save(folder.path / "tokenizer.json")  # they have none; scores ask for none
        return both

    return made


@functools.cache
def scores(path, how: str | None, mesh: MeshSpec = ONE) -> np.ndarray:
    llm = shardlm.LLM(path, quantization=how, mesh=mesh, dtype="float32", **SIZES)
    return np.concatenate([np.array(row) for row in llm.score(ROWS)])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("mesh", [ONE, MeshSpec(expert=2, tensor=2)], ids=str)
def test_numbers_are_those_of_the_file(folders, name, mesh):
    plain, few = (
        load(folder.path, dtype="float32", quantization=how, decoding=True, mesh=mesh)
        for folder, how in zip(folders(name), (None, "checkpoint"), strict=True)
    )
    groups, held, expected = few.model.groups, flatten_dict(few.params), flatten_dict(plain.params)
    assert {found.numbers for found in groups.values()} == {KINDS.get(name, "int4")}
    with jax.set_mesh(few.mesh):
        for path, w in expected.items():
            if path not in groups:
                assert np.array_equal(held[path], w), path
                continue
            parts = [np.asarray(held[own]) for own in (path, of_scale(path), of_zero(path)) if own in held]
            axis = grouped_axis(parts[0].shape, parts[1].shape)
            found = dequantised(Grouped(*parts), axis, groups[path], w.dtype)
            assert np.array_equal(found, w), path
    assert (("mlp", "gate") in {path[-2:] for path in groups}) and len(groups) >= 2


@pytest.mark.parametrize("name", WAYS)
def test_a_plan_knows_it_by_config_json_alone(folders, name, tmp_path):
    folder = folders(name)[1].path
    shutil.copy(folder / "config.json", tmp_path)
    on = (Cluster.of(GPUS["h100"], 2), EngineConfig(mesh=MeshSpec(expert=2), max_model_len=64))
    known, told = (ServingCase(ServedModel.of_folder(path), *on, 32, 16) for path in (folder, tmp_path))
    kinds = [
        {own: dataclasses.replace(groups, scale="") for own, groups in case.weights.kinds if not own.startswith("mtp.")}
        for case in (known, told)  # the reference has no modules that predict further tokens
    ]
    assert kinds[0] == kinds[1] and len(kinds[0]) >= 3 and set(known.weights.left) <= set(told.weights.left)
    of_16 = told.on(quantization="dtype")
    assert ("quantization", "checkpoint") in _choices(of_16) and ("quantization", "int8") in _choices(told)
    sizes = [serving_memory(case).fullest.weights for case in (of_16, known, told)]
    assert sizes[0] > 1.05 * sizes[1] and sizes[1] == pytest.approx(sizes[2], rel=0.05)


def test_a_plan_holds_a_draft_model_so(folders):
    """As engines on GPUs do, which cannot be asked for anything else of it."""
    plain, few = (ServedModel.of_folder(folder.path) for folder in folders("llama"))
    wanted = {"model": "smaller", "num_speculative_tokens": 2}
    engine = EngineConfig(max_model_len=64, speculative_config=wanted)
    both = [
        ServingCase(plain, Cluster.of(GPUS["h100"], 1), engine, 32, 16, acceptance_rate=0.5, draft=one)
        for one in (plain, few)
    ]
    sizes = [serving_memory(case).fullest.draft for case in both]
    assert both[0].draft_weights == "dtype" and both[1].draft_weights.kinds and sizes[0] > 1.05 * sizes[1]
    assert drafter_of(both[1]).weight_bytes == sizes[1]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3_moe", MeshSpec(expert=2, tensor=2)),
        ("gpt_oss", MeshSpec(expert=4)),
        ("deepseek_v3", MeshSpec(expert=2, pipeline=2)),
    ],
)
@pytest.mark.wide
def test_scores_on_a_mesh(folders, name, mesh):
    plain, few = (folder.path for folder in folders(name))
    expected = scores(plain, None)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(scores(few, "checkpoint", mesh), expected, atol=2e-5)


def test_what_is_chosen(folders, tmp_path):
    """As it is held in the file, where it is served."""
    _, few = folders("gpt_oss")
    assert load(few.path).model.execution.weights == "dtype"
    kept = load(few.path, decoding=True).model.execution.weights
    assert isinstance(kept, AsPublished) and set(kept.by_key) == {"experts.gate", "experts.up", "experts.down"}
    halved = load(few.path, decoding=True, quantization="checkpoint", mesh=MeshSpec(tensor=4)).model
    assert halved.execution.weights.by_key["experts.down"].longest == 16 and not kept.left
    llama = load(folders("llama")[1].path, decoding=True, quantization="checkpoint", mesh=MeshSpec(tensor=4))
    assert llama.model.execution.weights.left == ("down",)
    assert "but for down, which are in float32" in grown(llama, "checkpoint")
    assert load(few.path, decoding=True, quantization="dtype").model.execution.weights == "dtype"
    with pytest.raises(ShardlmError, match="as the checkpoint's file has them, and it has no such; choose from int8"):
        load(folders("gpt_oss")[0].path, decoding=True, quantization="checkpoint")


def test_layers_that_differ(folders, tmp_path):
    """One that was left in 16 bits, as Meta's 405B has its first and its last, stays so, in a pipeline too."""
    plain, few = folders("llama")
    ours, theirs = ({n: a.read(...) for n, a in folder.tensors.items()} for folder in (plain, few))
    mixed = {n: a for n, a in theirs.items() if ".layers.2." not in n} | {n: a for n, a in ours.items() if ".2." in n}
    folder = written(tmp_path / "mixed", few.config, mixed)
    TOKENIZER.save(folder.path / "tokenizer.json")
    opened = load(folder.path, decoding=True, quantization="checkpoint", dtype="float32")
    held = opened.model.execution.weights
    assert dict(held.but) == dict.fromkeys(held.by_key, (2,)) and not held.left
    last = opened.params["segments"][2]["blocks"][0]["mlp"]
    assert (
        last["down"].dtype == np.float32 and opened.params["segments"][1]["blocks"][0]["mlp"]["down"].dtype == np.int8
    )
    found = scores(folder.path, "checkpoint", MeshSpec(pipeline=2))
    np.testing.assert_allclose(found, scores(plain.path, None), atol=2e-5)
    on = (Cluster.of(GPUS["h100"], 2), EngineConfig(mesh=MeshSpec(pipeline=2), max_model_len=64), 32, 16)
    cases = (ServingCase(ServedModel.of_folder(one.path), *on) for one in (plain, folder, few))
    sizes = [[stage.weights for stage in serving_memory(case).stages] for case in cases]
    assert sizes[0][0] > sizes[1][0] == sizes[2][0] and sizes[0][1] == sizes[1][1] > sizes[2][1]


def test_a_run_from_such_a_checkpoint_has_weights_of_its_own(folders, tmp_path):
    to_run(folders("llama")[1].path, tmp_path / "run")
    with pytest.raises(ShardlmError, match="as the checkpoint's file has them, and it has no such"):
        load(tmp_path / "run", decoding=True, quantization="checkpoint")
    opened = load(tmp_path / "run", decoding=True)
    assert opened.model.execution.weights == "dtype" and not grown(opened, None)


def test_groups_that_no_device_can_have_a_part_of(folders, tmp_path):
    plain, few = folders("llama")
    ours, theirs = ({n: a.read(...) for n, a in folder.tensors.items()} for folder in (plain, few))
    mixed = {n: a for n, a in theirs.items() if ".down_proj." in n}
    mixed |= {n: a for n, a in ours.items() if ".down_proj." not in n}
    folder = written(tmp_path / "down", few.config, mixed)
    with pytest.raises(ShardlmError, match=r"down are in groups that the mesh .* cannot split; choose from int8"):
        load(folder.path, decoding=True, quantization="checkpoint", mesh=MeshSpec(tensor=4))
    engine = EngineConfig(mesh=MeshSpec(tensor=4), max_model_len=64, quantization="checkpoint")
    case = ServingCase(ServedModel.of_folder(folder.path), Cluster.of(GPUS["h100"], 4), engine, 32, 16)
    with pytest.raises(ShardlmError, match="none of down can be held so on the mesh"):
        serving_memory(case)
    assert case.on(quantization=None).weights == "dtype"


def test_what_lies_with_its_inputs_first_is_not_held():
    """GPT-2's matrices do: what shares a scale along their rows is not what is summed over."""
    shape = Pretrained(str(REFERENCES / "gpt2")).transformer()
    rules, options = serving_rules(shape, ONE), read_config(REFERENCES / "gpt2")
    options = {**options, "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    with jax.sharding.use_abstract_mesh(ONE.abstract()):
        found = as_published(kinds_told(options, shape, rules), rules)
    assert found.kinds == () and set(found.left) == {"wq", "wk", "wv", "wo", "up", "down"}


def test_other_weights_while_it_is_served(folders, tmp_path):
    plain, few = (folder.path for folder in folders("llama"))
    llm = shardlm.LLM(few, quantization="checkpoint", dtype="float32", **SIZES)
    before = llm.score(ROWS[:1])
    llm.update_weights(few)
    assert llm.score(ROWS[:1]) == before
    not_so = r"_proj\.weight is not held in int4 by groups of 8 with scales in float16 and zeros, .* but in float32; "
    with pytest.raises(ShardlmError, match=not_so):
        llm.update_weights(plain)
    with pytest.raises(ShardlmError, match="a checkpoint's own few bits"):
        llm.update_weights(load(plain, dtype="float32").params)
    to_run(few, tmp_path / "run")
    with pytest.raises(ShardlmError, match=r"a checkpoint's own few bits .* and a run has none"):
        llm.update_weights(tmp_path / "run")
    assert llm.score(ROWS[:1]) == before
