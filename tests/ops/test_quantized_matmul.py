"""8-bit projections: the numbers and their scales, the products against float32, and one result on every mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.ops.quantized_matmul import quantize, quantized_einsum
from shardlm.rules import Rules

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
STREAM = ("batch", "seq", "embed")
WIDEN, NARROW = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
MESHES = (
    MeshSpec(data=8),
    MeshSpec(fsdp=8),
    MeshSpec(tensor=8),
    MeshSpec(fsdp=2, tensor=4),
    MeshSpec(data=2, fsdp=2, tensor=2),
)
# Relative error of a product of random numbers (norm of the difference over the norm). One rounding to 3 bits after the
# leading one is 2**-4 at most, 0.026 on average; two such factors are 0.037 (measured 0.037), two projections in a row
# 0.053, and with e5m2 gradients of 2 bits, 0.083. int8 with a scale a row: 0.011.
ERROR = {"fp8": (0.06, 0.09), "int8": (0.015, 0.015)}


def test_fp8_scales_are_powers_of_two_and_nothing_overflows():
    rng = np.random.default_rng(0)
    for dtype, largest, bits in ((E4M3, 448.0, 3), (E5M2, 57_344.0, 2)):
        for size in (1e-20, 1e-3, largest, 3 * largest, 1e20):
            a = jnp.asarray(rng.uniform(-size, size, (64, 32)), jnp.float32).at[0, 0].set(size)
            q = quantize(a, dtype, (0, 1))
            scale = float(q.scale[0, 0])
            assert scale == 2.0 ** round(np.log2(scale))
            top = size / scale
            assert largest / 2 < top <= largest  # no smaller scale would do
            error = np.abs(np.asarray(q.values, np.float32) * scale - a)
            smallest_normal = float(jnp.finfo(dtype).smallest_normal) * scale
            assert np.all(error <= np.maximum(np.abs(a), smallest_normal) * 2.0 ** -(bits + 1))


def test_int8_is_symmetric_with_a_scale_a_slice():
    a = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)) * np.logspace(-3, 3, 16)[:, None], jnp.float32)
    q = quantize(a, jnp.int8, (1,))
    assert q.scale.shape == (16, 1) and np.all(np.abs(q.values).max(axis=1) == 127)
    assert np.all(np.abs(q.values * q.scale - a) <= q.scale * 0.501)


@pytest.mark.parametrize("dtype", [E4M3, jnp.int8])
def test_zeros_stay_zeros_and_what_is_not_finite_shows(dtype):
    zeros = quantize(jnp.zeros((4, 8)), dtype, (0, 1))
    assert not np.any(np.asarray(zeros.values, np.float32) * np.asarray(zeros.scale))
    for bad in (np.inf, -np.inf, np.nan):
        q = quantize(jnp.ones((4, 8)).at[1, 2].set(bad), dtype, (0, 1))
        assert np.all(np.isnan(np.asarray(q.values, np.float32) * np.asarray(q.scale)))


def arrays():
    rng = np.random.default_rng(1)
    shapes = {"x": (8, 16, 32), "wide": (32, 8, 8), "narrow": (8, 8, 32), "dy": (8, 16, 32)}
    sizes = {"x": 1.0, "wide": 32**-0.5, "narrow": 1 / 8, "dy": 1e-6}  # gradients are small
    return {name: (rng.normal(size=shape) * sizes[name]).astype(np.float32) for name, shape in shapes.items()}


def run(spec: MeshSpec, matmul: str, dtype: str, text: bool = False):
    """Two projections and their gradients: [output, dx, d wide, d narrow], as a layer calls them."""
    rules, mesh = Rules.make("zero3", spec), mesh_of(spec)
    stream, inside = rules.act.spec(*STREAM), rules.act.spec("batch", "whole_seq", "embed")

    def project(letters, x, w, names, out=None):
        if matmul == "dtype":
            return jnp.einsum(letters, x, rules.gather(w.astype(x.dtype), *names), out_sharding=out)
        return quantized_einsum(letters, x, w, matmul, use=rules.use.spec(*names), out_sharding=out)

    def layer(x, wide, narrow):
        heads = project("btd,dnh->btnh", jax.reshard(x, inside), wide, WIDEN)
        return project("btnv,nvd->btd", heads, narrow, NARROW, stream)

    def both(x, wide, narrow, dy):
        y, pull = jax.vjp(layer, x, wide, narrow)
        return y, *pull(dy)

    specs = {"x": stream, "wide": rules.rest.spec(*WIDEN), "narrow": rules.rest.spec(*NARROW), "dy": stream}
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(jnp.asarray(a), NamedSharding(mesh, specs[n])) for n, a in arrays().items()}
        placed |= {name: placed[name].astype(dtype) for name in ("x", "dy")}
        step = jax.jit(both)
        results = step(**placed)
        assert [r.dtype for r in results] == [dtype, dtype, jnp.float32, jnp.float32]
        assert [r.sharding.spec for r in results] == [stream, stream, specs["wide"], specs["narrow"]]
        lowered = step.lower(**placed)
    return [np.asarray(r, np.float32) for r in results], lowered.as_text() if text else ""


@functools.cache
def one_device(matmul: str, dtype: str):
    return run(MeshSpec(), matmul, dtype)[0]


def errors(found, expected):
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("matmul", ["fp8", "int8"])
def test_output_and_gradients_are_within_the_rounding_of_8_bits(matmul, dtype):
    forward, *backward = errors(one_device(matmul, dtype), one_device("dtype", "float32"))
    assert 0.005 < forward < ERROR[matmul][0]  # from below too: these are 8-bit products
    assert all(0.005 < error < ERROR[matmul][1] for error in backward)


@pytest.mark.parametrize("spec", MESHES, ids=str)
@pytest.mark.parametrize("matmul", ["fp8", "int8"])
def test_every_mesh_gives_the_same(matmul, spec):
    # The 8-bit numbers are the same; float32 sums of them differ in order (measured: at most 3e-7).
    assert max(errors(run(spec, matmul, "float32")[0], one_device(matmul, "float32"))) < 2e-6
    # In bfloat16, by one rounding of 2**-8 of partial sums (measured: at most 0.003).
    assert max(errors(run(spec, matmul, "bfloat16")[0], one_device(matmul, "bfloat16"))) < 0.01


def test_operands_of_every_product_are_8_bits():
    _, text = run(MeshSpec(fsdp=2, tensor=4), "fp8", "bfloat16", text=True)
    operands = re.findall(r"stablehlo\.dot_general .*? : \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", text)
    forward, gradient = ("f8E4M3FN", "f8E4M3FN"), {"f8E4M3FN", "f8E5M2"}
    assert operands.count(forward) == 2
    assert sum(set(pair) == gradient for pair in operands) == 4
    assert len(operands) == 6


def test_one_value_out_of_range_spoils_the_step_visibly():
    with jax.set_mesh(mesh_of(MeshSpec())):
        x = jnp.ones((2, 4, 8)).at[0, 0, 0].set(jnp.inf)
        y = quantized_einsum("btd,df->btf", x, jnp.ones((8, 4)), "fp8", use=jax.sharding.PartitionSpec())
        assert np.all(np.isnan(y))


def test_refusals():
    use = jax.sharding.PartitionSpec()
    x, w = jnp.ones((1, 2, 4)), jnp.ones((4, 2))
    with pytest.raises(ShardlmError, match="unknown 8-bit matmul 'int4'; choose from fp8, int8"):
        quantized_einsum("btd,df->btf", x, w, "int4", use=use)
    with pytest.raises(ShardlmError, match=r"fp8 products do not fit float16.*use bfloat16 or float32"):
        quantized_einsum("btd,df->btf", x.astype(jnp.float16), w, "fp8", use=use)
