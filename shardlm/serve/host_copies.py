"""The programs that move pages between the devices and the host's memory (host_pages.py), a bundle at a time, and what
they have moved: on GPUs pinned memory, each device's part beside it, on CPUs other arrays."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.host_memory import POOL
from shardlm.layers.context import SLOTTED, Pages
from shardlm.mesh import shard_map
from shardlm.serve.host_pages import BUNDLE, Move
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.state import ServeState
from shardlm.state import at_rest

HOST = "pinned_host"
Bundle = tuple[Pages, Pages]  # [layers, BUNDLE, ...] of each pool, of the model and of what drafts
NO_PAGES = np.zeros(BUNDLE, np.int32)  # an example
SPARE = 4  # bundles more that there is room for: what is written while what was in its place is still read


@dataclasses.dataclass(frozen=True)
class PageCopies:
    """The two programs for a state, or for pages alone.

    num_pages  of a pool's layer
    proposer   whose state may have pages of the same numbers
    host       whether bundles go to the host's memory, which is that of the devices on CPUs
    """

    num_pages: int
    proposer: Proposer | None
    host: bool

    def save(self, _, state: ServeState | Pages, pages: jax.Array) -> tuple[Any, Bundle]:
        """(the state, what these pages of it hold, int32 [BUNDLE])."""
        bundle = tuple(_each(self._read, pools, pages) for pools in self._pools(state))
        return state, jax.device_put(bundle, jax.memory.Space.Host) if self.host else bundle

    def load(self, _, state: ServeState | Pages, bundle: Bundle, pages: jax.Array) -> ServeState | Pages:
        """The state with a bundle in these pages, int32 [BUNDLE]; what is for page 0 is left out."""
        bundle = jax.device_put(bundle, jax.memory.Space.Device) if self.host else bundle
        pairs = zip(self._pools(state), bundle, strict=True)
        return self._with(state, *(_each(self._write, pools, new, pages) for pools, new in pairs))

    def shapes(self, state: Any, mesh: Mesh) -> dict[str, tuple[Callable, tuple]]:
        """Of each program by name, (function, example arguments)."""
        with jax.set_mesh(mesh):
            bundle = jax.eval_shape(self.save, (), state, NO_PAGES)[1]
        bundle = jax.tree.map(lambda a: self._resting(at_rest(a, mesh)), bundle)
        return {"save": (self.save, ((), state, NO_PAGES)), "load": (self.load, ((), state, bundle, NO_PAGES))}

    def _resting(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not self.host:
            return shape
        mesh = shape.sharding.mesh
        mesh = mesh if _has_memories(mesh) else mesh.abstract_mesh
        sharding = NamedSharding(mesh, shape.sharding.spec, memory_kind=HOST)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    def _read(self, pool: jax.Array, pages: jax.Array) -> jax.Array:
        rows = jnp.arange(len(pool) // self.num_pages)[:, None] * self.num_pages + pages
        return pool.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def _write(self, pool: jax.Array, new: jax.Array, pages: jax.Array) -> jax.Array:
        rows = jnp.arange(new.shape[0])[:, None] * self.num_pages + pages
        # Nowhere, and apart: XLA writes 16-bit numbers to rows that may be the same by compare-and-swap.
        nowhere = len(pool) + jnp.arange(rows.size).reshape(rows.shape)
        at = jnp.where(pages > 0, rows, nowhere)
        return pool.at[at].set(new, mode="drop", wrap_negative_indices=False, unique_indices=True)

    def _pools(self, state: ServeState | Pages) -> tuple[Pages, Pages]:
        whole = isinstance(state, ServeState)
        own, drafts = state.pages if whole else state, {}
        if whole and self.proposer and state.slots is not None:
            drafts = self.proposer.pages(state.drafts)
        return tuple({name: a for name, a in pages.items() if name not in SLOTTED} for pages in (own, drafts))

    def _with(self, state: ServeState | Pages, own: Pages, drafts: Pages) -> ServeState | Pages:
        if not isinstance(state, ServeState):
            return state | own
        state = dataclasses.replace(state, pages=state.pages | own)
        if not drafts:
            return state
        every = self.proposer.pages(state.drafts) | drafts
        return dataclasses.replace(state, drafts=self.proposer.with_pages(state.drafts, every))


def _has_memories(mesh: Mesh) -> bool:
    """Devices that are compiled for and not there have none (train/offload.py)."""
    return bool(mesh.devices.flat[0].addressable_memories())


def _each(function: Callable, pools: Pages, *rest: Any) -> Pages:
    """`function` of each pool, with what belongs to it of trees like this one and with arrays that are whole, on each
    device."""
    if not pools:
        return {}
    specs = {name: jax.typeof(a).sharding.spec for name, a in pools.items()}
    of_bundles = {name: PartitionSpec(None, *spec) for name, spec in specs.items()}
    trees = [isinstance(one, dict) for one in rest]

    def local(pools: Pages, *rest: Any) -> Pages:
        return {
            name: function(a, *(one[name] if tree else one for one, tree in zip(rest, trees, strict=True)))
            for name, a in pools.items()
        }

    inner = [of_bundles if tree else PartitionSpec() for tree in trees]
    return shard_map(local, in_specs=(specs, *inner), out_specs=specs if any(trees) else of_bundles)(pools, *rest)


class Bundles:
    """Those of one stage, by number."""

    def __init__(self):
        self._held: dict[int, Bundle] = {}

    def moved(self, programs: Mapping[Any, Callable], s: int, state: Any, moves: Sequence[Move]) -> Any:
        """The state of stage `s` after these moves, by its programs (PageCopies)."""
        for move in moves:
            pages = np.array(move.pages, np.int32)
            if move.saves:
                self._held.pop(move.bundle, None)  # the new one may lie where it was
                state, self._held[move.bundle] = programs["save", s]((), state, pages)
            else:
                state = programs["load", s]((), state, self._held[move.bundle], pages)
        return state

    def filled(self, count: int) -> None:
        """Waits for `filling`, and forgets those beyond the first `count`, whose room XLA's pool keeps."""
        jax.block_until_ready(self._held)
        self._held = {number: one for number, one in self._held.items() if number < count}

    @property
    def nbytes(self) -> int:
        """Of all of them, over all devices."""
        return sum(a.nbytes for a in jax.tree.leaves(self._held))

    def clear(self) -> None:
        self._held.clear()


def filling(count: int) -> list[Move]:
    """What makes room for so many bundles and SPARE ones, before requests come: XLA's pool grows by regions as large as
    all of it before, and tens of GiB take seconds to pin, for which all programs would wait; or are not there."""
    return [Move(True, number, (0,) * BUNDLE) for number in range(count + SPARE)]


@contextlib.contextmanager
def told_of_room(count: int) -> Iterator[None]:
    """Raises ShardlmError where XLA has no room for so many bundles."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ShardlmError(
            f"{count * BUNDLE:,} pages do not fit in the host's memory ({error}). Lower kv_offloading_size; XLA "
            f"takes up to what {POOL} says ({os.environ.get(POOL, 'not set')})"
        ) from error
