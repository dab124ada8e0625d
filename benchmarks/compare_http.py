"""Compares serving over HTTP, and offline, with llama.cpp on the same weights and threads: processes apart, in turns,
ratios by concurrency. Both servers are asked the same by `python -m launch.bench serve --url`. Weights are float32, or
a GGUF file of few bits that both open (--numbers).

python benchmarks/peers/llama_gguf.py --output=runs/served
python benchmarks/compare_http.py --weights=runs/served --llama=llama.cpp/build/bin --rounds=3 --output=FILE.json
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
CONCURRENCY = (1, 8, 32)
PROMPT, NEW = 128, 64
SLOT = 256  # tokens of a request at most: prompt and reply, and something over
# llama.cpp keeps keys and values in float16 unless told otherwise, shardlm in the dtype that it computes in. With 16bit
# it is float16 there and bfloat16 here. (options of llama.cpp, options of shardlm)
CACHES = {
    "own": ([], []),
    "float32": (["-ctk", "f32", "-ctv", "f32"], []),
    "16bit": ([], ["--kv_cache_dtype=bfloat16"]),
}
PORTS = {"shardlm": 8461, "llama.cpp": 8462}
NUMBERS = ("f32", "q8_0", "q4_0")


def model_of(side: str, weights: pathlib.Path, numbers: str) -> pathlib.Path:
    """What a side opens of the folder that peers/llama_gguf.py wrote."""
    if numbers == "f32":
        return weights / ("hf" if side == "shardlm" else "model.gguf")
    return weights / f"model-{numbers}.gguf"


@contextlib.contextmanager
def serving(side: str, model: pathlib.Path, llama: pathlib.Path, threads: int, cache: str) -> Iterator[str]:
    """The address of a server that has answered; ended afterwards."""
    port, most = PORTS[side], max(CONCURRENCY)
    commands = {
        "shardlm": [
            *(sys.executable, "-m", "launch.serve", f"--model={model}", f"--port={port}"),
            *(f"--max_model_len={SLOT}", f"--max_num_seqs={most}"),
        ],
        "llama.cpp": [
            *(llama / "llama-server", "-m", model, "--port", str(port), "-t", str(threads)),
            *("-tb", str(threads), "-np", str(most), "-c", str(most * SLOT), "--no-webui", "--log-disable"),
        ],
    }
    with tempfile.TemporaryFile() as log:
        words = list(map(str, [*commands[side], *CACHES[cache][side == "shardlm"]]))
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait()


def wait_for(url: str, process: subprocess.Popen, log, seconds: float = 600) -> None:
    """Exits with what the server said where it ends or does not answer."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    log.seek(0)
    sys.exit(f"{log.read().decode(errors='replace')[-4000:]}\nerror: {process.args[0]} does not serve")


def under_load(url: str, requests: int) -> dict[str, dict[str, float]]:
    """{concurrency: {rate or time: its value}}."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "load.json")
        words = [f"--concurrency={','.join(map(str, CONCURRENCY))}", f"--requests={requests}", f"--output={file}"]
        words += [f"--url={url}", f"--prompt_len={PROMPT}", f"--output_len={NEW}", "--vocab=8000", "--quiet"]
        subprocess.run([sys.executable, "-m", "launch.bench", "serve", *words], cwd=ROOT, check=True)
        found = json.loads(file.read_text())["online"]
    if failed := [row["first_error"] for row in found if row["failed"]]:
        sys.exit(f"error: {url}: {failed[0]}")
    return {
        str(row["concurrency"]): {
            "output_tokens_per_second": row["output_tokens_per_second"],
            "ttft_p50": row["ttft_seconds"]["p50"],
            "tpot_p50": row["tpot_seconds"]["p50"],
        }
        for row in found
    }


def greedy(url: str) -> str:
    """What both must say alike."""
    body = {"prompt": list(range(1000, 1000 + PROMPT)), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]


def offline_of_llama(model: pathlib.Path, llama: pathlib.Path, threads: int, cache: str) -> dict[str, float]:
    """{batch: tokens a second while decoding}, by llama.cpp's own benchmark."""
    command = [llama / "llama-batched-bench", "-m", model, "-t", threads, "-tb", threads]
    command += ["-c", max(CONCURRENCY) * SLOT, "-npp", PROMPT, "-ntg", NEW, "-npl", ",".join(map(str, CONCURRENCY))]
    words = [*map(str, command), *CACHES[cache][0], "--output-format", "jsonl"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {str(row["pl"]): row["speed_tg"] for row in rows}


def offline_of_shardlm(model: pathlib.Path, cache: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "offline.json")
        words = [
            "serve",
            f"--model={model}" if model.is_file() else "--config=configs/bench_768x12.py",
            f"--prompt_len={PROMPT}",
            f"--output_len={NEW}",
            "--quiet",
            *CACHES[cache][1],
        ]
        subprocess.run([sys.executable, "-m", "launch.bench", *words, f"--output={file}"], cwd=ROOT, check=True)
        rows = json.loads(file.read_text())["offline"]
    return {str(row["batch"]): row["decode_tokens_per_second"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=pathlib.Path, required=True)
    parser.add_argument("--llama", type=pathlib.Path, required=True, help="folder of llama-server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of each concurrency")
    parser.add_argument("--threads", type=int, default=2, help="cores for each side, its client included")
    parser.add_argument("--cache", choices=list(CACHES), default="own", help="of both; own: as by default")
    parser.add_argument("--numbers", choices=NUMBERS, default="f32", help="of the weights")
    parser.add_argument("--output", type=pathlib.Path, help="file for the JSON")
    parser.add_argument("--only", choices=["http", "offline"], help="by default both")
    args = parser.parse_args()
    weights, llama = args.weights.absolute(), args.llama.absolute()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # the processes inherit it
    rounds = []
    for number in range(args.rounds):
        found: dict[str, dict] = {}
        said = {}
        for side in sorted(PORTS, reverse=number % 2 == 0):
            found[side], model = {}, model_of(side, weights, args.numbers)
            if args.only != "offline":
                with serving(side, model, llama, args.threads, args.cache) as url:
                    said[side] = greedy(url)
                    found[side]["http"] = under_load(url, args.requests)
            if args.only != "http":
                peer = functools.partial(offline_of_llama, llama=llama, threads=args.threads)
                decode = (offline_of_shardlm if side == "shardlm" else peer)(model, cache=args.cache)
                found[side]["offline"] = {n: {"decode_tokens_per_second": rate} for n, rate in decode.items()}
        found["same_greedy_text"] = len(set(said.values())) == 1 if said else None
        rounds.append(found)
        print(json.dumps(found), file=sys.stderr)
    report = {
        "ratios": ratios(rounds),
        "load_averages": os.getloadavg(),
        "threads": args.threads,
        "cache": args.cache,
        "numbers": args.numbers,
        "rounds": rounds,
    }
    print(json.dumps(report, indent=2))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


def ratios(rounds: list[dict]) -> dict:
    """shardlm over llama.cpp, medians of the rounds."""
    found: dict[str, dict] = {}
    for kind, by_load in rounds[0]["shardlm"].items():
        for load, values in by_load.items():
            for name in values:
                pairs = [(r["shardlm"][kind][load][name], r["llama.cpp"][kind][load][name]) for r in rounds]
                found.setdefault(kind, {}).setdefault(load, {})[name] = statistics.median(a / b for a, b in pairs)
    return found


if __name__ == "__main__":
    main()
