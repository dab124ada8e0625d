"""Which row of a table stands for a token and those before it: n-grams, hashed (Qwen4-Exp; transformers'
modeling_qwen4_exp.py is the definition). A hash is of 63 bits, which are computed here as two words of 32, since jax
has no integers of 64 bits unless all of a program does."""

import dataclasses
import math
from functools import reduce

import jax
import jax.numpy as jnp

_ALL = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_OF_LAYER = 10_007
LARGEST = 2**31  # rows of a table, whose numbers are int32; sizes below it leave a bit for `_modulo`


@dataclasses.dataclass(frozen=True)
class NgramHash:
    """multipliers  odd, of a token and of those before it, the nearest first: n-grams are of 2 tokens to so many
    sizes        of each head's part of the table, which lie one after the other; the first heads are of 2-grams, as
                 many follow of 3-grams, and so on
    eos          the token that ends a text: those before it count as itself
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    eos: int

    @property
    def before(self) -> int:
        """Tokens before a token that its n-grams hold."""
        return len(self.multipliers) - 1

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first row of each head."""
        return tuple(sum(self.sizes[:head]) for head in range(len(self.sizes)))

    @classmethod
    def of_layer(cls, number: int, tokens: int, vocab: int, heads: int, least: int, seed: int, eos: int) -> "NgramHash":
        """Of the layer with this number, from 0, among those that have n-grams: of up to so many tokens, with so many
        heads of each length, whose parts have at least so many rows, each another prime number of them."""
        half = max(1, (2**63 - 1) // max(vocab, 1) // 2)
        first = seed + _OF_LAYER * number
        multipliers = (2 * (_splitmix(first + _GAMMA * (i + 1)) % half) + 1 for i in range(tokens))
        count = heads * (tokens - 1)
        return cls(tuple(multipliers), primes(least, (number + 1) * count)[number * count :], eos)


def primes(least: int, count: int) -> tuple[int, ...]:
    """The first so many primes from `least` on."""
    found, number = [], max(2, least)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


def _splitmix(value: int) -> int:
    """SplitMix64 (https://doi.org/10.1145/2660193.2660195, figure 17)."""
    value = (value & _ALL) + _GAMMA & _ALL
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _ALL
    return value ^ value >> 31


def ngram_rows(own: NgramHash, tokens: jax.Array, before: jax.Array, text: jax.Array) -> jax.Array:
    """tokens int32 [B, T], `before` int32 [B, own.before] the tokens that text 0 goes on from and text int32 [B, T] as
    short_conv.short_conv has them -> int32 [B, T, heads]. A token sees no other text and nothing before an end of
    text, itself left out: eos stands there."""
    T, count = tokens.shape[1], own.before
    whole = jnp.concatenate([before, tokens], axis=1)
    of = jnp.concatenate([jnp.zeros_like(text, shape=before.shape), text], axis=1)
    ended, mixed, found = jnp.zeros(tokens.shape, bool), _times(tokens, own.multipliers[0]), []
    heads = len(own.sizes) // count
    for back in range(1, count + 1):
        part = slice(count - back, count - back + T)
        ended = ended | (whole[:, part] == own.eos) | (of[:, part] != text)
        seen = _times(jnp.where(ended, own.eos, whole[:, part]), own.multipliers[back])
        mixed = tuple(a ^ b for a, b in zip(mixed, seen, strict=True))
        found += [_modulo(mixed, size) for size in own.sizes[(back - 1) * heads : back * heads]]
    return jnp.stack(found, axis=-1).astype(jnp.int32) + jnp.asarray(own.firsts, jnp.int32)


def _times(tokens: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """tokens below 2**31 times a number below 2**63: (the upper word, the lower), uint32."""
    a = tokens.astype(jnp.uint32)
    low, high = (jnp.uint32(word) for word in (by & 0xFFFFFFFF, by >> 32))
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, low & 0xFFFF, low >> 16
    cross = a1 * b0 + (a0 * b0 >> 16)  # below 2**32, as a1 is below 2**15
    middle = a0 * b1 + (cross & 0xFFFF)
    carried = a1 * b1 + (cross >> 16) + (middle >> 16)
    return carried + a * high, a * low


def _modulo(words: tuple[jax.Array, jax.Array], size: int) -> jax.Array:
    """A number of two words modulo a size below 2**31, as many bits of the lower word at a time as leave a remainder in
    32 bits."""
    high, low = words
    step = 32 - size.bit_length()
    cuts = [(first, min(step, 32 - first)) for first in range(0, 32, step)]

    def take(rest, cut):
        first, bits = cut
        new = low >> (32 - first - bits) & jnp.uint32((1 << bits) - 1)
        return (rest << bits | new) % jnp.uint32(size)

    return reduce(take, cuts, high % jnp.uint32(size))
