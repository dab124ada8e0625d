"""Benchmarks, as JSON.

python -m launch.bench train --config=configs/bench_768x12.py --steps=20 --output=bench.json
"""

import json
import pathlib

from absl import flags

from launch.flags import run
from shardlm.config import Resolved
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

BENCHMARKS = {"train": "the training step of a configuration, on made-up tokens"}

_WARMUP = flags.DEFINE_integer("warmup", 3, "Steps before the clock starts.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Timed steps.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "", "File for the JSON, besides standard output.")


def main(resolved: Resolved, benchmark: str) -> int:
    if benchmark not in BENCHMARKS:
        known = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
        raise ShardlmError(f"there is no benchmark {benchmark!r}; there is {known}")
    from launch.devices import use_cpu_devices
    from shardlm.train.bench import bench_training
    from shardlm.train.program import Program

    config = resolved.config
    use_cpu_devices(config.cpu_devices)
    result = bench_training(Program.make(config, config.mesh.build()), warmup=_WARMUP.value, steps=_STEPS.value)
    text = json.dumps(result, indent=2)
    print(text)
    if _OUTPUT.value:
        write_atomically(pathlib.Path(_OUTPUT.value), text.encode() + b"\n")
    return 0


if __name__ == "__main__":
    run(main, arguments=("benchmark",))
