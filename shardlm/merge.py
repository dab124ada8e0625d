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
    factor, made = model.execution.lora.alpha / model.execution.lora.rank, {}
    for path, w in flatten_dict(base).items():
        fetch, pair = w.fetch, beside(path)
        if pair[0] in added:
            a, b = (np.asarray(added[own]) for own in pair)
            fetch = functools.partial(_sum, w, a, b, factor, path[0] == "segments")
        made[path] = Unread(w.shape, dtype, functools.partial(_in_dtype, fetch, dtype))
    return unflatten_dict(made)


def _in_dtype(fetch, dtype: np.dtype, index: Index) -> np.ndarray:
    return fetch(index).astype(dtype)


def _sum(w: Unread, a: np.ndarray, b: np.ndarray, factor: float, stacked: bool, index: Index) -> np.ndarray:
    """A slice of W [*stack, *inputs, *outputs]."""
    stack, rest, inputs = index[:stacked], index[stacked:], a.ndim - 1 - stacked
    a, b = a[*stack, *rest[:inputs]], b[*stack, :, *rest[inputs:]]
    held = jnp.asarray(w.fetch(index))
    return np.asarray(held + (factor * _product(a, b, stacked)).astype(held.dtype))


def _product(a: np.ndarray, b: np.ndarray, stacked: bool) -> jax.Array:
    """[*stack, *inputs, rank] times [*stack, rank, *outputs]."""
    letters = iter("ijkmnop")
    stack = "l" if stacked else ""
    inputs = "".join(next(letters) for _ in range(a.ndim - 1 - stacked))
    outputs = "".join(next(letters) for _ in range(b.ndim - 1 - stacked))
    return jnp.einsum(f"{stack}{inputs}z,{stack}z{outputs}->{stack}{inputs}{outputs}", a, b, precision="highest")
