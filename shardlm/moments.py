"""An optimizer's moments in fewer bytes, around any optax transformation: in bfloat16, or in 8 bits with a scale for
each block (https://arxiv.org/abs/2110.02861). An update reads them as float32 and rounds what it writes.

Rounding is stochastic: to the nearest number that there is, a second moment stands still once a step changes it by less
than half of what lies between two (b2=0.999 in bfloat16), and what only now and then grows it makes it too large. The
bits are a hash of the update's number, the parameter and the place in it, so that they are the same on every mesh.

A block lies inside of what any rules leave together on a device, so that scales are split as the weight is and no
collective is needed for them.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from shardlm.errors import ShardlmError

Moments = Literal["float32", "bfloat16", "int8"]
SMALL = 4096  # numbers of a weight below which its moments stay float32
BLOCK, LEAST = 128, 16  # numbers of a block: the most, and the fewest that a scale is kept for
# Over how many devices a dimension may be split without a block being so: those that no rules split, those that tensor
# does (heads that few devices have whole are split over others), those that the axes of rows and stages do. Experts are
# in blocks of their own.
WHOLE = ("head_dim", "norm", "index_heads", "latent_whole", "router", "rank", "groups")
SPLIT = ("heads", "kv_heads", "kv_heads_whole", "mlp", "expert_mlp", "vocab")
WAYS = {**dict.fromkeys(WHOLE, 1), **dict.fromkeys(SPLIT, 16)}
WAYS |= dict.fromkeys(("embed", "expert_embed", "latent"), 1024)
LOWEST = 4  # of the codes of squares, unless all of a block are zero: a root 2.5e-4 of the largest
SQUARES = "nu"  # the name of second moments in optax's states

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A moment in 8 bits: codes like the weight, int8 or, of squares, uint8; scales float32, the largest of each block.

    A number is a power of its code's share of the largest code, times the scale: the third power, with the code's
    sign, or of squares the fourth, so that neighbours differ by a like share over decades of gradients. Squares have no
    codes below LOWEST: an update divides by their root, of which the next code has four times as much as the first,
    and first moments need smaller numbers than those roots, since rounding up makes many of them one step above zero.
    """

    codes: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """count int32, updates made; keys, of each weight with such moments uint32 for each of its layers; state, the
    transformation's own with Blocks or bfloat16 in the place of moments."""

    count: jax.Array
    keys: Tree
    state: Tree


def kind_of(kind: Moments, names: tuple[str, ...], shape: tuple[int, ...]) -> Moments:
    """What a weight's moments are held in, where `kind` is asked for; names and sizes of its own dimensions."""
    if kind == "float32" or math.prod(shape) < SMALL:
        return "float32"
    return kind if kind == "bfloat16" or math.prod(block(names, shape)) >= LEAST else "bfloat16"


def block(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of a block in each dimension: it goes as far as it may along those that are split over fewest devices, of
    these the last ones first. Of what may be split a block has a power of two, so that odd numbers of devices share
    blocks too."""
    found, room = [1] * len(shape), BLOCK
    for i in sorted(range(len(shape)), key=lambda i: (WAYS.get(names[i], 0), -i)):
        ways, n = WAYS.get(names[i]), shape[i]
        if ways is None:
            continue
        if ways == 1:
            found[i] = max(one for one in range(1, room + 1) if n % one == 0)
        else:
            own = n // math.gcd(n, ways)
            found[i] = min(own & -own, 1 << (room.bit_length() - 1))
        room //= found[i]
    return tuple(found)


def check_split(path: str, names: tuple[str, ...], shape: tuple[int, ...], ways: Sequence[int]) -> None:
    """Raises ShardlmError where a weight that is split so, dimension by dimension, has blocks on two devices."""
    if kind_of("int8", names, shape) != "int8":
        return
    for name, n, own, many in zip(names, shape, block(names, shape), ways, strict=True):
        if n // many % own:
            raise ShardlmError(
                f"optim.moments=int8: {path} has blocks of {own} along {name}={n}, and {many} devices would share "
                f"some; split it over a divisor of {n // own}, or set optim.moments to bfloat16"
            )


def held(tx: optax.GradientTransformation, kinds: Tree, names: Tree) -> optax.GradientTransformation:
    """`tx` with moments of each weight as `kinds` asks; `names` has (stack_names, names) of each."""
    of = _by_path(kinds), _by_path(names, tuple)

    def init(params: Tree) -> Held:
        shapes = {path: a.shape[len(of[1][path][0]) :] for path, a in _by_path(params).items()}
        found = {path: kind_of(of[0][path], of[1][path][1], shape) for path, shape in shapes.items()}

        def one(path, a):
            own = _own(path, found)
            if own is None or found[own] == "float32":
                return a
            if found[own] == "bfloat16":
                return a.astype(jnp.bfloat16)
            return _empty(a, block(of[1][own][1], shapes[own]), _is_squares(path))

        def key(path, a):
            own = _words(path)
            stack = a.shape[: len(of[1][own][0])]
            first = zlib.crc32("/".join(map(str, own)).encode())
            own_keys = np.uint32(first) + np.arange(math.prod(stack), dtype=np.uint32).reshape(stack)
            return None if found[own] == "float32" else jnp.asarray(own_keys)

        keys = jax.tree_util.tree_map_with_path(key, params)
        return Held(jnp.int32(0), keys, jax.tree_util.tree_map_with_path(one, tx.init(params)))

    def update(grads, state: Held, params):
        def moved(grads, held):
            return tx.update(grads, jax.tree.map(_read, held, is_leaf=_is_blocks), params)

        # Twice, for scales and for codes: XLA would keep moments in float32 between these, all of them at once.
        largest = jax.tree.map(_largest, state.state, moved(grads, state.state)[1], is_leaf=_is_blocks)
        old, largest = jax.lax.optimization_barrier((state.state, largest))
        updates, new = moved(grads, old)
        keys = _by_path(state.keys)

        def written(path, old, new, largest):
            if new.ndim == 0 or not (_is_blocks(old) or old.dtype == jnp.bfloat16):
                return dataclasses.replace(old, codes=new) if _is_blocks(old) else new
            bits = _bits(keys[_own(path, keys)], state.count, new)
            bits = bits >> 16 if _is_squares(path) else bits & 0xFFFF
            return _in_blocks(new, old, largest, bits) if _is_blocks(old) else _in_bfloat16(new, bits)

        new = jax.tree_util.tree_map_with_path(written, old, new, largest, is_leaf=_is_blocks)
        return updates, Held(state.count + 1, state.keys, new)

    return optax.GradientTransformation(init, update)


def _empty(a: jax.Array, own: tuple[int, ...], squares: bool) -> Blocks:
    """Zeros like a weight in blocks of that size, its own dimensions the last ones."""
    tile = (1,) * (a.ndim - len(own)) + own
    how = {"out_sharding": _spec(a)} if _meshed() else {}
    scales = jnp.zeros(tuple(n // t for n, t in zip(a.shape, tile, strict=True)), **how)
    return Blocks(jnp.zeros_like(a, jnp.uint8 if squares else jnp.int8), scales)


def _read(a: jax.Array | Blocks) -> jax.Array:
    if not _is_blocks(a):
        return a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a
    if a.codes.ndim == 0:
        return a.codes
    codes = a.codes.astype(jnp.float32)
    if a.codes.dtype == jnp.uint8:
        return jnp.square(jnp.square(codes / 255)) * _spread(a.scales, a.codes)
    return (codes / 127) ** 3 * _spread(a.scales, a.codes)


def _largest(old: jax.Array | Blocks, x: jax.Array) -> jax.Array | None:
    """The scales of what takes the place of such blocks; None for what is in none, or has no layer's turn."""
    if not _is_blocks(old) or x.ndim == 0:
        return None
    shape, spec, inside = [], [], []
    for n, own, axes in zip(x.shape, _tile(old), _spec(x), strict=True):
        shape += [n // own, own] if own > 1 else [n]
        spec += [axes, None] if own > 1 else [axes]
        inside += [len(shape) - 1] if own > 1 else []
    return jnp.max(jnp.abs(_reshaped(x, shape, spec)), axis=inside)


def _in_blocks(x: jax.Array, old: Blocks, scales: jax.Array, bits: jax.Array) -> Blocks:
    """x rounded to one of the two numbers beside it, so that its mean is x."""
    squares = old.codes.dtype == jnp.uint8
    share = jnp.abs(x) * _spread(1 / jnp.where(scales > 0, scales, 1), x)
    top, root, power = (255, lambda a: jnp.sqrt(jnp.sqrt(a)), 4) if squares else (127, jnp.cbrt, 3)
    below = jnp.minimum(jnp.floor(root(share) * top), top - 1)
    low, high = ((below + i) / top for i in (0, 1))
    part = (share - low**power) / (high**power - low**power)
    codes = below + (bits.astype(jnp.float32) < part * 2**16)
    # No comparison with zero: XLA would keep the zeros that gradients are summed in for it.
    codes = jnp.maximum(codes, LOWEST) if squares else jnp.sign(x) * codes
    return Blocks(codes.astype(old.codes.dtype), scales)


def _in_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    whole = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits
    return jax.lax.bitcast_convert_type((whole >> 16).astype(jnp.uint16), jnp.bfloat16)


def _bits(key: jax.Array, count: jax.Array, like: jax.Array) -> jax.Array:
    """32 bits for each number of a weight, of whose layers `key` has one each."""
    place = jnp.zeros((), jnp.uint32)
    own = like.ndim - key.ndim
    shape, spec, stride = like.shape[-own:], _spec(like)[-own:], 1
    for i in reversed(range(own)):
        how = {"out_sharding": PartitionSpec(*spec)} if _meshed() else {}
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, i, **how) * np.uint32(stride % 2**32)
        stride *= shape[i]
    first = _mixed(key + count.astype(jnp.uint32) * np.uint32(0x9E3779B9))
    return _mixed(first.reshape(first.shape + (1,) * own) + place)


def _mixed(x: jax.Array) -> jax.Array:
    """A hash of 32 bits, each of which depends on all (https://github.com/skeeto/hash-prospector, triple32's first)."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def _tile(a: Blocks) -> tuple[int, ...]:
    return tuple(n // m for n, m in zip(a.codes.shape, a.scales.shape, strict=True))


def _spread(scales: jax.Array, like: jax.Array) -> jax.Array:
    """Each block's for each of its numbers."""
    shape, spec = [], []
    for n, m, axes in zip(like.shape, scales.shape, _spec(like), strict=True):
        if n > m:
            scales = jnp.expand_dims(scales, len(shape) + 1)
        shape += [m, n // m] if n > m else [n]
        spec += [axes, None] if n > m else [axes]
    how = {"out_sharding": PartitionSpec(*spec)} if _meshed() else {}
    return _reshaped(jnp.broadcast_to(scales, shape, **how), like.shape, _spec(like))


def _reshaped(x: jax.Array, shape, spec) -> jax.Array:
    return x.reshape(shape, out_sharding=PartitionSpec(*spec)) if _meshed() else x.reshape(shape)


def _spec(a: jax.Array) -> PartitionSpec:
    spec = jax.typeof(a).sharding.spec
    return PartitionSpec(*spec, *[None] * (a.ndim - len(spec)))


def _meshed() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


# Trees by path


def _is_blocks(a: Any) -> bool:
    return isinstance(a, Blocks)


def _words(path: tuple) -> tuple:
    return tuple(getattr(part, "key", getattr(part, "idx", getattr(part, "name", None))) for part in path)


def _by_path(tree: Tree, leaf: type | None = None) -> dict[tuple, Any]:
    is_leaf = (lambda a: isinstance(a, leaf)) if leaf else None
    return {_words(path): a for path, a in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def _own(path: tuple, known: dict[tuple, Any]) -> tuple | None:
    """The parameter's path at the end of one in a state, if it is one's."""
    words = _words(path)
    return next((words[i:] for i in range(len(words)) if words[i:] in known), None)


def _is_squares(path: tuple) -> bool:
    return SQUARES in _words(path)
