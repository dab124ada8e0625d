"""What interrupts a run: signals to stop, and steps whose loss is not finite."""

import signal
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlm.errors import ShardlmError

AGREE_SECONDS = 5.0  # between the moments when several processes ask each other whether to stop


class StopSignal:
    """Catches SIGINT (Ctrl-C), SIGTERM and SIGHUP (a terminal that closes; not under nohup), so that the loop can save
    and leave between steps: from `listen` on, until it is left. Before that there is no step to save, and a signal ends
    the process at once, also while XLA compiles for minutes; except in a job of several, where a process that goes
    alone leaves the others waiting for it.

    A second SIGINT interrupts at once, as usual. `told` is the signal that some process of the job was told to stop by,
    as of when they last asked each other; 0: none.
    """

    def __init__(self):
        self.name: str | None = None
        self.told = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if jax.process_count() > 1:
            self.listen()
        return self

    def listen(self) -> None:
        """Catches them from now on."""
        if self._previous:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._caught)

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _caught(self, number, frame) -> None:
        del frame
        if self.name == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    @property
    def status(self) -> int:
        """That the process ends with: of a process that the signal ended, or where another one was told, of SIGTERM."""
        return 128 + signal.Signals[self.name or "SIGTERM"]

    def agree(self, seconds: float = 0.0) -> float:
        """Asks all processes whether they were told to stop; returns the longest of the `seconds` that they say. All
        must call it."""
        own = signal.Signals[self.name].value if self.name else 0
        if jax.process_count() == 1:
            self.told = own
            return seconds
        every = multihost_utils.process_allgather(np.array([own, seconds], np.float32))
        self.told = max(self.told, int(every[:, 0].max()))
        return float(every[:, 1].max())

    def asking(self) -> Callable[[], bool]:
        """To be called once for each of many like things that all processes do, steps or batches: whether any was told
        to stop. Several processes ask each other about every AGREE_SECONDS, or at each where one takes longer: a
        scheduler that takes a machine away gives it half a minute."""
        return _Asking(self)


class _Asking:
    def __init__(self, stop: StopSignal):
        self._stop = stop
        self._done = 0
        self._looked: tuple[int, float] | None = None  # of several processes: after how many, and when
        self._next = 0  # after how many they look again

    def __call__(self) -> bool:
        self._done += 1
        if self._done >= self._next or jax.process_count() == 1:
            self._ask()
        return bool(self._stop.told)

    def _ask(self) -> None:
        now = time.monotonic()
        before, since = self._looked or (self._done - 1, now - AGREE_SECONDS)
        self._looked = self._done, now
        slowest = self._stop.agree((now - since) / (self._done - before))
        self._next = self._done + max(1, int(AGREE_SECONDS / max(slowest, 1e-3)))


def check_finite(step: int, metrics: Mapping[str, float], *, max_bad_steps: int, rows: str, remedy: str) -> str | None:
    """Reports a skipped step, and stops the run after too many in a row.

    Returns a line to print, or None for a good step. Raises ShardlmError naming the step and its batch (`rows`).
    """
    if metrics["finite"]:
        return None
    problem = f"step {step}: loss {metrics['loss']:.4g}, gradient norm {metrics['grad_norm']:.4g} on {rows}"
    if metrics["bad_steps"] >= max_bad_steps:
        raise ShardlmError(
            f"{problem}; not finite for {metrics['bad_steps']:.0f} steps in a row "
            f"(train.max_bad_steps={max_bad_steps}). {remedy} "
            "Look at that batch, lower optim.learning_rate, or raise optim.warmup_steps."
        )
    scale = f"; overflow at loss scale {metrics['loss_scale']:.0f}, halved" if "loss_scale" in metrics else ""
    return f"{problem}: update skipped{scale}"
