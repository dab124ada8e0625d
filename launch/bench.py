"""Benchmarks, as JSON.

python -m launch.bench train --config=configs/bench_768x12.py --steps=20 --output=bench.json
python -m launch.bench strategies --config=configs/bench_strategies.py --output=benchmarks/results/strategies.json
python -m launch.bench serve --config=configs/bench_768x12.py --rates=2,inf --output=serve.json
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

from absl import flags

from launch.flags import PREFIX, cluster, run, split_overrides
from shardlm.config import Resolved
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

BENCHMARKS = {
    "train": "the training step of a configuration, on made-up tokens",
    "serve": "a configuration's model with random weights, served: all requests at once, and at given rates",
    "strategies": "the same in each way of shardlm/train/strategies.py, one process after another, as one table",
}

_WARMUP = flags.DEFINE_integer("warmup", 3, "Steps before the clock starts.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Timed steps, at most.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", math.inf, "Start no timed step after this long.", lower_bound=0.001)
_OUTPUT = flags.DEFINE_string("output", "", "File for the JSON, besides standard output.")
_STRATEGIES = flags.DEFINE_list("strategies", [], "Names of the strategies to compare; empty: all.")
_PROMPT_LEN = flags.DEFINE_integer("prompt_len", 128, "serve: tokens of each prompt.", lower_bound=1)
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 64, "serve: new tokens of each request.", lower_bound=2)
_SHARED = flags.DEFINE_integer("shared_prefix", 0, "serve: tokens that all prompts begin with.", lower_bound=0)
_SPECULATIVE = flags.DEFINE_string("speculative_config", None, "serve: JSON of drafts, as launch.serve takes it.")
_RATES = flags.DEFINE_list("rates", [], "serve: requests a second, each measured in turn; inf: all at once.")


def main(resolved: Resolved, benchmark: str) -> int:
    if benchmark not in BENCHMARKS:
        raise ShardlmError(unknown(benchmark))
    if benchmark == "strategies":
        return compare_strategies()
    return serve(resolved.config) if benchmark == "serve" else train(resolved.config)


def serve(config) -> int:
    from launch.devices import use_cpu_devices
    from shardlm.mesh import MeshSpec
    from shardlm.serve.bench import bench_serving, random_engine
    from shardlm.serve.build import EngineConfig
    from shardlm.serve.speculation.config import SpeculativeConfig

    mesh = MeshSpec(tensor=config.mesh.tensor, expert=config.mesh.expert)
    use_cpu_devices(config.cpu_devices and mesh.tensor * mesh.expert)
    prompt, output = _PROMPT_LEN.value, _OUTPUT_LEN.value
    rates = [float(rate) for rate in _RATES.value]
    speculative = SpeculativeConfig.from_json(_SPECULATIVE.value) if _SPECULATIVE.value else None
    options = EngineConfig(mesh=mesh, speculative_config=speculative)
    engine = random_engine(config.model.transformer(), options, prompt + output)
    found = bench_serving(engine, prompt_len=prompt, output_len=output, shared=_SHARED.value, rates=rates)
    write(found)
    return 0


def write(result: dict) -> None:
    """To standard output, and to --output."""
    text = json.dumps(result, indent=2)
    print(text)
    if _OUTPUT.value:
        write_atomically(pathlib.Path(_OUTPUT.value), text.encode() + b"\n")


def train(config) -> int:
    import jax

    from launch.devices import use_cpu_devices
    from shardlm.distributed import detect, explicit, joined
    from shardlm.train.bench import bench_training
    from shardlm.train.program import Program

    use_cpu_devices(config.cpu_devices)
    with joined(explicit(**cluster()) or detect(os.environ)):
        program = Program.make(config, config.mesh.build())
        result = bench_training(program, warmup=_WARMUP.value, steps=_STEPS.value, seconds=_SECONDS.value)
        if jax.process_index() == 0:
            write(result)
    return 0


def compare_strategies() -> int:
    """Runs `train` for each strategy in a process of its own, prints the table, and writes it as JSON to --output and
    as Markdown beside it. 1 if one of them did not run."""
    from shardlm.train.strategies import chosen, failed, markdown, report, row

    rows, results = [], []
    for variant in chosen(_STRATEGIES.value):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "result.json")
            done = subprocess.run(_command(variant, file), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                rows.append(failed(variant, (done.stderr.strip().splitlines() or ["no message"])[-1]))
            else:
                results.append(json.loads(file.read_text()))
                rows.append(row(variant, results[-1]))
        print(f"{variant.name}: {rows[-1].get('error') or 'done'}", file=sys.stderr)
    table = report(rows, results)
    print(markdown(table))
    if _OUTPUT.value:
        output = pathlib.Path(_OUTPUT.value)
        write_atomically(output, json.dumps(table, indent=2).encode() + b"\n")
        write_atomically(output.with_suffix(".md"), markdown(table).encode())
    return int(len(results) < len(rows))


def _command(variant, output: pathlib.Path) -> list[str]:
    """`train` with the same flags and overrides as here, and then the variant's."""
    config = variant.config or flags.FLAGS.config
    bounds = [f"--warmup={_WARMUP.value}", f"--steps={_STEPS.value}", f"--seconds={_SECONDS.value}"]
    own = [f"{PREFIX}{path}={value}" for path, value in split_overrides(sys.argv)[1]]
    start = [sys.executable, "-m", "launch.bench", "train", f"--config={config}", f"--output={output}"]
    return [*start, *bounds, *own, *variant.flags()]


def unknown(benchmark: str) -> str:
    known = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    return f"there is no benchmark {benchmark!r}; there is {known}"


if __name__ == "__main__":
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if not first.startswith("-") and first not in BENCHMARKS:
        sys.exit(f"error: {unknown(first)}")  # before a configuration is asked for
    run(main, arguments=("benchmark",))
