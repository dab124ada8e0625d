"""Training adapters: any mesh gives the numbers of one device, the base stays as it is, and what cannot be is refused.
Their files are tests/hf/test_adapters.py's, the command line tests/hf/test_opening.py's."""

import pathlib

import jax
import numpy as np
import pytest
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


def trained(config: RunConfig):
    """(losses of the steps and of an evaluation, the adapters afterwards)."""
    program = Program.make(config, mesh_of(config.mesh))
    batch = packed_batch(rows=8, vocab=96)
    with jax.set_mesh(program.mesh):
        start = program.init(program.pretrained(), program.frozen())
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
        ("llama", "int4", [MeshSpec(fsdp=4, tensor=2), MeshSpec(data=2, context=2, tensor=2)]),
        ("deepseek_v2", "int8", [MeshSpec(fsdp=2, expert=2, tensor=2)]),
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
        ({"rank": 4, "base": "int3"}, "lora.base='int3'; choose from dtype, int8, int4, fp8"),
        ({"base": "int4"}, "integers cannot be trained"),
    ):
        with pytest.raises(ShardlmError, match=message):
            LoraConfig(**wrong)
