"""Muon's update (https://arxiv.org/abs/2502.16982) for matrices that are split over devices: momentum, orthogonalised
by five Newton-Schulz steps. The matrices of all layers are one array, and devices share them: each has all of some of
them while it multiplies, by one exchange before and one after. State is optax.contrib.muon's."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax import contrib

STEPS = 5
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of https://kellerjordan.github.io/posts/muon


def orthogonalised(dimensions: Any, specs: Any, scale: float) -> optax.GradientTransformation:
    """The first two of muon's transformations in one, where XLA chooses shardings; the second has no state.

    dimensions  of each weight contrib.MuonDimensionNumbers, optax.MaskedNode where another optimizer has it
    specs       of each weight, how it is split where the optimizer's state rests
    scale       updates have the root mean square that times this makes of an orthogonal matrix's (section 2.2 there)
    """
    # Without steps: momentum of Nesterov's kind, corrected and divided by its norm.
    momentum = contrib.scale_by_muon(COEFFICIENTS, 0, weight_dimension_numbers=dimensions)

    def update(grads, state, params=None):
        updates, state = momentum.update(grads, state, params)

        def one(dims, x, spec):
            return x if isinstance(dims, optax.MaskedNode) else _orthogonal(x, dims, spec, scale)

        return jax.tree.map(one, dimensions, updates, specs, is_leaf=_is_leaf), state

    return optax.GradientTransformation(momentum.init, update)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (contrib.MuonDimensionNumbers, optax.MaskedNode))


def sharing(stack: int, axes: list[str], sizes: dict[str, int]) -> tuple[str, ...]:
    """Of the mesh axes that split a matrix those over which so many of them are shared instead: in order, as far as
    they divide. The devices of the others each make the same."""
    found: list[str] = []
    for axis in axes:
        if stack % (math.prod(sizes[name] for name in found) * sizes[axis]) == 0:
            found.append(axis)
    return tuple(found)


def _orthogonal(x: jax.Array, dims: contrib.MuonDimensionNumbers, spec: PartitionSpec, scale: float) -> jax.Array:
    """x [layers, experts or none, rows..., columns...], of norm 1 each -> the orthogonal matrices next to them."""
    rows, columns = tuple(dims.reduction_axis), tuple(dims.output_axis)
    batch = tuple(i for i in range(x.ndim) if i not in rows + columns)
    split = [part if isinstance(part, tuple) else (part,) if part else () for part in spec]
    split += [()] * (x.ndim - len(split))
    inside = [axis for i in rows + columns for axis in split[i]]
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    shared = sharing(x.shape[batch[0]] // math.prod(sizes[a] for a in split[batch[0]]), inside, sizes)
    stacked = [split[i] for i in batch]
    stacked[0] += shared
    turned = jnp.transpose(x, batch + rows + columns)
    shape = *turned.shape[: len(batch)], *(math.prod(x.shape[i] for i in of) for of in (rows, columns))
    whole = PartitionSpec(*(axes or None for axes in stacked), *[None] * (len(rows) + len(columns)))
    m = jax.lax.with_sharding_constraint(turned, whole).reshape(shape)
    flip = shape[-2] > shape[-1]
    m = jnp.swapaxes(m, -1, -2) if flip else m
    for _ in range(STEPS):
        m = _step(m)
    m = (jnp.swapaxes(m, -1, -2) if flip else m) * (scale * math.sqrt(max(shape[-2:])))
    m = jax.lax.with_sharding_constraint(m.reshape(turned.shape), whole)
    back = sorted(range(x.ndim), key=(batch + rows + columns).__getitem__)
    return jax.lax.with_sharding_constraint(jnp.transpose(m, back), spec)


def _step(m: jax.Array) -> jax.Array:
    """m [..., r, c], r <= c: three products, of r r c, r r r and r r c multiply-adds."""
    a, b, c = COEFFICIENTS
    square = jnp.einsum("...rc,...sc->...rs", m, m)
    return a * m + jnp.einsum("...rs,...sc->...rc", b * square + c * (square @ square), m)
