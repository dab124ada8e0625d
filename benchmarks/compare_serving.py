"""Compares offline serving with transformers' generate on the same shape: separate processes, taken in turns, ratios by
batch.

python benchmarks/compare_serving.py --torch_python=.venv-torch/bin/python --rounds=3

The two sides are benchmarks/peers/transformers_generate.py and `python -m launch.bench serve`.
"""

import argparse
import json
import os
import statistics
import sys

from compare_training import run

OURS = ("-m", "launch.bench", "serve", "--config=configs/bench_768x12.py")
THEIRS = ("benchmarks/peers/transformers_generate.py",)
RATES = ("decode_tokens_per_second", "output_tokens_per_second")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch_python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sides = {"shardlm": [sys.executable, *OURS], "transformers": [args.torch_python, *THEIRS]}
    rounds = []
    for number in range(args.rounds):
        reports = {}
        for side in sorted(sides, reverse=number % 2 == 0):
            reports[side] = run(sides[side], dict(os.environ))
        rows = {}
        for ours, theirs in zip(*(reports[side]["offline"] for side in ("shardlm", "transformers")), strict=True):
            rows[ours["batch"]] = {
                name: {"shardlm": ours[name], "transformers": theirs[name], "ratio": ours[name] / theirs[name]}
                for name in RATES
            }
        rounds.append(rows)
        print(json.dumps(rows), file=sys.stderr)
    ratios = {
        batch: {name: statistics.median(rows[batch][name]["ratio"] for rows in rounds) for name in RATES}
        for batch in rounds[0]
    }
    versions = {side: report["versions"] for side, report in reports.items()}
    print(json.dumps({"ratios": ratios, "rounds": rounds, "versions": versions}, indent=2))


if __name__ == "__main__":
    main()
