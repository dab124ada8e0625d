"""Processes of a job that are told, or find, different things: refused in each, before one waits for the other."""

import dataclasses
import json
import os

import pytest

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.run_lock import only_trainer
from shardlm.train import alike
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.resume import claim

CONFIG = RunConfig(
    LlamaConfig(vocab_size=320, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64),
    mesh=MeshSpec(data=2),
)


@pytest.fixture
def beside(monkeypatch):
    """Makes what is said by this process that of process 1, beside one with another configuration."""

    def process_0(config):
        said = []
        monkeypatch.setattr(alike, "texts_of_all", lambda own: said.append(own) or [own])
        alike.check_configs(config)
        monkeypatch.setattr(alike, "texts_of_all", lambda own: [*said, own])

    return process_0


def test_alone_there_is_nothing_to_differ():
    alike.check_configs(CONFIG)
    alike.check_same({"a": 1}, "")


def test_processes_with_one_configuration_may_keep_it_in_places_of_their_own(beside):
    data = dataclasses.replace(CONFIG.data, cache_dir="/local/data", train=("/mnt/corpus",))
    beside(dataclasses.replace(CONFIG, run_dir="/mnt/run", cpu_devices=4, data=data, trackers=("wandb",)))
    alike.check_configs(CONFIG)


def test_settings_that_differ_are_named(beside):
    beside(dataclasses.replace(CONFIG, train=TrainConfig(steps=7), mesh=MeshSpec(fsdp=2)))
    with pytest.raises(ShardlmError) as error:
        alike.check_configs(CONFIG)
    assert str(error.value) == (
        "process 1 of 2 differs from process 0: mesh.data is 2, not 1; mesh.fsdp is 1, not 2; train.steps is 1000, not "
        "7; start all of them by one command, with the same packages"
    )


def test_of_many_differences_the_first_are_named(monkeypatch):
    said = [json.dumps(dict.fromkeys("abcdef", value)).encode() for value in (None, 500)]
    monkeypatch.setattr(alike, "texts_of_all", lambda own: said)
    with pytest.raises(ShardlmError, match=r"a is 500, not None; b is 500.*; d is 500, not None and 2 more; share it"):
        alike.check_same({}, "share it")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (lambda own: own.replace(b"null", b"500"), "the latest checkpoint in run_dir is 500, not None"),
        (lambda own: own.replace(b"process ", b"process 9"), "who holds run_dir/.lock is 'process 9{pid} on .*', not "),
    ],
    ids=["latest", "new run"],
)
def test_a_run_directory_that_hosts_do_not_share_is_refused(tmp_path, monkeypatch, said, told):
    monkeypatch.setattr(alike, "texts_of_all", lambda own: [own, said(own)])
    with only_trainer(tmp_path), pytest.raises(ShardlmError, match=f"{told.format(pid=os.getpid())}.*; give all of th"):
        claim(tmp_path, CONFIG, None)
