"""Products of rows with a weight, for a CPU: what serving is made of. Weights lie with what they make first,
[made, summed].

What XLA:CPU does with them, all products of a step of 768 x 12 layers in float32, two cores, ms:

- x [B, summed] times a weight [summed, made]: 30.5 and 53.2 with 8 and 32 rows, on a machine whose memory allows 22
- the weight [made, summed] as the first operand: 24.8 and 36.2; with 64 rows 49.6 of 57.5. XLA turns a product around
  whose result is transposed next: a barrier between them keeps it
- a chunk of 256 tokens took 333 ms of CPU so and 385 with the weight second. Of 512 rows products alone take as long
  either way on an AMD EPYC (first 189 to 192 ms of 151 MB, second 194 to 200), but second XLA turns each weight for
  each chunk, 49 ms of a core: four chunks of 512 tokens took 1,883 to 1,928 ms so, 1,746 to 1,818 with it first, and
  1,920 to 1,975 in blocks of 256 rows (in turns, in one process). On an Intel Xeon 512 rows alone were quicker with it
  second (303 of 395)
- of a single row it makes a loop of one thread, which reads 28 to 35 GB/s where two threads read 50. As products in a
  batch it is given to all threads: in 4 parts 8.7 ms became 6.6, of weights [summed, made]; in 2 or 8 parts no more
- of a single row of int8 it makes 32 bits of the weight first: 83 ms where two rows take 6 (79 M weights, a busy
  machine); float32 in parts took 10. Of 8 rows int8 took 8 ms with the weight first, 12 with it second, float32 14
"""

import functools
import math

import jax
import jax.numpy as jnp

PARTS = 4


def cpu_einsum(letters: str, x, w, *, preferred_element_type=None, out_sharding=None) -> jax.Array:
    """`jnp.einsum` of the same arguments to rounding, on one device, where `out_sharding` says nothing: rows x
    [*rows, *summed] by a weight [*made, *summed] as above. Else it is that einsum itself."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=preferred_element_type)
    xs, (ws, ys) = letters.split(",")[0], letters.split(",")[1].split("->")
    summed = "".join(letter for letter in ws if letter not in ys)
    made, rows = ws.removesuffix(summed), xs.removesuffix(summed)
    if not ws.endswith(summed) or not xs.endswith(summed) or ys != rows + made:
        return einsum(letters, x, w)
    count = math.prod(x.shape[: len(rows)])
    if count == 1 and w.dtype == jnp.int8:  # two rows
        twice = jnp.concatenate([x, x])
        return cpu_einsum(letters, twice, w, preferred_element_type=preferred_element_type)[:1]
    if count == 1 and w.shape[0] % PARTS == 0:
        width = x.size
        each = jnp.broadcast_to(x.reshape(1, 1, width), (PARTS, 1, width))
        y = einsum("pik,pfk->pif", each, w.reshape(PARTS, -1, width))
        return y.reshape(*x.shape[: len(rows)], *w.shape[: len(made)])
    if count == 1:
        return einsum(letters, x, w)
    y = jax.lax.optimization_barrier(einsum(f"{ws},{xs}->{made}{rows}", w, x))
    return jnp.moveaxis(y, range(len(made)), range(-len(made), 0))
