"""Any mesh, same numbers, for mixtures of experts: losses, gradients and loads equal those of one device, whichever way
tokens reach their experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import init, mesh_of, model_on, on_devices, packed_batch, relative_error
from small_moe import MOE

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules
from shardlm.train.check import check_model
from shardlm.train.step import NextToken, StepConfig, gradients

# float32: only the order of sums differs, as in test_parallel_parity (measured: up to 9.7e-7). A tie between two
# experts would break it; random logits have none.
FP32 = 1e-5


def loss_and_gradients(spec, preset="zero3", config=MOE, accumulation=1, one_f_one_b=False, context="ring", **more):
    with jax.set_mesh(mesh_of(spec)):
        how = {"remat": "full", "microbatches": accumulation, "context_attention": context} | more
        model = model_on(spec, preset, config, **how)
        step = StepConfig(accumulation=accumulation, objective=NextToken(1e-3), one_f_one_b=one_f_one_b)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step))
        return jax.tree.map(np.asarray, run(init(model), on_devices(packed_batch(), model)))


@functools.cache
def one_device():
    return loss_and_gradients(MeshSpec(), "replicated")


def assert_same(got):
    grads, losses = one_device()
    assert relative_error(got[1], losses) < FP32
    assert relative_error(got[0], grads) < FP32


def test_what_one_device_reports():
    _, losses = one_device()
    assert losses["expert_load"].shape == (3, 8)
    np.testing.assert_allclose(losses["expert_load"].sum(axis=1), 1, rtol=1e-6)
    assert losses["load_imbalance"] == pytest.approx(8 * losses["expert_load"].max())
    assert losses["dropped_fraction"] == 0
    # Three layers' balance of at least 1 each (1 is even), times its weight and the counted share of a row's tokens.
    assert 3 * 0.02 <= losses["balance_loss"] < 3 * 0.02 * 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "spec,preset",
    [
        (MeshSpec(expert=2), "zero1"),  # gathered
        (MeshSpec(expert=8), "zero3"),  # sent
        (MeshSpec(expert=4, tensor=2), "zero1"),
        (MeshSpec(data=2, expert=2, tensor=2), "hybrid"),
        (MeshSpec(fsdp=2, expert=4), "zero3"),
        (MeshSpec(data=2, fsdp=2, tensor=2), "zero2"),
    ],
    ids=str,
)
def test_every_way_to_the_experts(spec, preset):
    assert_same(loss_and_gradients(spec, preset))


def test_tokens_gathered_over_more_devices_than_a_token_goes_to():
    """As on GPUs of a host, beside weights that come over the network."""
    assert_same(loss_and_gradients(MeshSpec(expert=4, tensor=2), gathers_tokens=True))


def test_accumulation_does_not_change_the_balance():
    assert_same(loss_and_gradients(MeshSpec(fsdp=2, expert=2), accumulation=4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec,preset,one_f_one_b",
    [
        pytest.param(MeshSpec(pipeline=2, expert=2, tensor=2), "zero3", False, marks=pytest.mark.wide),
        (MeshSpec(pipeline=2, expert=2, tensor=2), "zero3", True),
        (MeshSpec(data=2, pipeline=2, expert=2), "zero1", False),
        pytest.param(MeshSpec(data=2, pipeline=2, expert=2), "zero1", True, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_through_pipeline_stages(spec, preset, one_f_one_b):
    assert_same(loss_and_gradients(spec, preset, accumulation=4, one_f_one_b=one_f_one_b))


def test_refusals():
    def message(config, spec):
        with pytest.raises(ShardlmError) as caught:
            check_model(config.transformer(), Rules.make("zero3", spec))
        return str(caught.value)

    assert "experts=8 cannot be split over expert=3; choose expert from 1, 2, 4, 8" in message(MOE, MeshSpec(expert=3))
    from small import LLAMA

    assert "mesh.expert=2: the model has no experts to split" in message(LLAMA, MeshSpec(expert=2))
