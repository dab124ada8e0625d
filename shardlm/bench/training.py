"""The part `train`: the step that training compiles on one device, and PyTorch's of the same shape."""

import functools
import json
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from shardlm import hardware
from shardlm.bench.ahead import Made
from shardlm.bench.case import Given, missing, said
from shardlm.bench.cases import TORCH, torch_shape
from shardlm.bench.sizes import Sizes, is_apart, named
from shardlm.compiled_together import Lowering
from shardlm.train.bench import CompiledStep, bench_training
from shardlm.train.config import RunConfig
from shardlm.train.program import Program

PEER = pathlib.Path(__file__).parents[2] / "benchmarks/peers/torch_train.py"
STATE_BYTES = 24  # a parameter's float32 weight and AdamW's two moments, read and written
KEPT = ("tokens_per_second", "mfu", "model_flops_per_step", "step_seconds", "compile_seconds", "peak_memory_bytes")
KEPT += ("compiled_argument_bytes", "compiled_temporary_bytes", "loss_first", "loss_last", "steps", "parameters")
KEPT += ("global_batch", "seq_len", "precision", "remat", "attention", "xla_options", "xla_options_left_out")


def programs(cases: Sequence[str], given: Given) -> dict[str, Lowering]:
    """Steps that are compiled ahead of all cases."""
    return steps_of(cases, named(given.sizes).train)


def steps_of(cases: Sequence[str], configs: Mapping[str, RunConfig]) -> dict[str, Lowering]:
    """(program, its step) of those cases that are steps and not apart."""
    steps = {name: configs[name] for name in cases if name in configs}
    return {name: functools.partial(_lowered, config) for name, config in steps.items() if not is_apart(config)}


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """One row."""
    sizes = named(given.sizes)
    if name in sizes.train:
        yield {"name": name, "side": "shardlm", **trained(sizes.train[name], sizes, given.ahead.get(name))}
    else:
        own = name.removeprefix(TORCH)
        yield {"name": own, "side": "torch", **against_torch(sizes.train[own], sizes, given)}


def trained(config: RunConfig, sizes: Sizes, made: Made | None) -> dict[str, Any]:
    """What `bench_training` says of a step on the first device, and the least time that the device's figures allow:
    the model's FLOPs at the 16-bit peak, then the optimizer's pass over weights and moments. `made`: (program, step)
    as it was compiled ahead. Raises what that raised."""
    device = jax.devices()[0]
    program, step = made.get() if made else (_program(config), None)
    compiled = CompiledStep(step, made.seconds) if made else None
    before = _peak_bytes(device)
    bounds = {"warmup": sizes.warmup, "steps": sizes.steps, "seconds": sizes.step_seconds}
    result = bench_training(program, **bounds, compiled=compiled)
    if before is not None and _peak_bytes(device) == before:  # the most of this process was another's
        result["peak_memory_bytes"]["measured_on_device"] = None
    gpu, found = hardware.lookup(device.device_kind), {name: result[name] for name in KEPT}
    if gpu is not None:
        state = STATE_BYTES * result["parameters"] / gpu.hbm_bytes_per_second
        least = result["model_flops_per_step"] / gpu.peak.bf16 + state
        found |= {"least_seconds": least, "of_bound": least / result["step_seconds"]["p50"]}
    return found


def _program(config: RunConfig) -> Program:
    return Program.make(config, config.mesh.build([jax.devices()[0]]))


def _lowered(config: RunConfig) -> Callable[[], tuple[Program, jax.stages.Compiled]]:
    program = _program(config)
    lowered, options = program.lower_step(), dict(program.xla_options().options)
    return lambda: (program, lowered.compile(options))


def _peak_bytes(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def against_torch(config: RunConfig, sizes: Sizes, given: Given) -> dict[str, Any]:
    """PyTorch's step, compiled and in bfloat16 by autocast, keeping everything for the backward pass. Where its memory
    is too small for the batch, that is halved; `shape` says what ran."""
    why = missing(given.torch_python, ("torch",), cuda=sizes.gpu)
    if not PEER.exists():
        why = f"{PEER} is not there: the comparison needs the source tree"
    if why:
        return {"not_compared": why}
    shape = torch_shape(config)
    while "OutOfMemoryError" in (found := _peer(shape, sizes, given)).get("error", "") and shape["batch"] > 1:
        shape = shape | {"batch": shape["batch"] // 2}
    return found


def _peer(shape: dict[str, Any], sizes: Sizes, given: Given) -> dict[str, Any]:
    where = ["--device=cuda", "--dtype=bfloat16"] if sizes.gpu else ["--mode=eager"]
    bounds = [f"--warmup={sizes.warmup}", f"--steps={sizes.steps}"]
    command = [given.torch_python, str(PEER), f"--shape_json={json.dumps(shape)}", *where, *bounds]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": said(done.stderr)}
    report = json.loads(done.stdout.strip().splitlines()[-1])
    return report | {"tokens_per_second": report["tokens_per_second"]["p50"]}
