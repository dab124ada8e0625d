"""The live line of a run and the rates on it. Which loss is shown and how long a step took comes from the
training loop; what a FLOP is, from `shardlm.flops`.
"""

import collections
import contextlib
import dataclasses
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from shardlm import flops as flop_convention

PLAIN_SECONDS = 10.0  # between lines where the output is no terminal


@dataclasses.dataclass(frozen=True)
class Rates:
    """Means over the last steps, of the whole mesh: tokens and model FLOPs a second, seconds a step, and MFU
    as a fraction of 1, or None where the peak is not known."""

    tokens_per_second: float
    flops_per_second: float
    step_seconds: float
    mfu: float | None


class RateMeter:
    """Rates over the last `window` measurements, so that one slow step neither hides nor dominates."""

    def __init__(self, peak_flops_per_second: float | None, devices: int, window: int = 20):
        """`peak_flops_per_second` is that of one device in the dtype it multiplies in, None if unknown."""
        self._peak, self._devices = peak_flops_per_second, devices
        self._recent: collections.deque[tuple[int, float, float, float]] = collections.deque(maxlen=window)

    def add(self, steps: int, tokens: float, flops: float, seconds: float) -> Rates:
        """Adds `steps` steps that took `seconds` together and returns the rates with them. Leave out the step
        that compiled, and the time of evaluations and checkpoints."""
        self._recent.append((steps, tokens, flops, seconds))
        steps, tokens, flops, seconds = map(sum, zip(*self._recent, strict=True))
        mfu = self._peak and flop_convention.mfu(flops, seconds, self._peak, self._devices)
        return Rates(tokens / seconds, flops / seconds, seconds / steps, mfu)


class ProgressLine:
    """Step, loss, rates and time left: one line that stays in place on a terminal, else a line now and then.

    A context manager; the other processes of a run pass ``enabled=False`` and see nothing.
    """

    def __init__(self, total_steps: int, step: int = 0, enabled: bool = True, console: Console | None = None):
        """`step` is where the run begins or resumes."""
        self._total, self._enabled = total_steps, enabled
        self._console = console or Console()
        self._first: tuple[int, float] | None = None  # step and time of the first update
        self._printed = 0.0
        self._live = self._console.is_terminal and enabled
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=min(30, max(6, self._console.width - 76))),
            TextColumn("{task.fields[rest]}", markup=False, table_column=Column(no_wrap=True)),
            console=self._console,
            refresh_per_second=4,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=step, rest="compiling the first step ...")

    def update(self, step: int, loss: float, rates: Rates | None = None) -> None:
        """Shows `step` done with its loss; `rates` are None until a step has been timed. The time left counts
        everything since the first update, so that call it when the compiling step is done."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        rest = "  ".join(describe(loss, rates) + self._left(step, now))
        if self._live:
            self._bar.update(self._task, completed=step, rest=rest)
        elif self._enabled and (now - self._printed > PLAIN_SECONDS or step == self._total):
            self._printed = now
            self._print(f"step {step}/{self._total}  {rest}")

    def note(self, text: str) -> None:
        """Prints `text` as lines of its own, above the live line."""
        if self._enabled:
            self._print(text)

    def _print(self, text: str) -> None:
        """Costs the run nothing where nobody takes it: Ctrl-C ends the tee of `launch.train | tee FILE` too, whereupon
        rich ends this process, before it has saved; and a file that the output goes to may be on a full disk."""
        with contextlib.suppress(OSError, SystemExit):
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _left(self, step: int, now: float) -> list[str]:
        first, since = self._first
        if step == first or step >= self._total:
            return []
        return [format_duration((now - since) / (step - first) * (self._total - step)) + " left"]

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError, SystemExit):
            self._bar.stop()


def describe(loss: float, rates: Rates | None) -> list[str]:
    """The parts of the line between the step and the time left."""
    if rates is None:
        return [f"loss {loss:.4f}"]
    utilisation = [] if rates.mfu is None else [f"MFU {rates.mfu:.1%}"]
    speed = [f"{rates.tokens_per_second:,.0f} tok/s", f"{format_flops(rates.flops_per_second)}/s"]
    return [f"loss {loss:.4f}", *speed, *utilisation]


def format_flops(flops: float) -> str:
    """Three digits and a prefix: 1.23e12 -> "1.23 TFLOP"."""
    for prefix, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= unit:
            return f"{flops / unit:.3g} {prefix}FLOP"
    return f"{flops:.0f} FLOP"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: 3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
