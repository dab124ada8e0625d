"""Compares the training step with PyTorch's on the same shape: separate processes, taken in turns, ratio per round.

python benchmarks/compare_training.py --shape=768x12 --torch_python=.venv-torch/bin/python --rounds=3
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

TORCH = "benchmarks/peers/torch_train.py"


def last_json(text: str) -> dict:
    """The JSON object that a benchmark printed last."""
    return json.loads(text[text.index("{") :])


def run(command: list[str], hugepages: bool) -> float:
    """Tokens per second, by the median step, of one process."""
    environment = dict(os.environ, OMP_NUM_THREADS="2")
    if hugepages:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    rate = last_json(done.stdout)["tokens_per_second"]
    return rate["p50"] if isinstance(rate, dict) else rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=["768x12", "288x6"], required=True)
    parser.add_argument("--torch_python", required=True, help="a Python with torch (benchmarks/README.md)")
    parser.add_argument("--mode", default="compile", choices=["eager", "compile"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hugepages", action="store_true", help="glibc's huge pages, for both sides")
    args = parser.parse_args()
    torch = [args.torch_python, TORCH, f"--shape={args.shape}", f"--mode={args.mode}", f"--steps={args.steps}"]
    ours = [sys.executable, "-m", "launch.bench", "train"]
    ours += [f"--config=configs/bench_{args.shape}.py", f"--steps={args.steps}"]
    rounds = []
    for _ in range(args.rounds):
        pair = {"torch": run(torch, args.hugepages), "shardlm": run(ours, args.hugepages)}
        rounds.append(pair | {"ratio": pair["shardlm"] / pair["torch"]})
        print(json.dumps(rounds[-1]), file=sys.stderr)
    ratio = statistics.median(r["ratio"] for r in rounds)
    print(
        json.dumps(
            {"shape": args.shape, "mode": args.mode, "hugepages": args.hugepages, "rounds": rounds, "ratio": ratio}
        )
    )


if __name__ == "__main__":
    main()
