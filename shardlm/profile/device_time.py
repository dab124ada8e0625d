"""Sums a trace up: how long each device computed what, sent what, how much of that was exposed, and was idle."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from shardlm.hlo.labels import Labels
from shardlm.hlo.rows import COPIES, OUTSIDE
from shardlm.profile.intervals import Divided, Span, divide
from shardlm.profile.trace import Event

SECOND = 1e9  # in nanoseconds


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device, or the mean of several, in one step.

    window    from the first to the last thing that ran for the profiled program on any device of this process
    busy      in which anything ran; `computed` and `exposed` add up to it
    computed  (row, phase) -> seconds
    sent      row -> seconds that a collective, or a copy to or from the host, took
    exposed   row -> those of them in which the device computed nothing
    unknown   seconds of kernels of which no single instruction is known; among the row "other"
    """

    window: float
    busy: float
    computed: Mapping[tuple[str, str], float]
    sent: Mapping[str, float]
    exposed: Mapping[str, float]
    unknown: float

    @property
    def idle(self) -> float:
        return self.window - self.busy

    def to_json(self) -> dict[str, Any]:
        computed: dict[str, dict[str, float]] = {}
        for (row, phase), seconds in self.computed.items():
            computed.setdefault(row, {})[phase] = seconds
        return dataclasses.asdict(self) | {"computed": computed, "idle": self.idle}


def device_times(events: Sequence[Event], programs: Sequence[Labels], steps: int) -> dict[int, DeviceTime]:
    """By device, of one step. `events` are in order of start; `programs` are all that a step may run."""
    labels = _programs(events, programs)
    mine = [event for event in events if (event.module, event.program) in labels]
    if not mine:
        return {}
    start, end = mine[0].start, max(event.end for event in mine)
    inside = sorted((e for e in events if e.end > start and e.start < end), key=lambda event: event.device)
    found = {}
    for device, group in groupby(inside, key=lambda event: event.device):
        spans, unknown = [], 0
        for event in group:
            span = _span(event, labels.get((event.module, event.program)))
            if span:
                spans.append(dataclasses.replace(span, start=max(span.start, start), end=min(span.end, end)))
                unknown += (event.end - event.start) * (span.row == _UNKNOWN)
        found[device] = _seconds(divide(spans), end - start, unknown, steps)
    return found


def mean(times: Iterable[DeviceTime]) -> DeviceTime:
    """Over devices; a row that one lacks is 0 there."""
    times = list(times)

    def rows(name: str) -> dict:
        keys = {key: None for time in times for key in getattr(time, name)}
        return {key: sum(getattr(time, name).get(key, 0.0) for time in times) / len(times) for key in keys}

    def number(name: str) -> float:
        return sum(getattr(time, name) for time in times) / len(times)

    numbers = {name: number(name) for name in ("window", "busy", "unknown")}
    return DeviceTime(**numbers, **{name: rows(name) for name in ("computed", "sent", "exposed")})


_UNKNOWN = ("other", "other", "unknown")


def _span(event: Event, labels: Labels | None) -> Span | None:
    """None for an event on a CPU that contains others."""
    if event.name in ("MemcpyH2D", "MemcpyD2H"):
        return Span(event.start, event.end, COPIES, sends=True)
    if labels is None:
        return Span(event.start, event.end, (OUTSIDE, "other"), sends=False)
    label = labels.of(event.op) if event.op in labels else None
    if label and label.contains and not event.kernel:
        return None
    if label is None or label.contains:  # a kernel that is launched by a graph may bear the graph's name
        return Span(event.start, event.end, _UNKNOWN, sends=False)
    return Span(event.start, event.end, label.row if label.sends else (label.row, label.phase), label.sends)


def _programs(events: Sequence[Event], programs: Sequence[Labels]) -> dict[tuple[str, int], Labels]:
    """The labels of each program of the trace, by its name and number: of several of one name, those that have most of
    the instructions that ran."""
    ran: dict[tuple[str, int], set[str]] = {}
    for event in events:
        ran.setdefault((event.module, event.program), set()).add(event.op)
    found = {}
    for key, ops in ran.items():
        candidates = [labels for labels in programs if labels.name == key[0]]
        if candidates:
            found[key] = max(candidates, key=lambda labels: sum(op in labels for op in ops))
    return found


def _seconds(divided: Divided, window: int, unknown: int, steps: int) -> DeviceTime:
    unit = SECOND * steps
    computed: dict[tuple[str, str], float] = {}
    for row, length in divided.computed.items():
        computed[row[:2]] = computed.get(row[:2], 0.0) + length / unit
    sent = {row: length / unit for row, length in sorted(divided.sent.items())}
    exposed = {row: divided.exposed.get(row, 0) / unit for row in sent}
    return DeviceTime(window / unit, divided.busy / unit, computed, sent, exposed, unknown / unit)
