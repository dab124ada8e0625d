"""The part `kernels`: the largest error of each kernel, its time by the profiler, the share of the roofline, and about
its reference's time. Of each shape four programs are compiled, ahead of all shapes of a process (ahead.py)."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from shardlm import hardware
from shardlm.bench.ahead import Made
from shardlm.bench.case import Given, of_roofline
from shardlm.bench.kernel import Arrays, Kernel
from shardlm.bench.kernels import kernel_of
from shardlm.bench.sizes import named
from shardlm.bench.traces import busy, traced
from shardlm.compiled_together import Lowering
from shardlm.hardware import Gpu
from shardlm.mesh import MeshSpec

CALLS = 5
FRESH = 2**27  # bytes of all inputs: a GPU keeps up to 60 MB of what it read last (H200)
MOST = 8  # inputs


def programs(cases: Sequence[str], given: Given) -> dict[tuple[str, str, str], Lowering]:
    """By family, shape and what the program is for."""
    device, sizes = jax.devices()[0], named(given.sizes)
    mesh, found = MeshSpec().build([device]), {}
    for case in cases:
        for shape, what in given.left(case, sizes.kernels[case]):
            kernel = kernel_of(what, device.platform == "gpu")
            own = programs_of(kernel, mesh)
            found |= {(case, shape, use): lower for use, lower in own.items()}
    return found


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """A row for each shape of a family; what fails is its row's `error`, and the next goes on."""
    device, sizes = jax.devices()[0], named(given.sizes)
    for shape, what in given.left(name, sizes.kernels[name]):
        kernel = kernel_of(what, device.platform == "gpu")
        made = {use: given.ahead[name, shape, use] for use in PROGRAMS}
        try:
            yield {"name": shape, **_measured(kernel, made, hardware.lookup(device.device_kind))}
        except Exception as error:  # of the compiler, the driver or a kernel: the other shapes are still wanted
            yield {"name": shape, "error": f"{type(error).__name__}: {error}"[:2000]}


def _measured(kernel: Kernel, made: Mapping[str, Made], gpu: Gpu | None) -> dict[str, Any]:
    inputs = several(made["inputs"].get())
    found = float(made["error"].get()(inputs[0]))
    seconds = seconds_of(made["run"].get(), inputs)
    _timed(made["reference"].get(), inputs[0])  # the first one reads it in
    reference = _timed(made["reference"].get(), inputs[0])
    return {
        "what": kernel.what,
        "largest_error": found,
        "allowed_error": kernel.allowed,
        "seconds": seconds,
        "reference_seconds": reference,
        "flops_per_second": kernel.flops / seconds,
        "bytes_per_second": kernel.nbytes / seconds,
        "of_roofline": _of_roofline(kernel, gpu, seconds),
        "compile_seconds": {use: one.seconds for use, one in made.items()},
        **({} if found <= kernel.allowed else {"error": f"off by {found:.3g}, and {kernel.allowed} is allowed"}),
    }


def _of_roofline(kernel: Kernel, gpu: Gpu | None, seconds: float) -> float | None:
    peak, bandwidth = gpu and gpu.peak.of(kernel.peak), gpu and gpu.hbm_bytes_per_second
    return of_roofline(seconds, kernel.flops, kernel.nbytes, peak, bandwidth)


PROGRAMS = ("inputs", "error", "run", "reference")


def programs_of(kernel: Kernel, mesh: Mesh) -> dict[str, Lowering]:
    """key -> inputs; inputs -> the largest error; inputs -> the result; the same of the reference. On a mesh of one
    device, which may not be there."""
    whole = NamedSharding(mesh, jax.P())
    key = jax.eval_shape(lambda: jax.random.key(0))

    def lower(f: Callable, from_key: bool = False) -> Callable[[], Any]:
        with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
            given = key if from_key else jax.eval_shape(kernel.inputs, key)
            held = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), given)
            return jax.jit(f, **({"out_shardings": whole} if from_key else {})).lower(held).compile

    return {
        "inputs": functools.partial(lower, kernel.inputs, from_key=True),
        "error": functools.partial(lower, functools.partial(_largest_error, kernel)),
        "run": functools.partial(lower, lambda inputs: kernel.run(*inputs)),
        "reference": functools.partial(lower, lambda inputs: kernel.reference(*inputs)),
    }


def exact(inputs: Arrays) -> Arrays:
    """Floating-point arguments in float32."""
    wide = lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a  # noqa: E731
    return jax.tree.map(wide, inputs)


def largest_error(kernel: Kernel, inputs: Arrays) -> float:
    """Of all results: max|kernel - reference| over max|reference|, the reference in float32; inf where it is NaN."""
    return float(jax.jit(functools.partial(_largest_error, kernel))(inputs))


def _largest_error(kernel: Kernel, inputs: Arrays) -> jax.Array:
    """In one program. The barrier keeps XLA from leaving out how the results are rounded, and from computing once what
    both sides have in common."""

    def error(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        off = jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)
        return jnp.nan_to_num(off, nan=jnp.inf)

    found = jax.lax.optimization_barrier(kernel.run(*inputs))
    with jax.default_matmul_precision("highest"):
        expected = kernel.reference(*exact(jax.lax.optimization_barrier(inputs)))
    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, found, expected))))


def several(make: Callable[[jax.Array], Arrays]) -> list[Arrays]:
    """Inputs of as many keys as make FRESH bytes, so that those of a call are not what the device has just read."""
    found = [make(jax.random.key(0))]
    nbytes = sum(a.nbytes for a in jax.tree.leaves(found[0]))
    found += (make(jax.random.key(i)) for i in range(1, min(MOST, -(-FRESH // nbytes))))
    return found


def seconds_of(program: Callable, inputs: Sequence[Arrays]) -> float:
    """For which a call keeps the device busy, on average, after one of each of the inputs: how long jax takes to start
    it is not in that, about 50 us (H200, measured)."""
    for own in inputs:
        jax.block_until_ready(program(own))

    def run() -> None:
        for i in range(CALLS):
            jax.block_until_ready(program(inputs[i % len(inputs)]))

    return busy(traced(run)[1]) / CALLS


def _timed(program: Callable, inputs: Arrays) -> float:
    """Of a call, by the host's clock."""
    started = time.perf_counter()
    jax.block_until_ready(program(inputs))
    return time.perf_counter() - started
