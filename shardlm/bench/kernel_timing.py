"""The part `kernels`: the largest error of each kernel, its time and its reference's, and the share of the roofline. Of
each shape four programs are compiled, ahead of all shapes of a process (ahead.py)."""

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
from shardlm.compiled_together import Lowering
from shardlm.hardware import Gpu
from shardlm.mesh import MeshSpec

ROUNDS = 3
MOST = 400  # runs in a loop, and calls in a round
FEW = 3  # runs in a loop where no roofline is known
OF_REFERENCE = 2  # some take a thousand times what their kernel does
PATIENCE = 3  # rounds that one call may take before it is the only one


def programs(cases: Sequence[str], given: Given) -> dict[tuple[str, str, str], Lowering]:
    """By family, shape and what the program is for."""
    device, sizes = jax.devices()[0], named(given.sizes)
    mesh, gpu, found = MeshSpec().build([device]), hardware.lookup(device.device_kind), {}
    for case in cases:
        for shape, what in given.left(case, sizes.kernels[case]):
            kernel = kernel_of(what, device.platform == "gpu")
            own = programs_of(kernel, mesh, runs_of(kernel, gpu, sizes.round_seconds))
            found |= {(case, shape, use): lower for use, lower in own.items()}
    return found


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """A row for each shape of a family; what fails is its row's `error`, and the next goes on."""
    device, sizes = jax.devices()[0], named(given.sizes)
    for shape, what in given.left(name, sizes.kernels[name]):
        kernel = kernel_of(what, device.platform == "gpu")
        made = {use: given.ahead[name, shape, use] for use in PROGRAMS}
        try:
            yield {"name": shape, **_measured(kernel, made, hardware.lookup(device.device_kind), sizes.round_seconds)}
        except Exception as error:  # of the compiler, the driver or a kernel: the other shapes are still wanted
            yield {"name": shape, "error": f"{type(error).__name__}: {error}"[:2000]}


def _measured(kernel: Kernel, made: Mapping[str, Made], gpu: Gpu | None, work: float) -> dict[str, Any]:
    inputs = made["inputs"].get()(jax.random.key(0))
    found, runs = float(made["error"].get()(inputs)), runs_of(kernel, gpu, work)
    seconds = seconds_of(made["run"].get(), inputs, runs, work)
    reference = seconds_of(made["reference"].get(), inputs, min(runs, OF_REFERENCE), work)
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


def runs_of(kernel: Kernel, gpu: Gpu | None, work: float) -> int:
    """How many runs are one program, which is compiled before anything is timed: about `work` seconds at half of the
    roofline. Called one by one, what takes less than 60 us shows how long jax takes to start it, about 50 us (H200,
    measured)."""
    if not kernel.in_loop:
        return 1
    least = _of_roofline(kernel, gpu, 1.0)
    return max(1, min(MOST, round(work / (2 * least)))) if least else FEW


PROGRAMS = ("inputs", "error", "run", "reference")


def programs_of(kernel: Kernel, mesh: Mesh, runs: int) -> dict[str, Lowering]:
    """key -> inputs; inputs -> the largest error; inputs -> the result of so many runs; the same of the reference, of
    few runs. On a mesh of one device, which may not be there."""
    whole = NamedSharding(mesh, jax.P())
    key = jax.eval_shape(lambda: jax.random.key(0))

    def lower(f: Callable, from_key: bool = False) -> Callable[[], Any]:
        with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
            given = key if from_key else jax.eval_shape(kernel.inputs, key)
            held = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), given)
            return jax.jit(f, **({"out_shardings": whole} if from_key else {})).lower(held).compile

    def several(run: Callable, count: int) -> Callable:
        return (lambda a: repeated(run, a, count)) if count > 1 else lambda a: run(*a)

    return {
        "inputs": functools.partial(lower, kernel.inputs, from_key=True),
        "error": functools.partial(lower, functools.partial(_largest_error, kernel)),
        "run": functools.partial(lower, several(kernel.run, runs)),
        "reference": functools.partial(lower, several(kernel.reference, min(runs, OF_REFERENCE))),
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


def seconds_of(program: Callable, inputs: Arrays, runs: int, work: float) -> float:
    """Of one of the `runs` of a program: the quickest of ROUNDS rounds of about `work` seconds, call after call, of
    which the last is waited for. Of one that takes far longer than a round, the second call alone."""
    _timed(program, inputs, 1)  # the first one reads it in
    once = _timed(program, inputs, 1)
    if once > PATIENCE * work:
        return once / runs
    calls = max(1, min(MOST, round(work / once)))
    return min(_timed(program, inputs, calls) for _ in range(ROUNDS)) / (calls * runs)


def _timed(program: Callable, inputs: Arrays, calls: int) -> float:
    """Of so many calls; the results before are given up as they come."""
    started = time.perf_counter()
    for _ in range(calls):
        result = program(inputs)
    jax.block_until_ready(result)
    return time.perf_counter() - started


def repeated(run: Callable, inputs: Arrays, repeats: int) -> Any:
    """The last result of so many runs. Each is given what came before: one number of every argument gets one that is
    too small to change it, which XLA does not know. Else it would compute once what depends on weights alone. The
    number of runs is known to the compiler: else a GPU asks the host after each."""

    def once(_, carry):
        inputs, _ = carry
        result = run(*inputs)
        one = jax.tree.leaves(result)[0]
        nothing = one[(0,) * one.ndim].astype(jnp.float32) * 1e-30
        return jax.tree.map(lambda a: a.at[(0,) * a.ndim].add(nothing.astype(a.dtype)), inputs), result

    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, *inputs))
    return jax.lax.fori_loop(0, repeats, once, (inputs, empty))[1]
