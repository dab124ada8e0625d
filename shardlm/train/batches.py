"""Carries a batch from the loader's arrays on each process to one global array over the mesh."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding


def local_rows(sharding: NamedSharding, global_batch: int, seq_len: int) -> tuple[int, ...]:
    """Rows of the global batch that this process's devices hold, ascending. Processes may share rows."""
    held = sharding.addressable_devices_indices_map((global_batch, seq_len)).values()
    return tuple(sorted({row for index in held for row in range(*index[0].indices(global_batch))}))


def to_devices(
    batch: Mapping[str, np.ndarray], rows: tuple[int, ...], sharding: NamedSharding, global_batch: int
) -> dict[str, jax.Array]:
    """Arrays [len(rows), T] of this process -> global arrays [global_batch, T]."""
    first = {row: place for place, row in enumerate(rows)}

    def place(local: np.ndarray) -> jax.Array:
        def shard(index):
            start, stop, _ = index[0].indices(global_batch)
            return local[first[start] : first[start] + stop - start, index[1]]

        return jax.make_array_from_callback((global_batch, local.shape[1]), sharding, shard)

    return {name: place(local) for name, local in batch.items()}
