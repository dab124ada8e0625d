"""Products of one row with a weight, for CPUs: what a decoding step of one request is made of.

XLA:CPU makes such a product a loop of one thread, which reads 28 to 35 GB/s where two threads read 50. As products in a
batch it is given to all threads. 768 x 12 layers in float32, two cores, all products of a step: 8.7 ms became 6.6, in 4
parts; in 2 or 8 parts no more, and of 8 rows the parts are slower than the whole (14.5 and 12.1). A step of the engine
became 9.6 ms of 13.7."""

import functools
import math

import jax
import jax.numpy as jnp

PARTS = 4


def einsum_of_one_row(letters: str, x, w, *, preferred_element_type=None, out_sharding=None) -> jax.Array:
    """`jnp.einsum` of the same arguments to rounding, on one device, where `out_sharding` says nothing: if x is one row
    of numbers that are all summed over, and they are the first or the last of w's dimensions, w is cut into PARTS along
    its first one. Else it is that einsum itself."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=preferred_element_type)
    xs, (ws, ys) = letters.split(",")[0], letters.split(",")[1].split("->")
    summed = "".join(letter for letter in ws if letter not in ys)
    width, first = math.prod(w.shape[ws.index(letter)] for letter in summed), w.shape[0]
    if x.size != width or not xs.endswith(summed) or first % PARTS:
        return einsum(letters, x, w)
    sizes = dict(zip(xs + ws, (*x.shape, *w.shape), strict=True))
    shape = [sizes[letter] for letter in ys]
    if ws.startswith(summed):
        parts = einsum("pik,pkf->pif", x.reshape(PARTS, 1, -1), w.reshape(PARTS, width // PARTS, -1))
        return parts.sum(axis=0).reshape(shape)
    if ws.endswith(summed):
        rows = jnp.broadcast_to(x.reshape(1, 1, width), (PARTS, 1, width))
        return einsum("pik,pfk->pif", rows, w.reshape(PARTS, -1, width)).reshape(shape)
    return einsum(letters, x, w)
