"""Compiles the programs of runners, several at a time, and the options that some of them have of their own."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardlm.compiled_together import compiled_together
from shardlm.serve.chunk_programs import WHILE_WEIGHTS_ARE_READ

APART = {"xla_gpu_dot_merger_threshold_mb": 0}  # products of the same operand stay apart
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def compile_all(runners: Sequence[Any], progress: Callable[[int, int], None]) -> None:
    """Compiles the programs of runners of one model, several at a time: traced once, and compiled for the devices of
    each, as what XLA makes is bound to its devices. Then allocates their states."""
    started = time.perf_counter()
    work = [runner._shapes() for runner in runners]
    # In the order of the keys, the same in all processes of an engine: XLA on GPUs tries kernels out in turns with the
    # others, and waits for what they found (xla_gpu_shard_autotuning).
    lowerings = [
        ((runner, key), functools.partial(_lowered, runner, key, own[key]))
        for key in work[0]
        for runner, own in zip(runners, work, strict=True)
    ]
    for done, ((runner, key), future) in enumerate(compiled_together(lowerings), 1):
        runner._programs[key] = future.result()
        progress(done, len(lowerings))
    for runner in runners:
        runner.allocate()
        runner.compile_seconds = time.perf_counter() - started


def _lowered(runner: Any, key: Any, shapes: Sequence[Any]) -> Callable[[], Any]:
    return runner.lower(key, *shapes).compile


def options_of(platform: str, key: Any) -> dict[str, Any]:
    """XLA's, of the program of a key, beside those of all. Merged into one product, queries, keys and values of few
    tokens are read where their weights lie; for many XLA copies the weights together, 0.8 of the 13 ms that 512 tokens
    of Llama 3 8B take on an H200 (measured). A chunk runs once where decoding runs a loop, and a CUDA graph has to be
    told again wherever its memory lies now, kernel by kernel (https://github.com/openxla/xla/pull/35315): of four
    prompts of 2,048 tokens kernels take 175 of 215 ms (H200, measured with graphs, the kernels in a trace; how much of
    the rest was graphs is not known, and without them nothing is measured yet)."""
    if platform == "cpu" or key[0] not in ("chunk", "whole"):
        return {}
    return NO_GRAPHS | (APART if math.prod(key[1]) >= WHILE_WEIGHTS_ARE_READ[platform] else {})
