"""Adapters added into the weights that they stand on: W + alpha / rank * A B, for a model without adapters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.held_weights import of_scale, paths_of
from shardlm.layers.lora import LoraConfig, beside
from shardlm.ops.grouped_weights import Grouped, dequantised, grouped_axis
from shardlm.state import ModelDef

Tree = Any


def merged(model: ModelDef, params: Tree) -> tuple[ModelDef, Tree]:
    """(the model without adapters, its weights in the compute dtype) of a model with adapters and all its parameters;
    under its mesh. Weights in few bits are those that the adapters were trained on, not those they came from."""
    execution = model.execution
    plain = ModelDef.make(model.config, dataclasses.replace(execution, lora=LoraConfig(), weights="dtype"))
    flat, made = flatten_dict(params), {}
    for path, shape in flatten_dict(plain.shapes).items():
        w = flat[path]
        if of_scale(path) in flat:
            held = [flat[own] for own in paths_of(path, flat)]
            axis = grouped_axis(w.shape, held[1].shape)
            whole = [None if i == axis else part for i, part in enumerate(_spec(w))]
            held = Grouped(*(jax.reshard(a, jax.sharding.PartitionSpec(*whole)) for a in held))
            w = dequantised(held, axis, model.groups[path], execution.dtype)
            w = jax.reshard(w, shape.sharding.spec)
        if beside(path)[0] in flat:
            a, b = (flat[own] for own in beside(path))
            w = w + (execution.lora.alpha / execution.lora.rank * _product(a, b, path[0] == "segments")).astype(w.dtype)
        made[path] = w.astype(execution.dtype)
    return plain, unflatten_dict(made)


def _product(a: jax.Array, b: jax.Array, stacked: bool) -> jax.Array:
    """[*stack, *inputs, rank] times [*stack, rank, *outputs]."""
    letters = iter("ijkmnop")
    stack = "l" if stacked else ""
    inputs = "".join(next(letters) for _ in range(a.ndim - 1 - stacked))
    outputs = "".join(next(letters) for _ in range(b.ndim - 1 - stacked))
    return jnp.einsum(f"{stack}{inputs}z,{stack}z{outputs}->{stack}{inputs}{outputs}", a, b, precision="highest")


def _spec(a: jax.Array) -> tuple:
    spec = jax.typeof(a).sharding.spec
    return (*spec, *(None,) * (a.ndim - len(spec)))
