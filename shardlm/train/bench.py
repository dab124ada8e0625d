"""Times the training step of a configuration on made-up tokens: what `launch.bench train` reports. The step is the one
that training compiles; data loading and logging are left out. What PyTorch does on the same shape is benchmarks/'s."""

import dataclasses
import datetime
import math
import os
import resource
import time
from typing import Any

import jax
import numpy as np

from shardlm import hardware
from shardlm.errors import ShardlmError
from shardlm.flops import mfu, training_flops
from shardlm.hlo.bill import Bill
from shardlm.hlo.collectives import collectives
from shardlm.train.batches import local_rows, to_devices
from shardlm.train.program import Program
from shardlm.versions import versions
from shardlm.vision.parts import EncoderPart

PACKAGES = ("shardlm", "jax", "jaxlib", "flax", "optax")
PERCENTILES = (10, 50, 90)


def random_batch(program: Program, seed: int = 0) -> dict[str, jax.Array]:
    """A batch of random tokens, one document a row."""
    train, sharding = program.config.train, program.batch_sharding
    B, T = train.global_batch, train.seq_len
    tokens = np.random.default_rng(seed).integers(0, program.model.config.vocab_size, (B, T + 1)).astype(np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((B, T), np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "loss_mask": np.ones((B, T), np.float32),
    }
    batch |= {name: np.zeros((B, T), np.float32) for name in program.objective.columns}
    rows = local_rows(sharding, program.slots, T)
    return to_devices({name: a[list(rows)] for name, a in batch.items()}, rows, sharding, program.slots)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A program's step, and the seconds that compiling took (not tracing, if others were compiled beside it)."""

    run: jax.stages.Compiled
    seconds: float


def compile_step(program: Program) -> CompiledStep:
    """As training compiles it."""
    started = time.perf_counter()
    compiled = program.lower_step().compile(dict(program.xla_options().options))
    return CompiledStep(compiled, time.perf_counter() - started)


def bench_training(
    program: Program, *, warmup: int, steps: int, seconds: float = math.inf, compiled: CompiledStep | None = None
) -> dict[str, Any]:
    """Compiles, unless the step is `compiled`, runs `warmup` steps, then times `steps` more, starting none after
    `seconds`; each step is waited for.

    Rates are those of the median step. Memory and FLOPs say whether they were measured or compiled. Every process of
    a job calls this; each reports its own clock and memory.
    """
    if program.frozen_shapes() is not None:
        raise ShardlmError(
            "lora.rank, distill.teacher, or preferences or rewards that are compared with the checkpoint: steps are "
            "timed with made-up weights that are trained, and these runs hold others too; launch.train logs their "
            "seconds"
        )
    options, compiled = program.xla_options(), compiled or compile_step(program)
    losses, times = [], []
    with jax.set_mesh(program.mesh):
        state, batch = program.init(), random_batch(program)
        while len(times) < steps and sum(times) < seconds:
            started = time.perf_counter()
            state, metrics = compiled.run(state, batch)
            losses.append(float(metrics["loss"]))  # waits for the step
            if len(losses) > warmup:
                times.append(time.perf_counter() - started)
    return {
        "benchmark": "train",
        **_speed(program, times, float(metrics["attention_pairs"])),
        "compile_seconds": compiled.seconds,
        "compilation_cache": jax.config.jax_compilation_cache_dir is not None,  # where compile_seconds may be a read
        **_memory(compiled.run),
        "communication": _communication(program, compiled.run),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "steps": len(times),
        "warmup": warmup,
        "xla_options": options.profile,
        "xla_options_left_out": [option.name for option in options.left_out],
        **_setting(program),
    }


def _speed(program: Program, seconds: list[float], attention_pairs: float) -> dict[str, Any]:
    """Rates from the median step (measured); FLOPs by the convention of shardlm/flops.py."""
    config, model = program.config, program.model.config
    tokens = config.train.global_batch * config.train.seq_len
    macs, frozen = model.attention_macs(attention_pairs, tokens), config.lora.rank > 0
    flops = training_flops(model.parameters_per_token(), tokens, macs, frozen=frozen)
    median = float(np.median(seconds))
    gpu = hardware.lookup(program.mesh.devices.flat[0].device_kind)
    peak = gpu and gpu.peak.of(config.precision)
    quantiles = {f"p{p}": float(np.percentile(seconds, p)) for p in PERCENTILES}
    return {
        "tokens_per_second": tokens / median,
        "model_flops_per_second": flops / median,
        "model_flops_per_step": flops,
        "flop_convention": "6N plus unmasked attention, no recomputation (shardlm/flops.py)",
        "mfu": mfu(flops, median, peak, program.mesh.size) if peak else None,
        "peak_flops_per_second": peak,
        "step_seconds": quantiles | {"min": min(seconds), "max": max(seconds)},
    }


def _memory(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes of one device as the compiler planned them, the most that the device held (None where it does not say, as
    on CPU), and the most of the whole process on its host, compiling included."""
    planned = compiled.memory_analysis()
    outputs = planned.output_size_in_bytes - planned.alias_size_in_bytes  # the donated state's are its arguments
    # The sum, and not planned.peak_memory_in_bytes, which leaves temporaries out on XLA:CPU.
    peak = planned.argument_size_in_bytes + planned.temp_size_in_bytes + outputs
    return {
        "peak_memory_bytes": {
            "compiled": peak,
            "measured_on_device": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            "measured_process_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
        "compiled_argument_bytes": planned.argument_size_in_bytes,
        "compiled_temporary_bytes": planned.temp_size_in_bytes,
    }


def _communication(program: Program, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes that one device sends in a step by mesh axis and kind of collective, as compiled."""
    bill = Bill.of(collectives(compiled.as_text(), program.rules.mesh.sizes()))
    guesses = sorted({entry.guess for entry in bill.entries if entry.guess})
    return {"sent_bytes": bill.by_axis(), "sent_bytes_total": bill.bytes, "guesses": guesses}


def _setting(program: Program) -> dict[str, Any]:
    """What ran where."""
    config = program.config
    return {
        "mesh": program.rules.mesh.sizes(),
        "rules": config.rules,
        "precision": config.precision,
        "remat": config.remat,
        "unroll": config.unroll,
        "attention": program.model.execution.attention,
        "optimizer": config.optim.name,
        "global_batch": config.train.global_batch,
        "seq_len": config.train.seq_len,
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.model.shapes)),
        "device_kind": program.mesh.devices.flat[0].device_kind,
        "devices": program.mesh.size,
        "processes": jax.process_count(),
        "host_cpus": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(PACKAGES),
        **_left_out(config.train.encoder),
    }


def _left_out(encoder: EncoderPart) -> dict[str, str]:
    """What a run of the configuration does besides the step that is timed."""
    if encoder == "frozen":
        return {}
    what = f"images and train.encoder={encoder}: the step is one of text, and reads and trains no encoder"
    return {"left_out": what}
