"""A sweep as a picture: throughput, what a step's time goes to, and memory, over the values. All are estimates."""

import io
import os
import pathlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shardlm.files import write_atomically
from shardlm.hardware import GIB
from shardlm.plan.shares import shares
from shardlm.plan.sweep import NUM_GPUS, Row, Sweep

BLUE, YELLOW, RED, GREY, INK = "#2a6fbb", "#e0a030", "#d1495b", "#6b7280", "#1f2937"
KINDS = {"computing": BLUE, "communication": YELLOW, "pipeline bubble": GREY}  # as shares() ends its names


def plot(sweep: Sweep, path: str | os.PathLike) -> None:
    """Draws it as a PNG. Raises ShardlmError where it cannot be written."""
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    rows = sweep.rows
    panels = figure.subplots(1, 3)
    _speed(panels[0], rows, sweep.over.field == NUM_GPUS)
    _shares(panels[1], rows)
    _memory(panels[2], rows)
    for axes in panels:
        axes.set_xticks(range(len(rows)), [row.case.value for row in rows], rotation=30 if len(rows) > 5 else 0)
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.set_xlabel(sweep.over.field, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_atomically(pathlib.Path(path), image.getvalue())


def _speed(axes: Axes, rows: Sequence[Row], of_gpus: bool) -> None:
    """Over the number of GPUs beside as many times what the first that fits does on each of its own."""
    plans = [(i, row.plan) for i, row in enumerate(rows) if row.plan]
    axes.plot([i for i, _ in plans], [plan.cost.tokens_per_second for _, plan in plans], color=BLUE, marker="o")
    for i, row in enumerate(rows):
        if row.plan is None:
            axes.annotate("none\nfits", (i, 0.02), xycoords=("data", "axes fraction"), ha="center", color=RED)
    if of_gpus and plans:
        each = plans[0][1].cost.tokens_per_second / plans[0][1].cluster.num_gpus
        linear = [each * row.case.cluster.num_gpus for row in rows]
        axes.plot(range(len(rows)), linear, color=GREY, linestyle="--", linewidth=1, label="as the first, for each GPU")
        axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("tokens a second (estimated)", fontsize=10, color=INK)


def _shares(axes: Axes, rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        if row.plan is None:
            continue
        bottom = 0.0
        for kind, colour in KINDS.items():
            part = sum(share for name, share in shares(row.plan).items() if name.endswith(kind))
            axes.bar(i, part, bottom=bottom, color=colour, width=0.5)
            bottom += part
        axes.annotate(f"MFU\n{row.plan.mfu:.0%}", (i, 1.02), ha="center", fontsize=8, color=INK)
    for kind, colour in KINDS.items():
        axes.bar(0, 0, color=colour, label=kind)
    axes.set_ylim(0, 1.4)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper center")
    axes.set_title("share of a step (estimated)", fontsize=10, color=INK)


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        if row.plan:
            axes.bar(i, row.plan.memory.total / GIB, color=BLUE, width=0.5)
    limits = [row.case.cluster.gpu.hbm_bytes / GIB for row in rows]
    axes.plot(range(len(rows)), limits, color=RED, marker="_", markersize=24, linestyle="none")
    axes.set_ylim(bottom=0)
    axes.set_title("GiB of a GPU (estimated; red: all it has)", fontsize=10, color=INK)
