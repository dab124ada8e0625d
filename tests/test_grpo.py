"""Training on rewarded replies: loss and gradients are those of the formula on all logits, on every mesh, of all
weights and of adapters, with empty microbatches; and what cannot be is refused. Sampling is
tests/serve/test_reinforced_run.py's."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import mesh_of, on_devices, relative_error

from shardlm.data.config import DataConfig
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.packed import Packed
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.models.pretrained import Pretrained
from shardlm.ops.policy_loss import policy_loss
from shardlm.reinforce.rows import Reply, rows_of
from shardlm.train.config import GrpoConfig, OffloadConfig, PreferenceConfig, RunConfig, SlowLinkConfig, TrainConfig
from shardlm.train.policy import check_policy
from shardlm.train.program import Program
from shardlm.train.step import StepConfig, gradients

REFERENCES = pathlib.Path(__file__).parent / "hf" / "references"
T, VOCAB, ROWS = 32, 96, 16
GRPO = GrpoConfig(("judge:it",), group_size=4, max_tokens=8, beta=0.3, clip_low=0.1, clip_high=0.2)
TOLERANCE = 2e-5  # float32 sums in another order


def replies() -> list[Reply]:
    """Of a policy that is some way off, so that some ratios are beyond their bounds; of the one that is not taught
    they are infinite."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(ROWS):
        prompt, told = (tuple(rng.integers(0, VOCAB, n).tolist()) for n in rng.integers(1, 9, 2))
        logprobs = np.log(1 / VOCAB) + 0.5 * rng.standard_normal(len(told)) - 200 * (number == 3)
        found.append(Reply(prompt, told, tuple(logprobs.tolist()), float(rng.standard_normal()), taught=number != 3))
    return found


def config_of(**changes) -> RunConfig:
    options = {
        "model": Pretrained(str(REFERENCES / "llama"), T),
        "data": DataConfig(),
        "mesh": MeshSpec(),
        "precision": "fp32",
        "remat": "none",
        "grpo": GRPO,
        "train": TrainConfig(global_batch=ROWS, seq_len=T),
    }
    return RunConfig(**(options | changes))


def moved(params):
    """The parameters some way into training, the same on every mesh."""
    rng = np.random.default_rng(1)

    def move(a):
        return jax.device_put(np.asarray(a) + 0.05 * rng.standard_normal(a.shape, np.float32), a.sharding)

    return jax.tree.map(move, params)


def loss_and_gradients(config: RunConfig):
    """(gradients, metrics)."""
    program = Program.make(config, mesh_of(config.mesh))
    step = StepConfig(config.train.accumulation, objective=program.objective)
    batch = rows_of(replies(), ROWS, T, config.train.accumulation, config.grpo.loss)
    state = program.init(program.pretrained(), program.frozen())
    with jax.set_mesh(program.mesh):
        run = jax.jit(lambda p, frozen, b: gradients(program.model.bound(frozen), p, b, jnp.float32(1), step))
        return jax.tree.map(np.asarray, run(moved(state.params), state.frozen, on_devices(batch, program.model)))


def naive(config: RunConfig):
    """The formulas of the papers on all logits: each reply in a row of its own, the means written out."""
    grpo, program = config.grpo, Program.make(config, mesh_of(MeshSpec()))
    given = replies()
    rows = {name: np.zeros((ROWS, T), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    for row, reply in enumerate(given):
        ids = np.array([*reply.prompt, *reply.tokens])
        for name, value in zip(rows, (ids[:-1], ids[1:], 1, np.arange(len(ids) - 1)), strict=True):
            rows[name][row, : len(ids) - 1] = value

    def logprobs(model, params):
        lm = model.model(params)
        ctx = Packed.make(jnp.asarray(rows["segment_ids"]), None, model.execution)
        logits = lm.logits(lm(jnp.asarray(rows["tokens"]), jnp.asarray(rows["positions"]), ctx)[0])
        every = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(rows["targets"])[..., None], -1)[..., 0]
        return [every[i, len(r.prompt) - 1 : len(r.prompt) - 1 + len(r.tokens)] for i, r in enumerate(given)]

    def loss(params, frozen):
        policy, reference = logprobs(program.model.bound(frozen), params), logprobs(program.objective.reference, frozen)
        losses, found = (
            [],
            {name: [] for name in ("ratio", "clipped_fraction", "sampling_gap", "surprise", "divergence")},
        )
        for own, before, reply in zip(policy, reference, given, strict=True):
            if not reply.taught:
                continue
            change = own - np.array(reply.logprobs, np.float32)
            ratio = jnp.exp(change)
            bounded = jnp.clip(ratio, 1 - grpo.clip_low, 1 + grpo.clip_high)
            kl = jnp.exp(before - own) - (before - own) - 1
            losses.append(-jnp.minimum(ratio * reply.advantage, bounded * reply.advantage) + grpo.beta * kl)
            clipped = bounded * reply.advantage < ratio * reply.advantage
            for name, values in zip(found, (ratio, clipped, abs(change), -own, kl), strict=True):
                found[name].append(values)
        if grpo.loss == "grpo":
            total = sum(jnp.mean(one) for one in losses) / len(losses)
        elif grpo.loss == "dapo":
            total = jnp.mean(jnp.concatenate(losses))
        else:
            total = sum(jnp.sum(one) for one in losses) / (ROWS * grpo.max_tokens)
        weights = [jnp.ones(len(one)) / (len(one) if grpo.loss == "grpo" else 1) for one in losses]
        weights = jnp.concatenate(weights) / sum(map(jnp.sum, weights))
        return total, {name: jnp.sum(weights * jnp.concatenate(values)) for name, values in found.items()} | {
            "loss": total
        }

    state = program.init(program.pretrained(), program.frozen())
    with jax.set_mesh(program.mesh):
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss, has_aux=True))(moved(state.params), state.frozen))


@pytest.mark.parametrize(
    ("loss", "options", "mesh", "accumulation"),
    [
        ("dapo", {}, MeshSpec(fsdp=2, tensor=2), 4),
        ("grpo", {"lora": LoraConfig(4)}, MeshSpec(data=2, context=2), 2),
        ("dr_grpo", {}, MeshSpec(data=2, fsdp=2, tensor=2), 1),
    ],
)
def test_loss_and_gradients_are_the_formulas_on_every_mesh(loss, options, mesh, accumulation):
    grpo = dataclasses.replace(GRPO, loss=loss)
    grads, metrics = naive(config_of(grpo=grpo, **options))
    assert 0.1 < metrics["clipped_fraction"] < 0.9 and metrics["divergence"] > 1e-4
    train = TrainConfig(global_batch=ROWS, seq_len=T, accumulation=accumulation)
    found, of_step = loss_and_gradients(config_of(grpo=grpo, mesh=mesh, train=train, **options))
    assert relative_error(of_step, metrics) < TOLERANCE
    assert relative_error(found, grads) < TOLERANCE


def test_the_clip_ends_gradients_on_its_own_side_alone():
    """As PPO's figure 1: a good token's beyond 1 + high, a bad one's below 1 - low."""
    ratio, gain = jnp.array([0.5, 0.5, 1.5, 1.5, 1.0]), jnp.array([1.0, -1.0, 1.0, -1.0, 2.0])
    losses, clipped = policy_loss(jnp.log(ratio), gain, 0.2, 0.3)
    np.testing.assert_allclose(losses, [-0.5, 0.8, -1.3, 1.5, -2.0], rtol=1e-6)
    assert clipped.tolist() == [0, 1, 1, 0, 0]
    slopes = jax.grad(lambda change: jnp.sum(policy_loss(change, gain, 0.2, 0.3)[0]))(jnp.log(ratio))
    np.testing.assert_allclose(slopes, [-0.5, 0.0, 0.0, 1.5, -2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": LlamaConfig()}, "replies are a checkpoint's; set model to"),
        ({"preference": PreferenceConfig(0.1)}, "preference.beta=0.1: choose one"),
        (
            {"train": TrainConfig(global_batch=18, seq_len=T)},
            "are no groups of grpo.group_size=4; choose a batch of 16",
        ),
        ({"train": TrainConfig(global_batch=16, seq_len=8)}, "grpo.max_tokens=8 leaves no room for prompts"),
        ({"slow_link": SlowLinkConfig("int8")}, "leave those as they are"),
        ({"mesh": MeshSpec(pipeline=2)}, "devices of pipeline to fsdp"),
        ({"offload": OffloadConfig(params=True)}, "set offload.params to False"),
        ({"lora": LoraConfig(4, base="int4")}, "set lora.base to dtype"),
        ({"train": TrainConfig(global_batch=16, seq_len=T, z_loss=1e-4)}, "set train.z_loss to 0"),
        ({"data": DataConfig(packing="pairs")}, "data.packing to cut"),
        ({"data": DataConfig(weights=(1.0,))}, "prompts are taken one as often as the other; leave data.weights out"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ShardlmError, match=message):
        check_policy(config_of(**changes))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"group_size": 1}, "grpo.group_size=1: it must be at least 2"),
        ({"updates": 0}, "grpo.updates=0: it must be at least 1"),
        ({"clip_low": 1.0}, "clip_low between 0 and 1"),
    ],
)
def test_settings_that_mean_nothing(wrong, message):
    with pytest.raises(ShardlmError, match=message):
        GrpoConfig(**wrong)
