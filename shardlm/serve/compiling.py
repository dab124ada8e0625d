"""Compiles the programs of runners, several at a time, and the options that some of them have of their own."""

import concurrent.futures
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardlm.serve.chunk_programs import WHILE_WEIGHTS_ARE_READ

APART = {"xla_gpu_dot_merger_threshold_mb": 0}  # products of the same operand stay apart


def compile_all(runners: Sequence[Any], progress: Callable[[int, int], None]) -> None:
    """Compiles the programs of runners of one model, several at a time: traced once, and compiled for the devices of
    each, as what XLA makes is bound to its devices. Then allocates their states."""
    started = time.perf_counter()
    work = [runner._shapes() for runner in runners]

    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        try:
            compiling = {}
            # Traced one after the other: Python does one at a time, and 22 together on 16 cores were all traced, after
            # two minutes, before the first was compiled (Llama 3 8B on an H200, measured). In the order of the keys,
            # the same in all processes of an engine: XLA on GPUs tries kernels out in turns with the others, and waits
            # for what they found (xla_gpu_shard_autotuning).
            for key in work[0]:
                for runner, own in zip(runners, work, strict=True):
                    compiling[pool.submit(runner.lower(key, *own[key]).compile)] = runner, key
            for done, future in enumerate(concurrent.futures.as_completed(compiling), 1):
                runner, key = compiling[future]
                runner._programs[key] = future.result()
                progress(done, len(compiling))
        except BaseException:  # Ctrl-C, or one that fails: those that have not begun would be minutes to wait for
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for runner in runners:
        runner.allocate()
        runner.compile_seconds = time.perf_counter() - started


def options_of(platform: str, key: Any) -> dict[str, Any]:
    """XLA's, of the program of a key, beside those of all. Merged into one product, queries, keys and values of few
    tokens are read where their weights lie; for many XLA copies the weights together, 0.8 of the 13 ms that 512 tokens
    of Llama 3 8B take on an H200 (measured)."""
    chunk = platform != "cpu" and key[0] in ("chunk", "whole")
    return APART if chunk and math.prod(key[1]) >= WHILE_WEIGHTS_ARE_READ[platform] else {}
