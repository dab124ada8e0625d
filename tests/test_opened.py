"""What a path names, before its weights are read."""

import json

import pytest

from shardlm.config_json import to_json
from shardlm.errors import ShardlmError
from shardlm.models.llama import LlamaConfig
from shardlm.models.pretrained import Pretrained
from shardlm.opened import describe
from shardlm.run_files import save_run_files
from shardlm.train.config import RunConfig, TrainConfig

HF = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
OWN = LlamaConfig(vocab_size=64, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)


@pytest.mark.parametrize(
    "model, rows, longest",
    [
        (HF, 64, 512),  # trained further on short rows, as chats are: it reads what it read before
        (HF, 1024, 1024),
        (HF | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 64, 64),  # the run has fixed its rotation
        (OWN, 64, 64),
    ],
)
def test_a_run_has_the_positions_of_its_rows_or_of_the_checkpoint_that_it_began_with(model, rows, longest, tmp_path):
    source = Pretrained("elsewhere", config=json.dumps(model)) if isinstance(model, dict) else model
    save_run_files(tmp_path, to_json(RunConfig(source, train=TrainConfig(seq_len=rows))))
    assert describe(tmp_path).longest == longest


def test_a_run_in_the_place_of_a_folder_is_told_how_it_becomes_one(tmp_path):
    save_run_files(tmp_path, to_json(RunConfig(OWN)))
    with pytest.raises(ShardlmError, match=f"is a run, and .*launch.convert --checkpoint={tmp_path} --output=FOLDER"):
        Pretrained(str(tmp_path)).transformer()
