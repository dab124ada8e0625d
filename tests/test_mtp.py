"""Modules that predict further tokens: their loss in packed rows against the formula on each text alone, meshes against
one device, chunks and decoding against whole rows, and what is refused. Against torch: hf/test_mtp_reference.py."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import init, mesh_of, model_on, on_devices, packed_batch, relative_error
from small_moe import DEEPSEEK
from small_mtp import further_logits

from shardlm.errors import ShardlmError
from shardlm.generate import make_pages
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules
from shardlm.state import ModelDef
from shardlm.train.config import PreferenceConfig, RunConfig, TrainConfig
from shardlm.train.mtp import check_mtp
from shardlm.train.step import NextToken, StepConfig, gradients

SMALL = dataclasses.replace(DEEPSEEK, num_layers=2, dense_layers=0)
ONE, TWO = dataclasses.replace(SMALL, mtp=1), dataclasses.replace(SMALL, mtp=2)


def texts(batch) -> list[np.ndarray]:
    """The documents of a batch, each with the token after its last input where that is its own."""
    found = []
    for row in range(len(batch["tokens"])):
        for segment in (1, 2):
            at = np.flatnonzero(batch["segment_ids"][row] == segment)
            last = batch["targets"][row, at[-1:]] if batch["loss_mask"][row, at[-1]] else []
            found.append(np.concatenate([batch["tokens"][row, at], last]).astype(np.int32))
    return found


def formula(logits, found: list[np.ndarray], places: int) -> float:
    """Minus the sum of the log-probabilities of all tokens `places` on (eq. 24, but for 1 / T)."""
    total = 0.0
    for own, text in zip(np.asarray(logits, np.float64), found, strict=True):
        for i in range(len(text) - places):
            total += np.log(np.exp(own[i]).sum()) - own[i, text[i + places]]
    return total


def test_the_loss_in_packed_rows_is_the_formula_on_each_text():
    batch = packed_batch(rows=4)
    found = texts(batch)
    padded = np.stack([np.pad(text, (0, 18 - len(text))) for text in found])
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = model_on(MeshSpec(), config=TWO)
        params, objective = init(model), NextToken(mtp_loss=0.3)
        logits = jax.jit(partial(further_logits, model))(params, jnp.asarray(padded))
        run = jax.jit(lambda p, b: objective.sums(model, p, b, objective.weights(b, jnp.float32(8))))
        total, parts = jax.tree.map(np.asarray, run(params, on_devices(batch, model)))
    losses = [formula(a, found, places) / batch["loss_mask"].sum() for places, a in enumerate(logits, 1)]
    assert parts["nll"] / 8 == pytest.approx(losses[0], rel=1e-5)
    assert parts["mtp_loss"] / 8 == pytest.approx((losses[1] + losses[2]) / 2, rel=1e-5)
    # The modules' experts are counted as their loss weighs, and see no token whose target is another text's.
    assert total == pytest.approx(parts["nll"] + 0.3 * parts["mtp_loss"] + parts["balance_loss"].sum(), rel=1e-5)
    real = np.count_nonzero(batch["segment_ids"])
    assert parts["expert_load"].sum(axis=1).tolist() == [2 * (real - depth * len(found)) for depth in (0, 0, 1, 2)]
    assert objective.metrics(parts)["mtp_loss"] == parts["mtp_loss"]


def loss_and_gradients(spec, preset, one_f_one_b=False, accumulation=1, remat="full"):
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, preset, ONE, microbatches=accumulation, remat=remat)
        step = StepConfig(accumulation=accumulation, objective=NextToken(1e-3, 0.3), one_f_one_b=one_f_one_b)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step))
        return jax.tree.map(np.asarray, run(init(model), on_devices(packed_batch(), model)))


@pytest.mark.wide
def test_any_mesh_gives_the_numbers_of_one_device():
    """float32: only the order of sums differs, as in test_parallel_hybrid (measured: up to 2.4e-6)."""
    grads, losses = loss_and_gradients(MeshSpec(), "replicated", remat="none")
    assert np.abs(grads["mtp"]["from_hidden"]).max() > 1e-3
    for spec, preset, *how in (
        (MeshSpec(fsdp=2, expert=2, tensor=2), "zero3"),
        (MeshSpec(pipeline=2, expert=2, fsdp=2), "zero1", True, 2),
    ):
        found = loss_and_gradients(spec, preset, *how)
        assert relative_error(found[1], losses) < 1e-5 and relative_error(found[0], grads) < 1e-5, spec


def test_chunks_and_decoding_are_the_whole_row():
    """The module's keys and values are the last layer of the pool."""
    spec, length = MeshSpec(tensor=2), 14
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, length + 1)), jnp.int32)
    table = jnp.asarray([[2], [1]], jnp.int32)

    @jax.jit
    def paged(params, pages, start, tokens):
        positions = start + jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32), tokens[:, 1:].shape)
        lm, ctx = model.model(params), Paged.make(table, positions >= 0, layout, model.execution)
        hidden, pages, _ = lm(tokens[:, :-1], positions, ctx, pages)
        hidden, pages = lm.predict_next(hidden, tokens[:, 1:], positions, ctx, pages)
        return lm.logits_of_next(hidden), pages

    with jax.set_mesh(mesh_of(spec)):
        model = ModelDef.make(ONE.transformer(), Execution(Rules.make("zero3", spec).for_decoding()))
        layout = PageLayout.whole(model.config.cached_layers, 3)
        params, pages, found = init(model), jax.jit(lambda: make_pages(model, layout))(), []
        assert pages["k"].shape[0] == 3 * 3
        for start, stop in [(0, 8), *[(i, i + 1) for i in range(8, length)]]:
            logits, pages = paged(params, pages, jnp.int32(start), tokens[:, start : stop + 1])
            found.append(np.asarray(logits))
        expected = jax.jit(partial(further_logits, model))(params, tokens)[1]
        assert np.abs(np.concatenate(found, axis=1) - np.asarray(expected)).max() < 2e-5  # test_one_forward.py's


def test_modules_that_nothing_trains_are_refused():
    shape = ONE.transformer()
    check_mtp(RunConfig(ONE), shape)
    check_mtp(RunConfig(SMALL, train=TrainConfig(mtp_loss=0.0)), SMALL.transformer())
    with pytest.raises(ShardlmError, match=r"train\.mtp_loss=0 does not train them: set it to 0\.3, or leave them out"):
        check_mtp(RunConfig(ONE, train=TrainConfig(mtp_loss=0.0)), shape)
    with pytest.raises(ShardlmError, match=r"preference\.beta=0\.1 does not train them: leave them out"):
        check_mtp(RunConfig(ONE, preference=PreferenceConfig(beta=0.1)), shape)
    with pytest.raises(ShardlmError, match=r"train\.mtp_loss=-1: it must be at least 0"):
        TrainConfig(mtp_loss=-1)
