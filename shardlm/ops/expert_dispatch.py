"""Brings tokens to their experts and the results back. Owns the order of rows, the exchanges over the `expert` axis and
the choice between them; it runs on one device's arrays, inside a shard_map. Nothing here scatters: gradients of gathers
are gathers by the inverse permutation, since a scatter-add is slow on GPUs and crashes jaxlib 0.11.2 on CPUs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from shardlm.mesh import MeshSpec
from shardlm.ops.or_zero import or_zero, zeros_beside

Exchange = Literal["local", "everywhere", "gather", "all_to_all"]
Experts = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows [n, D] sorted by this device's experts, group_sizes int32 [E local]) -> [n, D]."""


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How the experts of one layer are reached.

    num_experts, ranks  experts, and devices of the expert axis they are spread over evenly, in order
    exchange            over that axis (see `choose`)
    capacity_factor     pairs that a device takes from another, as a multiple of the even share; 0: all that come, for
                        which buffers hold the worst case
    ragged              all_to_all moves only what there is (GPUs); else whole buffers, in which XLA:CPU is able to
    """

    num_experts: int
    ranks: int
    exchange: Exchange
    capacity_factor: float = 0.0
    ragged: bool = False

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ranks

    @property
    def sends_ragged(self) -> bool:
        """Whether programs have ragged all-to-alls, for which XLA has options of their own (xla_options.py)."""
        return self.ragged and self.exchange == "all_to_all"


def choose(ranks: int, top_k: int, split: bool = True, near: bool = False) -> Exchange:
    """The exchange that moves fewer bytes. With n tokens of D numbers a device, gathering all tokens of the axis and
    scattering the sums moves 2 (ranks - 1) n D; sending each pair to its expert and back 2 (ranks - 1) / ranks k n D.
    So tokens are gathered up to `top_k` devices, where each of them has work for most tokens anyway; where devices are
    `near`, whatever it moves. Where they are not split over the axis, as in decoding, every device has them: each runs
    its own experts, and only sums travel."""
    if ranks == 1:
        return "local"
    if not split:
        return "everywhere"
    return "gather" if near or ranks <= top_k else "all_to_all"


def near(mesh: MeshSpec, joined: int) -> bool:
    """Whether tokens are gathered however few experts a token goes to: `beside_weights`, on a mesh over several hosts,
    of each of which NVLink joins so many devices, where those of the expert axis lie in one host. It moves ranks /
    top_k times as much, over the fastest link; sent, tokens are one collective at a time (xla_options.py), for which
    the weights that come over the network wait, and pass through two more buffers."""
    group = mesh.size("expert", "context", "tensor")
    inside = group <= joined and joined % group == 0
    return inside and beside_weights(mesh) and mesh.size(*mesh.sizes()) > joined


def beside_weights(mesh: MeshSpec) -> bool:
    """Whether several weights may come at once as tokens go to experts (xla_options.py). Compiled for H100, seconds and
    GiB of temporaries sent and gathered: Mixtral on 32 as fsdp=4 x expert=8 2.59 and 2.22, 22.8 and 23.2; 12 layers of
    DeepSeek V3 with 4 of 64 experts a token so 0.922 and 0.819, 21.5 and 17.8. Of Mixtral 8 layers on 16 as fsdp=2 x
    expert=8, where weights come one by one, 0.616 and 0.620, 17.8 and 18.1; on 8, where none come, 0.569 and 0.558,
    21.5 and 22.9. In stages it was not compared."""
    return mesh.expert > 1 and mesh.fsdp >= 4 and mesh.pipeline == 1


def run_experts(dispatch: Dispatch, x, weights, experts, run: Experts) -> tuple[jax.Array, jax.Array]:
    """x [n, D], weights float32 [n, k], experts int32 [n, k] (num_experts for a pair that goes nowhere) -> (sum over
    k of weight times expert's output [n, D], number of dropped pairs, float32 scalar of this device). Of the exchange
    "everywhere" it is this device's part of the sum."""
    if dispatch.exchange == "all_to_all":
        return _all_to_all(dispatch, x, weights, experts, run)
    if dispatch.exchange == "local":
        out, dropped = _own_pairs(x, weights, experts, dispatch.num_experts, len(x) * experts.shape[1], run)
        return out, dropped
    gathered = dispatch.exchange == "gather"
    if gathered:
        x, weights, experts = (jax.lax.all_gather(a, "expert", tiled=True) for a in (x, weights, experts))
    first = jax.lax.axis_index("expert") * dispatch.local_experts
    mine = (experts >= first) & (experts < first + dispatch.local_experts)
    local = jnp.where(mine, experts - first, dispatch.local_experts)
    worst = len(x) * min(experts.shape[1], dispatch.local_experts)
    even = len(x) * experts.shape[1] / dispatch.ranks
    room = min(worst, math.ceil(even * dispatch.capacity_factor)) if dispatch.capacity_factor else worst
    out, dropped = _own_pairs(x, weights, local, dispatch.local_experts, room, run)
    return jax.lax.psum_scatter(out, "expert", tiled=True) if gathered else out, dropped


def _own_pairs(x, weights, experts, num_experts: int, room: int, run: Experts):
    """Pairs of tokens with this device's experts, at most `room` of them; others (expert = num_experts) add nothing."""
    n, k = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.argsort(order)  # of each pair in the sorted order
    sizes = _count(flat, num_experts)
    ends = jnp.minimum(jnp.cumsum(sizes), room)
    kept = jnp.diff(ends, prepend=0)
    y = run(take_tokens(x, order[:room], place, k), kept)
    pairs = take_back(y, order[:room], jnp.where((flat < num_experts) & (place < room), place, room))
    out = jnp.einsum("nk,nkd->nd", weights.astype(x.dtype), pairs.reshape(n, k, -1))
    return out, jnp.sum(sizes - kept).astype(jnp.float32)


def _all_to_all(dispatch: Dispatch, x, weights, experts, run: Experts):
    """Each pair travels to its expert's device and back."""
    (n, k), ranks, El = experts.shape, dispatch.ranks, dispatch.local_experts
    worst = n * min(k, El)
    room = min(worst, math.ceil(n * k / ranks * dispatch.capacity_factor)) if dispatch.capacity_factor else worst
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.argsort(order)
    sizes = _count(flat, dispatch.num_experts).reshape(ranks, El)
    starts = jnp.cumsum(sizes.sum(axis=1)) - sizes.sum(axis=1)
    ends = jnp.minimum(jnp.cumsum(sizes, axis=1), room)
    sent = jnp.diff(ends, axis=1, prepend=0)  # [ranks, El], to each device
    # Slot c of the buffer for device r holds sorted pair starts[r] + c; beyond what is sent it holds nothing.
    slot = starts[:, None] + jnp.arange(room)
    slot = jnp.where(jnp.arange(room) < ends[:, -1:], slot, n * k).reshape(-1)
    to = jnp.minimum(flat // El, ranks - 1)
    within = place - starts[to]
    back = jnp.where((flat < dispatch.num_experts) & (within < ends[to, -1]), to * room + within, ranks * room)
    pair = jnp.append(order, n * k)[slot]
    buffer = take_tokens(x, pair, back, k).reshape(ranks, room, -1)
    received = jax.lax.all_to_all(sent, "expert", 0, 0, tiled=True)  # [ranks, El], from each device
    move = functools.partial(_move, ragged=dispatch.ragged)
    rows = move(buffer, sent.sum(axis=1), received.sum(axis=1)).reshape(ranks * room, -1)
    which = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(room), side="right"))(jnp.cumsum(received, axis=1))
    one = jnp.ones((ranks * room, 1), jnp.float32)
    done, _ = _own_pairs(rows, one, which.reshape(-1, 1).astype(jnp.int32), El, ranks * room, run)
    home = move(done.reshape(ranks, room, -1), received.sum(axis=1), sent.sum(axis=1)).reshape(ranks * room, -1)
    pairs = take_back(home, pair, back)
    out = jnp.einsum("nk,nkd->nd", weights.astype(x.dtype), pairs.reshape(n, k, -1))
    return out, jnp.sum(sizes - sent).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _move(buffer, sizes, received, ragged: bool):
    """buffer [ranks, room, D], row block r for device r, of which sizes[r] rows count -> the blocks that came."""
    if not ragged:
        return jax.lax.all_to_all(buffer, "expert", 0, 0)
    ranks, room, D = buffer.shape
    offsets = jnp.arange(ranks, dtype=jnp.int32) * room
    here = jnp.full(ranks, jax.lax.axis_index("expert") * room, jnp.int32)
    flat, empty = buffer.reshape(-1, D), zeros_beside(sizes, (ranks * room, D), buffer.dtype)
    sizes, received = sizes.astype(jnp.int32), received.astype(jnp.int32)
    moved = jax.lax.ragged_all_to_all(flat, empty, offsets, sizes, here, received, axis_name="expert")
    return moved.reshape(buffer.shape)


def _move_forward(buffer, sizes, received, ragged):
    return _move(buffer, sizes, received, ragged), (sizes, received)


def _move_backward(ragged, kept, d_moved):
    sizes, received = kept
    return _move(d_moved, received, sizes, ragged), None, None


_move.defvjp(_move_forward, _move_backward)


def _count(flat, num_experts: int):
    """Pairs of each expert, int32 [num_experts]."""
    return jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_tokens(x: jax.Array, pair: jax.Array, place: jax.Array, k: int) -> jax.Array:
    """x [n, D] -> [R, D]: row r is the token of pair[r] (token * k + choice; n * k: zeros). place [n * k] is where
    each pair went (R: nowhere)."""
    return _rows(x, pair // k)


def _tokens_forward(x, pair, place, k):
    return take_tokens(x, pair, place, k), place


def _tokens_backward(k, place, d_rows):
    d_pairs = _rows(d_rows, place)
    return d_pairs.reshape(-1, k, d_rows.shape[-1]).sum(axis=1), None, None


take_tokens.defvjp(_tokens_forward, _tokens_backward)


@jax.custom_vjp
def take_back(rows: jax.Array, pair: jax.Array, place: jax.Array) -> jax.Array:
    """rows [R, D] -> [n * k, D], each pair's row; the same `pair` and `place` as for `take_tokens`."""
    return _rows(rows, place)


def _back_forward(rows, pair, place):
    return take_back(rows, pair, place), pair


def _back_backward(pair, d_pairs):
    return _rows(d_pairs, pair), None, None


take_back.defvjp(_back_forward, _back_backward)


def _rows(a, index):
    """a[index], zeros where the index is beyond the end."""
    return or_zero(index < len(a), a[jnp.minimum(index, len(a) - 1)])
