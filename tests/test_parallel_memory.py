"""Any mesh, same numbers, for linear attention: losses and gradients equal those of one device."""

import functools

import pytest
from small import relative_error
from small_hybrid import HYBRID
from test_parallel_moe import loss_and_gradients

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules
from shardlm.train.check import check_model

# Sums in another order; a norm of what is read of a memory makes much of it where there is little (measured: up to
# 4.1e-5, and 3.0e-5 on one device between the rule in chunks and a token at a time).
FP32 = 2e-4


@functools.cache
def one_device():
    return loss_and_gradients(MeshSpec(), "replicated", HYBRID)


@pytest.mark.parametrize(
    "spec,preset",
    [
        pytest.param(MeshSpec(tensor=8), "zero1", marks=pytest.mark.wide),
        (MeshSpec(pipeline=2, context=2, data=2), "zero1"),  # as 1F1B
        (MeshSpec(data=2, fsdp=2, tensor=2), "zero3"),
        pytest.param(MeshSpec(context=4, fsdp=2), "zero3", marks=pytest.mark.wide),
        pytest.param(MeshSpec(data=2, context=2, tensor=2), "hybrid", marks=pytest.mark.wide),
        pytest.param(MeshSpec(pipeline=2, context=2, tensor=2), "zero3", marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_every_axis(spec, preset):
    accumulation = 4 if spec.pipeline > 1 else 1
    one_f_one_b = spec.pipeline > 1 and preset == "zero1"
    grads, losses = loss_and_gradients(spec, preset, HYBRID, accumulation, one_f_one_b, context="ulysses")
    assert relative_error(losses, one_device()[1]) < FP32
    assert relative_error(grads, one_device()[0]) < FP32


@pytest.mark.parametrize(
    "spec,context,message",
    [
        (MeshSpec(tensor=2, context=8), "auto", "heads=8 .* tensor=2 x context=8; choose sizes whose product"),
        (MeshSpec(context=2), "ring", "set context_attention to auto or ulysses"),
    ],
    ids=str,
)
def test_refused(spec, context, message):
    rules = Rules.make("zero3", spec)
    with pytest.raises(ShardlmError, match=message):
        check_model(HYBRID.transformer(), rules, context)
