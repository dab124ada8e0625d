"""The pictures of a page as numbers: what is how wide, in percent of its picture. How it looks is page.html.jinja's."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardlm.plan.report import sentences, tables
from shardlm.plan.report.figures import duration, figure, gib, large

Data = dict[str, Any]
BARS = 8  # plans whose bars are drawn
COLOURS = 12  # of page.css: --c0 to --c11
JOBS = 48  # up to so many microbatches are told apart on a stage's bar


def memory(answer: Data) -> Data:
    """A bar of each plan's memory by kind, one more as its program has it, and the GPU's limit."""
    drawn = answer["plans"][:BARS] + [p for p in answer["plans"][BARS:] if p["memory"]["compiled"]]
    drawn = drawn or [answer["shortfall"]]
    kinds = list(dict.fromkeys(row["kind"] for plan in drawn for row in plan["memory"]["kinds"]))
    looks = kind_looks(kinds)
    legend = [{"name": kind, "look": look} for kind, look in looks.items()]
    bars = []
    for plan in drawn:
        held = plan["memory"]
        parts = [(row["kind"], looks[row["kind"]], row["bytes"]) for row in held["kinds"]]
        bars.append((plan, "estimated", [*parts, (_RESERVE, "reserve", held["reserve_bytes"])]))
        made = held["compiled"]
        if made:
            parts = [(_RESTS, "rests", made["at_rest_bytes"]), (_BESIDES, "besides", made["during_the_step_bytes"])]
            bars.append((plan, "compiled", [*parts, (_RESERVE, "reserve", held["reserve_bytes"])]))
            legend += [{"name": f"{name}, compiled", "look": look} for name, look, _ in parts]
    legend = list({one["look"]: one for one in legend}.values())
    limit = drawn[0]["memory"]["limit_bytes"]
    widest = max([limit, *(sum(part[2] for part in parts) for *_, parts in bars)]) * 1.02
    return {
        "legend": [*legend, {"name": _RESERVE, "look": "reserve"}],
        "limit": {"at": limit / widest, "text": f"{gib(limit)} GiB of a GPU"},
        "bars": [_named(plan) | memory_bar(basis, parts, limit, widest) for plan, basis, parts in bars],
    }


def kind_looks(kinds: Sequence[str]) -> dict[str, str]:
    """A look of its own for each kind of memory: what begins with the same word ("weights", "weights in use"), and the
    head with its logits, has one colour: whole, lighter and hatched either way. Up to COLOURS such groups of four."""
    hues: dict[str, int] = {}
    looks: dict[str, str] = {}
    for kind in kinds:
        word = kind.split()[0]
        hue = hues.setdefault("head" if word == "logits" else word, len(hues))
        variants = (f"c{hue}", *(f"c{hue} part{n}" for n in (1, 2, 3)))
        looks[kind] = next(look for look in variants if look not in looks.values())
    return looks


_RESERVE, _RESTS, _BESIDES = "reserve of the runtime", "at rest", "besides, during the step"


def memory_bar(basis: str, parts: list[tuple[str, str, float]], limit: float, widest: float) -> Data:
    """Of (kind, look, bytes), in a picture as wide as `widest` bytes."""
    total = sum(nbytes for *_, nbytes in parts)
    return {
        "basis": basis,
        "text": f"{gib(total)} GiB",
        "over": total > limit,
        "parts": [
            {"look": look, "width": 100 * nbytes / widest, "tip": f"{kind}: {gib(nbytes)} GiB, {basis}"}
            for kind, look, nbytes in parts
            if nbytes
        ],
    }


def _named(plan: Data) -> Data:
    rank = f"#{plan['rank']} " if "rank" in plan else ""
    return {"label": rank + plan["mesh_text"], "rules": plan["rules"]}


def steps(answer: Data) -> Data:
    """A bar of each plan's step in the order of time, and under it the communication that kernels hide; one more as its
    program has it, which tells no phases apart."""
    drawn = answer["plans"][:BARS]
    phases = list(dict.fromkeys(phase["phase"] for plan in drawn for phase in plan["timeline"]))
    kinds = list(dict.fromkeys(part["part"] for plan in drawn for phase in plan["timeline"] for part in phase["parts"]))
    widest = max(plan[b]["step_seconds"] for plan in drawn for b in ("estimated", "compiled") if plan[b]) * 1.02
    bars = []
    for plan in drawn:
        parts = [
            {
                "look": _look(phases.index(phase["phase"]), kinds.index(part["part"]), part["part"]),
                "width": 100 * part["seconds"] / widest,
                "tip": f"{phase['phase']}, {tables.PARTS.get(part['part'], part['part'])}: {figure(part['seconds'])} s",
            }
            for phase in plan["timeline"]
            for part in phase["parts"]
            if part["seconds"]
        ]
        hidden = plan["hidden_communication_seconds"]
        behind = {
            "look": "hidden",
            "width": 100 * hidden / widest,
            "tip": f"communication behind kernels: {figure(hidden)} s",
        }
        text = f"{duration(plan['estimated']['step_seconds'])} s"
        named = _named(plan) | {"basis": "estimated", "text": text}
        bars.append(named | {"parts": parts, "hidden": [behind] if hidden else []})
        bars += [_program_bar(plan, widest)] if plan["compiled_step"] else []
    used = [(p, k) for p, k in itertools.product(phases, kinds) if any(_seconds(plan, p, k) for plan in drawn)]
    legend = [
        {"name": f"{p}, {tables.PARTS.get(k, k)}", "look": _look(phases.index(p), kinds.index(k), k)} for p, k in used
    ]
    legend.append({"name": "communication behind kernels", "look": "hidden"})
    if any(plan["compiled_step"] for plan in drawn):
        legend += [{"name": f"{name}, compiled", "look": look} for name, look, _ in _PROGRAM]
    return {"bars": bars, "legend": legend}


_PROGRAM = (
    ("kernels and idle stages", "rests", "compute_seconds"),
    ("slowed by communication", "rests part1", "contention_seconds"),
    ("exposed communication", "besides", "exposed_seconds"),
)


def _program_bar(plan: Data, widest: float) -> Data:
    step = plan["compiled_step"]
    parts = [
        {"look": look, "width": 100 * step[key] / widest, "tip": f"{name}: {figure(step[key])} s, compiled"}
        for name, look, key in _PROGRAM
        if step[key]
    ]
    text = f"{duration(step['step_seconds'])} s"
    return _named(plan) | {"basis": "compiled", "text": text, "parts": parts, "hidden": []}


def _look(phase: int, part: int, name: str) -> str:
    """The phase's colour; what is not its first part is hatched, idle time grey."""
    return "idle" if name == "idle" else f"c{phase % COLOURS}" + (f" part{part}" if part else "")


def _seconds(plan: Data, phase: str, part: str) -> float:
    found = (
        p["seconds"] for one in plan["timeline"] if one["phase"] == phase for p in one["parts"] if p["part"] == part
    )
    return math.fsum(found)


STAGE_LOOKS = {
    "forward": "c0",
    "backward": "c1",
    "forward and backward": "both",
    "outside the stages": "c4",
    "optimizer": "c2",
    "idle": "idle",
}


def stages(answer: Data) -> Data | None:
    """A row of spans for each stage of the first plan's pipeline."""
    found = answer["first"] and answer["first"]["stages"]
    if not found:
        return None
    total = answer["plans"][0]["estimated"]["step_seconds"]
    rows = [
        {
            "label": f"stage {row['stage']}",
            "parts": [
                {
                    "look": STAGE_LOOKS[span["what"]],
                    "width": 100 * span["seconds"] / total,
                    "jobs": span["jobs"] if 1 < span["jobs"] <= JOBS else 0,
                    "tip": f"stage {row['stage']}, {span['what']}: {figure(span['seconds'])} s",
                }
                for span in row["spans"]
            ],
        }
        for row in found["rows"]
    ]
    used = {span["what"] for row in found["rows"] for span in row["spans"]}
    legend = [{"name": what, "look": look} for what, look in STAGE_LOOKS.items() if what in used]
    return {"rows": rows, "legend": legend, "caption": sentences.pipeline(answer["first"])}


def mesh(answer: Data) -> Data | None:
    """GPUs in their hosts and islands, with a colour by each axis; None where there is but one GPU."""
    found = answer["first"] and answer["first"]["placement"]
    return laid(found, answer["cluster"]) if found and found["axes"] else None


def laid(found: Data, cluster: Data) -> Data:
    """A placement on a cluster."""
    sizes = {one["axis"]: one["size"] for one in found["axes"]}
    islands = []
    for island, hosts in itertools.groupby(found["hosts"], key=lambda host: host["island"]):
        islands.append({"island": island, "hosts": [_host(host, sizes) for host in hosts]})
    per_island = cluster["gpus_per_island"] // cluster["gpus_per_host"]
    left = found["hosts_left_out"]
    note = f"The first {len(found['hosts'])} of {cluster['num_hosts']:,} hosts; the others follow in the same order."
    return {
        "axes": [one | {"text": _spread(one, cluster)} for one in reversed(found["axes"])],
        "islands": islands,
        "joined": per_island > 1,
        "link": cluster["inside_link"],
        "note": note if left else "",
    }


def _host(host: Data, sizes: dict[str, int]) -> Data:
    gpus = []
    for gpu in host["gpus"]:
        place = ", ".join(f"{axis} {at}" for axis, at in gpu["place"].items()) or "not used"
        gpus.append(
            {
                "tip": f"GPU {gpu['gpu']} of host {host['host']}: {place}",
                "places": [
                    {"axis": axis, "at": at, "colour": _colour(at, sizes[axis])} for axis, at in gpu["place"].items()
                ],
            }
        )
    return {"host": host["host"], "gpus": gpus}


def _colour(at: int, size: int) -> str:
    if size <= COLOURS:
        return f"var(--c{at})"
    return f"color-mix(in oklab, var(--low), var(--high) {100 * at / (size - 1):.1f}%)"


def _spread(one: Data, cluster: Data) -> str:
    if one["islands"] == 1:
        return f"{one['axis']} = {one['size']}: its GPUs share {cluster['inside_link']}"
    inside = f", up to {one['inside']} GPUs in each" if one["inside"] > 1 else ""
    what = "hosts" if cluster["gpus_per_island"] == cluster["gpus_per_host"] else f"{cluster['inside_link']} domains"
    return f"{one['axis']} = {one['size']}: over {one['islands']} {what}{inside}"


def sweep(answer: Data) -> Data | None:
    """Throughput against GPUs: the line through those that fit, and the line of equal throughput for each GPU. None
    where nothing fits or was asked."""
    rows = answer["sweep"]
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        return None
    first = fitting[0]
    each = first["tokens_per_second"] / first["num_gpus"]
    points = [
        Point(
            row["num_gpus"],
            row["tokens_per_second"] if row["fits"] else None,
            each * row["num_gpus"] if row["fits"] else None,
            f"{row['num_gpus']:,} GPUs: "
            + (f"{figure(row['tokens_per_second'])} tokens/s" if row["fits"] else "does not fit"),
        )
        for row in rows
    ]
    return plot(points)


class Point(NamedTuple):
    """Of a plot: y and what it could be at best, both None where there is nothing."""

    x: float
    y: float | None
    ideal: float | None
    tip: str


def plot(points: Sequence[Point]) -> Data:
    """Both axes by powers; a line through those that have a y, and one of what it could be at best."""
    real = [point for point in points if point.y is not None]
    xs = _scale([point.x for point in points])
    ys = _scale([y for point in real for y in (point.y, point.ideal)])
    drawn = [
        {"x": xs(p.x), "y": 100.0 if p.y is None else 100 - ys(p.y), "fits": p.y is not None, "tip": p.tip}
        for p in points
    ]
    ticks = _ticks([point.y for point in real], [point.ideal for point in real])
    return {
        "points": drawn,
        "line": " ".join(f"{p['x']:.2f},{p['y']:.2f}" for p in drawn if p["fits"]),
        "ideal": " ".join(f"{xs(point.x):.2f},{100 - ys(point.ideal):.2f}" for point in real),
        "x_ticks": [{"at": xs(point.x), "text": f"{point.x:,}"} for point in points],
        "y_ticks": [{"at": 100 - ys(y), "text": large(y).replace(".00", "").replace(".0 ", " ")} for y in ticks],
    }


def _scale(values: list[float]):
    """Values by their logarithm to 4 ... 96 percent."""
    low, high = math.log(min(values)), math.log(max(values))
    span = high - low or 1.0
    return lambda value: 4 + 92 * (math.log(value) - low) / span if high > low else 50.0


def _ticks(values: list[float], ideal: list[float]) -> list[float]:
    """1, 2 and 5 times powers of ten inside the range; its ends where there are fewer than two."""
    low, high = min(values), max([*values, *ideal])
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return found if len(found) > 1 else sorted({low, high})
