"""Benchmarks, as JSON.

python -m launch.bench train --config=configs/bench_768x12.py --steps=20 --output=bench.json
"""

import json
import math
import os
import pathlib
import sys

from absl import flags

from launch.flags import cluster, run
from shardlm.config import Resolved
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

BENCHMARKS = {"train": "the training step of a configuration, on made-up tokens"}

_WARMUP = flags.DEFINE_integer("warmup", 3, "Steps before the clock starts.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Timed steps, at most.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", math.inf, "Start no timed step after this long.", lower_bound=0.001)
_OUTPUT = flags.DEFINE_string("output", "", "File for the JSON, besides standard output.")


def main(resolved: Resolved, benchmark: str) -> int:
    if benchmark not in BENCHMARKS:
        raise ShardlmError(unknown(benchmark))
    import jax

    from launch.devices import use_cpu_devices
    from shardlm.distributed import detect, explicit, joined
    from shardlm.train.bench import bench_training
    from shardlm.train.program import Program

    config = resolved.config
    use_cpu_devices(config.cpu_devices)
    with joined(explicit(**cluster()) or detect(os.environ)):
        program = Program.make(config, config.mesh.build())
        result = bench_training(program, warmup=_WARMUP.value, steps=_STEPS.value, seconds=_SECONDS.value)
        if jax.process_index() == 0:
            text = json.dumps(result, indent=2)
            print(text)
            if _OUTPUT.value:
                write_atomically(pathlib.Path(_OUTPUT.value), text.encode() + b"\n")
    return 0


def unknown(benchmark: str) -> str:
    known = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    return f"there is no benchmark {benchmark!r}; there is {known}"


if __name__ == "__main__":
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if not first.startswith("-") and first not in BENCHMARKS:
        sys.exit(f"error: {unknown(first)}")  # before a configuration is asked for
    run(main, arguments=("benchmark",))
