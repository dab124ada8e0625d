"""The kernels that multiply few rows, with norm and gate, against products in float32: interpreted. How they are
compiled is looked at in test_gpu_machine_code.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import few_rows
from shardlm.ops.few_rows import GATES, Norm, gated, products
from shardlm.ops.norm import rms_norm
from shardlm.ops.swiglu import activate

ERROR = 0.006  # of the largest: results, and what is multiplied, have 8 bits


def operands(rows: int, summed: int, columns, seed: int, offset: float | None):
    """(x, the weights, the norm or None, x as it is multiplied), of x with rows of very different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, summed)) * 10.0 ** rng.integers(-2, 3, (rows, 1))
    x = jnp.asarray(x, jnp.bfloat16)
    weights = [jnp.asarray(rng.normal(size=(summed, n)) * summed**-0.5, jnp.bfloat16) for n in columns]
    if offset is None:
        return x, weights, None, x.astype(jnp.float32)
    norm = Norm(jnp.asarray(rng.normal(size=summed) + 1 - offset, jnp.bfloat16), 1e-5, offset)
    read = rms_norm(x, norm.scale.astype(jnp.float32) + offset, norm.eps)
    return x, weights, norm, read.astype(jnp.float32)


def error(found, wanted) -> float:
    """Of each row, of its largest."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float((np.abs(found - wanted).max(1) / np.abs(wanted).max(1)).max())


@pytest.mark.parametrize(
    ("rows", "summed", "columns", "offset"),
    [
        (1, 256, (64,), None),
        (2, 2048, (128, 64, 48), 0.0),  # four parts; the last weight ends within a block
        (16, 1096, (96,), 1.0),  # what is summed over ends within a step, and in a part
        (17, 320, (96, 32), None),
        (64, 1088, (192, 64), 0.0),
    ],
)
def test_products_of_rows_and_of_their_norm(rows, summed, columns, offset):
    x, weights, norm, read = operands(rows, summed, columns, rows, offset)
    made = jax.jit(functools.partial(products, interpret=True))(x, weights, norm)
    for found, weight in zip(made, weights, strict=True):
        assert found.shape == (rows, weight.shape[1]) and found.dtype == x.dtype
        assert error(found, read @ weight.astype(jnp.float32)) < ERROR


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("rows", "offset", "lone"), [(3, 0.0, 1), (64, None, 1), (3, 1.0, 1000)])
def test_gates(monkeypatch, activation, rows, offset, lone):
    """In one kernel, and of weights with few columns in two steps."""
    monkeypatch.setattr(few_rows, "LONE", lone)
    x, (gate, up), norm, read = operands(rows, 1088, (96, 96), 5, offset)
    run = jax.jit(lambda x, gate, up, norm: gated(x, gate, up, activation, norm, interpret=True))
    wanted = activate(read @ gate.astype(jnp.float32), activation) * (read @ up.astype(jnp.float32))
    assert error(run(x, gate, up, norm), wanted) < 2 * ERROR
    calls = str(jax.make_jaxpr(run)(x, gate, up, norm)).count("name=few_rows_gated")
    assert bool(calls) == (lone == 1)


def test_how_products_are_cut():
    """Of Llama 3 8B: queries, keys and values, what goes back, gate and up; a share of four; and of 70B."""
    splits = lambda summed, *columns: few_rows._in_parts(2, summed, columns).splits  # noqa: E731
    assert splits(4096, 4096, 1024, 1024) == 4 and splits(4096, 4096) == 4 and splits(14_336, 4096) == 4
    assert splits(4096, 1024, 256, 256) == 8 and splits(1024, 4096) == 2 and splits(28_672, 8192) == 2
    assert few_rows.is_one(14_336) and few_rows.is_one(28_672) and not few_rows.is_one(3584)


def test_a_row_is_the_same_beside_any_others():
    """How sums are cut is the weight's."""
    x, weights, norm, _ = operands(16, 2048, (64, 32), 3, 0.0)
    run = jax.jit(functools.partial(products, interpret=True))
    all_of_them = run(x, weights, norm)
    for rows in (1, 5):
        some = run(x[3 : 3 + rows], weights, norm)
        for few, many in zip(some, all_of_them, strict=True):
            np.testing.assert_array_equal(np.asarray(few, np.float32), np.asarray(many[3 : 3 + rows], np.float32))
