"""What was measured as text and as a picture. No jax."""

import dataclasses
import io
import math
import os
import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, NullLocator

from shardlm.files import write_atomically
from shardlm.network.links import Links
from shardlm.network.profile import CollectiveRate
from shardlm.network.rates import HostRate, MatmulRate, MemoryRate

COLOURS = ("#2a6fbb", "#d1495b", "#e0a030", "#3d8b5f", "#7a4fa3")
INK, PEAK_COLOUR = "#1f2937", "#6b7280"


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured point (collectives.py), its bandwidths, and the link that bounds it with the bus bandwidth that this
    allows; None where no figure of the link is known."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    link: str | None
    link_bandwidth: float | None


HEAD = (
    f"{'collective':<19}{'over':<20}{'devices':>8}{'bytes':>13}{'time us':>12}{'alg GB/s':>11}{'bus GB/s':>11}"
    "  of the link"
)


def _giga(rate: float) -> str:
    """Of little that is sent two digits, where there would be 0."""
    return f"{rate / 1e9:.2f}" if rate >= 5e6 else f"{rate / 1e9:.2g}"


def format_row(row: Row) -> str:
    """A line under HEAD; GB are 10**9 bytes."""
    share = f"{row.bus_bandwidth / row.link_bandwidth:.0%} of {row.link}" if row.link_bandwidth else "not known"
    return (
        f"{row.kind:<19}{'+'.join(row.axes):<20}{row.group_size:>8}{row.bytes:>13,}{row.seconds * 1e6:>12.1f}"
        f"{_giga(row.algorithm_bandwidth):>11}{_giga(row.bus_bandwidth):>11}  {share}"
    )


def format_rates(rates: Sequence[CollectiveRate]) -> str:
    """The fitted lines: what a collective costs that sends nothing, the bandwidth of more, and how well that fits."""
    lines = [
        f"{'collective':<19}{'over':<20}{'devices':>8}{'latency us':>12}{'bus GB/s':>11}{'error':>8}{'largest':>9}"
    ]
    for rate in rates:
        lines.append(
            f"{rate.kind:<19}{'+'.join(rate.axes):<20}{rate.group_size:>8}{rate.latency_seconds * 1e6:>12.1f}"
            f"{rate.bytes_per_second / 1e9:>11.2f}{rate.error:>8.0%}{rate.largest_error:>9.0%}"
        )
    return "\n".join(lines)


def format_rate(rate: MatmulRate | MemoryRate | HostRate) -> str:
    """A line for what was measured of one device."""
    if isinstance(rate, MatmulRate):
        giga = rate.flops_per_second / 1e9
        return f"matmul {rate.m} x {rate.k} x {rate.n} {rate.dtype}: " + (
            f"{giga / 1e3:.2f} TFLOP/s" if giga >= 100 else f"{giga:.2f} GFLOP/s"
        )
    what = f"memory {rate.operation}" if isinstance(rate, MemoryRate) else f"{rate.direction}, {rate.memory} memory"
    return f"{what}, {rate.bytes:,} bytes: {rate.bytes_per_second / 1e9:.2f} GB/s"


def format_links(links: Links) -> str:
    """The paths between GPUs as a matrix; for each GPU its NVLinks, the adapters near to it and its NUMA node."""
    width = max(map(len, links.gpus)) + 1
    lines = ["links of this host, by the driver (GPUs by bus)"]
    lines.append("  " + " " * width + "".join(name.rjust(width + 1) for name in links.gpus))
    for gpu in links.gpus:
        cells = ["X" if other == gpu else str(links.pairs.get((gpu, other), "?")) for other in links.gpus]
        lines.append("  " + gpu.ljust(width) + "".join(cell.rjust(width + 1) for cell in cells))
    for gpu in links.gpus:
        told = []
        if gpu in links.nvlinks:
            told.append(f"{len(links.nvlinks[gpu])} NVLinks, {sum(links.nvlinks[gpu]) / 1e9:.1f} GB/s each way")
        if near := links.nearest_adapters(gpu):
            told.append(f"{', '.join(near)} by {links.pairs[gpu, near[0]]}")
        if gpu in links.numa:
            told.append(f"NUMA node {links.numa[gpu]}")
        lines.append(f"  {gpu}: {'; '.join(told) or 'nothing more is told'}")
    return "\n".join(lines)


class _Plain(LogFormatterSciNotation):
    """0.2 and 100, where powers of ten stand otherwise."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _size(nbytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def plot(rows: Sequence[Row], title: str, path: str | os.PathLike) -> None:
    """Bus bandwidth over the size as a PNG: a panel for each set of axes, a line for each kind, dashed what the link
    allows. Raises: ShardlmError where it cannot be written."""
    over = list(dict.fromkeys(row.axes for row in rows))
    columns = min(3, len(over))
    figure = Figure(figsize=(4.6 * columns, 3.6 * math.ceil(len(over) / columns) + 0.4), dpi=120, layout="constrained")
    panels = figure.subplots(math.ceil(len(over) / columns), columns, squeeze=False, sharey=True).flat
    kinds = list(dict.fromkeys(row.kind for row in rows))
    for axes, panel in zip(over, panels, strict=False):  # `over` first: at its end no panel more is taken
        here = [row for row in rows if row.axes == axes]
        for kind, colour in zip(kinds, COLOURS, strict=False):
            points = [(row.bytes, row.bus_bandwidth / 1e9) for row in here if row.kind == kind]
            panel.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=kind)
        for link, most in dict.fromkeys((row.link, row.link_bandwidth) for row in here if row.link_bandwidth):
            panel.axhline(most / 1e9, color=PEAK_COLOUR, linestyle=(0, (5, 4)), linewidth=1)
            panel.annotate(link, (here[0].bytes, most / 1e9), fontsize=8, color=PEAK_COLOUR, va="bottom")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes := sorted({row.bytes for row in here}), [_size(n) for n in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(_Plain())
        panel.yaxis.set_minor_formatter(_Plain())
        panel.set_title(f"{'+'.join(axes)}: groups of {here[0].group_size}", fontsize=10, color=INK)
        panel.tick_params(labelsize=8)
        panel.set_xlabel("bytes", fontsize=9)
        panel.grid(color="#e5e7eb", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(panels):
        panel.set_visible(False)
    figure.axes[0].set_ylabel("bus bandwidth, GB/s (measured)", fontsize=9)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left")
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_atomically(pathlib.Path(path), image.getvalue())
