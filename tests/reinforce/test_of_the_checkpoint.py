"""What a run on rewards trains is what it samples with: the same tokens and the same rotation; and all processes have
the same prompts."""

import json
import pathlib

import pytest

from shardlm.errors import ShardlmError
from shardlm.models.pretrained import Pretrained
from shardlm.reinforce import task
from shardlm.reinforce.prompts import Prompt, digest
from shardlm.reinforce.sampler import check_longest, check_rotation
from shardlm.reinforce.task import check_alike, tokenizer_of
from shardlm.tokenizer import train_bpe

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"


def test_another_rotation_than_that_which_samples_is_refused():
    """The fixture was first trained with rows of 16."""
    stretched = str(REFERENCES / "llama_dynamic")
    for fine in (Pretrained(stretched, 32), Pretrained(str(REFERENCES / "llama"))):
        check_rotation(fine, 32)
    check_rotation(Pretrained(stretched), 16)
    with pytest.raises(ShardlmError, match=r"model.length=0 with train.seq_len=32: .*; set model.length to 32"):
        check_rotation(Pretrained(stretched), 32)


def test_rows_beyond_the_models_positions_are_refused():
    model = Pretrained("small", config=json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    check_longest(model, 64)
    with pytest.raises(ShardlmError, match=r"train.seq_len=65 is more than the 64 positions .* at most 64"):
        check_longest(model, 65)


def test_another_tokenizer_than_the_checkpoints_is_refused(tmp_path):
    for name, text in (("own", "a mesh of devices"), ("other", "what is it?")):
        (tmp_path / name).mkdir()
        train_bpe([text] * 8, 270).save(tmp_path / name / "tokenizer.json")
    found, file = tokenizer_of(str(tmp_path / "own"), str(tmp_path / "own"))
    assert file == tmp_path / "own" / "tokenizer.json" and found.vocab_size
    for wrong in ("bpe:4096", str(tmp_path / "other")):
        with pytest.raises(ShardlmError, match=f"data.tokenizer={wrong} is another .* set data.tokenizer to .*own"):
            tokenizer_of(wrong, str(tmp_path / "own"))


def test_other_prompts_on_another_host_are_refused(monkeypatch):
    given = {"data.train": (Prompt("a", (1,), {"answer": 3}),), "data.validation": (Prompt("b", (2,), {}),)}
    check_alike(given)
    assert 0 <= digest(given["data.train"]) < 2**63
    other = digest((Prompt("a", (1,), {"answer": 4}),))  # to which another reward would be given
    monkeypatch.setattr(task, "of_all", lambda own: [own, own, other])
    with pytest.raises(ShardlmError, match=r"data\.train: process 2 of 3 has other prompts than process 0; give all"):
        check_alike(given)
