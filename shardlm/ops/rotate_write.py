"""Queries, keys and values of few tokens on their way to attention over pages: what products leave in parts is added
up, queries and keys have their norm and rotation, and keys and values are written into pages. On GPUs that is one
kernel (rotate_write_kernel.py); to XLA it is three, and two more with norms, each about as long as it takes to start
one."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.ops import paged_attention
from shardlm.ops.few_rows import Norm, Sums
from shardlm.ops.norm import rms_norm
from shardlm.ops.rope import rotated
from shardlm.rules import Table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unrotated:
    """Of a step's tokens, by the names q, k and v.

    sums    what projections make, [splits, B, T, N, H] of queries and [splits, B, T, K, H] of keys and values
    biases  [N, H] and [K, H], of all three or of none
    norms   of each head of queries and of keys, or of none
    sines   those of the rotation and its cosines, float32 [B, T, 1, dim / 2], an even number of which pages of 8 bits
            take two at a time; None: nothing is rotated
    """

    sums: dict[str, Sums]
    biases: dict[str, jax.Array]
    norms: dict[str, Norm]
    sines: tuple[jax.Array, jax.Array] | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of queries, [B, T, N, H]."""
        return self.sums["q"].parts.shape[1:]

    def specs(self, act: Table, kv_name: str) -> "Unrotated":
        """How it is split, in its own form, where the kv heads are split as `kv_name` says."""
        names = {"q": "heads", "k": kv_name, "v": kv_name}
        tokens, whole = act.spec("batch", "whole_seq"), jax.sharding.PartitionSpec()
        of_rows = act.spec(None, "batch", "whole_seq")

        def sums(name: str, one: Sums) -> Sums:
            parts = act.spec(None, "batch", "whole_seq", names[name], "head_dim")
            return dataclasses.replace(one, parts=parts, squares=None if one.squares is None else of_rows)

        return Unrotated(
            {name: sums(name, one) for name, one in self.sums.items()},
            {name: act.spec(names[name], "head_dim") for name in self.biases},
            {name: dataclasses.replace(norm, scale=whole) for name, norm in self.norms.items()},
            self.sines and (tokens, tokens),
        )


def fits(pages: dict[str, jax.Array]) -> bool:
    """Whether the kernel writes into such pools: of keys and of values, not of latents or of bits for XLA."""
    kinds = jnp.floating, jnp.int16  # of which an element has two numbers
    return {"k", "v"} <= set(pages) and all(
        any(jnp.issubdtype(pool.dtype, kind) for kind in kinds) for pool in pages.values()
    )


def reference(
    made: Unrotated,
    pages: dict[str, jax.Array],
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(queries [B, T, N, H], the pools with keys and values written). Pools are [pages, page_size, K, H], and the rest
    is as in `paged_attention.write_pages`."""
    found = {}
    for name, sums in made.sums.items():
        a = sums.taken
        a = a + made.biases[name] if made.biases else a
        if name in made.norms:
            norm = made.norms[name]
            a = rms_norm(a, norm.scale + norm.offset, norm.eps)
        found[name] = rotated(a, *made.sines) if made.sines and name != "v" else a
    q = found.pop("q")
    return q, paged_attention.write(pages, found, page_table, positions, valid, first_page, implementation="pallas")


def run(
    made: Unrotated, pages: dict[str, jax.Array], *where: jax.Array, interpret: bool = False
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """As the reference, in one kernel, rounded once and into pools where they lie."""
    from shardlm.ops.rotate_write_kernel import pallas  # Pallas takes a while to import

    return pallas(made, pages, *where, interpret=interpret)
