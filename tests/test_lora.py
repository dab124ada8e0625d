"""Training adapters: any mesh gives the numbers of one device, the base stays as it is, and what cannot be is refused.
Their files are tests/hf/test_adapters.py's, the command line tests/hf/test_opening.py's."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from few_bits import in_few_bits
from flax.traverse_util import flatten_dict
from small import mesh_of, packed_batch, relative_error

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.train.batches import to_devices
from shardlm.train.config import OffloadConfig, RunConfig, SlowLinkConfig, TrainConfig
from shardlm.train.lora import check_lora
from shardlm.train.program import Program
from shardlm.train.report import frozen_in
from shardlm.train.settled import settle

REFERENCES = pathlib.Path(__file__).parent / "hf" / "references"
STEPS = 3


def config_of(family: str, **changes) -> RunConfig:
    options = {
        "model": Pretrained(str(REFERENCES / family), 16),
        "mesh": MeshSpec(),
        "lora": LoraConfig(4, base="int4"),
        "precision": "fp32",
        "optim": OptimConfig("sgd", learning_rate=1.0, warmup_steps=1, schedule="constant"),
        "train": TrainConfig(steps=STEPS, global_batch=8, seq_len=16),
    }
    return RunConfig(**(options | changes))


def first(config: RunConfig):
    """The adapters of a run before its first step; those on another base begin with other numbers."""
    program = Program.make(config, mesh_of(config.mesh))
    with jax.set_mesh(program.mesh):
        return jax.tree.map(np.asarray, program.init(program.pretrained(), program.frozen()).params)


def trained(config: RunConfig, adapters=None):
    """(losses of the steps and of an evaluation, the adapters afterwards), from these adapters where given."""
    program = Program.make(config, mesh_of(config.mesh))
    batch = packed_batch(rows=8, vocab=96)
    with jax.set_mesh(program.mesh):
        start = program.init(program.pretrained(), program.frozen())
        if adapters is not None:
            placed = jax.tree.map(lambda a, own: jax.device_put(a, own.sharding), adapters, start.params)
            start = dataclasses.replace(start, params=placed)
        frozen = jax.tree.map(np.asarray, start.frozen)
        step = program.compile_step({})
        rows = to_devices(batch, tuple(range(8)), program.batch_sharding, program.slots)
        losses, state = [], start
        for number in range(1, STEPS + 1):
            state, metrics = step(number, state, rows)
            losses.append(float(metrics["loss"]))
        sums = program.lower_eval().compile()(state.params, state.frozen, rows)
        losses.append(float(sums["loss"] / sums["tokens"]))
    jax.tree.map(np.testing.assert_array_equal, state.frozen, frozen)
    return np.array(losses), jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize(
    ("family", "base", "meshes"),
    [
        ("llama", "int4", [MeshSpec(fsdp=4, tensor=2)]),
        pytest.param("llama", "int4", [MeshSpec(data=2, context=2, tensor=2)], marks=pytest.mark.wide),
        pytest.param("deepseek_v2", "int8", [MeshSpec(fsdp=2, expert=2, tensor=2)], marks=pytest.mark.wide),
    ],
)
def test_any_mesh_trains_the_same_adapters(family, base, meshes):
    lora = LoraConfig(4, base=base)
    losses, adapters = trained(config_of(family, lora=lora))
    assert losses[-1] < losses[0] - 0.01
    assert {path[-1][-7:] for path in flatten_dict(adapters)} == {"_lora_a", "_lora_b"}
    for mesh in meshes:
        others, found = trained(config_of(family, mesh=mesh, lora=lora))
        np.testing.assert_allclose(others, losses, rtol=2e-5)
        assert relative_error(found, adapters) < 1e-4


@pytest.mark.wide
def test_adapters_stand_on_the_numbers_of_a_file(tmp_path):
    """AWQ's, experts and zeros among them: held in few bits on a mesh, in full on one device."""
    _, few = in_few_bits(tmp_path, "qwen3_moe")
    config = config_of("", model=Pretrained(str(few.path), 16), lora=LoraConfig(4))
    losses, adapters = trained(config)
    mesh, lora = MeshSpec(fsdp=2, expert=2), LoraConfig(4, base="checkpoint")
    as_it_is = dataclasses.replace(config, mesh=mesh, lora=lora)
    groups = settle(as_it_is, mesh, jax.devices()[0]).execution.weights.by_key
    assert {(found.numbers, found.zeros) for found in groups.values()} == {("int4", True)} and "experts.up" in groups
    others, found = trained(as_it_is, first(config))
    np.testing.assert_allclose(others, losses, rtol=2e-5)
    assert relative_error(found, adapters) < 1e-4


def test_weights_that_cannot_be_as_their_file_has_them_are_named(tmp_path):
    """Of 48 in groups of 8, six groups cannot be split over four."""
    _, few = in_few_bits(tmp_path, "llama")
    config = config_of("", model=Pretrained(str(few.path), 16), lora=LoraConfig(4, base="checkpoint"), precision="bf16")
    told = {n: frozen_in(settle(config, MeshSpec(tensor=n), jax.devices()[0]).execution) for n in (2, 4)}
    whole = ", projections in int4 as published"
    assert told == {2: whole, 4: whole + " but for down, which are in bfloat16"}


def test_a_base_that_no_file_has_is_refused(tmp_path):
    lora = LoraConfig(4, base="checkpoint")
    with pytest.raises(ShardlmError, match=r"config\.json has no quantization_config\); choose from dtype, int8"):
        settle(config_of("llama", lora=lora), MeshSpec(), jax.devices()[0])
    _, few = in_few_bits(tmp_path, "llama")
    tables = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    whole = json.dumps(few.config | {"quantization_config": tables})
    with pytest.raises(ShardlmError, match="none of unread, in few bits by bitsandbytes, is of a kind that is held so"):
        settle(config_of("", model=Pretrained("unread", 16, whole), lora=lora), MeshSpec(), jax.devices()[0])
    some = few.config["quantization_config"] | {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}
    whole = json.dumps(few.config | {"quantization_config": some | {"quant_method": "awq", "version": "gemm"}})
    with pytest.raises(ShardlmError, match="some layers have wq in 16 bits: training holds all layers alike"):
        settle(config_of("", model=Pretrained("unread", 16, whole), lora=lora), MeshSpec(), jax.devices()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": LlamaConfig()}, "adapters stand on a checkpoint"),
        ({"matmul": "int8", "precision": "bf16"}, "set matmul to dtype, or lora.base to dtype"),
        ({"slow_link": SlowLinkConfig("int8"), "mesh": MeshSpec(data=2), "rules": "zero1"}, "leave those as they"),
        ({"offload": OffloadConfig(optimizer=True)}, "offload.optimizer and offload.params to False"),
        ({"mesh": MeshSpec(tensor=2, pipeline=2)}, "devices of pipeline to fsdp"),
    ],
)
def test_refusals(changes, message):
    config = config_of("llama", **changes)
    with pytest.raises(ShardlmError, match=message):
        check_lora(config)


def test_settings_that_mean_nothing():
    for wrong, message in (
        ({"rank": -1}, "a rank is at least 0"),
        ({"rank": 4, "targets": ("wqq",)}, "'wqq' is no projection; choose from wq"),
        ({"rank": 4, "base": "int3"}, "lora.base='int3'; choose from dtype, int8, int4, fp8, checkpoint"),
        ({"base": "int4"}, "integers cannot be trained"),
    ):
        with pytest.raises(ShardlmError, match=message):
            LoraConfig(**wrong)
