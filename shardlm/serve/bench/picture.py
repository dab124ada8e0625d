"""The load test as a picture: latencies and throughput over the rate or the concurrency."""

import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shardlm.files import write_atomically

PANELS = (
    ("ttft_seconds", "to the first token, s"),
    ("tpot_seconds", "each token after it, s"),
    ("e2e_seconds", "whole request, s"),
)
COLOURS = {"p50": "#2a6fbb", "p90": "#e0a030", "p99": "#d1495b"}
INK = "#1f2937"


def plot_load(reports: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Draws `online.bench`'s reports: a row of panels for the rates, one for the concurrencies."""
    kinds = [kind for kind in ("request_rate", "concurrency") if any(kind in report for report in reports)]
    figure = Figure(figsize=(12, 3.2 * len(kinds)), dpi=120, layout="constrained")
    grid = figure.subplots(len(kinds), len(PANELS) + 1, squeeze=False)
    for kind, row in zip(kinds, grid, strict=True):
        some = sorted((report for report in reports if kind in report), key=lambda report: float(report[kind]))
        places = range(len(some))
        labels = [f"{float(report[kind]):g}" for report in some]
        for axes, (name, label) in zip(row, PANELS, strict=False):
            for percentile, colour in COLOURS.items():
                values = [report[name].get(percentile, math.nan) for report in some]
                axes.plot(places, values, color=colour, marker="o", markersize=4, label=percentile)
            axes.set_title(label, fontsize=10, color=INK)
            axes.set_ylim(bottom=0)
        row[0].legend(frameon=False, fontsize=8)
        rates = [report["output_tokens_per_second"] for report in some]
        row[-1].bar(places, rates, color=COLOURS["p50"], width=0.5)
        row[-1].set_title("output tokens a second", fontsize=10, color=INK)
        for axes in row:
            axes.set_xticks(places, labels)
            axes.set_xlabel("requests a second" if kind == "request_rate" else "requests at once", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_atomically(pathlib.Path(path), image.getvalue())
