"""Adapters in the weights that sample, compiled once."""

import types

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from small import mesh_of

from shardlm.layers.lora import LoraConfig
from shardlm.merge import added
from shardlm.mesh import MeshSpec
from shardlm.reinforce.sampler import Sampler


def test_adapters_are_added_by_one_program_at_every_step():
    rng = np.random.default_rng(0)
    shapes = {"wq": (4, 2, 3), "wq_lora_a": (4, 2), "wq_lora_b": (2, 2, 3), "norm": (4,)}
    numbers = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    given: list[dict] = []
    model = types.SimpleNamespace(execution=types.SimpleNamespace(lora=LoraConfig(2, alpha=3.0)))
    sampler = Sampler(types.SimpleNamespace(update_weights=given.append), model)
    mesh = mesh_of(MeshSpec())
    before = added._cache_size()
    with jax.set_mesh(mesh):
        here = {name: jax.device_put(a, NamedSharding(mesh, PartitionSpec())) for name, a in numbers.items()}
        base = {"head": {name: here[name] for name in ("wq", "norm")}}
        for _ in range(3):
            sampler.update({"head": {name: a for name, a in here.items() if "lora" in name}}, base)
    assert added._cache_size() == before + 1
    product = np.einsum("dz,znh->dnh", numbers["wq_lora_a"], numbers["wq_lora_b"])
    for params in given:
        np.testing.assert_allclose(params["head"]["wq"], numbers["wq"] + 1.5 * product, rtol=1e-6)
        assert (params["head"]["norm"] == numbers["norm"]).all()
