"""The tables of an answer, made from its plain data (data.py): titles, cells as text, which figures are estimated and
which compiled. text.py and html.py show the same ones."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardlm.plan.report.figures import NONE, count, duration, figure, gib, milliseconds, percent

Data = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """
    title  with its unit
    basis  "estimated" or "compiled", of figures that are one of both
    words  whether it holds text, which may be wrapped, and no figures
    below  of text: where there is little room, a line of its own below the row
    """

    title: str
    basis: str = ""
    words: bool = False
    below: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells row by row; the last `sums` rows are sums of those above."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    sums: int = 0
    note: str = ""


Cell = tuple[Column, Callable[[Data], str]]


def _table(key: str, title: str, cells: Iterable[Cell], rows: Sequence[Data], note: str = "") -> Table:
    cells = list(cells)
    made = tuple(tuple(show(row) for _, show in cells) for row in rows)
    return Table(key, title, tuple(column for column, _ in cells), made, note=note)


def was_compiled(answer: Data) -> bool:
    """Whether any plan or change was."""
    return any(plan["compiled"] for plan in [*answer["plans"], *answer["changes"]])


def plans(answer: Data) -> Table:
    """The best meshes, the fastest first."""
    rows = answer["plans"]
    narrow = (_SECONDS, _SHARE, _HELD)  # tokens/s follow from s/step, and there is no room for so much twice
    wide = narrow if was_compiled(answer) else (_SECONDS, _RATE, _SHARE, _HELD)
    figures = _figures(rows, wide, narrow)
    cells = [(Column("#"), lambda p: str(p["rank"])), *_settings(rows), *figures, _STATUS]
    left = answer["plans_left_out"]
    said = [f"{left:,} slower ones are left out."] if left else []
    return _table("plans", "The best meshes", cells, rows, " ".join([*said, *_eight_bits(rows), *_not_compiled(rows)]))


def _eight_bits(rows: Sequence[Data]) -> list[str]:
    return ["MFU is against the 16-bit peak, with 8-bit matmuls too."] if _names_matmul(rows) else []


def _names_matmul(rows: Sequence[Data]) -> bool:
    return any(p["matmul"] != "dtype" for p in rows)


def _not_compiled(rows: Sequence[Data]) -> list[str]:
    """That plans which were only estimated may be better than the first, where that is so."""
    best = rows[0]["compiled"]
    if rows[0]["status"] != "verified" or not best:
        return []
    better = sum(p["estimated"]["step_seconds"] < best["step_seconds"] for p in rows if p["status"] == "estimated")
    tried = sum(p["status"] != "estimated" for p in rows)
    if not better:
        return []
    were, are = ("was", "is") if better == 1 else ("were", "are")
    return [
        f"{better} of those shown {were} not compiled and {are} estimated to take less than the "
        f"{duration(best['step_seconds'])} s of the first one's program: --verify={tried + better} compiles them too."
    ]


def changes(answer: Data) -> Table:
    """What would make it fit."""
    rows = answer["changes"]
    chosen = [(column, show) for column, show in _settings(rows) if column.title != "micro-batches"]
    limit = (Column("of GiB"), lambda c: gib(c["memory"]["limit_bytes"]))
    cells = [(Column("change", words=True), lambda c: c["change"]), *chosen, *_figures(rows, _SHORT, _SHORT), limit]
    note = "The least intrusive is the first of each kind: verified, estimated, refused."
    return _table("changes", "Changes that make it fit", [*cells, _STATUS], rows, note)


def _settings(rows: Sequence[Data]) -> list[Cell]:
    """What was chosen, as far as it differs from the ordinary in any row."""
    cells: list[Cell] = [
        (Column("mesh", words=True), lambda p: p["mesh_text"]),
        (Column("rules", words=True), lambda p: p["rules"]),
        (Column("remat", words=True), lambda p: p["remat"]),
    ]
    if any(p["schedule"] for p in rows):
        cells.append((Column("schedule", words=True), schedule))
    cells.append((Column("micro-batches"), lambda p: str(p["microbatches"])))
    if any(p["offload"] for p in rows):
        cells.append((Column("offload", words=True), lambda p: ", ".join(p["offload"]) or NONE))
    if any(p["moments"] != "float32" for p in rows):
        cells.append((Column("moments", words=True), lambda p: p["moments"]))
    if _names_matmul(rows):
        cells.append((Column("matmul", words=True), lambda p: p["matmul"]))
    if any(not p["unroll"] for p in rows):
        cells.append((Column("unroll"), lambda p: str(p["unroll"])))
    return cells


def schedule(plan: Data) -> str:
    """Of the pipeline, with its rounds."""
    rounds = f", {plan['rounds']} rounds" if plan["rounds"] > 1 else ""
    return plan["schedule"] + rounds if plan["schedule"] else NONE


def _figures(rows: Sequence[Data], estimated: Sequence[tuple], compiled: Sequence[tuple]) -> list[Cell]:
    """Speed and memory as estimated, and as compiled where any was: of each (title, key, how it is shown)."""

    def cell(basis: str, title: str, key: str, show: Callable) -> Cell:
        return Column(title, basis), lambda p: show(p[basis][key]) if p[basis] else NONE

    cells = [cell("estimated", *one) for one in estimated]
    return cells + ([cell("compiled", *one) for one in compiled] if any(p["compiled"] for p in rows) else [])


_SECONDS, _RATE = ("s/step", "step_seconds", duration), ("tokens/s", "tokens_per_second", figure)
_SHARE, _HELD = ("MFU", "mfu", percent), ("GiB", "memory_bytes", gib)
_SHORT = (_SECONDS, _HELD)
_STATUS: Cell = (Column("figures", words=True), lambda p: p["status"])


def memory(plan: Data) -> Table:
    """GiB of one GPU by kind, and the sums of a compiled program beside the estimated ones."""
    held = plan["memory"]
    made = held["compiled"]
    kinds = [(row["kind"], row["bytes"]) for row in held["kinds"]]
    rows = [(kind, nbytes, None) for kind, nbytes in [*kinds, ("KV cache (serving only)", 0)]]
    sums = (("at rest", "at_rest_bytes"), ("besides, during the step", "during_the_step_bytes"))
    estimated = held["estimated"]
    rows += [(name, estimated[key], made and made[key]) for name, key in sums]
    rows.append(("reserve of the runtime", held["reserve_bytes"], made and held["reserve_bytes"]))
    rows.append(("all", estimated["total_bytes"], made and made["total_bytes"]))
    limit = held["limit_bytes"]
    left = limit - estimated["total_bytes"], made and limit - made["total_bytes"]
    rows.append((f"left of the GPU's {gib(limit)}", *left))
    title = f"Memory of a GPU, {'the first plan' if 'rank' in plan else 'what needs least'}"
    columns = [Column("kind", words=True), Column("GiB", "estimated")]
    cells = [[name, gib(nbytes)] for name, nbytes, _ in rows]
    if made:
        columns.append(Column("GiB", "compiled"))
        cells = [[*cell, gib(nbytes)] for cell, (*_, nbytes) in zip(cells, rows, strict=True)]
    doubt = f"The estimate may be off by more than 5%: {held['doubt']}." if held["doubt"] and not made else ""
    host = f"Another {gib(held['host_bytes'])} GiB rest in the host's memory." if held["host_bytes"] else ""
    workspace = made["workspace_bytes"] if made else 0
    unknown = f"Attention workspace, {gib(workspace)} GiB, is estimated under compiled too." if workspace else ""
    note = " ".join(filter(None, (_MEMORY, unknown, doubt, host)))
    return Table("memory", title, tuple(columns), tuple(map(tuple, cells)), sums=5, note=note)


_MEMORY = (
    "Kept: of the forward pass, for the backward pass. Streams: activations between layers. Attention, mlp, experts "
    "and head: activations inside them. Attention workspace: what cuDNN takes besides as gradients are made. "
    "Weights in use: gathered for the layer at work; turned: copies from which they are gathered."
)


def step(plan: Data) -> Table:
    """A step's phases and what they are made of."""
    phases, seconds_of_all = plan["timeline"], plan["estimated"]["step_seconds"]
    parts = list(dict.fromkeys(part["part"] for phase in phases for part in phase["parts"]))
    rows = []
    for phase in phases:
        seconds = {part["part"]: part["seconds"] for part in phase["parts"]}
        total = sum(seconds.values())
        shown = [milliseconds(seconds.get(part, 0)) for part in parts]
        rows.append((phase["phase"], *shown, milliseconds(total), percent(total / seconds_of_all)))
    totals = [sum(p["seconds"] for phase in phases for p in phase["parts"] if p["part"] == part) for part in parts]
    rows.append(("all", *map(milliseconds, totals), milliseconds(seconds_of_all), percent(1)))
    names = [Column(f"{PARTS.get(part, part)} ms", "estimated") for part in parts]
    ends = [Column("ms", "estimated"), Column("share", "estimated")]
    return Table("step", "Time of a step", (Column("phase", words=True), *names, *ends), tuple(rows), sums=1)


def compared(plan: Data) -> Table:
    """A step as estimated and as its program is scheduled."""
    made, xla = plan["compiled_step"], plan["compiled_step"]["xla_compute_seconds"]
    parts = [part for phase in plan["timeline"] for part in phase["parts"]]
    exposed = sum(part["seconds"] for part in parts if part["part"] == "exposed")
    kernels = made["compute_seconds"] + made["contention_seconds"]
    before = (phase["parts"] for phase in plan["timeline"] if phase["phase"] == "images")  # which the program has not
    estimated = plan["estimated"]["step_seconds"] - sum(part["seconds"] for parts in before for part in parts)
    rows = [
        ("kernels, and stages that wait", estimated - exposed, kernels),
        *([("kernels by XLA's own estimate", None, xla)] if xla else []),
        ("exposed communication", exposed, made["exposed_seconds"]),
        ("all", estimated, made["step_seconds"]),
    ]
    columns = (Column("part", words=True), Column("ms", "estimated"), Column("ms", "compiled"))
    cells = tuple((name, *map(milliseconds, seconds)) for name, *seconds in rows)
    unknown = ", ".join(f"{name} ({times} times)" for name, times in made["unknown_kernels"].items())
    notes = [f"Counted by the memory they touch, as their work is not known: {unknown}."] if unknown else []
    notes += ["XLA's own estimate is of tiles that were chosen without a GPU, and is no time of a step."] if xla else []
    note = " ".join(notes)
    return Table("compared", "The step's formulas and its program", columns, cells, sums=1, note=note)


PARTS = {"exposed": "exposed communication", "contention": "slowed by communication"}


def communication(first: Data) -> Table:
    """By axes and collective."""
    rows = first["communication"]
    table = _table("communication", "Communication by axis, of a GPU in a step", _sent("estimated"), rows)
    return _with_sum(table, rows)


def compiled_communication(first: Data) -> Table | None:
    """The same of the program; None where there is none."""
    rows = first["compiled_communication"]
    if rows is None:
        return None
    cells = _sent("compiled")
    return _with_sum(_table("compiled-communication", "Communication by axis, of the program", cells, rows), rows)


def bill(first: Data, most: int | None = None, frames: int | None = None) -> Table:
    """Every collective with its cause, and that many of its source lines; of more than `most` rows the rest in one."""
    rows, basis = first["bill"]["rows"], first["bill"]["basis"]
    cells = [*_sent(basis), (Column("cause", words=True, below=True), lambda r: _cause(r, frames))]
    shown = rows if most is None else rows[:most]
    title = "Bill of the compiled program's collectives" if basis == "compiled" else "Bill of collectives"
    table = _table("bill", title, cells, shown)
    left = rows[len(shown) :]
    if left:
        label = (f"{len(left)} more", *[""] * 2)
        table = dataclasses.replace(table, rows=(*table.rows, _sum_row(table, left, label)), sums=1)
    return _with_sum(table, rows)


def _sent(basis: str) -> list[Cell]:
    return [
        (
            Column("operation", words=True),
            lambda r: " ".join(filter(None, (r["operation"], r.get("dtype")))) + _guess(r),
        ),
        (Column("axes", words=True), lambda r: "+".join(r["axes"])),
        (Column("link", words=True), lambda r: r["link"]),
        (Column("count", basis), lambda r: count(r["count"])),
        (Column("GiB", basis), lambda r: gib(r["bytes"])),
        (Column("ms", basis), lambda r: milliseconds(r["seconds"])),
        (Column("exposed ms", basis), lambda r: milliseconds(r["exposed_seconds"])),
        (Column("hidden ms", basis), lambda r: milliseconds(r["hidden_seconds"])),
    ]


def _guess(row: Data) -> str:
    return f" (count not certain: {row['guess']})" if row.get("guess") else ""


def _cause(row: Data, frames: int | None) -> str:
    """The weight or functions, and where in the source: lines innermost first, then jax's name of the operation."""
    said = f"{row.get('phase', '')} {row['cause']}".strip()
    lines, _, operation = row.get("where", "").partition(" [")
    if not lines:
        return said
    if frames is None:
        return f"{said}\nat {lines}" + (f" [{operation}" if operation else "")
    return f"{said} at {' < '.join(lines.split(' < ')[:frames])}"


def _with_sum(table: Table, rows: Sequence[Data]) -> Table:
    last = _sum_row(table, rows, ("all", "", ""))
    return dataclasses.replace(table, rows=(*table.rows, last), sums=table.sums + 1)


def _sum_row(table: Table, rows: Sequence[Data], label: tuple[str, ...]) -> tuple[str, ...]:
    times, nbytes, *seconds = (sum(row[key] for row in rows) for key in _SUMMED)
    cells = (*label, count(times), gib(nbytes), *map(milliseconds, seconds))
    return cells + ("",) * (len(table.columns) - len(cells))


_SUMMED = ("count", "bytes", "seconds", "exposed_seconds", "hidden_seconds")


def compute(first: Data, step_seconds: float) -> Table:
    """Kernels by layer, then by what limits them."""
    rows = [("by layer", r["layer"], r["seconds"]) for r in first["compute"]["layers"]]
    rows += [("by limit", r["unit"], r["seconds"]) for r in first["compute"]["units"]]
    cells = tuple((by, kind, milliseconds(s), percent(s / step_seconds)) for by, kind, s in rows)
    columns = (
        Column("", words=True),
        Column("kind", words=True),
        Column("ms", "estimated"),
        Column("share", "estimated"),
    )
    return Table("compute", "Compute by kind", columns, cells)


def sweep(answer: Data) -> Table:
    """Throughput against the number of GPUs."""
    cells = [
        (Column("GPUs"), lambda r: f"{r['num_gpus']:,}"),
        (Column("tokens/s", "estimated"), lambda r: figure(r["tokens_per_second"]) if r["fits"] else NONE),
        (Column("tokens/s of a GPU", "estimated"), lambda r: figure(_each(r)) if r["fits"] else NONE),
        (Column("fits", words=True), lambda r: "yes" if r["fits"] else "no"),
    ]
    own, first = answer["cluster"]["num_gpus"], answer["first"]
    note = f"Of {own:,} GPUs the first plan, of others the fastest as estimated." if first else ""
    return _table("sweep", "Throughput against the number of GPUs", cells, answer["sweep"], note)


def _each(row: Data) -> float:
    return row["tokens_per_second"] / row["num_gpus"]


def search(answer: Data, most: int | None = None) -> Table:
    """What was looked at, and why some of it cannot be; of more than `most` reasons the rest together."""
    found = answer["search"]
    impossible = found["impossible"]
    rows = [("too large for the GPU's memory", found["too_large"])] if found["too_large"] else []
    rows += [(row["reason"], row["count"]) for row in impossible[:most]]
    rest = [row["count"] for row in impossible[len(impossible[:most]) :]]
    rows += [(f"for {len(rest)} other reasons", sum(rest))] if rest else []
    cells = tuple((f"{times:,}", reason) for reason, times in rows)
    what = f"on {found['meshes']:,} meshes something fits" if found["meshes"] else "none fits"
    took = f" in {figure(found['seconds'])} s" if found["seconds"] else ""
    note = f"{found['considered']:,} configurations were looked at{took}; {what}."
    if answer["constraints"]:
        note += f" Asked for: {', '.join(answer['constraints'])}."
    return Table("search", "Considered and refused", (Column("times"), Column("reason", words=True)), cells, note=note)
