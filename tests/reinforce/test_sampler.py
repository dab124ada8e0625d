"""Adapters in the weights that sample, compiled once; and which copies a process has."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.merge import added
from shardlm.mesh import MeshSpec
from shardlm.reinforce.sampler import Sampler, copies_of, parts_of
from shardlm.serve.sampling_params import SamplingParams


def nobody() -> types.SimpleNamespace:
    """Stands in for an engine."""
    runner = types.SimpleNamespace(settled=lambda: None, _parts=[], _state=(), _shape_of_empty=tuple, mesh=None)
    runner.allocate = lambda: None
    return types.SimpleNamespace(runner=runner, update_weights=lambda _: None, reset_prefix_cache=lambda **_: True)


def test_adapters_are_added_by_one_program_at_every_step():
    rng = np.random.default_rng(0)
    shapes = {"wq": (4, 2, 3), "wq_lora_a": (4, 2), "wq_lora_b": (2, 2, 3), "norm": (4,)}
    numbers = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    given: list[dict] = []
    model = types.SimpleNamespace(execution=types.SimpleNamespace(lora=LoraConfig(2, alpha=3.0)))
    weights = types.SimpleNamespace(placed=lambda params: given.append(params) or {})
    sampler = Sampler(types.SimpleNamespace(engine=nobody()), model, weights, (1,))
    mesh = mesh_of(MeshSpec())
    before = added._cache_size()
    with jax.set_mesh(mesh):
        here = {name: jax.device_put(a, NamedSharding(mesh, PartitionSpec())) for name, a in numbers.items()}
        base = {"head": {name: here[name] for name in ("wq", "norm")}}
        for _ in range(3):
            with sampler.holding({"head": {name: a for name, a in here.items() if "lora" in name}}, base):
                pass
    assert added._cache_size() == before + 1
    product = np.einsum("dz,znh->dnh", numbers["wq_lora_a"], numbers["wq_lora_b"])
    assert len(given) == 3
    for params in given:
        np.testing.assert_allclose(params["head"]["wq"], numbers["wq"] + 1.5 * product, rtol=1e-6)
        assert (params["head"]["norm"] == numbers["norm"]).all()


def test_a_copy_has_devices_of_one_process():
    assert copies_of([0] * 8, 2) == (4,) and copies_of([0, 0, 1, 1, 1, 1], 2) == (1, 2)
    with pytest.raises(ShardlmError, match=r"grpo\.tensor=3 does not divide 8 devices; choose from 1, 2, 4, 8"):
        copies_of([0] * 8, 3)
    with pytest.raises(
        ShardlmError, match=r"=4 does not divide the 2 devices of a process, in .*; choose from 1, 2, or start fewer"
    ):
        copies_of([0, 0, 1, 1], 4)


def test_copies_have_equally_many_requests():
    asked = SamplingParams(n=8, seed=5)
    assert parts_of(asked, 16, 8) == [asked]
    assert [(one.n, one.seed) for one in parts_of(asked, 12, 8)] == [(4, 5), (4, 9)]
    assert [(one.n, one.seed) for one in parts_of(asked, 5, 8)] == [(1, 5 + i) for i in range(8)]
    greedy = SamplingParams(temperature=0)
    assert parts_of(greedy, 5, 8) == [greedy]
