"""The language models in checkpoints that also see, against transformers (make_seeing_references.py): logits of text,
and what is written of them: the checkpoint whole, and without its encoder a checkpoint of the language model alone."""

import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from small import logits_of
from test_opening import change_tensors

import shardlm
from shardlm import hf_files, peft, peft_folder
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.text_parts import alone
from shardlm.state import is_adapter
from shardlm.train import convert
from shardlm.vision import kept
from shardlm.vision.registry import sees

SEEING = pathlib.Path(__file__).parent / "seeing"
NAMES = sorted(path.name for path in SEEING.iterdir())
LOGITS = 1e-4  # test_families.py's


@pytest.mark.parametrize("name", NAMES)
def test_what_sees_is_read_and_written_with_and_without_its_sight(name, tmp_path, monkeypatch):
    home = SEEING / name
    if sees(hf_files.read_config(home)):
        convert.to_hf(home, tmp_path / "whole", "float32")
        found, expected = (hf_files.Folder.open(folder).tensors for folder in (tmp_path / "whole", home))
        found, expected = ({kimis(name): a for name, a in tensors.items()} for tensors in (found, expected))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name].read(...), a.read(...).astype("f4")) for name, a in expected.items())
    monkeypatch.setattr(kept, "whole", lambda folder, options: None)
    check(home, tmp_path / "written")


def kimis(name: str) -> str:
    return name.replace(".model.blocks.", ".model.layers.")


def check(home: pathlib.Path, written: pathlib.Path) -> None:
    stored = hf_files.header(home / "expected.safetensors.reference")
    tokens, logits = (stored[key].read(...) for key in ("tokens", "logits"))
    opened = shardlm.load(home, dtype="float32")
    with jax.set_mesh(opened.mesh):
        run = jax.jit(lambda params, tokens: logits_of(opened.model, params, tokens))
        assert np.abs(np.asarray(run(opened.params, jnp.asarray(tokens))) - logits).max() < LOGITS
    convert.to_hf(home, written)
    back = shardlm.load(written, dtype="float32")
    assert not any("vis" in name for name in back.source.options)
    assert alone_is(back.model.config) == alone_is(opened.model.config)
    assert jax.tree.all(jax.tree.map(np.array_equal, back.params, opened.params))


def alone_is(config) -> str:
    """Without the axes on which images have positions, that the language model alone has none of."""
    return re.sub(r"\baxes=\([^()]*\)", "axes=()", repr(config))


def test_gemma3n_beside_what_sees_and_hears(tmp_path):
    """As published; transformers writes no tiny one without timm, which has what sees."""
    home = SEEING.parent / "references" / "gemma3n"
    folder = shutil.copytree(home, tmp_path / "seeing")
    options = json.loads((home / "config.json").read_text())
    own = {"model_type": "gemma3n", "text_config": options, "vision_config": {}, "audio_config": {}}
    (folder / "config.json").write_text(json.dumps(own | {"vision_soft_tokens_per_image": 256}))
    tensors = {name: stored.read(...).astype(np.float32) for name, stored in hf_files.Folder.open(home).tensors.items()}
    moved = {name.replace("model.", "model.language_model.", 1): a for name, a in tensors.items()}
    seen = ("vision_tower.timm_model.conv_stem.conv", "embed_vision.embedding", "audio_tower.conformer.0.norm")
    aside = {f"model.{name}.weight": np.ones((2, 2), np.float32) for name in (*seen, "embed_audio.soft_embedding_norm")}
    change_tensors(folder, **dict.fromkeys(tensors), **moved, **aside)
    opened, alone_ = (shardlm.load(path, dtype="float32") for path in (folder, home))
    assert opened.model.config == alone_.model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, opened.params, alone_.params))
    assert alone(own)["architectures"] == ["Gemma3nForCausalLM"]


EXPERTS = "model.language_model.layers.{}.mlp.experts."


def together(folder: pathlib.Path, inputs_first: bool) -> dict[str, np.ndarray | None]:
    """The changes of a checkpoint by which experts of a layer are in two tensors, [E, results, inputs] or turned."""
    stored, found = hf_files.Folder.open(folder).tensors, {}
    for layer in range(3):
        where = EXPERTS.format(layer)
        each = {
            part: np.stack([stored[f"{where}{expert}.{part}_proj.weight"].read(...) for expert in range(4)])
            for part in ("gate", "up", "down")
        }
        whole = {"gate_up_proj": np.concatenate([each["gate"], each["up"]], axis=1), "down_proj": each["down"]}
        for name, a in whole.items():
            found[where + name] = np.ascontiguousarray(a.swapaxes(1, 2)) if inputs_first else a
    return found | {name: None for name in stored if ".experts." in name}


@pytest.mark.parametrize("inputs_first", [False, True])
def test_experts_together_and_one_by_one(inputs_first, tmp_path):
    """Results first, as transformers writes them, or inputs, as Qwen 3 VL was published: a mesh reads its parts."""
    home = SEEING / "qwen3_5_moe"
    folder = shutil.copytree(home, tmp_path / "together")
    change_tensors(folder, **together(home, inputs_first))
    assert hf_files.Folder.open(folder).tensors[f"{EXPERTS.format(1)}gate_up_proj"].shape[1:] == (
        (32, 48) if inputs_first else (48, 32)
    )
    mesh = MeshSpec(fsdp=2, expert=2)
    params = [shardlm.load(path, mesh=mesh, dtype="float32").params for path in (home, folder)]
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(*map(np.asarray, (a, b))), *params))
    change_tensors(folder, **{f"{EXPERTS.format(1)}down_proj": np.zeros((4, 32, 32), np.float32)})
    with pytest.raises(ShardlmError, match=r"experts.down_proj is \[4, 32, 32\]: whether its matrices have results"):
        shardlm.load(folder)


def test_adapters_are_where_peft_looks_for_them(tmp_path):
    """Beside what sees, which has modules of the same names."""
    rng, module = (
        np.random.default_rng(0),
        "base_model.model.model.language_model.layers.{}.self_attn.{}.lora_{}.weight",
    )
    shapes = {"A": (2, 32), "B": (48, 2)}
    made = {
        module.format(layer, "q_proj", part): rng.normal(size=shape).astype(np.float32)
        for layer in range(2)
        for part, shape in shapes.items()
    }
    folder = tmp_path / "adapters"
    folder.mkdir()
    planned = [hf_files.Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in made.items()]
    assert len(list(hf_files.write_file(folder / peft_folder.WEIGHTS, planned))) == len(made)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(SEEING / "mistral3"), "r": 2, "lora_alpha": 4}
    (folder / peft_folder.CONFIG).write_text(json.dumps(config | {"target_modules": r".*language_model.*\.q_proj"}))
    opened = shardlm.load(folder, dtype="float32")
    adapters = unflatten_dict({path: a for path, a in flatten_dict(opened.params).items() if is_adapter(path)})
    peft.save(tmp_path / "written", opened.model, adapters, opened.source)
    written = hf_files.header(tmp_path / "written" / peft_folder.WEIGHTS)
    assert written.keys() == made.keys()
    assert all(np.array_equal(written[name].read(...), a) for name, a in made.items())
    named = json.loads((tmp_path / "written" / peft_folder.CONFIG).read_text())["target_modules"]
    found = ["model.language_model.layers.0.self_attn.q_proj", "model.vision_tower.layers.0.self_attn.q_proj"]
    assert [bool(re.fullmatch(named, name)) for name in found] == [True, False]
    assert shardlm.load(tmp_path / "written").model.execution.lora.targets == ("wq",)


def test_qwens_first_form_has_text_and_pictures_side_by_side():
    for name in ("qwen2_vl", "qwen2_5_vl"):
        config = json.loads((SEEING / name / "config.json").read_text())
        text = {option: value for option, value in config["text_config"].items() if option != "rope_parameters"}
        older = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
        flat = {**text, **config, **older, "text_config": None}
        assert registry.transformer(flat) == registry.transformer(config)
        assert alone(flat)["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize(
    ("kind", "whole", "text", "tied"),
    [
        ("qwen3_vl", True, None, True),
        ("qwen3_vl_moe", False, True, False),
        ("qwen2_5_vl", False, True, True),
        ("mistral3", True, False, False),
        ("mistral3", True, None, True),
        ("mistral3", None, None, False),
        ("gemma3", None, None, True),
    ],
)
def test_whether_the_head_repeats_the_embedding(kind, whole, text, tied):
    config = json.loads((SEEING / kind / "config.json").read_text())
    config = config | {"tie_word_embeddings": whole}
    config["text_config"] = config["text_config"] | {"tie_word_embeddings": text}
    assert registry.transformer(config).tie_embeddings == tied
