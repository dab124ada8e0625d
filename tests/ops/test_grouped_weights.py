"""Weights in few bits: how far they are from what they were, in whole groups, on the host and on the device; products
with them, of a weight made anew and by the kernel for GPUs, which is interpreted."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu_programs import on_gpus
from jax.sharding import NamedSharding
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.layers import moe, param
from shardlm.layers.param import Execution, Params, few_rows, normal, project
from shardlm.mesh import MeshSpec
from shardlm.ops import grouped_matmul
from shardlm.ops.grouped_kernel import of_experts, pallas
from shardlm.ops.grouped_weights import (
    STORED,
    choose,
    dequantised,
    group_of,
    grouped_axis,
    packed_shape,
    quantised,
    scale_shape,
)
from shardlm.rules import Rules
from shardlm.topology import topology

# Of the largest number of a group: half a step of the integers; of e4m3, the largest steps are of 32 up to 448.
ERROR = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 16 / 448}


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize(("shape", "axis"), [((192, 10), 0), ((3, 100, 7), 1), ((2, 48, 4, 5), 1), ((6, 5), 0)])
def test_numbers_are_near_what_they_were(how, shape, axis):
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.exp2(np.arange(shape[-1]) - 4)
    w.reshape(-1, shape[-1])[:, 0] = 0  # groups of zeros
    group = group_of(shape[axis], how)
    packed, scale = quantised(w, axis, group, how)
    assert packed.dtype == STORED[how] and packed.shape == packed_shape(shape, axis, how)
    assert scale.shape == scale_shape(shape, axis, how)
    if packed.shape != scale.shape:
        assert grouped_axis(packed.shape, scale.shape) == axis
    found = np.asarray(jax.jit(lambda p, s: dequantised(p, s, axis, how, jnp.float32))(packed, scale))
    split = lambda a: a.reshape(*shape[:axis], -1, group, *shape[axis + 1 :])  # noqa: E731
    largest = np.abs(split(w)).max(axis + 1, keepdims=True)
    # Scales have 8 bits of mantissa: the largest numbers may be cut by that.
    assert np.all(np.abs(split(found) - split(w)) <= largest * (ERROR[how] + 2**-8))
    assert np.max(np.abs(split(found) - split(w)) / np.maximum(largest, 1e-9)) > ERROR[how] / 2 or group < 16
    again = quantised(found, axis, group, how)
    np.testing.assert_array_equal(again[0], packed)  # the unpacking inverts the packing
    # Some of the groups alone are what they are among all.
    first = np.take(w, range(group), axis)
    for whole, part in zip((packed, scale), quantised(first, axis, group, how), strict=True):
        np.testing.assert_array_equal(np.take(whole, range(part.shape[axis]), axis), part)


def test_fp8_keeps_what_is_small_better_than_int8():
    w = np.exp2(-np.arange(64) / 8).astype(np.float32)[:, None]  # down to 1/256 of the largest
    error = {}
    for how in ("int8", "fp8"):
        found = dequantised(*map(jnp.asarray, quantised(w, 0, 64, how)), 0, how, jnp.float32)
        error[how] = np.abs(np.asarray(found) / w - 1).max()
    assert error["fp8"] < 0.07 < 0.5 < error["int8"]


def test_what_has_no_pairs_is_refused():
    with pytest.raises(ShardlmError, match="dimension of 17 has no groups of even size for int4"):
        group_of(17, "int4")
    assert group_of(17, "fp8") == 17


# Rows, numbers summed over, columns: one part and many, groups of 64, 50 and 48, columns that fill no block, rows of
# more than one block.
PRODUCTS = {"one row": (1, 1024, 96), "odd": (5, 100, 7), "parts": (17, 768, 200), "blocks of rows": (130, 48, 64)}


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("shape", PRODUCTS)
def test_the_kernel_multiplies_as_the_reference_does(how, shape):
    M, K, F = PRODUCTS[shape]
    rng = np.random.default_rng(0)
    held = quantised(rng.normal(size=(K, F)).astype(np.float32), 0, group_of(K, how), how)
    packed, scale = map(jnp.asarray, held)
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.float32)
    run = jax.jit(lambda x: pallas(x, packed, scale, how, interpret=True))
    found, expected = run(x), jax.jit(lambda x: x @ dequantised(packed, scale, 0, how, jnp.float32))(x)
    np.testing.assert_allclose(found, expected, atol=2e-6 * K**0.5 * float(jnp.abs(expected).max()))  # another order
    assert np.array_equal(run(x[:1])[0], found[0])  # whatever is beside it
    half = run(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=2e-2 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize(("how", "sizes"), [*((how, [3, 0, 37, 1]) for how in STORED), ("int4", [300, 0, 129, 111])])
def test_experts_by_the_kernel(how, sizes):
    """One without rows, one with several blocks of them, and rows of none at the end."""
    E, K, F, sizes = 4, 96, 72, jnp.array(sizes, jnp.int32)
    n, rng = int(sizes.sum()), np.random.default_rng(0)
    held = quantised(rng.normal(size=(E, K, F)).astype(np.float32), 1, group_of(K, how), how)
    packed, scale = map(jnp.asarray, held)
    x = jnp.asarray(rng.normal(size=(n + 3, K)), jnp.float32)
    found = jax.jit(functools.partial(of_experts, how=how, interpret=True))(x, packed, scale, sizes)
    expected = grouped_matmul.reference(x, dequantised(packed, scale, 1, how, jnp.float32), sizes)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not np.any(found[n:])


@pytest.mark.parametrize("how", ["int4", "fp8"])
def test_a_mixture_on_a_mesh_runs_experts_as_they_are_held(how, monkeypatch):
    monkeypatch.setattr(moe, "expert_product", functools.partial(of_experts, interpret=True))
    spec = MeshSpec(expert=2, tensor=2)
    rules = Rules.make("zero3", spec).for_serving()
    rng = np.random.default_rng(1)
    with jax.set_mesh(mesh_of(spec)):
        module = moe.Moe(moe.MoeConfig(8, 2, 128), 64, 1.0, Params(nnx.Rngs(0), rules, weights=how))
        for name, shape in (("gate", (8, 64, 128)), ("up", (8, 64, 128)), ("down", (8, 128, 64))):
            held = quantised(rng.normal(size=shape).astype(np.float32), 1, group_of(shape[1], how), how)
            for end, numbers in zip(("", "_scale"), held, strict=True):
                own = getattr(module, name + end)
                own[...] = jax.device_put(numbers, own[...].sharding)
        x = jax.device_put(rng.normal(size=(5, 1, 64)).astype(np.float32), rules.act.spec("batch", "seq", "embed"))
        context = types.SimpleNamespace(real=jnp.ones((5, 1), bool), weights=None)
        made = {}
        for few_bits in ("dequantised", "pallas"):
            execution = Execution(rules, weights=how, few_bits=few_bits)
            made[few_bits] = jax.jit(lambda x, e=execution: module(x, context, e)[0])(x)
        plain, kernel = made.values()
        np.testing.assert_allclose(kernel, plain, rtol=1e-4, atol=1e-3 * float(jnp.abs(plain).max()))
        assert jnp.abs(plain).max() > 1
        # By the rows of an expert: 128 of 512 tokens that choose 2 of 8.
        called = []
        product = lambda x, *rest: called.append(1) or jnp.zeros((len(x), rest[1].shape[-1]), x.dtype)  # noqa: E731
        monkeypatch.setattr(moe, "expert_product", product)
        for tokens, by_kernel in ((512, True), (513, False)):
            many = types.SimpleNamespace(real=jnp.ones((1, tokens), bool), weights=None)
            x = jax.ShapeDtypeStruct((1, tokens, 64), jnp.float32, sharding=rules.act.spec("batch", "seq", "embed"))
            called.clear()
            jax.eval_shape(lambda x, many=many: module(x, many, execution)[0], x)
            assert bool(called) == by_kernel


class _Projections(nnx.Module):
    """Weights split along what they make and along what they sum over."""

    def __init__(self, params: Params):
        params.projection(self, "wq", (64, 8, 16), ("embed", "heads", "head_dim"), normal(1.0))
        params.projection(self, "wo", (8, 16, 64), ("heads", "head_dim", "embed"), normal(1.0), into=2)
        params.projection(self, "down", (256, 64), ("mlp", "embed"), normal(1.0))


@pytest.mark.parametrize("how", STORED)
def test_on_a_mesh_each_device_multiplies_its_part(how, monkeypatch):
    monkeypatch.setattr(param, "product", functools.partial(pallas, interpret=True))
    spec = MeshSpec(expert=2, tensor=2)
    rules = Rules.make("zero3", spec).for_serving(("heads", "mlp"))
    rng = np.random.default_rng(1)
    with jax.set_mesh(mesh_of(spec)):
        module = _Projections(Params(nnx.Rngs(0), rules, weights=how))
        for name, shape, axis in (("wq", (64, 8, 16), 0), ("wo", (8, 16, 64), 1), ("down", (256, 64), 0)):
            held = quantised(rng.normal(size=shape).astype(np.float32), axis, group_of(shape[axis], how), how)
            for end, numbers in zip(("", "_scale"), held, strict=True):
                own = getattr(module, name + end)
                own[...] = jax.device_put(numbers, own[...].sharding)
        of_rows = rules.act.spec("batch", "seq", "embed")
        cases = [
            ("wq", "btd,dnh->btnh", (3, 1, 64), ("embed",), None),
            ("wo", "btnv,nvd->btd", (3, 1, 8, 16), ("heads", "head_dim"), of_rows),
            ("down", "btf,fd->btd", (3, 1, 256), ("mlp",), of_rows),
        ]
        for name, letters, shape, names, out in cases:
            x = jax.device_put(rng.normal(size=shape).astype(np.float32), rules.act.spec("batch", "seq", *names))
            made = {}
            for few_bits in ("dequantised", "pallas"):
                execution = Execution(rules, weights=how, few_bits=few_bits)
                assert few_rows(letters, shape, module, name, execution) == (few_bits == "pallas")
                run = jax.jit(lambda x, e=execution, n=name, i=letters, o=out: project(i, x, module, n, e, o))
                made[few_bits] = run(x)
            plain, kernel = made.values()
            assert plain.sharding.spec == kernel.sharding.spec
            np.testing.assert_allclose(kernel, plain, atol=1e-4)  # of numbers up to 40, summed in another order
        # Where latent attention multiplies by each head's part, and of many rows, the weight is made anew.
        execution = Execution(rules, weights=how, few_bits="pallas")
        assert not few_rows("btnh,dnh->btnd", (3, 1, 8, 16), module, "wq", execution)
        assert not few_rows("btd,dnh->btnh", (3, 100, 64), module, "wq", execution)


def test_what_is_chosen():
    assert choose("cpu") == "dequantised" and choose("cuda") == choose("gpu") == "pallas"


@on_gpus
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_the_kernel_compiles_for_gpus(gpu):
    """All formats, few rows and many, whole blocks and not; beside the weights as they are held there are the parts
    alone."""
    mesh = MeshSpec().build(topology(gpu, 1, 1))
    whole = NamedSharding(mesh, jax.P())
    shapes = [(how, rows, K, F) for how in STORED for rows, K, F in ((4, 4096, 1024), (256, 200, 100))]

    def run(held, x, experts, sizes):
        made = [pallas(x, packed, scale, how) for (x, packed, scale), (how, *_) in zip(held, shapes, strict=True)]
        return made + [of_experts(x, *own, sizes, how) for own, how in zip(experts, STORED, strict=True)]

    held = []
    for how, rows, K, F in shapes:
        kinds = (rows, K), packed_shape((K, F), 0, how), scale_shape((K, F), 0, how)
        dtypes = jnp.bfloat16, STORED[how], jnp.bfloat16
        pairs = zip(kinds, dtypes, strict=True)
        held.append([jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in pairs])

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    shape = (8, 1024, 512)
    experts = [
        (array(packed_shape(shape, 1, how), STORED[how]), array(scale_shape(shape, 1, how), jnp.bfloat16))
        for how in STORED
    ]
    compiled = jax.jit(run).lower(held, array((128, 1024), jnp.bfloat16), experts, array((8,), jnp.int32)).compile()
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == len(shapes) + len(STORED)
    parts = 4 * (16 * 4 * 1024 + 256 * 100) + 2 * 128 * 512
    assert compiled.memory_analysis().temp_size_in_bytes <= len(STORED) * parts
