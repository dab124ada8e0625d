"""Adapters of PEFT: what PEFT computes with them, merged too, and written back. The references are adapters that PEFT
saved, with what it computed (make_adapters.py)."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from small import logits_of
from torch_saved import save

import shardlm
from shardlm import hf_files, peft, peft_folder
from shardlm.errors import ShardlmError
from shardlm.generate import Sampling, generate
from shardlm.layers.lora import LoraConfig
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.rules import Rules
from shardlm.serve import alike
from shardlm.serve.pool_size import page_bytes
from shardlm.state import ModelDef, is_adapter
from shardlm.train.convert import to_hf

HERE = pathlib.Path(__file__).parent
NAMES = sorted(path.name for path in (HERE / "adapters").iterdir())
COSTLY = (
    "falcon_new",
    "gemma4",
    "lfm2",
    "nemotron_h",
    "qwen3_5",
    "qwen3_next",
)  # 9 to 13 s of a core; what is theirs alone is names


@pytest.fixture(autouse=True)
def _at_root(monkeypatch):
    """adapter_config.json names its base from there."""
    monkeypatch.chdir(HERE.parent.parent)


def run(model, params, tokens):
    return np.asarray(jax.jit(lambda p: logits_of(model, p, tokens))(params))


def test_adapters_that_pytorch_saved(tmp_path):
    """As PEFT wrote them first: adapter_model.bin."""
    folder = shutil.copytree(HERE / "adapters" / "llama", tmp_path / "llama")
    stored = hf_files.header(folder / peft_folder.WEIGHTS)
    digests = [alike.digest(folder)]
    save(folder / peft_folder.OLDER, {name: one.read(...) for name, one in stored.items()})
    assert peft_folder.weights_of(folder).name == peft_folder.WEIGHTS  # goes first
    (folder / peft_folder.WEIGHTS).unlink()
    ours, theirs = (shardlm.load(path).params for path in (folder, HERE / "adapters" / "llama"))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    digests.append(alike.digest(folder))
    (folder / peft_folder.OLDER).unlink()
    digests.append(alike.digest(folder))
    assert len(set(digests)) == 3
    with pytest.raises(ShardlmError, match=r"neither adapter_model.safetensors nor adapter_model.bin; download one"):
        shardlm.load(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.wide] * (name in COSTLY)) for name in NAMES])
def test_peft_computes_the_same_and_reads_what_is_written(name, tmp_path):
    folder = HERE / "adapters" / name
    mesh = MeshSpec(tensor=2) if name in ("llama", "deepseek_v2") else MeshSpec()
    opened = shardlm.load(folder, mesh=mesh, dtype="float32", decoding=True, length=24)
    expected = hf_files.header(folder / "expected.safetensors.reference")["logits"].read(...)
    close = 5e-4 if name == "gemma4" else 1e-4  # PEFT's own float32 is up to 1.9e-4 from its float64 there
    base = hf_files.header(HERE / "references" / name / "expected.safetensors.reference")
    tokens = base["tokens"].read(...)
    with jax.set_mesh(opened.mesh):
        found = run(opened.model, opened.params, tokens)
        np.testing.assert_allclose(found, expected, atol=close)
        assert np.abs(expected - base["logits"].read(...)).max() > 0.1  # the adapters do something
        to_hf(folder, tmp_path / "merged", "float32", merge=True)
        plain = shardlm.load(tmp_path / "merged", mesh=mesh, dtype="float32", decoding=True, length=24)
        np.testing.assert_allclose(run(plain.model, plain.params, tokens), expected, atol=close)

        greedy = {"max_new_tokens": 6, "sampling": Sampling(temperature=0)}
        prompt = tokens[0].tolist()
        own = list(generate(opened.model, opened.params, prompt, **greedy))
        assert own == list(generate(plain.model, plain.params, prompt, **greedy))
        layout = PageLayout.whole(plain.model.config.num_layers, 2)
        assert page_bytes(opened.model, layout, 16) == page_bytes(plain.model, layout, 16) > 0

        adapters = unflatten_dict({p: a for p, a in flatten_dict(opened.params).items() if is_adapter(p)})
        peft.save(tmp_path / "written", opened.model, adapters, opened.source)
        again = shardlm.load(tmp_path / "written", mesh=mesh, dtype="float32", decoding=True, length=24)
        np.testing.assert_allclose(run(again.model, again.params, tokens), expected, atol=close)
    with pytest.raises(ShardlmError, match="exists; choose another"):
        peft.save(tmp_path / "written", opened.model, adapters, opened.source)


OWN_NAMES = ["glm5_next", "lara_mini", "longcat_flash", "minimax", "minimax_m3", "muse_glimmer"]


@pytest.mark.parametrize("name", ["bailing_hybrid", "hy_v4", "lfm3", "mistral_large4", "sarvam_moe", *OWN_NAMES])
def test_adapters_of_modules_that_transformers_calls_otherwise(name, tmp_path):
    """What is written for PEFT, by whose names, is read again, as what PEFT wrote itself is."""
    source = Pretrained(str((HERE / "references" / name).absolute())).pinned()

    def model_of(lora: LoraConfig) -> ModelDef:
        return ModelDef.make(source.transformer(), Execution(Rules.make("replicated", MeshSpec()), lora=lora))

    with jax.set_mesh(MeshSpec().build(jax.devices()[:1])):
        model, rng = model_of(LoraConfig(2)), np.random.default_rng(0)
        made = {path: rng.normal(size=a.shape).astype(np.float32) for path, a in flatten_dict(model.shapes).items()}
        peft.save(tmp_path / "written", model, unflatten_dict(made), source)
        told = peft.lora_of(tmp_path / "written", source)
        assert set(told.targets) == {path[-1].partition("_lora")[0] for path in made}
        again = peft.arrays(model_of(told), tmp_path / "written", source)
    assert again.keys() == made.keys() and all(map(np.any, again.values()))


def test_adapters_that_peft_would_not_open(tmp_path):
    opened = shardlm.load(HERE / "adapters" / "nemotron_h", dtype="float32")
    trained = {path: np.ones(a.shape) for path, a in flatten_dict(opened.params).items() if is_adapter(path)}
    with pytest.raises(ShardlmError, match="PEFT opens none of out_proj in a 'nemotron_h' model; train without wo in"):
        peft.save(tmp_path / "all", opened.model, unflatten_dict(trained), opened.source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True, which is not supported"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA'; supported: 'LORA'"),
        ({"init_lora_weights": "pissa"}, "changes the base too"),
        ({"base_model_name_or_path": None}, "no base_model_name_or_path"),
        ({"base_model_name_or_path": "nowhere"}, "there is no folder nowhere"),
        (
            {"base_model_name_or_path": "tests/hf/references/gemma3"},
            r"lora_B.weight is \[16, 4\] and the model needs \[24, 4\]",
        ),
        ({"base_model_name_or_path": "tests/hf/references/phi3"}, "adapts mlp.gate_proj"),
    ],
)
def test_refusals(change, message, tmp_path):
    folder = shutil.copytree(HERE / "adapters" / "llama", tmp_path / "adapter")
    config = json.loads((folder / peft_folder.CONFIG).read_text())
    (folder / peft_folder.CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(ShardlmError, match=message):
        shardlm.load(folder, dtype="float32")
