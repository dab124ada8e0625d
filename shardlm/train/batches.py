"""Carries a batch from the loader's arrays on each process to one global array over the mesh."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding

PADDING = -1


def slots(counts: tuple[int, ...], global_batch: int) -> tuple[int, ...]:
    """The row of the global batch in each place of the arrays on the devices, PADDING where there is none.

    counts[i] is the number of microbatches of replica i of `data`. All replicas have as many places as the one with
    the most; microbatch j is the places j, j + max(counts), ... (step.microbatches), so that the last ones stay empty.
    """
    most, rows = max(counts), iter(range(global_batch))
    places = most * global_batch // sum(counts)
    return tuple(next(rows) if place % most < count else PADDING for count in counts for place in range(places))


def local_rows(sharding: NamedSharding, slots: tuple[int, ...], seq_len: int) -> tuple[int, ...]:
    """Rows of the global batch that this process's devices hold, ascending. Processes may share rows."""
    held = sharding.addressable_devices_indices_map((len(slots), seq_len)).values()
    return tuple(sorted({row for index in held for row in slots[index[0]]} - {PADDING}))


def to_devices(
    batch: Mapping[str, np.ndarray], rows: tuple[int, ...], sharding: NamedSharding, slots: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Arrays [len(rows), T, ...] of this process -> global arrays [len(slots), T, ...], zero where they are padded."""
    at = {row: place for place, row in enumerate(rows)}

    def place(local: np.ndarray) -> jax.Array:
        empty = np.zeros_like(local[:1])
        padded = np.concatenate([local, empty]) if PADDING in slots else local

        def shard(index):
            return padded[[at.get(row, PADDING) for row in slots[index[0]]], index[1]]

        return jax.make_array_from_callback((len(slots), *local.shape[1:]), sharding, shard)

    return {name: place(local) for name, local in batch.items()}
