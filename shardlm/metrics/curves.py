"""The loss curve of a run as a picture, from its metrics.jsonl. Which baselines it shows its caller says."""

import io
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically
from shardlm.metrics.jsonl import read
from shardlm.metrics.log import FILE_NAME, TRAIN_LOSS, VALIDATION_LOSS

TRAIN_COLOUR, VALIDATION_COLOUR, REFERENCE_COLOUR, INK = "#2a6fbb", "#d1495b", "#6b7280", "#1f2937"


def plot_curves(
    run_dir: str | os.PathLike, references: Mapping[str, float] | None = None, per: str = "token"
) -> pathlib.Path:
    """Draws RUN/loss.png and returns its path: training loss raw and smoothed, validation loss, in nats `per` token or
    whatever else, and a horizontal line for each of `references`, name to loss, such as that of a bigram model.

    Raises:
        ShardlmError: the run has no losses yet, or the picture cannot be written.
    """
    run_dir = pathlib.Path(run_dir)
    lines = read(run_dir / FILE_NAME)
    train, validation = _series(lines, TRAIN_LOSS), _series(lines, VALIDATION_LOSS)
    if not train and not validation:
        raise ShardlmError(
            f"{run_dir / FILE_NAME} holds no {TRAIN_LOSS!r} or {VALIDATION_LOSS!r} to draw: "
            "is this the directory of a run that has done a step?"
        )
    image = io.BytesIO()
    FigureCanvasAgg(_draw(run_dir.name, train, validation, references or {}, per)).print_png(image)
    path = run_dir / "loss.png"
    write_atomically(path, image.getvalue())
    return path


def _series(lines: Sequence[dict], name: str) -> list[tuple[int, float]]:
    """(step, value) of the lines that have a finite value under `name`."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value with up to `reach` neighbours on either side; near the start as many on the one
    side as on the other, so that the steep part of a curve is not shifted."""
    sums = [0.0, *itertools.accumulate(values)]
    spans = [(i - min(reach, i), min(i + min(reach, i) + 1, len(values))) for i in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def _draw(
    title: str,
    train: list[tuple[int, float]],
    validation: list[tuple[int, float]],
    references: Mapping[str, float],
    per: str,
) -> Figure:
    figure = Figure(figsize=(9, 5), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=TRAIN_COLOUR, alpha=0.25, linewidth=0.8)
        axes.plot(
            steps,
            smooth(losses, len(losses) // 100),
            color=TRAIN_COLOUR,
            linewidth=1.8,
            label="training",
        )
    if validation:
        label = f"validation, last {validation[-1][1]:.3f}"
        axes.plot(*zip(*validation, strict=True), color=VALIDATION_COLOUR, marker="o", markersize=4, label=label)
    for name, loss in references.items():
        axes.axhline(loss, color=REFERENCE_COLOUR, linewidth=1, linestyle=(0, (5, 4)))
        axes.annotate(
            f"{name} {loss:.3f}",
            (1, loss),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=REFERENCE_COLOUR,
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss (nats per {per})")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    return figure
