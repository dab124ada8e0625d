"""Work on programs for GPUs that are not there, in processes of their own: XLA ends the process on some programs, where
it should raise, and a CUDA plugin without its GPUs fails to start where jax was not told that it is not to run."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging

from shardlm.errors import ShardlmError
from shardlm.hardware import Gpu
from shardlm.plan.cluster import Cluster
from shardlm.topology import topology


@dataclasses.dataclass(frozen=True)
class Failed:
    """Stands for a result that there is not."""

    why: str


def each_apart(work: Callable, jobs: Sequence[tuple], workers: int = 2) -> list[Any]:
    """`work(*job)` of every job, so many at a time; Failed where it raised, or its process ended. A function of a
    module, and jobs and results that pickle can carry."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # which jax sets
        # What XLA has to say of memory, as an error where a server's pages fill it, is read from the program here; what
        # ends a process is still printed.
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    done: list[Any] = []
    for i in range(0, len(jobs), workers):  # a process that ends takes the others of its pool along
        with _pool(workers) as pool:
            futures = [pool.submit(work, *job) for job in jobs[i : i + workers]]
            done += map(_result, futures)
    return done


def impossible(cluster: Cluster) -> str:
    """Why nothing can be compiled for these GPUs here; "" where it can."""
    if cluster.is_cpu:
        return "these are CPU devices: run the plan's configuration, and launch.bench train says what its program holds"
    with _pool(1) as pool:
        return pool.submit(_topology_error, cluster.gpu).result()


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _without_gpus)


def _without_gpus() -> None:
    jax.config.update("jax_platforms", "cpu")
    logging.set_verbosity(logging.ERROR)  # without a GPU each grouped matmul warns that its tiles are not tuned


def _topology_error(gpu: Gpu) -> str:
    try:
        topology(gpu, 1, 1)
    except ShardlmError as error:
        return str(error)
    return ""


def _result(future: concurrent.futures.Future) -> Any:
    try:
        return future.result()
    except concurrent.futures.BrokenExecutor:
        return Failed("the compiler ended its process; run the plan's configuration by itself to see why")
    except ShardlmError as error:
        return Failed(str(error))
    except Exception as error:  # whatever XLA raises: the other candidates go on
        said = str(error).strip().splitlines()
        return Failed(": ".join([type(error).__name__, *said[:1]]))  # an assertion of jax's says nothing
