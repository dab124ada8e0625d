"""Passes over memory of other systems, against counting by hand."""

import pytest

from shardlm.plan import validate as validation
from shardlm.plan.compute import operations
from shardlm.plan.published import load
from shardlm.plan.sketch import Sketch
from shardlm.plan.systems import POLICIES, recomputed
from shardlm.plan.systems_passes import added_ops, as_multiplied, heads_ops, loss_op
from shardlm.plan.validate import configuration


@pytest.fixture(scope="module")
def published():
    return load(validation.POINTS)


def of(published, name):
    """(point, its model, a sketch of it, what it recomputes)"""
    point = published.points[name]
    model = published.model_of(point)
    sketch = Sketch.of(configuration(point, model), published.gpu_of(point))
    return point, model, sketch, recomputed(point) or POLICIES["none"]


TOKENS = 4 * 4096  # of one microbatch


def test_megatron_copies_norms_and_rotates_queries_and_keys_of_groups(published):
    (op,) = heads_ops(*of(published, "bridge-qwen3-30b-a3b-gb200x8-mxfp8-26.02"))
    q, k = 32 * 128, 4 * 128
    # Queries and values copied, queries and keys normed and rotated; back: rotated, normed, all joined.
    assert op.hbm_bytes == 2 * TOKENS * (2 * (q + k) + 2 * (q + k) + 2 * (q + k))
    assert op.gradient_bytes == 2 * TOKENS * (2 * (q + k) + 3 * (q + k) + 2 * (q + 2 * k))
    assert (op.count, op.forward, op.again) == (2 * 48 * 16, 48 * 16, 0)


def test_automodel_has_products_of_their_own_and_rotates_again_where_layers_are_recomputed(published):
    (op,) = heads_ops(*of(published, "automodel-qwen3-30b-a3b-h100x8"))
    q, k = 32 * 128, 4 * 128
    assert op.hbm_bytes == 2 * TOKENS * 4 * (q + k) and op.gradient_bytes == 2 * TOKENS * 5 * (q + k)
    assert (op.count, op.again) == (3 * 48 * 16, 48 * 16)


def test_latent_heads_are_rotated_in_place_or_joined(published):
    """Of 128 heads: 128 and 64 wide for queries and keys, values 128."""
    fused, *_ = heads_ops(*of(published, "bridge-deepseek-v3-gb200x256-bf16-25.11"))
    assert fused.hbm_bytes == fused.gradient_bytes == 2 * 4096 * 128 * (2 * 64 + 256 + 320)
    joined, *_ = heads_ops(*of(published, "automodel-deepseek-v3-h100x256"))
    assert joined.hbm_bytes == 2 * 4096 * 128 * (128 + 384 + (128 + 192) + 256)
    assert joined.hbm_bytes == joined.gradient_bytes == 2 * 4096 * 128 * (128 + 384 + 64 + 512)
    assert joined.in_stages


def test_learned_positions_rotate_nothing_and_compiled_systems_in_one_pass(published):
    assert not list(heads_ops(*of(published, "nemo-gpt3-175b-h100x128-bf16")))
    (op,) = heads_ops(*of(published, "torchtitan-llama3.1-8b-x8-bf16"))
    point = published.points["torchtitan-llama3.1-8b-x8-bf16"]
    tokens = point.microbatch * point.seq_len
    assert op.hbm_bytes == op.gradient_bytes == 2 * tokens * 2 * (32 + 8) * 128


@pytest.mark.parametrize(
    ("name", "tensor", "heads", "forward", "backward"),
    [
        ("bridge-deepseek-v3-mtp-gb200x256-mxfp8-26.02", 1, 2, 6, 4),
        ("nemo-llama3.1-70b-h100x64-bf16", 4, 1, 22, 14),
        ("automodel-qwen3-30b-a3b-h100x8", 1, 1, 8, 10),
        ("maxtext-llama2-7b-h100x8", 1, 1, 4, 4),
    ],
)
def test_logits_become_a_loss_as_each_system_does_it(published, name, tensor, heads, forward, backward):
    point, model, sketch, _ = of(published, name)
    op = loss_op(point, sketch)
    logits = point.microbatch * point.seq_len * model.vocab_size / tensor / point.mesh.context
    assert (op.layer, op.hbm_bytes, op.gradient_bytes) == ("head", forward * logits, backward * logits)
    assert op.count * point.mesh.pipeline == 2 * point.microbatches * heads


def test_megatrons_products_add_gradients_and_cast_weights_once(published):
    point, _, sketch, _ = of(published, "bridge-deepseek-v3-mtp-b200x256-mxfp8-25.11")
    ops = operations(sketch, ours=False)
    ups = [op for op in as_multiplied(ops, point) if op.grouped and op.what == "up"]
    assert {(op.added_bytes, op.cast_weights) for op in ups} == {(2.0 * 32 * 4096 * 7168, 1 / 128)}
    wide, _, other, _ = of(published, "megatron-llama3-8b-h100x8-fp8")  # gradients in float32
    products = [op for op in as_multiplied(operations(other), wide) if op.unit == "matmul"]
    assert {op.added_bytes / (op.dims[1] * op.dims[2]) for op in products} == {6}
    jax, _, there, _ = of(published, "maxtext-llama2-7b-h100x8")
    assert list(as_multiplied(operations(there), jax)) == operations(there)
    assert not list(added_ops(point, sketch)) and not list(added_ops(jax, there))


def test_pytorch_adds_further_microbatches_gradients_in_a_pass(published):
    point, _, sketch, _ = of(published, "automodel-qwen3-30b-a3b-h100x8")
    (op,) = added_ops(point, sketch)
    experts, rest = 48 * 16 * 3 * 2048 * 768, 48 * 2 * 2048 * (4096 + 512) + 2 * 151936 * 2048
    assert op.hbm_bytes == pytest.approx(6 * (experts + rest), rel=0.01)  # but for norms and the router
    assert op.count == op.forward == 15
