"""Adapters added into the weights that they stand on: W + alpha / rank * A B, for a model without adapters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.layers.lora import beside
from shardlm.state import ModelDef
from shardlm.unread import Index, Unread

Tree = Any


def merged(model: ModelDef, base: Tree, adapters: Tree) -> Tree:
    """The weights of a model without adapters, in the compute dtype, as `Unread`: of what the adapters stand on, as
    `Unread`, and them. Weights in few bits are those that the adapters were trained on, not those they came from."""
    added, dtype = flatten_dict(adapters), jnp.dtype(model.execution.dtype)
    factor = model.execution.lora.alpha / model.execution.lora.rank

    @functools.lru_cache(maxsize=1)  # a layer's blocks are read one after the other
    def product(path: tuple, layer: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        a, b = (np.asarray(added[own]) for own in beside(path))
        for i in layer:  # a stack of one, as it was of all: XLA's sums are the same then
            a, b = a[i : i + 1], b[i : i + 1]
        return np.asarray((factor * _product(a, b, bool(layer))).astype(dtype))

    def fetch(path: tuple, w: Unread, index: Index) -> np.ndarray:
        found = w.fetch(index)
        if beside(path)[0] in added and path[0] == "segments":
            first, *rest = index
            layers = range(first.start, first.stop)
            found = found + np.concatenate([product(path, (i,), found.dtype)[:, *rest] for i in layers])
        elif beside(path)[0] in added:
            found = found + product(path, (), found.dtype)[index]
        return found.astype(dtype)

    flat = flatten_dict(base)
    return unflatten_dict({path: Unread(w.shape, dtype, functools.partial(fetch, path, w)) for path, w in flat.items()})


@functools.partial(jax.jit, static_argnames="factor")  # once: a function made anew at each step is compiled at each
def added(base: Tree, adapters: Tree, factor: float) -> Tree:
    """As `merged`, of arrays on devices: W + factor A B, each where W is and in its dtype."""
    flat, given = flatten_dict(base), flatten_dict(adapters)

    def whole_of(path: tuple, w: jax.Array) -> jax.Array:
        if beside(path)[0] not in given:
            return w
        a, b = (given[own].astype(jnp.float32) for own in beside(path))
        product = _product(a, b, path[0] == "segments", jax.typeof(w).sharding)
        return (w.astype(jnp.float32) + factor * product).astype(w.dtype)

    return unflatten_dict({path: whole_of(path, w) for path, w in flat.items()})


def _product(a: np.ndarray | jax.Array, b: np.ndarray | jax.Array, stacked: bool, sharding: Any = None) -> jax.Array:
    """[*stack, *inputs, rank] times [*stack, rank, *outputs]."""
    letters = iter("ijkmnop")
    stack = "l" if stacked else ""
    inputs = "".join(next(letters) for _ in range(a.ndim - 1 - stacked))
    outputs = "".join(next(letters) for _ in range(b.ndim - 1 - stacked))
    equation = f"{stack}{inputs}z,{stack}z{outputs}->{stack}{inputs}{outputs}"
    return jnp.einsum(equation, a, b, precision="highest", out_sharding=sharding)
