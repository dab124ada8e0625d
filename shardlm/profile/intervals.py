"""What a device did at every moment: divides its time among the things that ran, so that nothing is counted twice."""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that ran from start to end; `sends` tells communication from computation."""

    start: int
    end: int
    row: Hashable
    sends: bool


@dataclasses.dataclass
class Divided:
    """Time by row, in the units of the spans.

    busy      in which anything ran; computed and exposed add up to it
    computed  rows that compute; moments in which several did are shared equally
    exposed   rows that send, while nothing computed, shared likewise
    sent      rows that send, whatever ran beside them; moments in which two spans of one row did count once
    """

    busy: int = 0
    computed: Counter = dataclasses.field(default_factory=Counter)
    exposed: Counter = dataclasses.field(default_factory=Counter)
    sent: Counter = dataclasses.field(default_factory=Counter)


def divide(spans: Iterable[Span]) -> Divided:
    """Sweeps over the moments at which anything starts or ends."""
    moments: dict[int, list[tuple[int, Span]]] = {}
    for span in spans:
        if span.end > span.start:
            moments.setdefault(span.start, []).append((1, span))
            moments.setdefault(span.end, []).append((-1, span))
    found, computing, sending, before = Divided(), Counter(), Counter(), 0
    for now in sorted(moments):
        _count(found, computing, sending, now - before)
        for change, span in moments[now]:
            active = sending if span.sends else computing
            active[span.row] += change
            if not active[span.row]:
                del active[span.row]
        before = now
    return found


def _count(found: Divided, computing: Counter, sending: Counter, length: int) -> None:
    active, into = (computing, found.computed) if computing else (sending, found.exposed)
    found.busy += length if active else 0
    for row, running in active.items():
        into[row] += length * running / active.total()
    for row in sending:
        found.sent[row] += length
