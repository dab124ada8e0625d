"""Training on rewards with images in prompts: what is trained is what was sampled, to the log-probability, and rewards
that depend on images rise."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import references
from rewarded import config_of, steps, task_of, write

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.reinforce.rows import images_of

MESH = MeshSpec(data=2, tensor=2)
# The sampler's programs and the trainer's sum in another order (measured: 3e-7 to 7e-7 in the mean).
CLOSE = 1e-5


def mean(found, name):
    return np.mean([line[name] for line in found])


@pytest.mark.wide
def test_vectors_turns_and_layers_of_their_own_on_a_mesh(tmp_path):
    """Qwen3-VL: the reward rises; devices read an image once for all replies to it; the encoder is held once; and a run
    goes on between two updates with the same replies."""
    folder = references.folder("qwen3_vl", tmp_path)
    write("qwen3_vl", tmp_path)
    task = task_of(config_of(folder, tmp_path, MESH, tensor=2, updates=2))
    found, state = steps(task, 32)
    assert all(line["sampling_gap"] < CLOSE and abs(line["ratio"] - 1) < CLOSE for line in found[::2])
    assert mean(found[-8:], "reward") > 0.75 > 0.65 > mean(found[:8], "reward")

    runners = [engine.runner for engine in task.judges.sampler._engines]
    resting = jax.tree.leaves([(runner._state, runner._parts) for runner in runners])
    assert resting and not any(isinstance(a, jax.Array) for a in resting)
    assert "2 images in prompts to train on" in task.described(task.source())[0]

    copies = [runner.image_encoder.params for runner in runners]
    held = {shard.device: shard.data for tree in copies for shard in jax.tree.leaves(tree)[0].addressable_shards}
    own = {shard.device: shard.data for shard in jax.tree.leaves(task.eyes)[0].addressable_shards}
    assert len(own) == 4
    assert all(own[d].unsafe_buffer_pointer() == held[d].unsafe_buffer_pointer() for d in own)

    first, second = task.source(), task.source()
    with jax.set_mesh(task.program.mesh):
        first.next(state)
        second.set_state(json.loads(json.dumps(first.get_state())))
        (one, told), (other, again) = first.next(state), second.next(state)
        values = task.evaluator({})(state.params, state.frozen)
    images = images_of(first._replies, 8, 32, 1, task.judges.sampler.prepare)
    [look] = task.program.seeing.readers(task.program.slots)(images)
    assert len(images) == len(look.taken) == 8 and np.count_nonzero(look.counts) <= 2 * 2
    assert told == again and one.keys() == other.keys() and "vectors" in one
    assert all((np.asarray(one[name]) == np.asarray(other[name])).all() for name in one)
    assert values["validation_reward"] > 0.75


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(pytest.param(name, MeshSpec(), marks=pytest.mark.wide) for name in ("gemma3", "qwen2_5_vl", "qwen3_vl")),
        *(pytest.param(name, MESH, marks=pytest.mark.wide) for name in ("qwen2_5_vl", "gemma3")),
    ],
    ids=str,
)
def test_what_samples_is_what_is_trained(name, mesh, tmp_path):
    folder = references.folder(name, tmp_path)
    write(name, tmp_path)
    found, _ = steps(task_of(config_of(folder, tmp_path, mesh)), 4)
    assert all(line["sampling_gap"] < CLOSE and abs(line["ratio"] - 1) < CLOSE for line in found)


@pytest.mark.wide
def test_adapters_and_the_checkpoint_as_it_was_see_the_same(tmp_path):
    folder = references.folder("qwen3_vl", tmp_path)
    write("qwen3_vl", tmp_path)
    config = dataclasses.replace(config_of(folder, tmp_path, MESH, beta=0.1), lora=LoraConfig(4))
    found, _ = steps(task_of(config), 3)
    assert found[0]["divergence"] < 1e-9 < found[-1]["divergence"]
    assert all(line["sampling_gap"] < CLOSE for line in found)


def test_a_ring_does_not_show_whole_images(tmp_path):
    """Refused before anything compiles."""
    folder = references.folder("gemma3", tmp_path)
    write("gemma3", tmp_path)
    config = dataclasses.replace(config_of(folder, tmp_path, MeshSpec(context=2)), context_attention="ring")
    with pytest.raises(ShardlmError, match="set context_attention to ulysses"):
        task_of(config)
