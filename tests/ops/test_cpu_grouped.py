"""Products with weights in few bits by the loops of a CPU, against the weight made anew; no whole weight is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_forms import FORMS, any_weight

from shardlm.ops import cpu_grouped, grouped_matmul
from shardlm.ops.cpu_grouped import looped, looped_experts
from shardlm.ops.grouped_weights import OWN, dequantised

# Numbers summed over, columns: several groups in a turn and several turns in a group, several blocks, and an odd size.
SIZES = {"blocks": (768, 96), "odd": (100, 7)}


def weights(rng, shape, axis):
    """Of each kind; those of files have no groups in an odd size."""
    kinds = FORMS if shape[axis] % 16 == 0 else OWN
    return {how: any_weight(rng, shape, axis, FORMS[how]) for how in kinds}


@pytest.mark.parametrize("size", SIZES)
def test_rows_times_each_kind_of_weight(size, monkeypatch):
    monkeypatch.setattr(cpu_grouped, "BLOCK", 256 * 48)
    monkeypatch.setattr(cpu_grouped, "WIDTH", 48)
    rng, (K, F) = np.random.default_rng(0), SIZES[size]
    held = weights(rng, (K, F), 0)
    x = jnp.asarray(rng.normal(size=(5, K)), jnp.float32)

    @jax.jit
    def both(x, held):
        found = {
            how: [looped(rows, own, FORMS[how]) for rows in (x, x[:2], x.astype("bfloat16"))]
            for how, own in held.items()
        }
        return found, {how: x @ dequantised(own, 0, FORMS[how], jnp.float32) for how, own in held.items()}

    found, expected = both(x, held)
    for how, (several, few, half) in found.items():
        largest = float(jnp.abs(expected[how]).max())
        np.testing.assert_allclose(several, expected[how], atol=2e-6 * K**0.5 * largest, err_msg=how)  # another order
        np.testing.assert_allclose(few, expected[how][:2], atol=2e-6 * K**0.5 * largest, err_msg=how)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(half.astype(jnp.float32), expected[how], atol=2e-2 * largest, err_msg=how)


@pytest.mark.parametrize("sizes", [(1, 0, 2, 1), (3, 0, 37, 1), (0, 0, 0, 0)], ids=str)
def test_experts_with_their_rows(sizes):
    """A row at a time and several, experts without rows, rows of none at the end."""
    (E, K, F), sizes, rng = (4, 96, 72), jnp.array(sizes, jnp.int32), np.random.default_rng(0)
    held = weights(rng, (E, K, F), 1)
    x = jnp.asarray(rng.normal(size=(int(sizes.sum()) + 3, K)), jnp.float32)

    @jax.jit
    def both(x, held):
        found = {how: looped_experts(x, own, sizes, FORMS[how]) for how, own in held.items()}
        whole = {how: dequantised(own, 1, FORMS[how], jnp.float32) for how, own in held.items()}
        return found, {how: grouped_matmul.reference(x, own, sizes) for how, own in whole.items()}

    found, expected = both(x, held)
    for how, rows in found.items():
        np.testing.assert_allclose(rows, expected[how], atol=1e-4, err_msg=how)
        assert not np.any(rows[int(sizes.sum()) :])


def test_a_scale_that_is_no_number_makes_no_number():
    held = any_weight(np.random.default_rng(0), (96, 8), 0, FORMS["int4"])
    held = held._replace(scale=held.scale.at[0, 3].set(jnp.nan))
    for rows in (1, 3):
        found = jax.jit(lambda x: looped(x, held, FORMS["int4"]))(jnp.ones((rows, 96)))
        assert np.array_equal(np.isnan(found), np.broadcast_to(np.arange(8) == 3, (rows, 8)))


@pytest.mark.parametrize("how", ["int4", "mxfp4", "fp8"])
@pytest.mark.parametrize("rows", [1, 32])
def test_nothing_of_a_weight_s_size_is_written(rows, how, monkeypatch):
    """But a copy of the bytes of fp8. Of the steps of a loop, each through several weights, too: XLA would make all
    their numbers before it."""
    monkeypatch.setattr(cpu_grouped, "BLOCK", 2**20)
    K, E, groups, rng = 1024, 4, FORMS[how], np.random.default_rng(0)
    x, sizes = jax.ShapeDtypeStruct((rows, K), jnp.float32), jax.ShapeDtypeStruct((E,), jnp.int32)
    held = jax.eval_shape(lambda: any_weight(rng, (E, K, K), 1, groups))
    layers = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held) for _ in range(E)]

    def step(x, layers):
        for own in layers:
            x = looped(jnp.tanh(x), own, groups)
        return x

    def steps(x, layers):
        return jax.lax.fori_loop(0, 3, lambda _, x: step(x, layers), x)

    allowed = 2**20 * 3.5 + (E * K * K if how == "fp8" else 0)  # of the weights each would be 4 MiB
    usual = {"xla_cpu_enable_concurrency_optimized_scheduler": True}  # unlike conftest.py
    for of in (step, steps):
        program = jax.jit(of).lower(x, layers).compile(usual)
        assert program.memory_analysis().temp_size_in_bytes < allowed
    program = jax.jit(lambda x, own, s: looped_experts(x, own, s, groups)).lower(x, held, sizes).compile()
    assert program.memory_analysis().temp_size_in_bytes < allowed
