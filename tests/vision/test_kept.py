"""Checkpoints that see, written whole again: names, tensors, options and files are those that they began with."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from flax.traverse_util import flatten_dict
from served import SIZES

from shardlm import LLM
from shardlm.hf_files import Folder, Planned, write_folder
from shardlm.mesh import MeshSpec
from shardlm.train.convert import opened_by, to_hf, to_run
from shardlm.unread import Unread
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sight_of
from shardlm.vision.trained import in_map, tensors_of, trained_of

BESIDE = ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(stored.read(...), np.float32) for name, stored in Folder.open(folder).tensors.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, a in expected.items():
        assert np.array_equal(found[name], a), name


def changed(folder: pathlib.Path, of: dict[str, np.ndarray], **options) -> pathlib.Path:
    """A folder with other tensors, and other options of its text."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= options
    other = folder.with_name("changed")
    planned = [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in of.items()]

    def finish(written):
        for name in BESIDE:
            shutil.copy(folder / name, written)

    write_folder(other, planned, config, finish)
    return other


@pytest.mark.parametrize("name", references.NAMES)
def test_what_a_run_trained_of_an_encoder_is_written_as_it_is_read(name):
    """Bit for bit: every weight of every family, back into the tensors that it was read from."""
    folder = Folder.open(references.HOME / name)
    sight = sight_of(references.HOME / name, folder.config)
    encoder = Encoder.make(sight.encoder, jnp.float32, MeshSpec().build(jax.devices()[:1]))
    read = {path: np.asarray(a) for path, a in flatten_dict(encoder.load(folder)).items()}
    made = tensors_of(encoder, {path: Unread(a.shape, a.dtype, a.__getitem__) for path, a in read.items()})
    named = {in_map(encoder, name): stored for name, stored in folder.tensors.items()}
    assert made and made.keys() <= named.keys()
    for tensor, make in made.items():
        expected = np.asarray(named[tensor].read(...), np.float32)
        found = make(np.dtype(np.float32))
        assert found.shape == expected.shape and np.array_equal(found, expected), tensor
    of_projector = trained_of(encoder, "projector")
    assert of_projector and of_projector < trained_of(encoder, "all") <= read.keys()


@pytest.mark.parametrize("name", references.NAMES)
def test_what_is_written_is_the_checkpoint_whole(name, tmp_path):
    """By every name of every family, of what sees and of the language model."""
    folder, written = references.folder(name, tmp_path), tmp_path / "written"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    to_hf(folder, written, "float32")
    same(arrays(written), arrays(folder))
    found, expected = (json.loads((one / "config.json").read_text()) for one in (written, folder))
    if name.startswith("kimi"):  # transformers counts a module that predicts further tokens, and writes none
        assert found["text_config"].pop("num_nextn_predict_layers") == 0
        del expected["text_config"]["num_nextn_predict_layers"]
    assert found == {**expected, "dtype": "float32"}
    for file in (*BESIDE, "chat_template.jinja"):
        assert (written / file).read_bytes() == (folder / file).read_bytes()
    assert opened_by(written) == "AutoModelForImageTextToText"


def test_experts_that_were_published_in_two_tensors_are_written_so(tmp_path):
    """[experts, inputs, results], as Qwen3-VL's are on the hub, where transformers writes results first."""
    folder = references.folder("qwen3_vl_moe", tmp_path)
    turned = {n: a.swapaxes(1, 2).copy() if ".mlp.experts." in n else a for n, a in arrays(folder).items()}
    other = changed(folder, turned)
    to_hf(other, tmp_path / "written", "float32")
    same(arrays(tmp_path / "written"), turned)


def test_modules_that_predict_further_tokens_are_written_beside_the_language_model(tmp_path):
    """As Qwen 3.5's are on the hub: mtp., not model.language_model.mtp."""
    folder = references.folder("qwen3_5", tmp_path)
    whole = arrays(folder)
    last = "model.language_model.layers.1."
    further = {f"mtp.layers.0.{name.removeprefix(last)}": a for name, a in whole.items() if name.startswith(last)}
    D = whole["model.language_model.norm.weight"].size
    rng = np.random.default_rng(0)
    further["mtp.fc.weight"] = rng.normal(size=(D, 2 * D)).astype(np.float32)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        further[f"mtp.{norm}.weight"] = rng.normal(size=D).astype(np.float32)
    other = changed(folder, whole | further, mtp_num_hidden_layers=1)
    to_run(other, tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "written", "float32")
    same(arrays(tmp_path / "written"), whole | further)
    assert Folder.open(tmp_path / "written").config["text_config"]["mtp_num_hidden_layers"] == 1


def test_whole_numbers_stay_what_they_are(tmp_path):
    """Places of patches, which older uploads have: 577 of them are others in bfloat16."""
    folder = references.folder("llava-clip", tmp_path)
    places = {"vision_tower.vision_model.embeddings.position_ids": np.arange(577)[None]}
    to_hf(changed(folder, arrays(folder) | places), tmp_path / "written", "bfloat16")
    [(name, expected)] = places.items()
    found = np.asarray(Folder.open(tmp_path / "written").tensors[name].read(...))
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("gone", ["the folder", "its weights"])
def test_without_the_encoder_the_text_is_written_alone(gone, tmp_path, caplog):
    folder, run = references.folder("qwen2_5_vl", tmp_path), tmp_path / "run"
    to_run(folder, run)
    if gone == "the folder":
        folder.rename(tmp_path / "elsewhere")
    else:
        (folder / "model.safetensors").unlink()
    to_hf(run, tmp_path / "text", "float32")
    assert f"{tmp_path / 'text'} has the text alone, as the encoder of images is in {folder}, which" in caplog.text
    written = Folder.open(tmp_path / "text")
    assert written.config["model_type"] == "qwen2" and not any("visual" in name for name in written.tensors)
    assert opened_by(tmp_path / "text") == "AutoModelForCausalLM"


def test_a_run_whose_checkpoint_moved_is_told_where_to(tmp_path, caplog):
    """What is written of a run is its checkpoint again, and the run itself sees as long as that can be found."""
    folder, run = references.folder("qwen3_vl_moe", tmp_path), tmp_path / "run"
    to_run(folder, run)
    to_hf(run, tmp_path / "written", "float32")
    same(arrays(tmp_path / "written"), arrays(folder))
    folder.rename(tmp_path / "moved")
    assert LLM(run, **SIZES).engine.sight is None
    assert f"write where it is now as model.folder in {run / 'config.json'}" in caplog.text
    told = (run / "config.json").read_text()
    (run / "config.json").write_text(told.replace(str(folder), str(tmp_path / "moved")))
    assert LLM(run, **SIZES).engine.sight is not None


@pytest.mark.wide
@pytest.mark.parametrize("name", references.NAMES)
def test_transformers_opens_what_is_written(name, tmp_path):
    """With nothing missing or left over, and the weights that it finds in the checkpoint itself."""
    torch = pytest.importorskip("torch", reason="a wide test of what transformers opens")
    transformers = pytest.importorskip("transformers", reason="a wide test of what transformers opens")
    folder = references.folder(name, tmp_path)
    to_run(folder, tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "written", "float32")
    opened = []
    for source in (folder, tmp_path / "written"):
        auto = transformers.AutoModelForImageTextToText
        model, info = auto.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        opened.append(model.state_dict())
    expected, found = opened
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], a) for key, a in expected.items())
