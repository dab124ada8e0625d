"""Compares the training step with PyTorch's on the same shape: separate processes, taken in turns, ratio per round.

python benchmarks/compare_training.py --shape=768x12 --torch_python=.venv-torch/bin/python --rounds=3

Owns the turns and the ratio; the two sides are benchmarks/peers/torch_train.py and `python -m launch.bench train`.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUANTILES = ("p10", "p50", "p90")  # far apart where something else ran on the cores


def run(command: list[str], environment: dict[str, str]) -> dict:
    """The JSON that one benchmark prints last, in a process of its own. Exits with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{done.stderr}error: {' '.join(command)} ended with status {done.returncode}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def compare(commands: dict[str, list[str]], rounds: int, environment: dict[str, str]) -> dict:
    """Runs both sides in each round, the other one first in every second; ratios are shardlm over torch."""
    reports, table = {}, []
    for number in range(rounds):
        for side in sorted(commands, reverse=number % 2 == 0):
            reports[side] = run(commands[side], environment)
        rates = {side: tokens_per_second(report) for side, report in reports.items()}
        spread = {side: {q: report["step_seconds"][q] for q in QUANTILES} for side, report in reports.items()}
        table.append(rates | {"ratio": rates["shardlm"] / rates["torch"], "step_seconds": spread})
        print(json.dumps(table[-1]), file=sys.stderr)
    versions = {side: report["versions"] for side, report in reports.items()}
    ratio = statistics.median(row["ratio"] for row in table)
    return {"ratio": ratio, "rounds": table, "date": reports["shardlm"]["date"], "versions": versions}


def tokens_per_second(report: dict) -> float:
    """By the median step of either side."""
    rate = report["tokens_per_second"]
    return rate["p50"] if isinstance(rate, dict) else rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["768x12", "288x6"], required=True)
    parser.add_argument("--torch_python", required=True, help="a Python with torch (benchmarks/README.md)")
    parser.add_argument("--mode", default="compile", choices=["eager", "compile", "compile-autotune"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a process")
    parser.add_argument("--threads", type=int, default=2, help="cores that each side may use")
    parser.add_argument("--hugepages", action="store_true", help="glibc's huge pages, for both sides")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    if len(cores) < args.threads:
        sys.exit(f"error: --threads={args.threads} on {len(cores)} cores; give at most {len(cores)}")
    os.sched_setaffinity(0, cores)  # the processes inherit it: XLA has a thread a core
    environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads))
    environment.pop("GLIBC_TUNABLES", None)
    if args.hugepages:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    turn = [f"--steps={args.steps}", "--seconds=60", "--warmup=3"]
    peer = ["benchmarks/peers/torch_train.py", f"--shape={args.shape}", f"--mode={args.mode}"]
    commands = {
        "torch": [os.path.abspath(args.torch_python), *peer, f"--threads={args.threads}", *turn],
        "shardlm": [sys.executable, "-m", "launch.bench", "train", f"--config=configs/bench_{args.shape}.py", *turn],
    }
    setting = {name: getattr(args, name) for name in ("shape", "mode", "steps", "threads", "hugepages")}
    print(json.dumps(setting | compare(commands, args.rounds, environment), indent=1))


if __name__ == "__main__":
    main()
