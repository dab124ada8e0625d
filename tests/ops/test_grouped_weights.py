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
from grouped_forms import FORMS, any_weight, on_device
from jax.sharding import NamedSharding
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.layers import moe
from shardlm.layers.param import Execution, Params, few_rows, normal, project
from shardlm.mesh import MeshSpec
from shardlm.ops import grouped_kernel, grouped_matmul
from shardlm.ops.grouped_kernel import of_experts, pallas
from shardlm.ops.grouped_weights import (
    OWN,
    STORED,
    Grouped,
    as_published,
    choose,
    dequantised,
    grouped_axis,
    packed_shape,
    parts_written,
    quantised,
    scale_shape,
    splits_of,
    splits_of_experts,
)
from shardlm.ops.weight_format import AsPublished
from shardlm.rules import Rules
from shardlm.topology import topology

# Of the largest number of a group: half a step of the integers; of e4m3, the largest steps are of 32 up to 448.
ERROR = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 16 / 448}


def _format(how: str, *keys: str):
    return how if how in OWN else AsPublished(tuple((key, FORMS[how]) for key in keys))


@pytest.mark.parametrize("how", OWN)
@pytest.mark.parametrize(("shape", "axis"), [((192, 10), 0), ((3, 100, 7), 1), ((2, 48, 4, 5), 1), ((6, 5), 0)])
def test_numbers_are_near_what_they_were(how, shape, axis):
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.exp2(np.arange(shape[-1]) - 4)
    w.reshape(-1, shape[-1])[:, 0] = 0  # groups of zeros
    group, groups = OWN[how].size(shape[axis]), OWN[how]
    packed, scale, _ = quantised(w, axis, group, how)
    assert packed.dtype == STORED[how] and packed.shape == packed_shape(shape, axis, groups)
    assert scale.shape == scale_shape(shape, axis, groups)
    if packed.shape != scale.shape:
        assert grouped_axis(packed.shape, scale.shape) == axis
    found = np.asarray(jax.jit(lambda p, s: dequantised(Grouped(p, s), axis, groups, jnp.float32))(packed, scale))
    split = lambda a: a.reshape(*shape[:axis], -1, group, *shape[axis + 1 :])  # noqa: E731
    largest = np.abs(split(w)).max(axis + 1, keepdims=True)
    # Scales have 8 bits of mantissa: the largest numbers may be cut by that.
    assert np.all(np.abs(split(found) - split(w)) <= largest * (ERROR[how] + 2**-8))
    assert np.max(np.abs(split(found) - split(w)) / np.maximum(largest, 1e-9)) > ERROR[how] / 2 or group < 16
    again = quantised(found, axis, group, how)
    np.testing.assert_array_equal(again[0], packed)  # the unpacking inverts the packing
    # Some of the groups alone are what they are among all.
    first = np.take(w, range(group), axis)
    for whole, part in zip((packed, scale), quantised(first, axis, group, how)[:2], strict=True):
        np.testing.assert_array_equal(np.take(whole, range(part.shape[axis]), axis), part)


def test_fp8_keeps_what_is_small_better_than_int8():
    w = np.exp2(-np.arange(64) / 8).astype(np.float32)[:, None]  # down to 1/256 of the largest
    error = {}
    for how in ("int8", "fp8"):
        found = dequantised(on_device(quantised(w, 0, 64, how)), 0, OWN[how], jnp.float32)
        error[how] = np.abs(np.asarray(found) / w - 1).max()
    assert error["fp8"] < 0.07 < 0.5 < error["int8"]


def test_a_scale_that_is_no_number_makes_no_number():
    """As it does where a damaged checkpoint is read in more bits."""
    groups = FORMS["mxfp4"]
    factors = np.array([[np.nan, 2.0]], np.float32)
    held = on_device(as_published(np.full((32, 2), 2, np.int8), factors, None, 0, 32, groups))
    found = np.asarray(dequantised(held, 0, groups, jnp.float32))
    assert np.isnan(found[:, 0]).all() and (found[:, 1] == 2).all()


def test_what_has_no_pairs_is_refused():
    with pytest.raises(ShardlmError, match="dimension of 17 has no groups of even size for int4"):
        OWN["int4"].size(17)
    assert OWN["fp8"].size(17) == 17


# Rows, numbers summed over, columns: one part and many, groups of 64, 50 and 48, columns that fill no block, rows of
# more than one block.
# Of files' own kinds "parts", whose first row is multiplied alone too, and the others in the wide tests.
PRODUCTS = {"one row": (1, 1024, 96), "odd": (5, 100, 7), "parts": (17, 768, 200), "blocks of rows": (130, 48, 64)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        pytest.param(shape, how, marks=[pytest.mark.wide] * (how not in most))
        for shape, most in zip(PRODUCTS, (OWN, OWN, FORMS, ()), strict=True)
        for how in FORMS
    ],
)
def test_the_kernel_multiplies_as_the_reference_does(shape, how):
    M, K, F = PRODUCTS[shape]
    K = 96 if FORMS[how].published and K == 100 else K  # no part of a group of 128
    rng = np.random.default_rng(0)
    groups = FORMS[how]
    held = any_weight(rng, (K, F), 0, groups)
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.float32)
    run = jax.jit(lambda x: pallas(x, held, groups, interpret=True))
    found, expected = run(x), jax.jit(lambda x: x @ dequantised(held, 0, groups, jnp.float32))(x)
    np.testing.assert_allclose(found, expected, atol=2e-6 * K**0.5 * float(jnp.abs(expected).max()))  # another order
    if groups.size(K) != 32:  # whatever is beside it; a CPU sums 32 numbers of one row in another order
        assert np.array_equal(run(x[:1])[0], found[0])
    half = run(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=2e-2 * float(jnp.abs(expected).max()))


def test_parts_of_many_rows_are_summed_in_one_program():
    M, K, F, groups = 130, 1024, 64, FORMS["int4"]
    assert splits_of(K, F) > 1 == parts_written(K, F, M)
    rng = np.random.default_rng(0)
    held, x = any_weight(rng, (K, F), 0, groups), jnp.asarray(rng.normal(size=(M, K)), jnp.float32)
    run = jax.jit(lambda x: pallas(x, held, groups, interpret=True))
    found, expected = run(x), x @ dequantised(held, 0, groups, jnp.float32)
    np.testing.assert_allclose(found, expected, atol=2e-6 * K**0.5 * float(jnp.abs(expected).max()))
    assert np.array_equal(run(x[:1])[0], found[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("how", "sizes"), [*((how, [3, 0, 37, 1]) for how in FORMS), ("int4", [300, 0, 129, 111])])
def test_experts_by_the_kernel(how, sizes):
    """One without rows, one with several blocks of them, and rows of none at the end."""
    E, K, F, sizes = 4, 96, 72, jnp.array(sizes, jnp.int32)
    n, rng = int(sizes.sum()), np.random.default_rng(0)
    groups = FORMS[how]
    held = any_weight(rng, (E, K, F), 1, groups)
    x = jnp.asarray(rng.normal(size=(n + 3, K)), jnp.float32)
    found = jax.jit(functools.partial(of_experts, how=groups, interpret=True))(x, held, sizes)
    expected = grouped_matmul.reference(x, dequantised(held, 1, groups, jnp.float32), sizes)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not np.any(found[n:])


def test_few_experts_are_split():
    """Of a few rows, so that a GPU has work for all of its cores."""
    E, K, F, sizes, groups = 4, 1024, 64, jnp.array([2, 0, 0, 1], jnp.int32), FORMS["int4"]
    assert splits_of_experts(K, F, 3, E) > 1
    rng = np.random.default_rng(0)
    held, x = any_weight(rng, (E, K, F), 1, groups), jnp.asarray(rng.normal(size=(3, K)), jnp.float32)
    found = jax.jit(functools.partial(of_experts, how=groups, interpret=True))(x, held, sizes)
    expected = grouped_matmul.reference(x, dequantised(held, 1, groups, jnp.float32), sizes)
    np.testing.assert_allclose(found, expected, atol=2e-6 * K**0.5 * float(jnp.abs(expected).max()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["int4", "fp8", "AWQ"])
def test_a_mixture_on_a_mesh_runs_experts_as_they_are_held(how, monkeypatch):
    monkeypatch.setattr(grouped_kernel, "of_experts", functools.partial(of_experts, interpret=True))
    spec = MeshSpec(expert=2, tensor=2)
    rules = Rules.make("zero3", spec).for_serving()
    rng, groups = np.random.default_rng(1), FORMS[how]
    weights = _format(how, "experts.gate", "experts.up", "experts.down")
    with jax.set_mesh(mesh_of(spec)):
        module = moe.Moe(moe.MoeConfig(8, 2, 128), 64, 1.0, Params(nnx.Rngs(0), rules, weights=weights))
        for name, shape in (("gate", (8, 64, 128)), ("up", (8, 64, 128)), ("down", (8, 128, 64))):
            held = any_weight(rng, shape, 1, groups)
            for end, numbers in zip(("", "_scale", "_zero")[: 2 + groups.zeros], held, strict=False):
                own = getattr(module, name + end)
                own[...] = jax.device_put(numbers, own[...].sharding)
        x = jax.device_put(rng.normal(size=(5, 1, 64)).astype(np.float32), rules.act.spec("batch", "seq", "embed"))
        context = types.SimpleNamespace(real=jnp.ones((5, 1), bool), weights=None)
        made = {}
        for few_bits in ("dequantised", "looped", "pallas"):
            execution = Execution(rules, weights=weights, few_bits=few_bits)
            made[few_bits] = jax.jit(lambda x, e=execution: module(x, context, e)[0])(x)
        plain = made.pop("dequantised")
        for found in made.values():
            np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-3 * float(jnp.abs(plain).max()))
        assert jnp.abs(plain).max() > 1
        # By the rows of an expert: 128 of 512 tokens that choose 2 of 8.
        called = []
        product = lambda x, *rest: called.append(1) or jnp.zeros((len(x), rest[0].scale.shape[-1]), x.dtype)  # noqa: E731
        monkeypatch.setattr(moe, "expert_product", product)
        for tokens, by_kernel in ((512, True), (513, False)):
            many = types.SimpleNamespace(real=jnp.ones((1, tokens), bool), weights=None)
            x = jax.ShapeDtypeStruct((1, tokens, 64), jnp.float32, sharding=rules.act.spec("batch", "seq", "embed"))
            called.clear()
            jax.eval_shape(lambda x, many=many: module(x, many, execution)[0], x)
            assert bool(called) == by_kernel


def test_a_single_group_of_an_expert_over_two_devices():
    """In 4 bits the first half of a group lies beside the second: one device's part of it is no slice of the weight."""
    made = []
    for spec in (MeshSpec(), MeshSpec(tensor=2)):
        rules, rng = Rules.make("zero3", spec), np.random.default_rng(1)
        with jax.set_mesh(mesh_of(spec)):
            module = moe.Moe(moe.MoeConfig(2, 1, 24), 32, 1.0, Params(nnx.Rngs(0), rules, weights="int4"))
            for name, shape in (("gate", (2, 32, 24)), ("up", (2, 32, 24)), ("down", (2, 24, 32))):
                for end, numbers in zip(("", "_scale"), any_weight(rng, shape, 1, OWN["int4"]), strict=False):
                    own = getattr(module, name + end)
                    assert own.shape == numbers.shape
                    own[...] = jax.device_put(numbers, own[...].sharding)
            x = jax.device_put(rng.normal(size=(1, 4, 32)).astype("f"), rules.act.spec("batch", "seq", "embed"))
            context = types.SimpleNamespace(real=jnp.ones((1, 4), bool), weights=None)
            execution = Execution(rules, weights="int4")
            made.append(np.asarray(jax.jit(lambda x, m=module, c=context, e=execution: m(x, c, e)[0])(x)))
    np.testing.assert_allclose(made[1], made[0], rtol=1e-5, atol=1e-5 * np.abs(made[0]).max())


class _Projections(nnx.Module):
    """Weights split along what they make and along what they sum over."""

    def __init__(self, params: Params):
        params.projection(self, "wq", (64, 8, 16), ("embed", "heads", "head_dim"), normal(1.0))
        params.projection(self, "wo", (8, 16, 64), ("heads", "head_dim", "embed"), normal(1.0), into=2)
        params.projection(self, "down", (512, 64), ("mlp", "embed"), normal(1.0))


@pytest.mark.sampled(2)
# Of those alike in how zeros and scales lie one each.
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[pytest.mark.wide] * (how in ("int8", "GPTQ, 8 bits", "GPTQ, groups of 32", "Q6_K")))
        for how in FORMS
    ],
)
def test_on_a_mesh_each_device_multiplies_its_part(how, monkeypatch):
    monkeypatch.setattr(grouped_kernel, "pallas", functools.partial(pallas, interpret=True))
    spec = MeshSpec(expert=2, tensor=2)
    rules = Rules.make("zero3", spec).for_serving(("heads", "mlp"))
    rng, groups = np.random.default_rng(1), FORMS[how]
    weights = _format(how, "wq", "wo", "down")
    with jax.set_mesh(mesh_of(spec)):
        module = _Projections(Params(nnx.Rngs(0), rules, weights=weights))
        for name, shape, axis in (("wq", (64, 8, 16), 0), ("wo", (8, 16, 64), 1), ("down", (512, 64), 0)):
            held = any_weight(rng, shape, axis, groups)
            for end, numbers in zip(("", "_scale", "_zero")[: 2 + groups.zeros], held, strict=False):
                own = getattr(module, name + end)
                own[...] = jax.device_put(numbers, own[...].sharding)
        of_rows = rules.act.spec("batch", "seq", "embed")
        cases = [
            ("wq", "btd,dnh->btnh", (3, 1, 64), ("embed",), None),
            ("wo", "btnv,nvd->btd", (3, 1, 8, 16), ("heads", "head_dim"), of_rows),
            ("down", "btf,fd->btd", (3, 1, 512), ("mlp",), of_rows),
        ]
        for name, letters, shape, names, out in cases:
            x = jax.device_put(rng.normal(size=shape).astype(np.float32), rules.act.spec("batch", "seq", *names))
            made = {}
            for few_bits in ("dequantised", "looped", "pallas"):
                execution = Execution(rules, weights=weights, few_bits=few_bits)
                assert few_rows(letters, shape, module, name, execution) == (few_bits != "dequantised")
                run = jax.jit(lambda x, e=execution, n=name, i=letters, o=out: project(i, x, module, n, e, o))
                made[few_bits] = run(x)
            plain = made.pop("dequantised")
            for found in made.values():
                assert plain.sharding.spec == found.sharding.spec
                np.testing.assert_allclose(found, plain, atol=1e-4)  # of numbers up to 40, summed in another order
        # Where latent attention multiplies by each head's part, and of many rows on a GPU, the weight is made anew.
        for few_bits in ("looped", "pallas"):
            execution = Execution(rules, weights=weights, few_bits=few_bits)
            assert not few_rows("btnh,dnh->btnd", (3, 1, 8, 16), module, "wq", execution)
            assert few_rows("btd,dnh->btnh", (3, 100, 64), module, "wq", execution) == (few_bits == "looped")


def test_what_is_chosen():
    assert choose("cpu") == "looped" and choose("cuda") == choose("gpu") == "pallas" and choose("tpu") == "dequantised"


@on_gpus
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_the_kernel_compiles_for_gpus(gpu):
    """All formats, few rows and many, whole blocks and not; beside the weights as they are held there are the parts
    alone."""
    mesh = MeshSpec().build(topology(gpu, 1, 1))
    whole = NamedSharding(mesh, jax.P())
    forms, sizes = list(FORMS.values()), ((4, 4096, 1024), (256, 200, 100))
    shapes = [(how, rows, K + 8 * how.published * (K == 200), F) for how in forms for rows, K, F in sizes]

    def run(held, x, experts, sizes):
        made = [pallas(*own, how) for own, (how, *_) in zip(held, shapes, strict=True)]
        return made + [of_experts(x, own, sizes, how) for own, how in zip(experts, forms, strict=True)]

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def weight(shape, axis, how):
        scales = scale_shape(shape, axis, how)
        zero = array(scales, how.zero) if how.zeros else None
        return Grouped(array(packed_shape(shape, axis, how), how.stored), array(scales, how.scale), zero)

    held = [(array((rows, K), jnp.bfloat16), weight((K, F), 0, how)) for how, rows, K, F in shapes]
    experts = [weight((8, 1024, 512), 1, how) for how in forms]
    with jax.set_mesh(mesh):  # which says what is compiled for, as jax 0.11 on asks
        lowered = jax.jit(run).lower(held, array((128, 1024), jnp.bfloat16), experts, array((8,), jnp.int32))
    compiled = lowered.compile()
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == len(shapes) + len(forms)
    parts = 4 * (16 * 4 * 1024 + 256 * 100) + 2 * 128 * 512
    assert compiled.memory_analysis().temp_size_in_bytes <= len(forms) * parts
