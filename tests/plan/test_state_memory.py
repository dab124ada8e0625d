"""What rests between steps (shardlm/plan/state.py), held to the shapes that the training program has on CPU devices."""

import dataclasses
import json
import math

import jax
import pytest

from shardlm.config import override, resolve
from shardlm.hardware import GPUS
from shardlm.layers.lora import LoraConfig
from shardlm.models.pretrained import Pretrained
from shardlm.plan.memory import memory, sampling
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import state
from shardlm.train.config import GrpoConfig
from shardlm.train.program import Program

HYBRID = {"rules": "hybrid", "optim.name": "adamw"}
# Overrides of configs/tiny.py on data=2, fsdp=2, tensor=2 that change what rests.
VARIANTS = [
    {"optim.name": "adamw", "optim.ema_decay": "0.99"},
    {"optim.name": "lion", "rules": "zero1"},
    {"optim.name": "sgd", "rules": "replicated"},
    {"optim.name": "sgd", "optim.b1": "0", "rules": "zero2"},
    {"optim.name": "adafactor", "model.num_heads": "2", "model.num_kv_heads": "2", "model.head_dim": "128"},
    {"optim.name": "muon", "model.tie_embeddings": "False"},
    {"optim.name": "adamw", "optim.moments": "int8", "optim.ema_decay": "0.99"},
    {"optim.name": "muon", "optim.moments": "int8", "model.tie_embeddings": "False", "rules": "zero1"},
    {"optim.name": "lion", "optim.moments": "bfloat16", "offload.optimizer": "True", "model.num_layers": "2"},
    {"optim.name": "adamw", "optim.moments": "int8", "local_sgd.inner_steps": "10", "rules": "hybrid"},
    {"optim.name": "adamw", "precision": "fp16", "lora.rank": "4"},
    {"optim.name": "adamw", "precision": "bf16", "lora.rank": "4", "lora.base": "int4"},
    {"optim.name": "adamw", "precision": "bf16", "preference.beta": "0.1", "data.packing": "pairs"},
    {"optim.name": "lion", "precision": "bf16", "preference.beta": "0.1", "data.packing": "pairs", "matmul": "W8A8"},
    {
        "optim.name": "adamw",
        "precision": "bf16",
        "grpo.reward": "judge.py:it",
        "grpo.max_tokens": "8",
        "grpo.beta": "1",
    },
    {**HYBRID, "slow_link.compression": "int8"},
    {**HYBRID, "slow_link.compression": "powersgd"},
    {**HYBRID, "local_sgd.inner_steps": "10", "slow_link.compression": "bf16"},
    {**HYBRID, "optim.name": "lion", "local_sgd.inner_steps": "10", "local_sgd.overlap": "2", "rules": "zero1"},
    {**HYBRID, "train.shares": "1,3", "train.global_batch": "16"},
    {"optim.name": "adamw", "offload.optimizer": "True", "optim.ema_decay": "0.9"},
    {"optim.name": "adamw", "offload.optimizer": "True", "offload.params": "True"},
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=lambda o: ",".join(f"{k.split('.')[-1]}={v}" for k, v in o.items()))
def test_what_rests_is_foreseen_to_the_byte(overrides):
    config = resolve("configs/tiny.py", [("cpu_devices", "0")]).config
    if overrides.keys() & {"lora.rank", "preference.beta", "grpo.reward"}:
        config = dataclasses.replace(config, model=Pretrained("unread", 0, json.dumps(config.model.to_hf())))
        config = override(config, [("train.baselines", "False")])
    config = override(config, list(overrides.items()))
    program = Program.make(config, config.mesh.build(jax.devices()))
    shapes = program.state_shapes()
    sketch = Sketch.of(config, GPUS["h100"])
    found = state(sketch)

    def nbytes(tree, kind="device"):
        leaves = [a for a in jax.tree.leaves(tree) if a.ndim and a.shape != (3,)]  # but for scalars and muon's factors
        return sum(
            math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in leaves
            if (a.sharding.memory_kind == "pinned_host") == (kind == "host")
        )

    expected = {
        "weights": shapes.params,
        "frozen": shapes.frozen,
        "optimizer": shapes.opt_state,
        "average": shapes.ema,
        "replicas": shapes.link,
        "batch": program.batch_shapes(),
    }
    assert {name: getattr(found, name) for name in expected} == pytest.approx(
        {name: nbytes(tree) for name, tree in expected.items()}, abs=200
    )
    assert found.host == nbytes(shapes, "host")
    if config.lora.rank:  # of the model in whatever it is held
        bare = Program.make(dataclasses.replace(config, lora=type(config.lora)()), config.mesh.build(jax.devices()))
        sizes = [sum(a.size for a in jax.tree.leaves(made.state_shapes().params)) for made in (bare, program)]
        assert [sketch.parameters, sketch.adapters] == sizes
    assert found.total == pytest.approx(sum(nbytes(tree) for tree in expected.values()), abs=400)


def test_what_samples_is_counted():
    """Its weights and pages are there while a step's temporaries are not."""
    config = resolve("configs/tiny.py", [("cpu_devices", "0")]).config
    model = Pretrained("unread", 0, json.dumps(config.model.to_hf()))
    config = override(dataclasses.replace(config, model=model), [("train.baselines", "False"), ("precision", "bf16")])
    grpo = GrpoConfig(("judge.py:it",), max_tokens=8, tensor=2, kv_cache_gib=1)
    sketch = Sketch.of(dataclasses.replace(config, grpo=grpo), GPUS["h100"])
    rests, held = state(sketch), sketch.parameters * 2 / 2 + 2**30
    assert [sampling(sketch, rests, there) for there in (0, 2**30, 2 * held)] == [held, held - 2**30, 0]
    kinds = memory(sketch).kinds
    assert sum(kinds.values()) == pytest.approx(rests.total + held)  # a step of this model takes less
    adapters = dataclasses.replace(config, grpo=grpo, lora=LoraConfig(4))
    sketch = Sketch.of(adapters, GPUS["h100"])
    rests = state(sketch)
    assert sampling(sketch, rests, 0) == held + rests.frozen > held
