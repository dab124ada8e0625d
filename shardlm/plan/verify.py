"""Compiles the real step of a plan for its GPUs, on a machine without them, and reads from the program what it holds
and sends. What is read is compiled, not measured: nothing ran."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Sequence

import jax

from shardlm.errors import ShardlmError
from shardlm.plan.bill import CompiledStep, compiled_step
from shardlm.plan.cluster import Cluster
from shardlm.plan.plan import Plan
from shardlm.plan.program_layers import buffers_filled
from shardlm.plan.sketch import Sketch
from shardlm.topology import topology
from shardlm.train.config import RunConfig
from shardlm.train.program import Program


@dataclasses.dataclass(frozen=True)
class Verified:
    """The compiled step of one device.

    argument_bytes   what rests, and the batch
    temporary_bytes  besides, at the fullest moment
    step             its kernels and collectives as they are scheduled, with times; None where there is no program
    failure          why there is no program; "" if there is, and then all else is 0
    """

    argument_bytes: int = 0
    temporary_bytes: int = 0
    step: CompiledStep | None = None
    compile_seconds: float = 0.0
    failure: str = ""

    @property
    def hbm_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes


def verify(plans: Sequence[Plan], workers: int = 2) -> list[Verified]:
    """Each plan's step compiled, in processes of their own: XLA ends the process on some programs, where it should
    raise."""
    jobs = [(plan.config, plan.cluster) for plan in plans]
    context = multiprocessing.get_context("spawn")
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # which jax sets
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA's advice on memory, which is read from the program here
    done: list[Verified] = []
    for job in _batches(jobs, workers):
        with concurrent.futures.ProcessPoolExecutor(workers, context, _without_gpus) as pool:
            futures = [pool.submit(compile_step, *one) for one in job]
            done += [_result(future) for future in futures]
    return done


def impossible(cluster: Cluster) -> str:
    """Why nothing can be compiled for these GPUs here; "" where it can."""
    if cluster.is_cpu:
        return "these are CPU devices: run the plan's configuration, and launch.bench train says what its program holds"
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _without_gpus) as pool:
        return pool.submit(_topology_error, cluster.gpu.name).result()


def _topology_error(gpu: str) -> str:
    try:
        topology(gpu, 1, 1)
    except ShardlmError as error:
        return str(error)
    return ""


def _without_gpus() -> None:
    """In a process of its own: a plugin without its GPUs fails to start unless jax is told that it is not to run."""
    jax.config.update("jax_platforms", "cpu")


def compile_step(config: RunConfig, cluster: Cluster) -> Verified:
    """In this process."""
    started = time.perf_counter()
    try:
        devices = topology(cluster.gpu.name, cluster.num_gpus // cluster.gpus_per_host, cluster.gpus_per_host)
        program = Program.make(config, config.mesh.build(devices))
        step = program.compile("step", dict(program.xla_options().options))
    except ShardlmError as error:
        return Verified(failure=str(error))
    memory = step.memory_analysis()
    filled = buffers_filled(Sketch.of(config, cluster.gpu))
    timed = compiled_step(step.as_text(), cluster, config.mesh, filled)
    seconds = time.perf_counter() - started
    return Verified(memory.argument_size_in_bytes, memory.temp_size_in_bytes, timed, seconds)


def _batches(jobs: list, size: int) -> list[list]:
    return [jobs[i : i + size] for i in range(0, len(jobs), size)]


def _result(future: concurrent.futures.Future) -> Verified:
    try:
        return future.result()
    except concurrent.futures.BrokenExecutor:
        return Verified(failure="the compiler ended its process; run the plan's configuration by itself to see why")
    except Exception as error:  # whatever XLA raises: the other candidates go on
        return Verified(failure=f"{type(error).__name__}: {str(error).splitlines()[0]}")
