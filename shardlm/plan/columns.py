"""Rows of text under each other, for the terminal."""

from collections.abc import Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """One line for the head and for each row: figures to the right, the columns `left`, such as names, to the left. A
    row may end early; its cells then count for no width."""
    whole = [row for row in rows if len(row) == len(head)]
    wide = [max(len(row[i]) for row in [head, *whole]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [f"{cell:<{wide[i]}}" if i in left else f"{cell:>{wide[i]}}" for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def large(x: float) -> str:
    """2 T, 5.24 M, 500,000, 812."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if x >= size:
            return f"{x / size:,.0f}{unit}" if x >= 1000 * size else f"{x / size:.3g}{unit}"
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def rounded(x: float, digits: int = 0) -> str:
    """To so many digits behind the point; what would be 0 and is not, to the first two that are there: 0.0037."""
    text = f"{x:,.{digits}f}"
    return text if x == 0 or text.strip("-0.") else f"{x:.2g}"


def percent(share: float, digits: int = 0) -> str:
    return rounded(100 * share, digits) + "%"


def dollars(x: float) -> str:
    """Without their sign; with cents where there are less than ten."""
    return rounded(x, 0 if x >= 10 else 2)


def three_digits(x: float) -> str:
    """0.0123, 1.23, 12.3, 1,234."""
    if x >= 99.95:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 9.995 else f"{x:.2f}" if x >= 0.9995 else f"{x:.3g}"
