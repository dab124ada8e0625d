"""Measures a device: matmul rates by shape and type, the bandwidth of its memory, and of the way to the host. Of
several devices, which virtual CPU devices need that share cores, all do the same at once and the rate is of each.

What the timed programs compute goes into the next repetition whole, so that XLA can neither drop nor shorten a part.
Rates are of the median call.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardlm import hardware
from shardlm.network.rates import HostRate, MatmulRate, MemoryRate

ROUNDS = 5
# (m, k, n): squares, then an MLP of 4,096 x 14,336 over many tokens and over the few of decoding.
GPU_SHAPES = ((1024,) * 3, (2048,) * 3, (4096,) * 3, (8192,) * 3, (8192, 4096, 14_336), (64, 4096, 14_336))
CPU_SHAPES = ((8,) * 3, (64,) * 3, (256,) * 3, (512,) * 3, (1024,) * 3)  # the first takes what any kernel does
GPU_WORK, CPU_WORK = 2e13, 2e9  # FLOPs of a timed call, about
# Of float32 on a GPU, which began the profile when all of its products were not measured after 90 s, and of which a
# training step was not compiled after 150 (H200): kernels that XLA tries out may be why.
SLOW_WORK = 4096**3
GPU_BYTES, CPU_BYTES = 2**30, 2**26  # of one array, well beyond any cache
PASSES = {"scale": 2, "triad": 3}  # arrays that are read and written
PASS_REPEATS = 10


def default_dtypes(device: jax.Device) -> tuple[str, ...]:
    """The types that the device's matrix units take; of a CPU, those it is used with."""
    if device.platform == "cpu":
        return ("float32", "bfloat16")
    return ("bfloat16", "int8", *(("float8_e4m3fn",) if hardware.multiplies_fp8(device) else ()), "float32")


def _gpu_shapes(dtype: str) -> list[tuple[int, int, int]]:
    return [shape for shape in GPU_SHAPES if dtype != "float32" or math.prod(shape) <= SLOW_WORK]


def measure_matmuls(
    devices: Sequence[jax.Device],
    shapes: Sequence[tuple[int, int, int]] | None = None,
    dtypes: Sequence[str] | None = None,
) -> Iterator[MatmulRate]:
    """A rate for each shape (m, k, n) and type, by default those above."""
    cpu = devices[0].platform == "cpu"
    work = CPU_WORK / len(devices) if cpu else GPU_WORK
    for dtype in dtypes or default_dtypes(devices[0]):
        for m, k, n in shapes or (CPU_SHAPES if cpu else _gpu_shapes(dtype)):
            flops = 4 * m * k * n  # there and back
            repeats = math.ceil(min(200, max(2, work / flops)))
            args = [_random(devices, i, shape, dtype) for i, shape in enumerate(((m, k), (k, n), (n, k)))]
            program = _on_each(devices, matmuls(repeats), len(args)).lower(*args).compile()
            seconds = _median(lambda x, p=program, w=args[1:]: p(x, *w), args[0])
            yield MatmulRate(m, k, n, dtype, repeats * flops / seconds)


def matmuls(repeats: int) -> Callable:
    """Jitted (x [m, k], there [k, n], back [n, k]) -> x [m, k], through both weights so many times."""

    def run(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda _, x: product(product(x, there), back), x)

    return jax.jit(run, donate_argnums=0)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [m, k] @ w [k, n] -> [m, n] of the same type and, for x and w of size 1, again of size 1."""
    if x.dtype == jnp.int8:
        total = jax.lax.dot(x, w, preferred_element_type=jnp.int32)
        return (total >> 6 + (x.shape[1].bit_length() - 1) // 2).astype(x.dtype)  # what 8 bits do not hold wraps round
    scale = x.shape[1] ** -0.5
    if x.dtype.itemsize > 1:
        return x @ w * scale
    # 8-bit floats: XLA hands a product of scaled bfloat16 copies to cuBLASLt as what it was made from.
    y = jax.lax.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32) * scale
    largest = float(jnp.finfo(x.dtype).max)
    return jnp.clip(y, -largest, largest).astype(x.dtype)


def measure_memory(devices: Sequence[jax.Device], nbytes: int | None = None) -> Iterator[MemoryRate]:
    """The bandwidth of a device's own memory, on float32 arrays of so many bytes; the memory of CPU devices is one."""
    cpu = devices[0].platform == "cpu"
    nbytes = nbytes or _array_bytes(devices[0]) // (len(devices) if cpu else 1)
    for operation, passes in PASSES.items():
        x, b = (_made(devices, lambda: jnp.linspace(0, 1, nbytes // 4)) for _ in range(2))
        program = _on_each(devices, streams(operation, PASS_REPEATS), 2).lower(x, b).compile()
        seconds = _median(lambda x, p=program, b=b: p(x, b), x)
        yield MemoryRate(operation, nbytes, PASS_REPEATS * passes * nbytes / seconds)


def streams(operation: str, repeats: int) -> Callable:
    """Jitted (x, b) -> x after so many passes of scale or triad, in place."""

    def once(b: jax.Array, x: jax.Array) -> jax.Array:
        return x * 0.999 if operation == "scale" else b + 0.5 * x

    def run(x: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda _, x: once(b, x), x)

    return jax.jit(run, donate_argnums=0)


def measure_host(device: jax.Device, nbytes: int | None = None) -> Iterator[HostRate]:
    """The way to the host; nothing for a CPU, whose memory is the host's."""
    if device.platform == "cpu":
        return
    nbytes = nbytes or _array_bytes(device) // 4
    there, pinned = SingleDeviceSharding(device), SingleDeviceSharding(device, memory_kind="pinned_host")
    host = np.random.default_rng(0).random(nbytes // 4, np.float32)
    on_device = jax.block_until_ready(jax.device_put(host, there))
    on_host = jax.block_until_ready(jax.device_put(host, pinned))
    ways = {
        ("to_device", "pinned"): lambda: jax.device_put(on_host, there),
        ("to_host", "pinned"): lambda: jax.device_put(on_device, pinned),
        ("to_device", "pageable"): lambda: jax.device_put(host, there),
        ("to_host", "pageable"): lambda: np.array(
            on_device + 0
        ),  # of a new array: jax keeps the copy of one it fetched
    }
    for (direction, memory), copy in ways.items():
        seconds = _median(lambda _, copy=copy: copy(), None)
        yield HostRate(direction, memory, nbytes, nbytes / seconds)


def _array_bytes(device: jax.Device) -> int:
    if device.platform == "cpu":
        return CPU_BYTES
    limit = (device.memory_stats() or {}).get("bytes_limit", 8 * GPU_BYTES)
    return min(GPU_BYTES, limit // 8)


def _random(devices: Sequence[jax.Device], seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Numbers of size 1, of int8 up to 127: what multiplies draws the power that it draws in earnest."""

    def made() -> jax.Array:
        key = jax.random.key(seed)
        if dtype == "int8":
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        return jax.random.normal(key, shape).astype(dtype)

    return _made(devices, made)


def _made(devices: Sequence[jax.Device], make: Callable[[], jax.Array]) -> jax.Array:
    """What it makes, once on each device, one after the other along the first dimension."""
    return _on_each(devices, make, 0)()


def _on_each(devices: Sequence[jax.Device], function: Callable, arguments: int) -> Callable:
    """Jitted: each device on its part of the arguments' first dimension. The first argument is given up."""
    mesh, spec = Mesh(np.array(devices), ("device",)), PartitionSpec("device")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * arguments, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0,) if arguments else (), out_shardings=NamedSharding(mesh, spec))


def _median(call: Callable, x: object) -> float:
    """Seconds of call(x) -> the next x: the median after one that is not timed."""
    x, seconds = jax.block_until_ready(call(x)), []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        x = jax.block_until_ready(call(x))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))
