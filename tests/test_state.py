"""A state is born in its shards: no device and no host ever holds the whole model."""

import dataclasses
import math

import jax
import pytest
from small import LLAMA, mesh_of

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

WIDE = dataclasses.replace(LLAMA, vocab_size=4096, embed_dim=512, mlp_dim=2048, num_heads=8, head_dim=64)
TRAIN = TrainConfig(global_batch=8, seq_len=64)


def program(spec, preset="zero3", **kwargs):
    return Program.make(RunConfig(model=WIDE, rules=preset, precision="fp32", train=TRAIN, **kwargs), mesh_of(spec))


def nbytes(tree):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("spec", [MeshSpec(fsdp=8), MeshSpec(data=2, fsdp=2, tensor=2), MeshSpec(tensor=8)], ids=str)
def test_bytes_of_a_new_state(spec):
    p = program(spec)
    whole = nbytes(p.state_shapes())
    with jax.set_mesh(p.mesh):
        memory = jax.jit(p._make_state).lower(0).compile().memory_analysis()
    # Weights and two Adam moments in eighths; norms and, at tensor=8, the two kv heads' projections stay whole.
    assert memory.output_size_in_bytes < whole / 8 * 1.25
    # Making it takes the random bits of a few shards, even with XLA's optimisations off, as in these tests.
    assert memory.temp_size_in_bytes < whole / 8
    assert memory.argument_size_in_bytes < 1024 and memory.host_output_size_in_bytes == 0


def test_shards_on_devices_are_what_the_shapes_say():
    p = program(MeshSpec(data=2, fsdp=2, tensor=2), "zero1")
    with jax.set_mesh(p.mesh):
        state = p.init()
    same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s.sharding, a.ndim), state, p.state_shapes())
    assert all(jax.tree.leaves(same))
    moment = state.opt_state[0].mu["embedding"]
    assert moment.addressable_shards[0].data.nbytes == moment.nbytes // 8  # zero1 splits it
    weight = state.params["embedding"]
    assert weight.addressable_shards[0].data.nbytes == weight.nbytes // 2  # over tensor only


@pytest.mark.parametrize(
    "spec,model,message",
    [
        (
            MeshSpec(tensor=8),
            {"num_heads": 12, "num_kv_heads": 4},
            r"heads=12 and kv_heads=4 .* tensor=8; choose tensor from 1, 2, 4, 12",
        ),
        (
            MeshSpec(tensor=8),
            {"num_heads": 8, "num_kv_heads": 8, "mlp_dim": 100},
            r"mlp=100 cannot be split over tensor=8; choose",
        ),
        (
            MeshSpec(tensor=8),
            {"vocab_size": 1001},
            r"vocab=1001 cannot be split over tensor=8; choose tensor from 1, 7, 11",
        ),
        (MeshSpec(fsdp=8), {"embed_dim": 100}, r"embed=100 cannot be split over fsdp=8; choose fsdp from 1, 2, 4, 5"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_before_compiling(spec, model, message):
    config = RunConfig(model=dataclasses.replace(WIDE, **model), precision="fp32", train=TRAIN)
    with pytest.raises(ShardlmError, match=message):
        Program.make(config, mesh_of(spec))


@pytest.mark.parametrize(
    "spec,train,message",
    [
        (
            MeshSpec(data=4, fsdp=2),
            {"global_batch": 12},
            r"global_batch=12 .* data=4 x fsdp=2 x accumulation=1, 8 ways; choose 8 or 16",
        ),
        (MeshSpec(data=8), {"accumulation": 2}, r"global_batch=8 .* 16 ways; choose 16"),
        (MeshSpec(tensor=8), {"seq_len": 60}, r"seq_len=60 cannot be split over tensor=8 .*; choose 56 or 64"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(spec, train, message):
    config = RunConfig(model=WIDE, precision="fp32", train=dataclasses.replace(TRAIN, **train))
    with pytest.raises(ShardlmError, match=message):
        Program.make(config, mesh_of(spec))


def test_experts_of_a_model_without_any_are_refused():
    with pytest.raises(ShardlmError, match=r"mesh\.expert=2: the model has no experts to split; set mesh\.expert=1"):
        program(MeshSpec(expert=2))
