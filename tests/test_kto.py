"""Kahneman-Tversky optimisation: loss and gradients as its formula on all logits has them, on a mesh. Its data are
tests/data/test_labelled.py's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import mesh_of, relative_error
from test_preference import ROWS, TOLERANCE, config_of, documents, filled, loss_and_gradients, moved

from shardlm.data.config import DataConfig
from shardlm.data.packing import DESIRABLE
from shardlm.errors import ShardlmError
from shardlm.layers.packed import Packed
from shardlm.mesh import MeshSpec
from shardlm.ops.preference import prospect_loss
from shardlm.train.config import PreferenceConfig
from shardlm.train.program import Program

KTO = PreferenceConfig(0.5, "kto", desirable_weight=1.5, undesirable_weight=0.75)


def config(**changes):
    return config_of("llama", **{"preference": KTO, "data": DataConfig(packing="labelled")} | changes)


def wanted_of(batch):
    """Every second answer, as LabelledRows has it."""
    counts = np.cumsum([0, *map(len, ROWS)])[:-1, None] + (batch["segment_ids"] - 1) // 2
    return np.where((batch["segment_ids"] % 2 == 1) & (counts % 2 == 0), 1.0, 0.0).astype(np.float32)


def closer(params):
    """By which the mismatched answers become likelier."""
    return jax.tree.map(lambda a: 0.8 * a, moved(params))


def naive():
    """Each document in a row of its own; of every two of them the first is judged, the other tells the divergence."""
    program = Program.make(config(), mesh_of(MeshSpec()))
    one_each = filled([[segment] for segments in documents() for segment in segments])
    tokens, targets, mask = (jnp.asarray(one_each[name]) for name in ("tokens", "targets", "loss_mask"))

    def log_probabilities(model, params):
        lm = model.model(params)
        ctx = Packed.make(jnp.asarray(one_each["segment_ids"]), None, model.execution)
        of_all = jax.nn.log_softmax(lm.logits(lm(tokens, jnp.asarray(one_each["positions"]), ctx)[0]))
        return jnp.sum(jnp.take_along_axis(of_all, targets[..., None], axis=-1)[..., 0] * mask, axis=1)

    def loss(params, frozen):
        gains = log_probabilities(program.model, params) - log_probabilities(program.objective.reference, frozen)
        own, mismatched = gains[::2], gains[1::2]
        kl = jax.lax.stop_gradient(jnp.maximum(jnp.mean(mismatched), 0))
        wanted = np.arange(len(own)) % 2 == 0
        good, bad = own[wanted], own[~wanted]
        margin = jnp.concatenate([0.5 * (good - kl), 0.5 * (kl - bad)])
        losses = np.repeat([1.5, 0.75], len(good)) * (1 - jax.nn.sigmoid(margin))
        found = {"loss": losses.mean(), "kl": kl}
        found |= {"reward_margin": margin.mean(), "reward_accuracy": (margin > 0).mean()}
        found |= {"desirable": wanted.mean(), "chosen_reward": 0.5 * good.mean(), "rejected_reward": 0.5 * bad.mean()}
        return found["loss"], found

    state = program.init(program.pretrained(), program.frozen())
    with jax.set_mesh(program.mesh):
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss, has_aux=True))(closer(state.params), state.frozen))


def test_loss_and_gradients_are_the_formulas_on_a_mesh(monkeypatch):
    monkeypatch.setattr("test_preference.moved", closer)
    grads, metrics = naive()
    batch = filled(list(documents()))
    batch |= {DESIRABLE: wanted_of(batch)}
    found, of_step, _ = loss_and_gradients(config(mesh=MeshSpec(fsdp=2, context=2, tensor=2)), batch)
    for name, value in metrics.items():
        np.testing.assert_allclose(of_step[name], value, rtol=TOLERANCE, atol=1e-6, err_msg=name)
    assert relative_error(found, grads) < TOLERANCE
    assert metrics["kl"] > 0.01 and 0.2 < metrics["reward_accuracy"] < 0.9


def test_figures_of_trl():
    """1 - sigmoid(beta (r - kl)) and 1 - sigmoid(beta (kl - r)), in torch."""
    np.testing.assert_allclose(
        prospect_loss(jnp.array([-2.0, 0.0, 0.3, 90.0])), [0.880797078, 0.5, 0.4255574832, 0.0], rtol=1e-6, atol=1e-30
    )


def test_settings_that_mean_nothing():
    for wrong, message in (
        ({"beta": 0.1, "loss": "kto", "sft_weight": 0.1}, "has no pairs"),
        ({"beta": 0.1, "undesirable_weight": 2.0}, "they are kto's"),
        ({"beta": 0.1, "loss": "kto", "desirable_weight": -1.0}, "at least 0 and not both 0"),
    ):
        with pytest.raises(ShardlmError, match=message):
            PreferenceConfig(**wrong)
    with pytest.raises(ShardlmError, match="preferences are labelled; set it to labelled"):
        Program.make(config(data=DataConfig(packing="pairs")), mesh_of(MeshSpec()))
