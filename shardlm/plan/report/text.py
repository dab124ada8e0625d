"""An answer as plain text of at most 110 columns."""

import dataclasses
import textwrap
from typing import Any

from shardlm.plan.report import tables
from shardlm.plan.report.figures import gib
from shardlm.plan.report.tables import Table

WIDTH = 110
GAP = "  "
BILL_ROWS, FRAMES = 12, 2
REASONS = 3


def to_text(answer: dict[str, Any]) -> str:
    """What `launch.plan` prints, of data.to_json's structure."""
    head = [answer["config"]] if answer["config"] else []
    blocks = ["\n".join(map(_wrapped, [*head, *tables.headline(answer)]))]
    if answer["first"]:
        blocks += [_show(tables.plans(answer)), *_refusals(answer), *_first(answer)]
    else:
        blocks += _nothing_fits(answer)
    if answer["sweep"]:
        blocks.append(_show(tables.sweep(answer)))
    if answer["unverified"]:
        blocks.append(_wrapped(f"Nothing was verified: {answer['unverified']}"))
    blocks += [_show(tables.search(answer, REASONS)), "\n".join(map(_wrapped, tables.words(answer)))]
    return "\n\n".join(blocks) + "\n"


def _first(answer: dict[str, Any]) -> list[str]:
    plan, first = answer["plans"][0], answer["first"]
    facts = tables.facts(plan, answer["run"])
    wide = max(len(what) for what, *_ in facts)
    figures = max(len(said) for _, said, _ in facts)
    lines = [f"The first: {plan['mesh_text']}, {plan['status']}"]
    lines += [f"  {what:<{wide}}  {said:>{figures}}  {basis}" for what, said, basis in facts]
    lines.append(_wrapped(f"  Limited by {plan['limited_by']}."))
    if first["stages"]:
        lines.append(_wrapped(f"  Pipeline, {tables.pipeline(first)}"))
    if answer["run"]["price_source"]:
        lines.append(_wrapped(f"  The price: {answer['run']['price_source']}."))
    shown = [
        tables.memory(plan),
        tables.step(plan),
        *([tables.compared(plan)] if plan["compiled_step"] else []),
        tables.communication(first),
        tables.compute(first, plan["step_seconds"]),
        tables.bill(first, BILL_ROWS, FRAMES),
    ]
    return ["\n".join(lines), *map(_show, shown)]


def _refusals(answer: dict[str, Any]) -> list[str]:
    found = [p for p in answer["plans"] if p["why"]]
    return (
        ["\n".join(_wrapped(f"#{p['rank']} {p['mesh_text']} was refused: {p['why']}") for p in found)] if found else []
    )


def _nothing_fits(answer: dict[str, Any]) -> list[str]:
    plan = answer["shortfall"]
    basis = "estimated" if plan["memory"]["compiled"] is None else "compiled"
    needed = plan["compiled_memory_bytes"] or plan["estimated_memory_bytes"]
    said = (
        f"Nothing fits. What needs least is {plan['mesh_text']}, rules={plan['rules']}, remat={plan['remat']}: "
        f"{gib(needed)} GiB a GPU ({basis}), {gib(plan['over_bytes'])} GiB more than the "
        f"{gib(plan['memory']['limit_bytes'])} of one {answer['cluster']['gpu']}."
    )
    remedy = _show(tables.changes(answer)) if answer["changes"] else "No single change that was tried makes it fit."
    return [_wrapped(said), *_refusals(answer), _show(tables.memory(plan)), remedy]


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _show(table: Table) -> str:
    """Title, the words estimated and compiled over their columns, column titles, rows; then the note."""
    table, below = _narrowed(table)
    widths = _widths(table)
    lines = [table.title]
    if any(column.basis for column in table.columns):
        lines.append(_bases(table, widths))
    lines += _line(table, widths, [column.title for column in table.columns])
    body = len(table.rows) - table.sums
    for i, row in enumerate(table.rows):
        if i == body:
            lines.append("  " + GAP.join("-" * width for width in widths))
        lines += _line(table, widths, row)
        lines += [_wrapped("      " + below[i])] if below[i] else []
    note = [_wrapped("  " + table.note)] if table.note else []
    return "\n".join(line.rstrip() for line in [*lines[: None if table.rows else 1], *note])


def _narrowed(table: Table) -> tuple[Table, list[str]]:
    """The table without its column that may go below the rows, and what goes there; as it is where all fits."""
    apart = [i for i, column in enumerate(table.columns) if column.below]
    if not apart or sum(_needed(table)) + len(GAP) * len(table.columns) <= WIDTH:
        return table, [""] * len(table.rows)
    (i,) = apart
    rows = tuple(row[:i] + row[i + 1 :] for row in table.rows)
    columns = table.columns[:i] + table.columns[i + 1 :]
    return dataclasses.replace(table, columns=columns, rows=rows), [row[i] for row in table.rows]


def _needed(table: Table, wrapped: bool = True) -> list[int]:
    """Of each column, with its title `wrapped` at hyphens and spaces or not."""
    parts = [textwrap.wrap(c.title, 1, break_long_words=False) if wrapped else [c.title] for c in table.columns]
    titles = [max(map(len, part), default=0) for part in parts]
    cells = [max(map(len, column)) for column in zip(*table.rows, strict=True)] if table.rows else titles
    widths = [max(pair) for pair in zip(titles, cells, strict=True)]
    pairs = enumerate(zip(widths, table.columns, strict=True))
    return [max(w, len(c.basis)) if _alone(table, i) else w for i, (w, c) in pairs]


def _widths(table: Table) -> list[int]:
    """What each column needs; where that is too much, titles are wrapped, and then columns of words, the widest
    first."""
    room = WIDTH - len(GAP) * len(table.columns)
    widths = _needed(table, wrapped=False)
    if sum(widths) > room:
        widths = _needed(table)
    words = [i for i, column in enumerate(table.columns) if column.words]
    while sum(widths) > room:
        widths[max(words, key=lambda i: widths[i])] -= 1
    return widths


def _alone(table: Table, i: int) -> bool:
    """Whether neither neighbour shares its word over the columns."""
    bases = ["", *(column.basis for column in table.columns), ""]
    return bases[i + 1] not in (bases[i], bases[i + 2])


def _bases(table: Table, widths: list[int]) -> str:
    """Each word once over the columns next to each other that it is said of."""
    line, i = "", 0
    while i < len(widths):
        basis, span = table.columns[i].basis, widths[i]
        i += 1
        while basis and i < len(widths) and table.columns[i].basis == basis:
            span += len(GAP) + widths[i]
            i += 1
        label = f" {basis} ".center(span, "-") if basis and span >= len(basis) + 4 else basis.rjust(span)
        line += GAP + label
    return line


def _line(table: Table, widths: list[int], cells: tuple[str, ...] | list[str]) -> list[str]:
    """A row, over as many lines as its longest cell needs."""
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for i in range(max(map(len, wrapped))):
        parts = [cell[i] if i < len(cell) else "" for cell in wrapped]
        aligned = [
            f"{part:<{width}}" if column.words else f"{part:>{width}}"
            for part, width, column in zip(parts, widths, table.columns, strict=True)
        ]
        lines.append("  " + GAP.join(aligned))
    return lines
