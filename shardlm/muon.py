"""Muon's update (https://arxiv.org/abs/2502.16982) for matrices that are split over devices: momentum, orthogonalised
by five Newton-Schulz steps. The matrices of all layers are one array, and devices share them: each has all of some of
them while it multiplies, by one exchange before and one after. State is optax.contrib.muon's."""

import math
from collections.abc import Mapping, Sequence
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


def moving(split: Sequence[tuple[str, ...]]) -> list[str]:
    """The axes that split a matrix's dimensions, of each dimension the last first: what is next to each other moves."""
    return [axis for axes in split for axis in reversed(axes)]


def sharing(batch: Sequence[int], axes: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """For each mesh axis that splits matrices over which of the dimensions before them they are shared instead, by how
    many of them a device holds, [layers] or [layers, experts]: layers where they divide, else experts where those do,
    else layers, with empty ones in the last places."""
    left, found = list(batch), []
    for axis in axes:
        size = sizes[axis]
        dim = next((i for i, n in enumerate(left) if n % size == 0), 0)
        left[dim] = -(-left[dim] // size)
        found.append((axis, dim))
    return found


def _orthogonal(x: jax.Array, dims: contrib.MuonDimensionNumbers, spec: PartitionSpec, scale: float) -> jax.Array:
    """x [layers, experts or none, rows..., columns...], of norm 1 each -> the orthogonal matrices next to them."""
    rows, columns = tuple(dims.reduction_axis), tuple(dims.output_axis)
    batch = tuple(i for i in range(x.ndim) if i not in rows + columns)
    if not batch:  # of no layer: as if of one
        behind = contrib.MuonDimensionNumbers(*(tuple(i + 1 for i in some) for some in (rows, columns)))
        return _orthogonal(x[None], behind, PartitionSpec(None, *spec), scale)[0]
    order = batch + rows + columns
    split = [part if isinstance(part, tuple) else (part,) if part else () for part in spec]
    split = [(split + [()] * x.ndim)[i] for i in order]
    turned = jnp.transpose(x, order)
    stages, layers = _on_the_way(split, len(batch), turned.shape)
    turned = jnp.pad(turned, [(0, layers - turned.shape[0])] + [(0, 0)] * (x.ndim - 1))
    for one in stages:
        turned = jax.lax.with_sharding_constraint(turned, one)
    lines = turned.shape[: len(batch)], turned.shape[len(batch) : len(batch + rows)], turned.shape[len(batch + rows) :]
    m = turned.reshape(*lines[0], math.prod(lines[1]), math.prod(lines[2]))
    flip = m.shape[-2] > m.shape[-1]
    m = jnp.swapaxes(m, -1, -2) if flip else m
    for _ in range(STEPS):
        m = _step(m)
    m = (jnp.swapaxes(m, -1, -2) if flip else m) * (scale * math.sqrt(max(m.shape[-2:])))
    m = m.reshape(turned.shape)
    for one in reversed(stages):
        m = jax.lax.with_sharding_constraint(m, one)
    m = m[: x.shape[batch[0]]]
    return jax.lax.with_sharding_constraint(jnp.transpose(m, sorted(range(x.ndim), key=order.__getitem__)), spec)


def _on_the_way(split: list[tuple[str, ...]], batch: int, shape: Sequence[int]) -> tuple[list[PartitionSpec], int]:
    """How arrays whose dimensions are split so are split while the axes of matrices, behind `batch` dimensions, move to
    those, one exchange each; and how many layers there are with the empty ones."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    own = [n // math.prod(sizes[axis] for axis in axes) for n, axes in zip(shape, split, strict=True)]
    found = [list(split)]
    for axis, dim in sharing(own[:batch], moving(split[batch:]), sizes):
        found.append([tuple(a for a in axes if a != axis) for axes in found[-1]])
        found[-1][dim] += (axis,)
    ways = math.prod(sizes[axis] for axis in found[-1][0])
    return [PartitionSpec(*(axes or None for axes in one)) for one in found], -(-shape[0] // ways) * ways


def _step(m: jax.Array) -> jax.Array:
    """m [..., r, c], r <= c: three products, of r r c, r r r and r r c multiply-adds."""
    a, b, c = COEFFICIENTS
    square = jnp.einsum("...rc,...sc->...rs", m, m)
    return a * m + jnp.einsum("...rs,...sc->...rc", b * square + c * (square @ square), m)
