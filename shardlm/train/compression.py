"""How replicas exchange what they sum over the `data` axis: exactly, in 16 or 8 bits, or as low-rank matrices, with
error feedback: what a replica could not send is added to what it sends next (https://arxiv.org/abs/1901.09847).

Everything here runs inside a shard_map that is manual over `data` (replicas.py); the other axes stay exact. When to
exchange, and what, is decided by the callers.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardlm.mesh import shard_map
from shardlm.train import powersgd

Tree = Any
Compression = Literal["none", "fp16", "bf16", "int8", "powersgd"]
"""What crosses the link between replicas:

none      float32 sums
fp16      float16; each number keeps 11 bits
bf16      bfloat16; each number keeps 8 bits, with float32's range
int8      8 bits and a float32 scale for each block of 256 numbers
powersgd  matrices as the product of two thin ones (powersgd.py), the rest in float32
"""

BLOCK = 256  # numbers that share a scale: 1.6% more bytes, and an outlier costs precision to 255 others only
FP16_MAX = 65504.0
_CODES = ("fp16", "bf16", "int8")
_FLOAT = {"fp16": jnp.float16, "bf16": jnp.bfloat16}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangeState:
    """residual, what each replica has yet to send: float32 [R, ...] like the tree, a leaf None where sums are exact;
    basis, PowerSGD's last right factors, alike on all replicas, a leaf None where there is none."""

    residual: Tree
    basis: Tree


EXCHANGE_SPECS = ExchangeState(PartitionSpec("data"), PartitionSpec())  # in and out of replicas.over_data


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Sums trees over `data`.

    names  (stack_names, names) of each leaf's dimensions, as in ModelDef
    rank   of PowerSGD's factors
    """

    compression: Compression
    rank: int
    names: Tree

    def init(self, tree: Tree) -> ExchangeState:
        """The state before the first exchange of trees like this replica's one."""

        def leaf(names, a):
            if a is None or not self._lossy(names, a):
                return None, None
            basis = powersgd.first_basis(a, names, self.rank) if self.compression == "powersgd" else None
            return jnp.zeros_like(a, dtype=jnp.float32)[None], basis

        return ExchangeState(*self._each(leaf, 2, tree))

    def __call__(self, tree: Tree, state: ExchangeState) -> tuple[Tree, ExchangeState]:
        """The sum over replicas of a float32 tree; a leaf None is left out. Over the steps, what all replicas sent and
        what they still keep add up to what they were given."""
        whole = self._each(lambda _, a, r: (_plus(a, r),), 1, tree, state.residual)[0]
        if self.compression in _CODES:
            leaves, structure = jax.tree.flatten(whole)
            total, left = (structure.unflatten(parts) for parts in encoded_sums(leaves, self.compression))
            basis = state.basis
        else:
            total, left, basis = self._each(self._sum, 3, whole, state.residual, state.basis)
        kept = self._each(lambda _, a, old, new: (old if a is None or old is None else new[None],), 1, tree,
                          state.residual, left)[0]  # fmt: skip
        return total, ExchangeState(kept, basis)

    def _sum(self, names, a, residual, basis):
        """One leaf's sum, what is left of it, and the next basis."""
        if a is None:
            return None, None, basis
        if residual is None:
            return powersgd.exact_sum(a), None, None
        return powersgd.low_rank_sum(a, basis, names)

    def bytes_sent(self, tree: Tree, replicas: int) -> float:
        """Bytes that one device sends to other replicas to sum a tree of this form, computed from its shapes and
        shardings: a ring all-reduce, or an all-to-all and an all-gather, each of (R - 1) / R of the numbers."""

        def leaf(names, a):
            local = math.prod(a.sharding.shard_shape(a.shape))
            if self.compression == "powersgd" and self._lossy(names, a):
                return (4 * powersgd.numbers_sent(a, names, self.rank),)
            if self.compression in ("none", "powersgd"):
                return (4 * local,)
            padded = math.ceil(local / (replicas * BLOCK)) * replicas * BLOCK
            return ({"fp16": 2, "bf16": 2, "int8": 1 + 4 / BLOCK}[self.compression] * padded,)

        return 2 * (replicas - 1) / replicas * sum(jax.tree.leaves(self._each(leaf, 1, tree)))

    def _lossy(self, names, a) -> bool:
        if self.compression == "powersgd":
            return powersgd.pays(a.shape, names, self.rank)
        return self.compression != "none"

    def _each(self, f, outputs: int, *trees: Tree) -> tuple[Tree, ...]:
        """`f(names, leaf of each tree, ...)` for every leaf, None too; its outputs as that many trees."""
        results = jax.tree.map(f, self.names, *trees, is_leaf=is_names)

        def output(i):
            return jax.tree.map(lambda _, result: result[i], self.names, results, is_leaf=is_names)

        return tuple(map(output, range(outputs)))


def is_names(leaf: Any) -> bool:
    """Whether a node of a tree of names is a leaf: (stack_names, names)."""
    return isinstance(leaf, tuple) and len(leaf) == 2 and all(isinstance(part, tuple) for part in leaf)


def _plus(a: jax.Array | None, residual: jax.Array | None) -> jax.Array | None:
    return a if a is None or residual is None else a + residual[0]


def encoded_sums(leaves: list[jax.Array], compression: Compression) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sums over `data` of float32 arrays, and what of each this replica did not send; both like the arrays.

    Each replica receives its part of everyone's numbers encoded (all-to-all), sums them in float32, and hands the sums
    on encoded (all-gather): nothing but the code crosses the link, and the error of a sum is kept by its sender. All
    arrays go together, since each message over a slow link waits for its round trip.
    """
    specs = [jax.typeof(a).sharding.spec for a in leaves]

    def local(arrays):
        replicas, me = jax.lax.axis_size("data"), jax.lax.axis_index("data")
        flat = [_parts(a, replicas) for a in arrays]
        codes = [encode(a, compression) for a in flat]
        received = _together(codes, lambda a: jax.lax.all_to_all(a, "data", split_axis=0, concat_axis=0))
        totals = [jnp.sum(decode(code, compression), axis=0, keepdims=True) for code in received]
        again = [encode(total, compression) for total in totals]
        gathered = _together(again, lambda a: jax.lax.all_gather(a, "data", axis=0, tiled=True))
        mine = jnp.arange(replicas)[:, None] == me
        left = [
            a - decode(code, compression) + jnp.where(mine, total - decode(sent, compression), 0)
            for a, code, total, sent in zip(flat, codes, totals, again, strict=True)
        ]
        whole = [decode(code, compression) for code in gathered]
        return tuple([_like(p, a) for p, a in zip(parts, arrays, strict=True)] for parts in (whole, left))

    return shard_map(local, in_specs=(specs,), out_specs=(specs, specs))(leaves)


def _parts(a: jax.Array, replicas: int) -> jax.Array:
    """Any array as [R, m], m whole blocks, padded with zeros."""
    part = math.ceil(a.size / (replicas * BLOCK)) * BLOCK
    return jnp.pad(a.reshape(-1), (0, replicas * part - a.size)).reshape(replicas, part)


def _like(parts: jax.Array, a: jax.Array) -> jax.Array:
    return parts.reshape(-1)[: a.size].reshape(a.shape)


def _together(codes: list[list[jax.Array]], move) -> list[list[jax.Array]]:
    """Codes after `move`, which is called once for all arrays of a kind, [R, blocks of all, ...]."""
    ends = np.cumsum([code[0].shape[1] for code in codes])[:-1]
    moved = [jnp.split(move(jnp.concatenate(kind, axis=1)), ends, axis=1) for kind in zip(*codes, strict=True)]
    return [list(code) for code in zip(*moved, strict=True)]


def encode(x: jax.Array, compression: Compression) -> list[jax.Array]:
    """float32 [n, m], m whole blocks, as arrays [n, blocks, ...] that are sent. What is not finite stays so."""
    x = x.reshape(x.shape[0], -1, BLOCK)
    if compression == "int8":
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        return [jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale]
    if compression == "fp16":
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -FP16_MAX, FP16_MAX), x)
    # As integers, since compilers may widen 16-bit floats that they only pass on (XLA:CPU does).
    return [jax.lax.bitcast_convert_type(x.astype(_FLOAT[compression]), jnp.uint16)]


def decode(code: list[jax.Array], compression: Compression) -> jax.Array:
    """What `encode` made, as float32 [n, m]."""
    if compression == "int8":
        q, scale = code
        return (q.astype(jnp.float32) * scale).reshape(q.shape[0], -1)
    x = jax.lax.bitcast_convert_type(code[0], _FLOAT[compression]).astype(jnp.float32)
    return x.reshape(x.shape[0], -1)
