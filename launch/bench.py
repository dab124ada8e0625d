"""Benchmarks, as JSON.

python -m launch.bench train --config=configs/bench_768x12.py --steps=20 --output=bench.json
python -m launch.bench strategies --config=configs/bench_strategies.py --output=benchmarks/results/strategies.json
python -m launch.bench plan --config=configs/bench_strategies.py --output=benchmarks/results/plan_ranking.json
python -m launch.bench serve --config=configs/bench_768x12.py --rates=2,inf --concurrency=1,8,32 --output=serve.json
python -m launch.bench serve --config=configs/bench_768x12.py --data=2 --tensor=2 --quantization=int8
python -m launch.bench serve --url=http://HOST:PORT --rates=2,4 --file=chats.jsonl --goodput=ttft:0.5,tpot:0.05
python -m launch.bench serve --model=FOLDER --concurrency=1,8 --images_per_prompt=1 --image_size=896x896
python -m launch.bench gpu --output=benchmarks/results/gpu_h200.json --limit_seconds=570 --resume
"""

import asyncio
import concurrent.futures
import json
import math
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile

from absl import flags

from launch.engine_flags import engine_options, mesh_sizes, refuse_given
from launch.flags import PREFIX, check_writable, cluster, run, split_overrides
from shardlm.config import Resolved
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

BENCHMARKS = {
    "train": "the training step of a configuration, on made-up tokens",
    "serve": "a configuration's model with random weights, --model or whatever answers at --url: under load over HTTP",
    "strategies": "the same in each way of shardlm/train/strategies.py, one process after another, as one table",
    "plan": "meshes as the planner predicts them from a profile of this machine, beside what they take, and the ranks",
    "gpu": "all there is to know of a GPU at hand: training, decoding, kernels, the planner, the tests (bench_gpu.py)",
}

_WARMUP = flags.DEFINE_integer("warmup", 3, "Steps before the clock starts.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Timed steps, at most.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", math.inf, "Start no timed step after this long.", lower_bound=0.001)
_OUTPUT = flags.DEFINE_string("output", "", "File for the JSON, besides standard output.")
_QUIET = flags.DEFINE_bool("quiet", False, "Print nothing besides --output.")
_STRATEGIES = flags.DEFINE_list("strategies", [], "strategies, plan: names of those to compare; empty: all.")
_PROFILE = flags.DEFINE_string("profile", None, "plan: the machine's profile, by launch.topology; else it is measured.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "plan: processes for each mesh, in turns; medians count.", lower_bound=1)
_CPU_DEVICES = flags.DEFINE_integer("cpu_devices", None, "plan: virtual CPU devices; else as the configuration says.")
_PROMPT_LEN = flags.DEFINE_integer("prompt_len", 128, "serve: tokens of each prompt.", lower_bound=1)
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 64, "serve: new tokens of each request.", lower_bound=2)
_SHARED = flags.DEFINE_integer("shared_prefix", 0, "serve: tokens that all prompts begin with.", lower_bound=0)
_RATIO = flags.DEFINE_float(
    "range_ratio", 0.0, "serve, over HTTP: lengths are spread evenly over 1 - RATIO to 1 + RATIO times the above."
)
_RATES = flags.DEFINE_list("rates", [], "serve: requests a second, each measured in turn; inf: all at once.")
_CONCURRENCY = flags.DEFINE_list("concurrency", [], "serve: requests at once, each measured in turn.")
_REQUESTS = flags.DEFINE_integer("requests", 64, "serve: requests of each rate and concurrency.", lower_bound=1)
_TURNS = flags.DEFINE_integer(
    "turns", 0, "serve: of conversations, as many as --requests, measured in this process too.", lower_bound=0
)
_FILE = flags.DEFINE_string("file", None, "serve: JSONL of prompts, messages or ShareGPT's conversations, over HTTP.")
_GOODPUT = flags.DEFINE_list("goodput", [], "serve: limits in seconds, as ttft:0.5,tpot:0.05,itl:0.2,e2e:9.")
_IMAGES = flags.DEFINE_integer(
    "images_per_prompt",
    0,
    "serve: random images before each prompt, of a --model or at a --url that sees.",
    lower_bound=0,
)
_IMAGE_SIZE = flags.DEFINE_string("image_size", "512x512", "serve: HEIGHTxWIDTH of these images, in pixels.")
_MODEL = flags.DEFINE_string("model", None, "serve: a checkpoint, as launch.serve takes it, instead of --config.")
_URL = flags.DEFINE_string("url", None, "serve: a server with OpenAI's API, instead of --config. Key: SHARDLM_API_KEY.")
_VOCAB = flags.DEFINE_integer("vocab", 256, "serve --url: random prompts are of token ids below this.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "serve: a PNG of the latencies and the throughput over the load.")


def main(resolved: Resolved, benchmark: str) -> int:
    if benchmark not in BENCHMARKS:
        raise ShardlmError(unknown(benchmark))
    if benchmark != "serve":
        refuse_given(benchmark)
    if benchmark == "strategies":
        return compare_strategies()
    if benchmark == "plan":
        return compare_plans(resolved.config)
    return serve(resolved.config) if benchmark == "serve" else train(resolved.config)


def serve(config) -> int:
    """A configuration's model, offline in this process, then over HTTP from another one."""
    from launch.devices import use_cpu_devices
    from shardlm.serve.bench.random_engine import random_engine
    from shardlm.serve.engine_config import EngineConfig

    if _IMAGES.value:
        raise ShardlmError(
            f"--images_per_prompt={_IMAGES.value}: a configuration's model reads text alone; give --model, a "
            "checkpoint that sees, or --url of a server of one"
        )
    sizes = mesh_sizes({"tensor": config.mesh.tensor, "expert": config.mesh.expert})
    options, needed = _served(sizes)
    use_cpu_devices(config.cpu_devices and math.prod(sizes.values()))
    options["max_model_len"] = options["max_model_len"] or needed
    if _FILE.value and _has_texts():
        raise ShardlmError(
            f"{_FILE.value} has texts, and a model of random weights has no tokenizer or chat template for them: give "
            "prompts as token ids, or --url of a server of the model"
        )
    tell("compiling, before anything is measured")
    return _measure(random_engine(config.model.transformer(), EngineConfig(**options)))


def serve_checkpoint(benchmark: str) -> int:
    """The same of --model."""
    from shardlm.serve.bench.checkpoint import checkpoint_engine
    from shardlm.serve.bench.image_work import size_of
    from shardlm.serve.engine_config import EngineConfig

    options, needed = _served(mesh_sizes())
    size = size_of(_IMAGE_SIZE.value)
    if _IMAGES.value and (_TURNS.value or _FILE.value):
        raise ShardlmError("--images_per_prompt is of random prompts: leave --turns and --file out")
    tell("opening and compiling, before anything is measured")
    return _measure(*checkpoint_engine(_MODEL.value, EngineConfig(**options), needed, _IMAGES.value, size))


def _served(sizes: dict[str, int]) -> tuple[dict, int]:
    """(fields of EngineConfig, tokens of the longest request). Raises ShardlmError for what cannot be asked."""
    from shardlm.mesh import MeshSpec
    from shardlm.serve.bench.turns import longest
    from shardlm.serve.bench.workload import check_shared, spread

    if _VOCAB.present:
        raise ShardlmError(
            f"--vocab={_VOCAB.value} goes with --url; of a model of this process it is known: leave it out"
        )
    asked()
    prompt, output, ratio = _PROMPT_LEN.value, _OUTPUT_LEN.value, _RATIO.value
    needed = spread(prompt, ratio)[-1] + spread(output, ratio)[-1]
    needed = max(needed, longest(_TURNS.value, prompt, output)) if _TURNS.value else needed
    check_shared(_SHARED.value, prompt, ratio)
    return {"mesh": MeshSpec(**sizes), **engine_options()}, needed


def _has_texts() -> bool:
    from shardlm.serve.bench.workload import read_jobs

    return any(not isinstance(job.body.get("prompt"), list) for job in read_jobs(_FILE.value, _OUTPUT_LEN.value))


def _measure(engine, template=None) -> int:
    """Offline in this process, then over HTTP from another one."""
    from shardlm.serve.bench.engine import bench_serving, serve_to
    from shardlm.serve.bench.image_work import size_of
    from shardlm.serve.bench.turns import in_turns

    tell(f"compiled {engine.runner.num_programs} programs in {engine.runner.compile_seconds:.0f} s")
    prompt, output, shared = _PROMPT_LEN.value, _OUTPUT_LEN.value, _SHARED.value
    seen = {"images": _IMAGES.value, "image_size": size_of(_IMAGE_SIZE.value)}
    found = bench_serving(engine, prompt_len=prompt, output_len=output, shared=shared, tell=tell, **seen)
    if _TURNS.value:
        found["turns"] = []
        for row in in_turns(engine, _REQUESTS.value, _TURNS.value, prompt, output, shared):
            found["turns"].append(row)
            tell(
                f"turn {row['turn']} of {_REQUESTS.value} conversations: {row['seconds']:.2f} s, "
                f"{row['cached_tokens']:,} of {row['prompt_tokens']:,} tokens cached"
            )
    if _RATES.value or _CONCURRENCY.value:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "online.json")
            command = _client_command(file, engine.runner.model.config.vocab_size)
            asyncio.run(serve_to(engine, command, template))
            found |= {name: value for name, value in json.loads(file.read_text()).items() if name not in found}
    write(found)
    return 0


def _client_command(file: pathlib.Path, vocab: int) -> list[str]:
    """`load` with the same flags as here, for a server of this process."""
    shared = [_RATES, _CONCURRENCY, _GOODPUT]
    flags = [f"--{flag.name}={','.join(map(str, flag.value))}" for flag in shared if flag.value]
    given = [_REQUESTS, _PROMPT_LEN, _OUTPUT_LEN, _SHARED, _RATIO, _FILE, _PLOT]
    given += [_IMAGES, _IMAGE_SIZE] if _IMAGES.value else []
    flags += [f"--{flag.name}={flag.value}" for flag in given if flag.value]
    flags += ["--quiet"] if _QUIET.value else []
    return [sys.executable, "-m", "launch.bench", "serve", *flags, f"--vocab={vocab}", f"--output={file}"]


def tell(text: str) -> None:
    """How far a measurement is, on standard error, unless --quiet."""
    if not _QUIET.value:
        print(text, file=sys.stderr, flush=True)


def load(benchmark: str) -> int:
    """What answers at --url, under load. Imports no jax."""
    from shardlm.serve.bench import image_work, online, workload
    from shardlm.serve.bench.client import Client
    from shardlm.serve.bench.picture import plot_load

    refuse_given("a server at --url", _MODEL, _TURNS)
    count, new, prompt = _REQUESTS.value, _OUTPUT_LEN.value, _PROMPT_LEN.value
    shared, ratio = _SHARED.value, _RATIO.value
    rates, concurrency, limits = asked()
    images, size = _IMAGES.value, image_work.size_of(_IMAGE_SIZE.value)
    if not rates and not concurrency:
        raise ShardlmError("give --rates or --concurrency, or both")
    if images and _FILE.value:
        raise ShardlmError("--images_per_prompt is of random prompts: give --file's messages images of their own")

    def jobs(seed: int):
        if _FILE.value:
            return workload.file_jobs(_FILE.value, count, new, seed)
        if images:
            return image_work.image_jobs(count, prompt, new, shared, seed, ratio, images, size)
        return workload.random_jobs(count, prompt, new, shared, _VOCAB.value, seed, ratio)

    client = Client(_URL.value, os.environ.get("SHARDLM_API_KEY", ""))
    found = asyncio.run(online.bench(client, jobs, rates=rates, concurrency=concurrency, limits=limits, tell=tell))
    made = {"prompt_len": prompt, "shared_prefix": shared, "range_ratio": ratio}
    made |= {"images_per_prompt": images, "image_size": list(size)} if images else {}
    kind = {"file": _FILE.value} if _FILE.value else made
    write({"benchmark": benchmark, "model": client.model, "workload": {**kind, "output_len": new}, "online": found})
    if _PLOT.value:
        plot_load(found, _PLOT.value)
    return 0


def asked() -> tuple[list[float], list[int], dict[str, float]]:
    """(rates, requests at once, limits of --goodput). Raises ShardlmError for what they cannot be, or a --plot that
    cannot be written: in `serve` before a model is compiled."""
    from shardlm.serve.bench.seen import limits_of

    check_writable(_PLOT, ".png")
    rates, concurrency = numbers("rates", _RATES.value, float), numbers("concurrency", _CONCURRENCY.value, int)
    return rates, concurrency, limits_of(_GOODPUT.value)


def numbers(name: str, words: list[str], kind: type) -> list:
    """Raises ShardlmError for what is no number above 0."""
    try:
        found = [kind(word) for word in words]
    except ValueError:
        found = [0]
    if any(not one > 0 for one in found):
        raise ShardlmError(f"{name}={','.join(words)} must be numbers above 0")
    return found


def write(result: dict) -> None:
    """To standard output, unless --quiet, and to --output."""
    text = json.dumps(result, indent=2)
    if not _QUIET.value:
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
        result = _trained(variant)
        if isinstance(result, str):
            rows.append(failed(variant, result))
        else:
            results.append(result)
            rows.append(row(variant, result))
        print(f"{variant.name}: {rows[-1].get('error') or 'done'}", file=sys.stderr)
    table = report(rows, results)
    _write_table(table, markdown(table))
    return int(len(results) < len(rows))


def compare_plans(config) -> int:
    """Predicts each mesh of shardlm/plan/ranking.py from the machine's profile, then runs `train` on it in processes of
    its own, --rounds times in turn with the others, and writes both as `compare_strategies` does. 1 if one of them did
    not run."""
    from launch.devices import use_cpu_devices
    from shardlm.config import resolve
    from shardlm.network.profile import load_profile
    from shardlm.plan import ranking

    use_cpu_devices(1)  # here nothing runs: a GPU is left to those processes that measure
    count = config.cpu_devices if _CPU_DEVICES.value is None else _CPU_DEVICES.value
    profile = load_profile(_PROFILE.value) if _PROFILE.value else _profile_of(count)
    asked, predicted, results = {}, {}, {}
    for variant in ranking.meshes(_STRATEGIES.value):
        changes = [tuple(change.split("=", 1)) for change in variant.changes.split()]
        asked[variant] = resolve(variant.config or flags.FLAGS.config, [*_overrides(), *changes]).config
        try:
            predicted[variant], results[variant] = ranking.predict(asked[variant], profile), []
        except ShardlmError as error:
            predicted[variant], results[variant] = {}, [str(error)]
    for _ in range(_ROUNDS.value):
        for variant, found in results.items():
            if not any(isinstance(one, str) for one in found):
                found.append(_trained(variant))
            row = ranking.row(variant, asked[variant], predicted[variant], found)
            print(f"{variant.name}: {ranking.sentence(row)}", file=sys.stderr)
    rows = [ranking.row(variant, asked[variant], predicted[variant], results[variant]) for variant in asked]
    ran = [one for found in results.values() for one in found if isinstance(one, dict)]
    table = ranking.report(rows, ran[-1] if ran else None, profile, _ROUNDS.value)
    _write_table(table, ranking.markdown(table))
    return int(any("error" in row for row in rows))


def _profile_of(cpu_devices: int):
    """The machine measured, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_measured, cpu_devices).result()


def _measured(cpu_devices: int):
    from launch.devices import use_cpu_devices
    from shardlm.plan.local import measure_here

    use_cpu_devices(cpu_devices)
    return measure_here(lambda text: print(text, file=sys.stderr, flush=True))


def _trained(variant) -> dict | str:
    """The result of `train` in a process of its own, or the last line of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "result.json")
        done = subprocess.run(_command(variant, file), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
        return json.loads(file.read_text())


def _write_table(table: dict, text: str) -> None:
    """Printed; as JSON to --output, and as Markdown beside it."""
    print(text)
    if _OUTPUT.value:
        output = pathlib.Path(_OUTPUT.value)
        write_atomically(output, json.dumps(table, indent=2).encode() + b"\n")
        write_atomically(output.with_suffix(".md"), text.encode())


def _overrides() -> list[tuple[str, str]]:
    """Those of the command line, and of --cpu_devices."""
    given = [] if _CPU_DEVICES.value is None else [("cpu_devices", str(_CPU_DEVICES.value))]
    return [*split_overrides(sys.argv)[1], *given]


def _command(variant, output: pathlib.Path) -> list[str]:
    """`train` with the same flags and overrides as here, and then the variant's."""
    config = variant.config or flags.FLAGS.config
    bounds = [f"--warmup={_WARMUP.value}", f"--steps={_STEPS.value}", f"--seconds={_SECONDS.value}"]
    own = [f"{PREFIX}{path}={value}" for path, value in _overrides()]
    start = [sys.executable, "-m", "launch.bench", "train", f"--config={config}", f"--output={output}"]
    return [*start, *bounds, *own, *variant.flags()]


def unknown(benchmark: str) -> str:
    known = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    return f"there is no benchmark {benchmark!r}; there is {known}"


if __name__ == "__main__":
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if not first.startswith("-") and first not in BENCHMARKS:
        sys.exit(f"error: {unknown(first)}")  # before a configuration is asked for
    start = main
    for name, own in (("model", serve_checkpoint), ("url", load)):  # which need no configuration
        if first == "serve" and any(word.split("=")[0] in (f"--{name}", f"-{name}") for word in sys.argv):
            start = own
    if first == "gpu":
        from launch.bench_gpu import main as start  # defines its own flags
    run(start, needs_config=start is main, processes=True, arguments=("benchmark",))
