"""Numbers as a reader wants them: three digits, and units that the place says."""

from shardlm.plan import columns

GIB = 2**30
NONE = "-"
_NAMES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def called(text: str, device: str) -> str:
    """Sentences and tables that say GPU, of devices that are called otherwise, in as many letters."""
    return text.replace("GPU", device)


def figure(x: float | None) -> str:
    """Three digits, thousands apart; NONE for what is not known."""
    if x is None:
        return NONE
    if x == 0:
        return "0"
    if abs(x) >= 99.95:
        return f"{x:,.0f}"
    if abs(x) < 0.0005:
        return f"{x:.0e}"
    digits = 1 if abs(x) >= 9.995 else 2 if abs(x) >= 0.9995 else 3
    return f"{x:.{digits}f}"


def duration(x: float | None) -> str:
    """Of a step: three digits of short ones too."""
    return figure(x) if not x or x >= 0.0995 else f"{x:#.3g}"


def count(x: float | None) -> str:
    """As a whole number where it is one."""
    return f"{round(x):,}" if x is not None and abs(x - round(x)) < 1e-6 else figure(x)


def gib(nbytes: float | None) -> str:
    if nbytes is not None and 0 < nbytes < 0.0005 * GIB:
        return "<0.001"
    return figure(None if nbytes is None else nbytes / GIB)


def milliseconds(seconds: float | None) -> str:
    return figure(None if seconds is None else seconds * 1e3)


def percent(share: float) -> str:
    return columns.percent(share, 1)


def large(x: float) -> str:
    """70.6 B, 4.19 M, 812."""
    for size, name in _NAMES:
        if x >= size:
            return f"{figure(x / size)} {name}"
    return figure(x)


def dollars(x: float | None) -> str:
    """Of a run: with cents where it costs less than ten."""
    if x is None:
        return NONE
    if 0 < x < 0.01:
        return "<$0.01"
    return f"${large(x)}" if x >= 1e6 else f"${x:,.0f}" if x >= 10 or x == 0 else f"${x:.2f}"


def days(x: float | None) -> str:
    if x is None:
        return NONE
    for size, unit in ((1, "days"), (1 / 24, "hours"), (1 / 1440, "minutes")):
        if x >= size:
            return f"{figure(x / size)} {unit}"
    return f"{duration(x * 86_400)} seconds"
