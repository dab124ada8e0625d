"""A run that resumes on other frozen weights than it began with, and adapters that are used on others: refused."""

import dataclasses
import os
import pathlib
import shutil

import pytest

from shardlm import opened
from shardlm.config import to_json
from shardlm.errors import ShardlmError
from shardlm.frozen_weights import FROZEN, SAMPLE_BYTES
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.run_files import save_run_files
from shardlm.serve import adapters
from shardlm.serve.adapter_table import Room
from shardlm.train import alike
from shardlm.train.config import DistillConfig, RunConfig
from shardlm.train.frozen import check_frozen, keep_frozen
from shardlm.train.scoring import score

LLAMA = pathlib.Path(__file__).parent / "hf" / "references" / "llama"


@pytest.fixture
def folder(tmp_path):
    """Of a checkpoint, whose files are large enough that not all of them is read."""
    path = tmp_path / "base"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    for number in (1, 2):
        (path / f"model-0000{number}-of-00002.safetensors").write_bytes(os.urandom(5 * SAMPLE_BYTES))
    return path


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def standing_on(folder):
    return RunConfig(Pretrained(str(folder), config="{}"), lora=LoraConfig(rank=4))


def test_the_same_weights_elsewhere_are_the_same(folder, run, tmp_path):
    keep_frozen(run, standing_on(folder))
    check_frozen(run, standing_on(shutil.copytree(folder, tmp_path / "copy")), resumes=True)


@pytest.mark.parametrize("at", [0, 2.5, 5], ids=["begin", "middle", "end"])
def test_other_weights_of_the_same_size_are_refused(folder, run, at):
    keep_frozen(run, standing_on(folder))
    victim = max(folder.glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[min(int(at * SAMPLE_BYTES), len(content) - 1)] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ShardlmError, match=r"model.folder names are others than those that .*run began with.*new dir"):
        check_frozen(run, standing_on(folder), resumes=True)
    check_frozen(run, standing_on(folder), resumes=False)
    (run / FROZEN).unlink()
    check_frozen(run, standing_on(folder), resumes=True)


def test_a_teacher_too_and_in_every_process(folder, run, monkeypatch):
    taught = RunConfig(standing_on(folder).model, distill=DistillConfig(teacher=str(folder)))
    keep_frozen(run, taught)
    assert "distill.teacher" in (run / FROZEN).read_text() and "model.folder" not in (run / FROZEN).read_text()
    monkeypatch.setattr(alike, "texts_of_all", lambda own: [own, own.replace(b'": "', b'": "f')])
    with pytest.raises(ShardlmError, match=r"process 1 of 2 differs .* the weights of distill.teacher is 'f"):
        check_frozen(run, taught, resumes=True)


def test_what_is_read_once_is_not_written_down(folder, run):
    whole = dataclasses.replace(standing_on(folder), lora=LoraConfig())
    keep_frozen(run, whole)
    assert not (run / FROZEN).exists()


def test_what_is_written_down_and_damaged_is_said(folder, run):
    (run / FROZEN).write_text("{")
    with pytest.raises(ShardlmError, match=r"frozen.json is damaged .*: delete it"):
        check_frozen(run, standing_on(folder), resumes=True)


@pytest.fixture
def adapters_run(tmp_path):
    """Of a run of adapters its files but for checkpoints, and the folder that it stands on."""
    base, run = shutil.copytree(LLAMA, tmp_path / "base"), tmp_path / "run"
    config = RunConfig(Pretrained(str(base)).pinned(), lora=LoraConfig(rank=4), run_dir=str(run))
    save_run_files(run, to_json(config))
    keep_frozen(run, config)
    return run, base


USES = {
    "generate, serve, convert": lambda run, base: opened.load(run),
    "eval": lambda run, base: score(run, [str(base)], mesh=MeshSpec(), seq_len=8, global_batch=1),
    "beside": lambda run, base: adapters.check(run, Pretrained(str(base)).pinned(), 32, Room(1, 4)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_adapters_are_not_used_on_other_weights(adapters_run, use):
    run, base = adapters_run
    with pytest.raises(ShardlmError) as error:  # of what comes next: it has no checkpoint, and no tokenizer
        use(run, base)
    assert "others than" not in str(error.value)
    weights = base / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    told = (
        r"the weights that model.folder names are others than those that .*run began with.*put those back, or train on"
    )
    with pytest.raises(ShardlmError, match=told):
        use(run, base)


def test_adapters_beside_another_folder_of_their_checkpoint_are_taken(adapters_run, tmp_path):
    """As one in few bits, which has other files."""
    run, base = adapters_run
    other = shutil.copytree(base, tmp_path / "other")
    (base / "model.safetensors").write_bytes(b"others")
    with pytest.raises(ShardlmError, match="There is no checkpoint"):
        adapters.check(run, Pretrained(str(other)).pinned(), 32, Room(1, 4))
