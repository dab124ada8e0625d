"""What is known of a kernel that is measured, and what those who say it have in common."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.mesh import shard_map

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All functions are called under a mesh of one device.

    what       the implementation that is timed
    inputs     key -> arguments, the first an array of a floating type
    run        arguments -> results
    reference  the same, plainly; it is given floating-point arguments in float32
    flops, nbytes  that the mathematics asks for, and that have to be read and written at least
    peak       type whose peak rate it is held to
    allowed    largest error, as a share of the largest number of the result
    """

    what: str
    inputs: Callable[[jax.Array], Arrays]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    flops: float
    nbytes: float
    peak: str
    allowed: float


# bfloat16 has 8 bits: results are rounded to 2**-9 of their size, weights of softmax and gradients on the way too.
ROUNDED, ROUNDED_BACK = 0.01, 0.03
# One 8-bit product of two numbers is off by up to 2**-4 (e4m3) or 2**-8 of the largest (int8); sums even that out.
EIGHT_BITS = {"fp8": 0.08, "int8": 0.03}


def normal(key: jax.Array, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Numbers of size 1 in bfloat16."""
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def with_back(f: Callable, operands: int) -> Callable:
    """(operands, cotangent of the result, rest) -> the gradients of f(operands, rest)."""

    def run(*args):
        some, d_out, rest = args[:operands], args[operands], args[operands + 1 :]
        return jax.vjp(lambda *a: f(*a, *rest), *some)[1](d_out)

    return run


def local(f: Callable) -> Callable:
    """f on the arrays of a device, as inside of a model."""
    return shard_map(f, in_specs=PartitionSpec(), out_specs=PartitionSpec())


def nbytes_of(*arrays) -> int:
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays)


def named(kernel: bool, on_gpu: bool, otherwise: str = "XLA") -> str:
    return ("pallas" if on_gpu else "pallas, interpreted") if kernel else otherwise
