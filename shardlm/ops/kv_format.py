"""What a cache of keys and values holds its numbers in: the dtype that is computed in (auto), bfloat16, or 8 bits each:

fp8   e4m3, as they are, values beyond 448 cut to it (scale 1, as vLLM's default)
int8  with a scale for each token and head, in pages of their own: the entry's name with "_scale" behind it

Where a token is on three axes is held in int32 whatever the rest is, as an entry whose name ends in "_axes".

Two 8-bit numbers are held as one int16. Pallas's Triton lowering counts elements in signed 32 bits in arrays of up to
4 GiB, so that of a pool of bytes it would read what lies beyond 2 GiB from wrong places; and Triton converts no fp8 on
an A100, where its bits are taken apart instead (paged_kernel.py).

Where XLA itself gathers and scatters pages (`blocked`), bfloat16 is held as its bits, uint16: XLA:CPU scatters no
bfloat16 and converted the whole pool to float32 and back in every layer. And heads stand before positions, of keys
their numbers too, so that neither product of attention has an operand to turn around. Of 8 and 32 rows of 768 x 12
layers at position 160 a decode step takes 27.2 and 61.5 ms so, and 28.5 and 62.9 with keys as values (two quiet cores).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from shardlm.errors import ShardlmError

KvFormat = Literal["auto", "bfloat16", "fp8", "int8"]
SCALE, AXES = "_scale", "_axes"
_LARGEST = {"fp8": 448.0, "int8": 127.0}

Entry = tuple[tuple[int, int], str, jnp.dtype]  # (K, numbers a head), name of the K dimension, dtype


def held(
    entries: dict[str, tuple[tuple[int, int], str]], how: KvFormat, dtype: jnp.dtype, paged_attention: str
) -> dict[str, Entry]:
    """The pools of a layer's cache entries ({name: ((K, H), name of the K dimension)}), as this implementation of
    attention over pages reads them. Raises ShardlmError for heads that cannot be held so."""
    found: dict[str, Entry] = {}
    for name, ((heads, width), kv_name) in entries.items():
        if name.endswith(AXES):
            found[name] = (heads, width), kv_name, jnp.dtype(jnp.int32)
            continue
        if how in ("auto", "bfloat16"):
            own = jnp.dtype(dtype if how == "auto" else jnp.bfloat16)
            as_bits = own == jnp.bfloat16 and paged_attention == "blocked"
            found[name] = (heads, width), kv_name, jnp.dtype(jnp.uint16) if as_bits else own
            continue
        if width % 2:
            raise ShardlmError(f"kv_cache_dtype={how}: heads of {width} numbers are not in pairs; choose auto")
        found[name] = (heads, width // 2), kv_name, jnp.dtype(jnp.int16)
        if how == "int8":
            found[name + SCALE] = (heads, 1), kv_name, jnp.dtype(jnp.float32)
    return found


def order_of(name: str, dtype: jnp.dtype, paged_attention: str) -> str:
    """The dimensions of a pool in their order: p pages, s positions of a page, k kv heads, h numbers of a head."""
    if paged_attention != "blocked":
        return "pskh"
    return "pkhs" if name == "k" and dtype != jnp.int16 else "pksh"  # packed numbers are unpacked along the last


def pool_shape(order: str, pages: int, page_size: int, heads: int, width: int) -> tuple[int, ...]:
    """Of a pool with its dimensions in this order."""
    sizes = {"p": pages, "s": page_size, "k": heads, "h": width}
    return tuple(sizes[letter] for letter in order)


def pool_names(order: str, kv_name: str) -> tuple[str | None, ...]:
    """The names of its dimensions (rules.py); `kv_name` is the heads'."""
    names = {"p": "pages", "s": "slots", "k": kv_name, "h": "head_dim"}
    return tuple(names[letter] for letter in order)


def parts_of_page(pool: jax.Array, order: str, heads: int, width: int) -> int:
    """Into how many parts a page divides whose layer has so many kv heads of `width` numbers: layers whose heads differ
    share pools, in which a page belongs to one of them, or a part of it, so that its numbers may lie as that layer
    has them."""
    return pool.size // pool.shape[0] // pool.shape[order.index("s")] * numbers_each(pool) // (heads * width)


def as_heads(pool: jax.Array, order: str, heads: int, parts: int) -> jax.Array:
    """A pool as pages of so many kv heads, each a part of one that was: the same bytes."""
    pages, page_size = pool.shape[0], pool.shape[order.index("s")]
    width = pool.size // (pages * parts * page_size * heads)
    return pool.reshape(pool_shape(order, pages * parts, page_size, heads, width))


def numbers_each(pool: jax.Array) -> int:
    """Numbers in one element of a pool."""
    return 2 if pool.dtype == jnp.int16 else 1


def to_bits(new: jax.Array) -> jax.Array:
    """Numbers rounded to bfloat16, as uint16."""
    return jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `to_bits` took, rounded. They are the upper half of a float32's bits: a shift, which XLA:CPU fuses with
    the gather before it."""
    if dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)


def packed(new: jax.Array, how: KvFormat) -> tuple[jax.Array, jax.Array | None]:
    """new [..., H] as int16 [..., H / 2] and, of int8, the scale float32 [..., 1]."""
    new, scale = new.astype(jnp.float32), None
    if how == "int8":
        largest = jnp.max(jnp.abs(new), axis=-1, keepdims=True)
        scale = scale_of(largest)
        small = jnp.round(new / scale).astype(jnp.int8)
    else:
        small = jnp.clip(new, -_LARGEST["fp8"], _LARGEST["fp8"]).astype(jnp.float8_e4m3fn)
    pairs = small.reshape(*small.shape[:-1], small.shape[-1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.int16), scale


def scale_of(largest: jax.Array) -> jax.Array:
    """Of whole numbers of 8 bits, for numbers up to `largest`."""
    return jnp.maximum(largest, 1e-30) / _LARGEST["int8"]


def unpacked(words: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """What `packed` took, rounded: words int16 [..., H / 2] -> [..., H]."""
    pairs = jax.lax.bitcast_convert_type(words, jnp.float8_e4m3fn if scale is None else jnp.int8)
    small = pairs.reshape(*words.shape[:-1], 2 * words.shape[-1]).astype(jnp.float32)
    return (small if scale is None else small * scale).astype(dtype)


def numbers_of(held: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Pages [..., K, H], as a pool holds them, in the dtype that is computed in."""
    if held.dtype == jnp.uint16:
        return from_bits(held, dtype)
    return held.astype(dtype) if numbers_each(held) == 1 else unpacked(held, scale, dtype)
