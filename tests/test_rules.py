"""Rule tables: where the presets put weights, gradients, optimizer state and activations, and what they refuse."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules

MESH = MeshSpec(data=2, fsdp=2, tensor=2)
NAMES = ("layers", "embed", "mlp")
BOTH = ("data", "fsdp")


@pytest.mark.parametrize(
    "preset,rest,grads,optimizer",
    [
        ("replicated", None, None, None),
        ("zero1", None, None, BOTH),
        ("zero2", None, BOTH, BOTH),
        ("zero3", BOTH, BOTH, BOTH),
        ("hybrid", "fsdp", "fsdp", "fsdp"),
    ],
)
def test_presets_differ_in_what_rests_where(preset, rest, grads, optimizer):
    rules = Rules.make(preset, MESH)
    found = [table.spec(*NAMES) for table in (rules.rest, rules.use, rules.grads, rules.optimizer)]
    assert found == [P(None, axes, "tensor") for axes in (rest, None, grads, optimizer)]


def test_axes_of_size_one_do_not_appear():
    assert Rules.make("zero3", MeshSpec(fsdp=4)).rest.spec(*NAMES) == P(None, "fsdp", None)
    assert Rules.make("zero3", MeshSpec()).act.spec("batch", "seq", "embed") == P(None, None, None)


def test_the_sequence_is_split_between_blocks_only():
    act = Rules.make("replicated", MESH).act
    assert act.spec("batch", "seq", "embed") == P(BOTH, "tensor", None)
    assert act.spec("batch", "whole_seq", "mlp") == P(BOTH, None, "tensor")


def test_refusals():
    rules = Rules.make("zero3", MeshSpec(fsdp=4, tensor=8))
    with pytest.raises(
        ShardlmError, match=r"heads=30 cannot be split over tensor=8; choose tensor from 1, 2, 3, 5, 6, 10, 15, 30"
    ):
        rules.rest.spec("embed", "heads", shape=(64, 30))
    with pytest.raises(ShardlmError, match=r"unknown dimension 'embd' .* did you mean 'embed'"):
        rules.rest.spec("embd")
    with pytest.raises(ShardlmError, match=r"split both 'heads' and 'mlp' .* over mesh axis 'tensor'"):
        rules.rest.spec("heads", "mlp")
    with pytest.raises(ShardlmError, match="unknown rules 'zero4'; choose from replicated, zero1"):
        Rules.make("zero4", MESH)


def test_what_does_not_divide_over_pipeline_rests_whole_there():
    rules = Rules.make("zero1", MeshSpec(pipeline=3, fsdp=4, expert=2))
    assert rules.fitting({"embed": [48], "latent": [24]}) is rules
    whole = rules.fitting({"embed": [64], "expert_embed": [36], "latent": [24, 16]})
    tables = (whole.rest, whole.use, whole.grads, whole.optimizer)
    assert [table.axes("embed") for table in tables] == [(), (), (), ("fsdp", "expert")]
    assert [table.axes("latent") for table in tables] == [(), (), (), ("fsdp",)]
    assert [table.axes("expert_embed") for table in tables] == [("pipeline",), (), ("pipeline",), ("pipeline", "fsdp")]
    assert whole.act == rules.act
    # A split that the preset promises stays, and is refused.
    kept = rules.fitting({"embed": [60]})
    assert kept is rules
    with pytest.raises(ShardlmError, match=r"embed=60 cannot be split over pipeline=3 x fsdp=4 x expert=2"):
        kept.optimizer.check("embed", 60)


def test_bytes_per_device():
    rules = Rules.make("zero3", MESH)
    assert rules.bytes_per_device((3, 64, 128), 4, *NAMES) == 3 * 64 * 128 * 4 // 8
    assert dataclasses.replace(rules, rest=rules.use).bytes_per_device((64, 128), 4, *NAMES[1:]) == 64 * 128 * 4 // 2
