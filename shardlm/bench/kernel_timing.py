"""The part `kernels`: the largest error of each kernel, its time and its reference's, and the share of the roofline."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from shardlm import hardware
from shardlm.bench.case import Given, of_roofline
from shardlm.bench.kernel_cases import Shape
from shardlm.bench.kernels import Arrays, Kernel, kernel_of
from shardlm.bench.sizes import named
from shardlm.mesh import MeshSpec

ROUNDS = 5
MOST = 400  # repeats in it


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """A row for each shape of a family; what fails is its row's `error`, and the next goes on."""
    device, sizes = jax.devices()[0], named(given.sizes)
    for shape, what in given.left(name, sizes.kernels[name]):
        try:
            with jax.set_mesh(MeshSpec().build([device])):
                yield from _measured(shape, what, device, sizes.round_seconds)
        except Exception as error:  # of the compiler, the driver or a kernel: the other shapes are still wanted
            yield {"name": shape, "error": f"{type(error).__name__}: {error}"[:2000]}


def _measured(name: str, shape: Shape, device: jax.Device, work: float) -> Iterator[dict[str, Any]]:
    gpu, on_gpu = hardware.lookup(device.device_kind), device.platform == "gpu"
    kernel = kernel_of(shape, on_gpu)
    inputs = jax.jit(kernel.inputs)(jax.random.key(0))
    found = largest_error(kernel, inputs)
    seconds = seconds_of(kernel.run, inputs, work, on_gpu and kernel.in_loop)
    yield {
        "name": name,
        "what": kernel.what,
        "largest_error": found,
        "allowed_error": kernel.allowed,
        "seconds": seconds,
        "reference_seconds": seconds_of(kernel.reference, inputs, work, on_gpu and kernel.in_loop),
        "flops_per_second": kernel.flops / seconds,
        "bytes_per_second": kernel.nbytes / seconds,
        "of_roofline": of_roofline(
            seconds, kernel.flops, kernel.nbytes, gpu and gpu.peak.of(kernel.peak), gpu and gpu.hbm_bytes_per_second
        ),
        **({} if found <= kernel.allowed else {"error": f"off by {found:.3g}, and {kernel.allowed} is allowed"}),
    }


def exact(inputs: Arrays) -> Arrays:
    """Floating-point arguments in float32."""
    wide = lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a  # noqa: E731
    return jax.tree.map(wide, inputs)


def largest_error(kernel: Kernel, inputs: Arrays) -> float:
    """Of all results: max|kernel - reference| over max|reference|, the reference in float32; inf where it is NaN."""

    def error(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda a: kernel.reference(*exact(a)))(inputs)
    found = jax.jit(kernel.run)(*inputs)
    errors = jax.tree.map(error, found, expected)
    return max(float(jnp.nan_to_num(e, nan=jnp.inf)) for e in jax.tree.leaves(errors))


def seconds_of(run: Callable, inputs: Arrays, work: float, in_loop: bool) -> float:
    """Of one run, the quickest of ROUNDS rounds of about `work` seconds. Many runs are a round: one program of them, or
    call after call, of which the last is waited for."""
    jitted = jax.jit(run)
    once = _timed(lambda: jitted(*inputs))
    repeats = max(1, min(MOST, round(work / once)))
    if in_loop:
        many = jax.jit(lambda a: repeated(run, a, repeats))
        return _timed(lambda: many(inputs)) / repeats
    return _timed(lambda: _last(lambda: jitted(*inputs), repeats)) / repeats


def _last(call: Callable[[], Any], repeats: int) -> Any:
    """Of so many calls; the results before are given up as they come."""
    result = call()
    for _ in range(repeats - 1):
        result = call()
    return result


def repeated(run: Callable, inputs: Arrays, repeats: int) -> Any:
    """The last result of so many runs. Each is given what came before: one number of every argument gets one that is
    too small to change it, which XLA does not know. Else it would compute once what depends on weights alone."""

    def once(_, carry):
        inputs, _ = carry
        result = run(*inputs)
        one = jax.tree.leaves(result)[0]
        nothing = one[(0,) * one.ndim].astype(jnp.float32) * 1e-30
        return jax.tree.map(lambda a: a.at[(0,) * a.ndim].add(nothing.astype(a.dtype)), inputs), result

    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, *inputs))
    return jax.lax.fori_loop(0, repeats, once, (inputs, empty))[1]


def _timed(call: Callable[[], Any]) -> float:
    """The quickest of ROUNDS, after one that may compile."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return min(seconds)
