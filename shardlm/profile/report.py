"""A profile as its user reads it: a table, beside a prediction where there is one, and JSON."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.hlo.labels import PHASES
from shardlm.hlo.rows import LAYERS, OUTSIDE, exposed
from shardlm.metrics.progress import format_flops
from shardlm.profile.device_time import DeviceTime, mean

MS = 1e3


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured over some steps, on the devices of one process.

    first, last   steps
    step_seconds  of each, by the clock of the host
    devices       by number in this process: seconds of one step
    flops         (kind of layer, phase) -> of the matmuls of one step on one device, from the compiled program
    uncounted     kernels whose FLOPs are not known, name -> times a step
    peak          FLOP/s of one device for the run's precision; None where it is not known
    """

    first: int
    last: int
    step_seconds: Sequence[float]
    devices: Mapping[int, DeviceTime]
    flops: Mapping[tuple[str, str], float]
    uncounted: Mapping[str, int]
    peak: float | None

    @property
    def step(self) -> float:
        return statistics.median(self.step_seconds)

    def rows(self) -> dict[str, float]:
        """Row of rows.py -> seconds of one step, mean over devices: what a prediction is compared with."""
        time = mean(self.devices.values())
        layers = {name: sum(time.computed.get((name, p), 0.0) for p in PHASES) for name in (*LAYERS, OUTSIDE)}
        sent = dict(time.sent) | {exposed(row): seconds for row, seconds in time.exposed.items()}
        return {row: s for row, s in layers.items() if s} | sent | self._totals(time)

    def _totals(self, time: DeviceTime) -> dict[str, float]:
        return {"busy": time.busy, "idle": time.idle, "step": self.step}  # the last by the host's clock, a median

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [self.first, self.last],
            "step_seconds": list(self.step_seconds),
            "seconds_per_step": self.rows(),
            "flops_per_step_and_device": {
                row: {p: self.flops[row, p] for p in PHASES if (row, p) in self.flops} for row in LAYERS
            },
            "uncounted_kernels": dict(self.uncounted),
            "peak_flops_per_second": self.peak,
            "devices": {str(device): time.to_json() for device, time in self.devices.items()},
        }


def table(profile: Profile, predicted: Mapping[str, float] | None = None) -> str:
    """For a terminal, in milliseconds of one step. `predicted` are seconds by row of rows.py."""
    time, plan = mean(profile.devices.values()), dict(predicted or {})
    seconds = profile.step_seconds
    head = (
        f"profile of steps {profile.first} to {profile.last}: milliseconds a step, mean of {len(profile.devices)} "
        f"devices; a step took {min(seconds) * MS:,.3f} to {max(seconds) * MS:,.3f}"
    )
    lines = [head, *_layers(profile, time, plan), *_communication(time, plan), *_totals(profile, time, plan)]
    whole = f"{time.window * MS:,.3f}"
    lines.append(f"shares are of {whole}, busy and idle together in the trace; step is by the host's clock, a median")
    if profile.uncounted:
        lines.append(f"FLOP without those of {', '.join(sorted(profile.uncounted))}, which are not known")
    if time.unknown > 0.01 * time.busy:
        lines.append(
            f"{time.unknown / time.busy:.0%} of the busy time belongs to kernels that name no instruction of the "
            'program, as inside CUDA graphs; XLA_FLAGS=--xla_gpu_enable_command_buffer="" launches them one by one'
        )
    return "\n".join(lines)


def _layers(profile: Profile, time: DeviceTime, plan: Mapping[str, float]) -> list[str]:
    measured = profile.rows()
    rows = []
    for row in (*LAYERS, OUTSIDE):
        if row not in measured and row not in plan and not any(name == row for name, _ in profile.flops):
            continue
        seconds = measured.get(row, 0.0)
        phases = [_ms(time.computed.get((row, phase))) for phase in PHASES]
        rate = _rate(profile, sum(profile.flops.get((row, phase), 0.0) for phase in PHASES), seconds)
        rows.append([row, *phases, *_compared(row, seconds, plan), f"{seconds / time.window:.1%}", *rate])
    return _aligned(["layer", *PHASES, *_heads(plan), "share", "FLOP", "FLOP/s", "of peak"], rows)


def _communication(time: DeviceTime, plan: Mapping[str, float]) -> list[str]:
    rows = []
    predicted = [row for row in plan if exposed(row) in plan and row not in time.sent]
    for row in (*time.sent, *predicted):
        both = (
            *_compared(row, time.sent.get(row, 0.0), plan),
            *_compared(exposed(row), time.exposed.get(row, 0.0), plan),
        )
        rows.append([row, *both, f"{time.exposed.get(row, 0.0) / time.window:.1%}"])
    heads = [*_heads(plan), *(f"exposed {head}" if plan else "exposed" for head in _heads(plan))]
    return _aligned(["communication", *heads, "share exposed"], rows) if rows else []


def _totals(profile: Profile, time: DeviceTime, plan: Mapping[str, float]) -> list[str]:
    rows = []
    for row, seconds in profile._totals(time).items():
        rate = _rate(profile, sum(profile.flops.values()), seconds) if row == "step" else ["", "", ""]
        rows.append([row, *_compared(row, seconds, plan), *rate])
    return _aligned(["in all", *_heads(plan), "FLOP", "FLOP/s", "of peak"], rows)


def _heads(plan: Mapping[str, float]) -> list[str]:
    return ["predicted", "measured"] if plan else ["measured"]


def _compared(row: str, seconds: float, plan: Mapping[str, float]) -> list[str]:
    return [_ms(plan.get(row)), _ms(seconds)] if plan else [_ms(seconds)]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * MS:,.3f}"


def _rate(profile: Profile, flops: float, seconds: float) -> list[str]:
    if not flops or not seconds:
        return ["-", "-", "-"]
    peak = f"{flops / seconds / profile.peak:.1%}" if profile.peak else "-"
    return [format_flops(flops), f"{format_flops(flops / seconds)}/s", peak]


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    widths[0] = max(widths[0], 28)

    def line(cells: Sequence[str]) -> str:
        first, *rest = cells
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return "  ".join(["", first.ljust(widths[0]), *padded]).rstrip()

    return [line(cells) for cells in (heads, *rows)]
