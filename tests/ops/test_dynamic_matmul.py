"""Projections that multiply 8-bit numbers of weights held so: the numbers of published checkpoints and of training, on
the host and on meshes, and what is compiled of them for GPUs."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu_programs import on_gpus
from jax.sharding import NamedSharding
from small import mesh_of

from shardlm.layers.param import Execution, Params, normal, project
from shardlm.mesh import MeshSpec
from shardlm.ops.cpu_einsum import cpu_einsum
from shardlm.ops.dynamic_matmul import by_result, dynamic_einsum, scales, stored
from shardlm.ops.quantized_matmul import quantized_einsum
from shardlm.ops.weight_format import DYNAMIC
from shardlm.rules import Rules
from shardlm.topology import topology

# Name of a weight -> its letters with x, its shape and how many of its dimensions are summed over.
WEIGHTS = {
    "wq": ("btd,dnh->btnh", (64, 8, 16), 1),
    "wo": ("btnh,nhd->btd", (8, 16, 64), 2),
    "down": ("btf,fd->btd", (256, 64), 1),
}


def held(w: np.ndarray, into: int, how: str) -> tuple[np.ndarray, np.ndarray]:
    found = scales(w, range(into), how)
    return by_result(np.moveaxis(w, range(into), range(-into, 0)), found, how), found


def turned(letters: str, into: int) -> str:
    xs, rest = letters.split(",")
    ws, y = rest.split("->")
    return f"{xs},{ws[into:]}{ws[:into]}->{y}"


@pytest.mark.parametrize("how", DYNAMIC)
def test_the_numbers_of_a_checkpoint_that_was_made_so_are_found_again(how):
    rng = np.random.default_rng(0)
    numbers = rng.integers(-127, 128, (40, 96)).astype(np.float32)
    numbers = numbers.astype(stored(how)).astype(np.float32)
    numbers[:, 0] = 127 if how == "int8_dynamic" else 448  # as scales are chosen
    numbers[3] = 0
    scale = rng.uniform(1e-4, 1e-2, 40).astype(np.float32)
    w = (numbers * scale[:, None]).T
    found = held(w, 1, how)
    assert found[0].dtype == stored(how) and found[1].dtype == np.float32
    np.testing.assert_array_equal(found[0].astype(np.float32), numbers)
    np.testing.assert_allclose(found[1], np.where(np.arange(40) == 3, 0, scale), rtol=4e-7)


def test_fp8_of_a_scale_for_all_is_found_again():
    """As AutoFP8, Mistral and ModelOpt publish it: a row's largest number may be any, and its scale any times a power
    of two. Other weights have the scale at which the largest is 448."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(0, 30, (96, 200)).astype(stored("fp8_dynamic")).astype(np.float32)
    numbers[:, 7] = 0
    w = numbers * np.float32(0.00371)
    found, scale = held(w, 1, "fp8_dynamic")
    shift = np.exp2(np.round(np.log2(np.where(scale == 0, 1, scale) / np.float32(0.00371))))
    np.testing.assert_array_equal(found.astype(np.float32) * np.where(scale == 0, 1, shift)[:, None], numbers.T)
    assert len(np.unique(shift)) > 1 and not scale[7] and np.abs(found.astype(np.float32)).max() <= 448
    w[5, 3] *= np.float32(1.01)
    np.testing.assert_allclose(scales(w, [0], "fp8_dynamic"), np.abs(w).max(0) / 448, rtol=3e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_int8_is_what_training_multiplies(name, dtype):
    letters, shape, into = WEIGHTS[name]
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=shape), dtype)
    x = jnp.asarray(
        rng.normal(size=(2, 5, *shape[:into])) * 2.0 ** rng.integers(-8, 8, (2, 5, 1, 1)[: 2 + into]), dtype
    )
    own = held(np.asarray(w).astype(np.float32), into, "int8_dynamic")
    spec = jax.P(*(None,) * w.ndim)
    with jax.set_mesh(mesh_of(MeshSpec())):
        trained = jax.jit(lambda x, w: quantized_einsum(letters, x, w, "int8", use=spec))(x, w)
        run = jax.jit(lambda x, *own: dynamic_einsum(turned(letters, into), x, *own))
        on_one = jax.jit(lambda x, *own: dynamic_einsum(turned(letters, into), x, *own, einsum=cpu_einsum))
        served, alone = run(x, *own), on_one.lower(x[1:, 3:4], *own).compile()
        by_cpu = on_one(x, *own)
    assert served.dtype == dtype
    np.testing.assert_array_equal(served, trained)
    np.testing.assert_array_equal(by_cpu, trained)
    np.testing.assert_array_equal(alone(x[1:, 3:4], *own)[0, 0], served[1, 3])  # whatever is beside it
    sizes = [math.prod(map(int, found.split(","))) for found in re.findall(r"s32\[([\d,]+)\]", alone.as_text())]
    assert sizes and max(sizes) < w.size  # the weight is not made 32 bits of


@pytest.mark.parametrize("how", DYNAMIC)
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_near_what_they_were(name, how):
    """Of the sizes that are multiplied: half a step of e4m3 is 1/16, of int8 1/254 of the largest, for both."""
    letters, shape, into = WEIGHTS[name]
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=shape).astype(np.float32), rng.normal(size=(2, 5, *shape[:into])).astype(np.float32)
    with jax.set_mesh(mesh_of(MeshSpec())):
        found = dynamic_einsum(turned(letters, into), jnp.asarray(x), *map(jnp.asarray, held(w, into, how)))
    expected, sizes = (np.einsum(letters, a, b) for a, b in ((x, w), (abs(x), abs(w))))
    error = np.sqrt(np.mean(np.square(found - expected) / np.square(sizes / np.prod(shape[:into]) ** 0.5)))
    assert (0.02 if how == "fp8_dynamic" else 0.005) < error < (0.08 if how == "fp8_dynamic" else 0.03), error


class _Projections(nnx.Module):
    """Weights split along what they make and along what they sum over."""

    def __init__(self, params: Params):
        params.projection(self, "wq", (64, 8, 16), ("embed", "heads", "head_dim"), normal(1.0))
        params.projection(self, "wo", (8, 16, 64), ("heads", "head_dim", "embed"), normal(1.0), into=2)
        params.projection(self, "down", (256, 64), ("mlp", "embed"), normal(1.0))


@pytest.mark.parametrize("how", DYNAMIC)
def test_any_mesh_multiplies_the_same_numbers(how):
    """A token has one scale, also where devices hold parts of it."""
    found = {}
    for spec in (MeshSpec(), MeshSpec(expert=2, tensor=2)):
        rules, rng = Rules.make("zero3", spec).for_serving(("heads", "mlp")), np.random.default_rng(1)
        with jax.set_mesh(mesh_of(spec)):
            module = _Projections(Params(nnx.Rngs(0), rules, weights=how))
            for name, (letters, shape, into) in WEIGHTS.items():
                numbers = held(rng.normal(size=shape).astype(np.float32), into, how)
                for end, part in zip(("", "_scale"), numbers, strict=True):
                    own = getattr(module, name + end)
                    own[...] = jax.device_put(part, own[...].sharding)
                split = [] if into > 1 or name == "down" else ["embed"]
                names = split or (["heads", "head_dim"] if into > 1 else ["mlp"])
                x = rng.normal(size=(3, 2, *shape[:into])).astype(np.float32)
                x = jax.device_put(x, rules.act.spec("batch", "seq", *names))
                out = None if split else rules.act.spec("batch", "seq", "embed")
                execution = Execution(rules, weights=how)
                y = jax.jit(project, static_argnums=(0, 3, 4, 5))(letters, x, module, name, execution, out)
                found.setdefault(name, []).append(np.asarray(y))
    for one, other in found.values():
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())
        assert np.abs(one).max() > 1


@on_gpus
@pytest.mark.parametrize("rows", [3, 64, 2048])
@pytest.mark.parametrize("how", DYNAMIC)
def test_gpus_multiply_what_is_held(how, rows):
    """An MLP: no weight is copied, turned or made anew, and the products take 8-bit operands."""
    D, F = 1024, 4096
    mesh = MeshSpec().build(topology("h100", 1, 1))
    whole = NamedSharding(mesh, jax.P())
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731
    weights = [(array(shape, stored(how)), array(shape[:1], jnp.float32)) for shape in ((F, D), (F, D), (D, F))]

    def run(x, gate, up, down):
        hidden = jax.nn.silu(dynamic_einsum("td,fd->tf", x, *gate)) * dynamic_einsum("td,fd->tf", x, *up)
        return dynamic_einsum("tf,df->td", hidden, *down)

    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(array((rows, D), jnp.bfloat16), *weights).compile()
    text, name = compiled.as_text(), {"int8_dynamic": "s8", "fp8_dynamic": "f8e4m3fn"}[how]
    types = dict(re.findall(r"^\s*%(\S+) = (\w+)\[", text, re.M))
    products = re.findall(r" dot\(%(\S+?), %(\S+?)\)", text)
    assert products and {types[operand] for pair in products for operand in pair} == {name}
    moved = rows * (2 * F * 4 + 3 * F + 2 * D) + 4 * 16 * rows * D  # products, numbers of both inputs, split sums
    assert compiled.memory_analysis().temp_size_in_bytes < moved + 2**16
