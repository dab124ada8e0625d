"""A pipeline stage's weights over the ticks of a step: held once in the type that layers compute in, read a layer at a
time, and their gradients summed in place, in the type that the weights rest in. When a layer runs is pipeline.py's."""

from typing import Any

import jax
import jax.numpy as jnp

from shardlm.layers.own_sums import spread_layer
from shardlm.layers.param import Execution

Tree = Any


def ahead(execution: Execution) -> jnp.dtype:
    """What a stage's matrices are held in through a step: where layers round them to what will be served, as they
    rest."""
    return jnp.float32 if execution.by_scheme else execution.dtype


def cast_ahead(weights: Tree, dtype: jnp.dtype) -> Tree:
    """A segment's weights [L, ...] as its layers compute with them."""
    return jax.tree_util.tree_map_with_path(lambda path, a: a.astype(computed_in(path, a, dtype)), weights)


def computed_in(path: tuple, a: jax.Array, dtype: jnp.dtype) -> jnp.dtype:
    """Of a segment's weight [L, ...]: layers cast their matrices to `dtype` first thing; norms and router count on
    float32, and what is held in few bits, or in 16, stays so."""
    names = [str(getattr(part, "key", getattr(part, "name", part))) for part in path]
    return jnp.dtype(dtype if a.ndim > 2 and a.dtype == jnp.float32 and "router" not in names else a.dtype)


@jax.custom_vjp
def layer_of(held: Tree, masters: Tree, at: jax.Array) -> tuple[Tree, Tree]:
    """(layer `at`, an int32 scalar, of weights [n, ...]; `masters`). Their values are those of `held`, their gradient
    is that of `masters` [n, ...], whose values nothing reads. Where these are spread (own_sums.py), the layer is too.

    Carried through all loops to their end, `masters` brings the sum of gradients back through them, and a layer's is
    added to its part alone, in float32, in place. Differentiating slices of weights that a loop closes over puts
    gradients among zeros instead, and adds all layers' (Llama 3 70B on 256 H100, two rounds of 8 stages: 0.48 s of a
    step of 1.96 in kernels without a product, and 0.32 of 1.74 so, compiled).
    """

    def of(a, master):
        layer = jax.lax.dynamic_index_in_dim(a, at, keepdims=False)
        return layer if layer.ndim + 1 == master.ndim else spread_layer(layer, master)

    return jax.tree.map(of, held, masters), masters


def _forward(held, masters, at):
    return layer_of(held, masters, at), at


def _backward(at, cotangents):
    gradients, sums = cotangents
    # By an index of its own: by the one that reads the layer's weights, XLA makes one kernel of both, and gathers of
    # weights wait for gradients (70B as data=2 x pipeline=4 x fsdp=2 x context=2 x tensor=8 2.07 s a step, 2.00 so).
    at = jax.lax.optimization_barrier(at)
    return None, add_at(sums, gradients, at), None


layer_of.defvjp(_forward, _backward)


def add_at(sums: Tree, gradients: Tree, at: jax.Array) -> Tree:
    """sums [n, ...] with gradients [...], of any floating-point type, added at `at`."""

    def add(total, a):
        if total.dtype == jax.dtypes.float0:
            return total
        here = jax.lax.dynamic_index_in_dim(total, at, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, here + a.astype(total.dtype), at, 0)

    return jax.tree.map(add, sums, gradients)
