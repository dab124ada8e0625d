"""Tables and sentences as plain text of at most WIDTH columns."""

import dataclasses
import textwrap

from shardlm.plan.report.tables import Table

WIDTH = 110
GAP = "  "


def wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def show(table: Table) -> str:
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
        lines += [wrapped("      " + below[i])] if below[i] else []
    note = [wrapped("  " + table.note)] if table.note else []
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
    first; words themselves are cut last."""
    room = WIDTH - len(GAP) * len(table.columns)
    widths = _needed(table, wrapped=False)
    if sum(widths) > room:
        widths = _needed(table)
    words = [i for i, column in enumerate(table.columns) if column.words]
    longest = {i: max((len(word) for row in table.rows for word in row[i].split()), default=0) for i in words}
    while sum(widths) > room:
        widths[max(words, key=lambda i: (widths[i] > longest[i], widths[i]))] -= 1
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
