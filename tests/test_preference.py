"""Direct preference optimisation and its relatives: loss and gradients are those of the formulas on all logits, on
every mesh, of all weights and of adapters; and what cannot be is refused. Its data are
tests/data/test_preferences.py's, the command line tests/hf/test_opening.py's."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import objective_runs
import pytest
from small import mesh_of, relative_error

from shardlm.data.config import DataConfig
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.packed import Packed
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.models.pretrained import Pretrained
from shardlm.ops.preference import hinge_loss, identity_loss, odds_loss, preference_loss
from shardlm.train.config import OffloadConfig, PreferenceConfig, RunConfig, SlowLinkConfig, TrainConfig
from shardlm.train.preference import check_preference
from shardlm.train.program import Program

REFERENCES = pathlib.Path(__file__).parent / "hf" / "references"
T, VOCAB = 32, 96
ROWS = [[(3, 4, 5), (2, 6, 1)], [(6, 9, 8)], [(1, 1, 2), (4, 3, 3), (2, 2, 1)], [(8, 8, 8)]] * 2
"""Of each pair in a row: tokens of the prompt, of the chosen answer, of the rejected one."""
LORA = LoraConfig(4)
# Float32 sums in another order, of rewards that are differences of log-probabilities (measured: up to 4e-6).
TOLERANCE = 2e-5


def documents():
    """Of each row its segments: (tokens [n + 1], whether each is in the answer), chosen and rejected in turn."""
    rng = np.random.default_rng(0)
    for row in ROWS:
        segments = []
        for prompt, *answers in row:
            asked = rng.integers(0, VOCAB, prompt)
            for answer in answers:
                ids = np.concatenate([asked, rng.integers(0, VOCAB, answer)])
                segments.append((ids, np.arange(len(ids)) >= prompt))
        yield segments


def filled(rows):
    """A batch of these segments in each row."""
    batch = {name: np.zeros((len(rows), T), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    batch["loss_mask"] = np.zeros((len(rows), T), np.float32)
    for i, segments in enumerate(rows):
        at = 0
        for number, (ids, learned) in enumerate(segments, 1):
            n = len(ids) - 1
            values = (ids[:-1], ids[1:], number, np.arange(n), learned[1:])
            for name, value in zip(batch, values, strict=True):
                batch[name][i, at : at + n] = value
            at += n
    return batch


def config_of(family: str, **changes) -> RunConfig:
    options = {
        "model": Pretrained(str(REFERENCES / family), T),
        "data": DataConfig(packing="pairs"),
        "mesh": MeshSpec(),
        "precision": "fp32",
        "remat": "none",
        "preference": PreferenceConfig(0.5),
        "train": TrainConfig(global_batch=len(ROWS), seq_len=T),
    }
    return RunConfig(**(options | changes))


def moved(params):
    """The parameters some way into training, the same on every mesh."""
    rng = np.random.default_rng(1)

    def move(a):
        noise = 0.05 * rng.standard_normal(a.shape, np.float32)
        return jax.device_put(np.asarray(a) + noise, a.sharding)

    return jax.tree.map(move, params)


def loss_and_gradients(config: RunConfig, batch, evaluates: bool = False):
    program = Program.make(config, mesh_of(config.mesh))
    state = program.init(program.pretrained(), program.frozen())
    return objective_runs.loss_and_gradients(program, moved(state.params), state.frozen, batch, evaluates)


def of_one_pair(preference: PreferenceConfig, gains, means):
    """The papers' formulas, from log-ratios of the chosen and the rejected answer, summed and averaged over tokens."""
    margin = preference.beta * (gains[0] - gains[1])
    if preference.loss == "hinge":
        return jnp.maximum(0, 1 - margin)
    if preference.loss == "ipo":
        return (means[0] - means[1] - 0.5 / preference.beta) ** 2
    if preference.loss == "orpo":
        odds = [jnp.exp(mean) / (1 - jnp.exp(mean)) for mean in means]
        return preference.beta * jnp.log1p(odds[1] / odds[0])
    if preference.loss == "simpo":
        margin = preference.beta * (means[0] - means[1]) - preference.gamma
    right, wrong = jnp.log1p(jnp.exp(-margin)), jnp.log1p(jnp.exp(margin))
    return (1 - preference.label_smoothing) * right + preference.label_smoothing * wrong


def naive(config: RunConfig):
    """The formula of the paper on all logits: each document in a row of its own, the sum over pairs written out."""
    preference = config.preference
    program = Program.make(config, mesh_of(MeshSpec()))
    one_each = filled([[segment] for segments in documents() for segment in segments])

    def log_probabilities(model, params):
        lm = model.model(params)
        ctx = Packed.make(jnp.asarray(one_each["segment_ids"]), None, model.execution)
        logits = lm.logits(lm(jnp.asarray(one_each["tokens"]), jnp.asarray(one_each["positions"]), ctx)[0])
        all_of_them = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(all_of_them, jnp.asarray(one_each["targets"])[..., None], axis=-1)[..., 0]
        return [jnp.sum(own * mask, axis=1) for mask in (one_each["loss_mask"], one_each["segment_ids"] > 0)]

    def loss(params, frozen):
        policy, whole = log_probabilities(program.model.bound(frozen), params)
        reference = program.objective.reference
        before = log_probabilities(reference, frozen)[0] if reference else jnp.zeros(len(policy))
        tokens = one_each["loss_mask"].sum(axis=1)
        losses, rewards = [], []
        for c in range(0, len(policy), 2):
            r = c + 1
            gains = [policy[n] - before[n] for n in (c, r)]
            means = [gain / tokens[n] for gain, n in zip(gains, (c, r), strict=True)]
            of_pair = of_one_pair(preference, gains, means)
            losses.append(of_pair - preference.sft_weight * policy[c] / tokens[c])
            rewards.append([preference.beta * gain for gain in (gains if reference else means)])
        rewards = jnp.array(rewards)
        margins = rewards[:, 0] - rewards[:, 1]
        total = sum(losses) / len(losses)
        if preference.loss == "orpo":
            total = total - sum(whole[::2]) / (one_each["segment_ids"][::2] > 0).sum()
        names = ("loss", "reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")
        values = (total, margins.mean(), (margins > 0).mean(), *rewards.mean(axis=0))
        return total, dict(zip(names, values, strict=True))

    state = program.init(program.pretrained(), program.frozen())
    with jax.set_mesh(program.mesh):
        run = jax.jit(jax.grad(loss, has_aux=True))
        return jax.tree.map(np.asarray, run(moved(state.params), state.frozen))


@pytest.mark.parametrize(
    ("options", "meshes"),
    [
        (
            {"preference": PreferenceConfig(0.5, label_smoothing=0.1, sft_weight=0.3)},
            [MeshSpec(), MeshSpec(fsdp=4, tensor=2), MeshSpec(data=2, context=2, tensor=2)],
        ),
        ({"lora": LORA}, [MeshSpec(fsdp=4, tensor=2)]),
        pytest.param(
            {"preference": PreferenceConfig(2.0, "simpo", 0.3, sft_weight=0.2)},
            [MeshSpec(fsdp=4, tensor=2)],
            marks=pytest.mark.wide,
        ),
        ({"preference": PreferenceConfig(0.4, "orpo")}, [MeshSpec(data=2, context=2, tensor=2)]),
    ],
    ids=["full", "lora", "simpo", "orpo"],
)
def test_loss_and_gradients_are_the_formulas_on_every_mesh(options, meshes):
    grads, metrics = naive(config_of("llama", **options))
    assert 0.2 < metrics["reward_accuracy"] < 0.9 and abs(metrics["reward_margin"]) > 0.01
    batch = filled(list(documents()))
    for spec in meshes:
        accumulation = 2 if spec.fsdp > 1 and "lora" not in options else 1
        train = TrainConfig(global_batch=len(ROWS), seq_len=T, accumulation=accumulation)
        config = config_of("llama", **options, mesh=spec, train=train)
        found, of_step, sums = loss_and_gradients(config, batch, evaluates=spec.tensor == 1)
        assert relative_error(of_step, metrics) < TOLERANCE
        assert relative_error(found, grads) < TOLERANCE
        if sums:
            pairs = sums.pop("pairs")
            assert pairs == sum(map(len, ROWS))
            assert relative_error(sums, {name: pairs * value for name, value in metrics.items()}) < TOLERANCE


@pytest.mark.wide
@pytest.mark.parametrize("loss", ["ipo", "hinge"])
def test_other_losses_against_the_reference(loss):
    preference = {"preference": PreferenceConfig(0.6, loss)}
    grads, metrics = naive(config_of("llama", **preference))
    batch = filled(list(documents()))
    found, of_step, _ = loss_and_gradients(config_of("llama", **preference, mesh=MeshSpec(fsdp=4, tensor=2)), batch)
    assert relative_error(of_step, metrics) < TOLERANCE
    assert relative_error(found, grads) < TOLERANCE


@pytest.mark.wide
def test_experts_on_their_axis():
    batch, config = filled(list(documents())), config_of("mixtral")
    grads, metrics, _ = loss_and_gradients(config, batch)
    assert metrics["balance_loss"] > 0 and metrics["loss"] > 0
    mesh = MeshSpec(fsdp=2, expert=2, tensor=2)
    found, of_step, _ = loss_and_gradients(dataclasses.replace(config, mesh=mesh), batch)
    assert relative_error(of_step, metrics) < TOLERANCE
    assert relative_error(found, grads) < TOLERANCE


def test_the_reference_takes_no_second_copy_with_adapters_and_rests_in_the_compute_dtype_without():
    full = Program.make(config_of("llama", precision="bf16"), mesh_of(MeshSpec()))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(full.frozen_shapes())} == {"bfloat16"}
    assert jax.tree.structure(full.frozen_shapes()) == jax.tree.structure(full.model.shapes)
    rounded = Program.make(config_of("llama", precision="bf16", matmul="W8A8"), mesh_of(MeshSpec()))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rounded.frozen_shapes())} == {"float32"}  # as what is trained
    adapted = Program.make(config_of("llama", lora=LoraConfig(4, base="int4")), mesh_of(MeshSpec()))
    assert jax.tree.structure(adapted.frozen_shapes()) == jax.tree.structure(adapted.model.frozen_shapes)
    assert jax.tree.structure(adapted.objective.reference.shapes) == jax.tree.structure(adapted.frozen_shapes())


def test_what_compares_with_nothing_holds_no_reference():
    for loss in ("simpo", "orpo"):
        alone = Program.make(config_of("llama", preference=PreferenceConfig(1.0, loss)), mesh_of(MeshSpec()))
        assert alone.frozen_shapes() is None and alone.objective.reference is None
        check_preference(config_of("llama", preference=PreferenceConfig(1.0, loss), offload=OffloadConfig(params=True)))
        check_preference(config_of("llama", preference=PreferenceConfig(1.0, loss), model=LlamaConfig()))


def test_the_losses_of_other_papers():
    """Figures of TRL 1.16's formulas in torch: relu(1 - m); (gap - 1 / (2 beta))^2; -logsigmoid of the log-odds with
    log1mexp. Of answers that are certain the latter's gradients are numbers all the same."""
    values = jnp.array([-1.0, 0.0, 0.5, 3.0])
    np.testing.assert_allclose(hinge_loss(values), [2.0, 1.0, 0.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(identity_loss(values, 0.25), [9.0, 4.0, 2.25, 1.0], rtol=1e-6)
    chosen, rejected = jnp.array([-1e-5, -0.2, -0.7, -9.0]), jnp.array([-3.0, -0.9, -0.7, -0.5])
    expected = [5.239594474e-07, 0.1412277889, 0.6931471806, 9.432708777]
    np.testing.assert_allclose(odds_loss(chosen, rejected), expected, rtol=2e-5)
    for pair in ((0, 0), (-200, 0), (0, -200)):
        assert np.isfinite(jax.grad(odds_loss, (0, 1))(*map(jnp.float32, pair))).all()


def test_the_loss_of_a_margin():
    """Figures of TRL's formulas in torch: -logsigmoid(m), and (1 - e) of it plus e times -logsigmoid(-m)."""
    margins = jnp.array([-30.0, -1.0, 0.0, 0.5, 3.0])
    plain = [30.0, 1.3132616875, 0.6931471806, 0.4740769842, 0.0485873516]
    smoothed = [27.0, 1.2132616875, 0.6931471806, 0.5240769842, 0.3485873516]
    np.testing.assert_allclose(preference_loss(margins), plain, rtol=1e-6)
    np.testing.assert_allclose(preference_loss(margins, 0.1), smoothed, rtol=1e-6)
    slope = functools.partial(jax.grad(preference_loss), jnp.float32(200.0))
    assert slope() == 0 and jax.grad(preference_loss)(jnp.float32(-200.0)) == -1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": LlamaConfig()}, "the reference is a checkpoint as it was; set model to"),
        ({"data": DataConfig(packing="whole")}, "data.packing=whole: preferences are pairs"),
        ({"preference": PreferenceConfig()}, "data.packing=pairs with preference.beta=0"),
        ({"slow_link": SlowLinkConfig("int8")}, "leave those as they are"),
        ({"train": TrainConfig(shares=(1, 3))}, "leave those as they are"),
        ({"offload": OffloadConfig(params=True)}, "set offload.params to False"),
        ({"mesh": MeshSpec(tensor=2, pipeline=2)}, "devices of pipeline to fsdp"),
        ({"train": TrainConfig(z_loss=1e-4)}, "set train.z_loss to 0"),
        ({"train": TrainConfig(baselines=True)}, "train.baselines to False"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ShardlmError, match=message):
        check_preference(config_of("llama", **changes))


def test_settings_that_mean_nothing():
    for wrong, message in (
        ({"beta": -1.0}, "beta and sft_weight are at least 0"),
        ({"beta": 0.1, "label_smoothing": 0.5}, "label_smoothing at least 0 and below 0.5"),
        ({"sft_weight": 1.0}, "without beta the others mean nothing"),
        ({"loss": "simpo"}, "preference.loss=simpo.*without beta"),
        ({"beta": 0.1, "gamma": 1.0}, "it is simpo's margin"),
        ({"beta": 0.1, "loss": "simpo", "gamma": -1.0}, "at least 0"),
        ({"beta": 0.1, "loss": "ipo", "label_smoothing": 0.1}, "something for sigmoid and simpo"),
        ({"beta": 0.1, "loss": "orpo", "sft_weight": 0.1}, "has the chosen answer's loss"),
    ):
        with pytest.raises(ShardlmError, match=message):
            PreferenceConfig(**wrong)
