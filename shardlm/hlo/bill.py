"""The bill of a program's collectives: what it sends by axis and kind, as a small record that can be kept beside a
configuration, and what has changed against such a record."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from shardlm.hlo.collectives import Collective

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Entry:
    """Collectives of one sort that have one cause.

    source  what is moved, where it is an argument of the program (a weight), or else the functions that ask for it,
            innermost first; without line numbers, so that a record outlives edits
    count   arrays moved in one run of the program, loops included
    bytes   that one device sends for them, by the ring algorithm (`Collective.wire_bytes`)
    guess   why the count is not certain; "" if it is, and then left out of the record
    where   lines in the source and jax's name of the operation; not recorded
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    phase: str
    source: str
    count: int
    bytes: int
    guess: str = ""
    where: str = dataclasses.field(default="", compare=False)

    @property
    def sort(self) -> tuple[str, str, str, str]:
        """What is compared as a whole. XLA names what it merges as it likes, so causes explain but do not decide."""
        return self.phase, self.kind, self.dtype, "+".join(self.axes)


@dataclasses.dataclass(frozen=True)
class Bill:
    """All entries, the costliest first."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, found: Iterable[Collective]) -> "Bill":
        groups: dict[tuple, list[Collective]] = {}
        for one in found:
            groups.setdefault((one.kind, one.axes, one.dtype, one.phase, source_of(one)), []).append(one)
        entries = []
        for key, group in groups.items():
            sent = round(sum(one.count * one.wire_bytes for one in group))
            guess = next((one.guess for one in group if one.guess), "")
            entries.append(Entry(*key, sum(one.count for one in group), sent, guess, where_of(group[0])))
        return cls(tuple(sorted(entries, key=lambda e: (-e.bytes, e.sort, e.source))))

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def by_axis(self) -> dict[str, dict[str, int]]:
        """Axes joined by "+" -> kind -> bytes that one device sends in one run of the program."""
        found: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            kinds = found.setdefault("+".join(entry.axes), {})
            kinds[entry.kind] = kinds.get(entry.kind, 0) + entry.bytes
        return found

    def to_json(self) -> list[dict[str, Any]]:
        fields = ("kind", "axes", "dtype", "phase", "source", "count", "bytes", "guess")
        rows = [{name: getattr(entry, name) for name in fields} for entry in self.entries]
        return [{name: value for name, value in row.items() if value != ""} for row in rows]

    @classmethod
    def from_json(cls, rows: Sequence[dict[str, Any]]) -> "Bill":
        return cls(tuple(Entry(**row | {"axes": tuple(row["axes"])}) for row in rows))


def compare(recorded: Bill, found: Bill, *, tolerance: float = 0.05, counts: bool = True) -> list[str]:
    """One message for each sort of collective (phase, kind, dtype, axes) that the record lacks or has otherwise, with
    the arguments or source lines that cause the difference. Empty where they agree.

    tolerance  relative difference in bytes that passes
    counts     whether counts must be equal; if not, sorts of less than a thousandth of all bytes are not compared. For
               records of another XLA, which merges small collectives in another way.
    """
    before, after = _by_sort(recorded), _by_sort(found)
    small = 0 if counts else 1e-3 * max(recorded.bytes, found.bytes)
    messages = []
    for sort in sorted({**before, **after}):
        old, new = before.get(sort, []), after.get(sort, [])
        was, now = sum(e.bytes for e in old), sum(e.bytes for e in new)
        times, times_now = sum(e.count for e in old), sum(e.count for e in new)
        same = abs(now - was) <= max(tolerance * was, small) and (times == times_now or not counts)
        if not same:
            more = (now, times_now) > (was, times)
            change = f"{times_now} times, {now / MIB:,.3f} MiB a device; recorded {times} times, {was / MIB:,.3f} MiB"
            causes = _causes(old, new) if more else _causes(new, old)
            verb = "new" if not old else "more" if more else "less" if new else "gone"
            phase, kind, dtype, axes = sort
            messages.append(f"{verb}: {phase} {kind} of {dtype} over {axes}, {change}{causes}")
    return messages


def _by_sort(bill: Bill) -> dict[tuple[str, str, str, str], list[Entry]]:
    found: dict[tuple[str, str, str, str], list[Entry]] = collections.defaultdict(list)
    for entry in bill.entries:
        found[entry.sort].append(entry)
    return found


def _causes(fewer: Sequence[Entry], more: Sequence[Entry], limit: int = 4) -> str:
    """The entries of `more` that grew most over those with the same source in `fewer`."""
    had = {entry.source: entry for entry in fewer}

    def growth(entry: Entry) -> tuple[int, int]:
        other = had.get(entry.source)
        return (entry.bytes - other.bytes, entry.count - other.count) if other else (entry.bytes, entry.count)

    grown = sorted((e for e in more if growth(e) > (0, 0)), key=growth, reverse=True)
    lines = [f"{e.source}{f' at {e.where}' if e.where else ''} ({e.count} times)" for e in grown[:limit]]
    rest = [f"and {len(grown) - limit} more"] if len(grown) > limit else []
    return "".join(f"\n    {line}" for line in lines + rest)


def source_of(one: Collective) -> str:
    """`Entry.source` of a collective."""
    functions = [frame.function for frame in one.frames[:4]]
    return one.argument or " < ".join(functions) or one.op_name or "(not noted)"


def where_of(one: Collective) -> str:
    """`Entry.where` of a collective."""
    lines = " < ".join(map(str, one.frames[:5]))
    return f"{lines} [{one.op_name}]" if one.op_name else lines
