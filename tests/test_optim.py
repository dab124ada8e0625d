"""Schedules and optimizers: their values, what they decay, and that a sharded update equals the whole one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from small import LLAMA, init, mesh_of, model_on, relative_error

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.optim import (
    OptimConfig,
    _is_matrix,
    _is_names,
    _muon_dimensions,
    make_optimizer,
    make_schedule,
)
from shardlm.rules import Rules

BASE = OptimConfig(learning_rate=1.0, warmup_steps=10, final_fraction=0.1)


@pytest.mark.parametrize(
    "schedule,expected",
    [
        ("constant", {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 99: 1.0}),
        ("linear", {9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1}),
        ("cosine", {9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1}),
        ("wsd", {9: 1.0, 80: 1.0, 90: 0.55, 100: 0.1}),
    ],
)
def test_schedules(schedule, expected):
    rate = make_schedule(dataclasses.replace(BASE, schedule=schedule), steps=100)
    np.testing.assert_allclose([rate(step) for step in expected], list(expected.values()), rtol=1e-5)


def test_refusals():
    with pytest.raises(ShardlmError, match=r"optim\.warmup_steps=10 leaves nothing of train\.steps=10"):
        make_schedule(BASE, steps=10)
    with pytest.raises(ShardlmError, match="unknown optimizer 'adam'; choose from adamw, lion"):
        make_optimizer(dataclasses.replace(BASE, name="adam"), 100, {})
    with pytest.raises(ShardlmError, match="unknown schedule 'step'; choose from cosine"):
        make_schedule(dataclasses.replace(BASE, schedule="step"), 100)
    with pytest.raises(ShardlmError, match=r"ema_decay=1\.0"):
        OptimConfig(ema_decay=1.0)
    with pytest.raises(ShardlmError, match=r"learning_rate=0"):
        OptimConfig(learning_rate=0)


# Wide enough for adafactor to factor (its threshold is 128) and for muon's matrices to be split both ways.
WIDE = dataclasses.replace(LLAMA, embed_dim=128, mlp_dim=256, num_layers=2, head_dim=16)


def updated(spec, preset, name):
    """Parameters after two updates with made-up gradients."""
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, preset, WIDE)
        tx = make_optimizer(dataclasses.replace(BASE, name=name, learning_rate=0.01), 100, model.names)
        table = model.execution.rules.optimizer

        @jax.jit
        def run(params):
            params = model.place(params, table)
            state = tx.init(params)
            for scale in (1.0, -0.3):
                grads = jax.tree.map(lambda p, scale=scale: scale * jnp.sin(40 * p), params)
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            return params

        return jax.tree.map(np.asarray, run(init(model)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon", "sgd"])
def test_sharded_update_equals_the_whole_one(name, preset):
    whole = updated(MeshSpec(), "replicated", name)
    # Reductions in another order; muon's five Newton-Schulz products amplify it (measured: 2e-6, muon 2e-5).
    assert relative_error(updated(MeshSpec(data=2, fsdp=2, tensor=2), preset, name), whole) < 1e-4


def test_muon_is_that_of_optax():
    config = dataclasses.replace(BASE, name="muon", learning_rate=0.01)
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = model_on(MeshSpec(), "replicated", WIDE)
        params = init(model)
        dimensions = jax.tree.map(_muon_dimensions, model.names, is_leaf=_is_names)
        matrices = jax.tree.map(_is_matrix, model.names, is_leaf=_is_names)
        undecayed, theirs = (
            contrib.muon(
                make_schedule(config, 100),
                weight_decay=config.weight_decay,
                weight_decay_mask=matrices,
                adam_b1=config.b1,
                adam_b2=config.b2,
                adam_weight_decay=decay,
                muon_weight_dimension_numbers=lambda _: dimensions,
                consistent_rms=0.2,
            )
            for decay in (0.0, config.weight_decay)
        )
        found = []
        for tx in (undecayed, theirs, make_optimizer(config, 100, model.names)):
            state = tx.init(params)
            for scale in (1.0, -0.3):
                grads = jax.tree.map(lambda p, scale=scale: scale * jnp.sin(40 * p), params)
                updates, state = jax.jit(tx.update)(grads, state, params)
            found.append((updates, state))
    # It decays norms and biases too, by adamw.
    (plain, _), (decayed, state), ours = found
    expected = jax.tree.map(lambda matrix, a, b: b if matrix else a, matrices, plain, decayed)
    assert jax.tree.structure((expected, state)) == jax.tree.structure(ours)  # checkpoints of either are of the other
    assert relative_error(ours, (expected, state)) < 1e-4  # products in another order, as above


def test_muon_of_a_matrix_that_no_layer_has():
    """Which is split over devices as those of layers are."""
    names, found = {"w": ((), ("embed", "head_dim"))}, []
    for spec in (MeshSpec(), MeshSpec(data=2, fsdp=4)):
        with jax.set_mesh(mesh_of(spec)):
            split = Rules.make("zero3", spec).rest.spec("embed", "head_dim")
            params = {"w": jax.device_put(jnp.sin(jnp.arange(16.0 * 12)).reshape(16, 12), split)}
            tx = make_optimizer(dataclasses.replace(BASE, name="muon"), 100, names)
            updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
            found.append(np.asarray(updates["w"]))
    assert relative_error(*found) < 1e-4


def test_decay_is_for_matrices_and_muon_for_the_layers():
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = model_on(MeshSpec(), "replicated", WIDE)
        params = init(model)

        @functools.partial(jax.jit, static_argnums=0)
        def moved(config, params):
            tx, zeros = make_optimizer(config, 100, model.names), jax.tree.map(jnp.zeros_like, params)
            return jax.tree.map(lambda u: jnp.any(u != 0), tx.update(zeros, tx.init(params), params)[0])

        for name in ("adamw", "lion", "sgd", "adafactor", "muon"):
            changed = moved(dataclasses.replace(BASE, name=name), params)
            assert changed["embedding"] and changed["segments"][0]["blocks"][0]["attention"]["wq"]
            assert not changed["final_norm"]["scale"] and not changed["segments"][0]["blocks"][0]["mlp_norm"]["scale"]
        tx = make_optimizer(dataclasses.replace(BASE, name="muon"), 100, model.names)
        momentum = jax.eval_shape(tx.init, params).inner_states["muon"].inner_state[0].mu
        with_momentum = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(momentum)}
        assert len(with_momentum) == 7 and not [p for p in with_momentum if "norm" in p or "embedding" in p]


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor", "muon"])
def test_biases_and_norms_of_heads_and_experts_are_no_matrices(name):
    """Though they have as many dimensions as what makes them: those of an encoder of images, too."""
    vectors = {
        "bq": (("layers",), ("heads", "head_dim")),
        "bk": (("layers",), ("kv_heads_whole", "head_dim")),
        "q_norm": (("layers",), ("heads", "norm")),
        "gate_bias": (("layers",), ("experts", "expert_mlp")),
        "down_bias": (("layers",), ("experts", "norm")),
    }
    matrices = {
        "wo": (("layers",), ("heads", "head_dim", "embed")),
        "down": (("layers",), ("experts", "expert_mlp", "expert_embed")),
        "router": (("layers",), ("embed", "experts")),
    }
    filters = {"taps": (("layers",), ("kv_heads", "head_dim", "norm")), "mixing": (("layers",), ("norm", "norm"))}
    names = vectors | matrices | filters
    with jax.set_mesh(mesh_of(MeshSpec())):
        params = {name: np.ones((2, *range(2, 2 + len(own))), np.float32) for name, (_, own) in names.items()}
        tx = make_optimizer(dataclasses.replace(BASE, name=name, schedule="constant"), 100, names)
        update = jax.jit(lambda params: tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params))
        updates, state = update(params)
    assert {name for name, a in updates.items() if np.any(a)} == matrices.keys() | filters.keys()
    if name == "muon":
        momentum = state.inner_states["muon"].inner_state[0].mu
        assert {name for name, a in momentum.items() if isinstance(a, jax.Array)} == matrices.keys()


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_an_indexer_stays_as_it_is(name):
    """It takes no part in the loss, and weights that have no gradient do not decay either."""
    names = {"indexer": {"wq": ((), ("embed", "heads"))}, "wq": ((), ("embed", "heads"))}
    params = jax.tree.map(lambda _: jnp.ones((2, 3)), names, is_leaf=_is_names)
    tx = make_optimizer(dataclasses.replace(BASE, name=name, weight_decay=0.1, schedule="constant"), 100, names)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert not updates["indexer"]["wq"].any() and updates["wq"].all()
