"""Several adapters side by side in parts of the rank of the same arrays: what puts one into its part, on the devices.
Pure functions; where an adapter comes from is adapters.py's, and when it is put there runner.py's."""

from typing import Any

import jax

from shardlm.layers.lora import rank_axis
from shardlm.layers.param import Execution

Tree = Any


def write_part(rank: int, part: Tree, adapters: Tree, number: jax.Array) -> Tree:
    """Adapters, each of this rank, with `part` in place of the one of this number, from 1. Both are trees of the same
    leaves."""
    start = (number - 1) * rank

    def put_in(path, whole, own):
        return jax.lax.dynamic_update_slice_in_dim(whole, own, start, _axis(path, whole))

    return jax.tree.map_with_path(put_in, adapters, part)


def shape_of_part(adapters: Tree, execution: Execution) -> Tree:
    """What `write_part` takes as `part`: shapes, at the places of the adapters."""
    rank = execution.lora.rank // execution.adapters

    def one(path, whole):
        axis = _axis(path, whole)
        shape = (*whole.shape[:axis], rank, *whole.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, whole.dtype, sharding=whole.sharding)

    return jax.tree.map_with_path(one, adapters)


def _axis(path: tuple, whole: jax.Array) -> int:
    return rank_axis(tuple(step.key for step in path)) % whole.ndim
