"""Attention over pages whose positions are split over devices that would each have a copy of them: latents, and kv
heads fewer than devices. Of R devices each has 1/R of the positions of every page, so that page numbers, and all that
the host knows of them, are as they were (decode context parallelism, https://docs.vllm.ai/en/latest/serving/
context_parallel_deployment/).

A device's positions are those of the text in order, so that what it has of the first n of a text is the first of its
own, and attention over its part is attention over pages that are smaller. Few tokens a row: all queries go to all
devices, and what each finds, with its log-partition, to the device of the head. Many: pages come whole to all devices,
a block at a time, and each attends with its own heads, since a chunk's queries and results are larger than latents are.
Of a window of whole pages a device has equally many positions wherever it ends, so that it sees a smaller window.
What runs here is one device's part.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.ops import paged_attention
from shardlm.ops.attention import MASKED
from shardlm.ops.attention_pair import merge
from shardlm.ops.chunk_attention import block_positions
from shardlm.ops.kv_format import SCALE
from shardlm.ops.paged_attention import PagedAttention
from shardlm.ops.sinks import with_sinks

# Of a row: a decode step, or one that verifies drafts. DeepSeek V3's queries and results of a token are 279 kB in all
# heads, the latent of a position 1.2 kB (counted): from 8 tokens on, texts of less than 2,000 positions are less.
FEW_TOKENS = 8
# Of the first block, in all rows, which is gathered however short texts are: NVLink moves so much in some 20 us, and
# one more block takes 60, for its merge and for the host (counted, 2,048 tokens of DeepSeek V3 on eight H200).
FIRST_BYTES = 8 * 2**20


@dataclasses.dataclass(frozen=True)
class SplitPages:
    """axes    of the mesh, over which positions are split and heads too
    ways    devices over them
    orders  of the dimensions of each pool (kv_format.py)
    implementation  of attention over the pages of one device
    """

    axes: tuple[str, ...]
    ways: int
    orders: Mapping[str, str]
    implementation: PagedAttention

    def size(self, pages: Mapping[str, jax.Array]) -> int:
        """Positions of a page that this device has."""
        return pages["k"].shape[self.orders["k"].index("s")]

    def place(self, positions: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """(where positions of texts are among this device's, whether they are), of the positions' shape."""
        slot = positions % (size * self.ways) - jax.lax.axis_index(self.axes) * size
        return positions // (size * self.ways) * size + positions % size, (slot >= 0) & (slot < size)

    def count(self, positions: jax.Array, size: int) -> jax.Array:
        """How many positions of a text up to these, themselves included, this device has."""
        pages, rest = jnp.divmod(positions + 1, size * self.ways)
        return pages * size + jnp.clip(rest - jax.lax.axis_index(self.axes) * size, 0, size)

    def attend(
        self,
        q: jax.Array,
        pages: Mapping[str, jax.Array],
        page_table: jax.Array,
        positions: jax.Array,
        first_page: jax.Array,
        sinks: jax.Array | None,
        head: jax.Array | None,
        options: Mapping[str, Any],
        window: int = 0,
        until: jax.Array | None = None,
    ) -> jax.Array:
        """Each query attends to the positions of its row up to its own, int32 [B, T], or to `until`, of which it sees
        the last `window`, whole pages, counted from its own (0: all). q [B, T, N, H] of this device's heads, `head` the
        kv head that they share, None: each has its own; returns [B, T, N, Hv]. `options` as of
        `paged_attention.blocked`."""
        seen = _Seen(positions if until is None else until, positions, window)
        if q.shape[1] <= FEW_TOKENS:
            out, lse = self._few(q, pages, page_table, seen, first_page, options)
        else:
            out, lse = self._many(q, pages, page_table, seen, first_page, dict(options) | {"head": head})
        return with_sinks(out, lse, sinks)[0].astype(q.dtype)

    def _few(self, q, pages, page_table, seen: "_Seen", first_page, options) -> tuple[jax.Array, jax.Array]:
        every = jax.lax.all_gather(q, self.axes, axis=2, tiled=True)  # [B, T, all N, H]
        seen = seen.through(lambda positions: self.count(positions, self.size(pages)) - 1, seen.window // self.ways)
        out, lse = self._by(every, pages, page_table, seen, first_page, options)
        parts = _as_bits(out, lse).reshape(*q.shape[:2], self.ways, q.shape[2], -1)
        parts = jax.lax.all_to_all(parts, self.axes, split_axis=2, concat_axis=0)  # [ways, B, T, N, Hv + lse]
        outs, lses = _of_bits(parts, out.dtype, out.shape[-1])
        largest = lses.max(axis=0)
        weights = jnp.exp(lses - largest)
        total = weights.sum(axis=0)
        merged = (outs * weights[..., None]).sum(axis=0)  # no product of matrices, which a GPU rounds to 19 bits
        return merged / total[..., None], largest + jnp.log(total)

    def _many(self, q, pages, page_table, seen: "_Seen", first_page, options) -> tuple[jax.Array, jax.Array]:
        (B, T), page_size = q.shape[:2], self.size(pages) * self.ways
        nbytes = sum(a.nbytes // a.shape[0] for a in pages.values()) // self.size(pages)
        if seen.window:  # of a row's pages those that its tokens see
            width = min(page_table.shape[1], (T + seen.window - 2) // page_size + 2)
            before = jnp.maximum(seen.positions.min(axis=1, keepdims=True) - seen.window + 1, 0) // page_size
            page_table = jnp.take_along_axis(page_table, before + jnp.arange(width), axis=1, mode="clip")
            seen, T = seen.through(lambda positions: positions - before * page_size), width * page_size
        width = page_table.shape[1]
        first, count = (min(width, n // page_size) for n in gathered_positions(T, B, nbytes, page_size))  # in pages
        table = jnp.pad(page_table, ((0, 0), (0, (first - width) % count)))

        def of_block(begin, count: int):
            some = jax.lax.dynamic_slice_in_dim(table, begin, count, axis=1).reshape(-1) + first_page
            held = {
                name: jax.lax.all_gather(a[some], self.axes, axis=self.orders[name].index("s"), tiled=True)
                for name, a in pages.items()
            }
            own = jnp.arange(B * count, dtype=jnp.int32).reshape(B, count)
            here = seen.through(lambda positions: positions - begin * page_size)
            if width > count:
                here = here.up_to(count * page_size - 1)
            return self._by(q, held, own, here, jnp.int32(0), options)

        found = of_block(jnp.int32(0), first)
        if width == first:
            return found
        stop = -(-(jnp.max(seen.last) // page_size + 1 - first) // count)
        return jax.lax.fori_loop(0, stop, lambda i, found: merge(found, of_block(first + i * count, count)), found)

    def _by(self, q, pages, page_table, seen: "_Seen", first_page, options) -> tuple[jax.Array, jax.Array]:
        """(out, float32 but of few tokens, log-partition) over pages that are at hand; of no weight where a query sees
        nothing there."""
        attend = paged_attention.implementation(self.implementation)
        options = dict(options) | {f"{name}_scale": pages.get(name + SCALE) for name in ("k", "v")}
        at = jnp.maximum(seen.last, 0)
        if seen.window:
            options["window"] = seen.window
            if seen.last is not seen.positions:
                at, options["until"] = jnp.maximum(seen.positions, 0), at
        out, lse = attend(q, pages["k"], pages.get("v"), page_table, at, first_page, **options, with_lse=True)
        there = seen.any[..., None]
        out = jnp.where(there[..., None], out, 0)
        return out if q.shape[1] <= FEW_TOKENS else out.astype(jnp.float32), jnp.where(there, lse, MASKED)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Which positions each query sees, of some: up to `last` int32 [B, T], and not those that lie `window` or more
    before its own, `positions` (0: all). Negative: before the first of them."""

    last: jax.Array
    positions: jax.Array
    window: int

    def through(self, place: Callable[[jax.Array], jax.Array], window: int | None = None) -> "_Seen":
        """The same of others, among which positions lie there."""
        last = place(self.last)
        own = last if self.positions is self.last else place(self.positions)
        return _Seen(last, own, self.window if window is None else window)

    def up_to(self, most: int) -> "_Seen":
        last = jnp.minimum(self.last, most)
        return _Seen(last, self.positions if self.window else last, self.window)

    @property
    def any(self) -> jax.Array:
        there = self.last >= 0
        return there & (self.last > self.positions - self.window) if self.window else there


def gathered_positions(tokens: int, rows: int, nbytes: int, page_size: int) -> tuple[int, int]:
    """(of a text's first block that chunks of so many tokens in each row gather, of each further one), whole pages; a
    position takes `nbytes` of all devices together. A chunk that begins a text gathers little else than itself."""
    most = max(1, block_positions(rows, nbytes) // page_size)
    first = min(most, -(-max(tokens, FIRST_BYTES // (rows * nbytes)) // page_size))
    return first * page_size, most * page_size


def _as_bits(out: jax.Array, lse: jax.Array) -> jax.Array:
    """Both as one array to send, out [..., H] and lse float32 [...]: bits, which nothing on the way rounds."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[out.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(lse if out.dtype.itemsize == 2 else lse[..., None], kind)
    return jnp.concatenate([jax.lax.bitcast_convert_type(out, kind), bits], axis=-1)


def _of_bits(parts: jax.Array, dtype: jnp.dtype, width: int) -> tuple[jax.Array, jax.Array]:
    """What `_as_bits` took, out in float32."""
    bits = parts[..., width:]
    lse = jax.lax.bitcast_convert_type(bits if bits.shape[-1] == 2 else bits[..., 0], jnp.float32)
    return jax.lax.bitcast_convert_type(parts[..., :width], dtype).astype(jnp.float32), lse
