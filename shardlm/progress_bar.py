"""What a terminal shows while weights are read or written, on stderr; elsewhere nothing is shown. How much is done is
told by whoever does it."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

SAY_SECONDS = 15.0  # between two lines of a log


class _Speed(ProgressColumn):
    """GiB a second, the mean of all when it is done."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed / 2**30:.2f} GiB/s")


@contextlib.contextmanager
def bytes_bar(what: str, enabled: bool = True, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar over bytes; yields what is called with (done, total). All processes but one pass ``enabled=False``."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(20),
        DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
        _Speed(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def count_bar(what: str, total: int, enabled: bool = True, console: Console | None = None) -> Iterator[Callable]:
    """A bar over things; yields what is called with how many are done."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def waiting(what: str, enabled: bool = True, console: Console | None = None) -> Iterator[None]:
    """A line that moves, for what cannot tell how far it is."""
    console = console or Console(stderr=True)
    with console.status(what) if enabled and console.is_terminal else contextlib.nullcontext():
        yield


def compiling(
    clock: Callable[[], float] = time.monotonic, what: str = "programs", enabled: bool = True
) -> Callable[[int, int], None]:
    """Is called with how many programs of how many are compiled, which a first start takes minutes for: says so now and
    then where no terminal shows it, as in the log of a pod. All processes but one pass ``enabled=False``."""
    said = clock()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if enabled and clock() - said >= SAY_SECONDS and not sys.stderr.isatty():
            said = clock()
            print(f"compiled {done} of {total} {what}", file=sys.stderr, flush=True)

    return progress
