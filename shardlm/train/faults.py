"""What interrupts a run: signals to stop, and steps whose loss is not finite."""

import signal
import time
from collections.abc import Mapping

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

    A second SIGINT interrupts at once, as usual.
    """

    def __init__(self):
        self.name: str | None = None
        self._previous: dict[int, object] = {}
        self._looked: tuple[int, float] | None = None  # of several processes: after which step, and when
        self._next = 0  # the step after which they look again

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

    def agreed(self, step: int) -> bool:
        """Whether any process was told to stop. With several processes all must call it after the same steps; they ask
        each other about every AGREE_SECONDS, or after every step where one takes longer: a scheduler that takes a
        machine away gives it half a minute."""
        if jax.process_count() == 1:
            return self.name is not None
        if step < self._next:
            return False
        told, slowest = self._asked(step)
        self._next = step + max(1, int(AGREE_SECONDS / max(slowest, 1e-3)))
        return told

    def _asked(self, step: int) -> tuple[bool, float]:
        """Whether any process was told, and the seconds of a step in the slowest since they last looked."""
        now = time.monotonic()
        before, since = self._looked or (step - 1, now - AGREE_SECONDS)
        self._looked = step, now
        own = [self.name is not None, (now - since) / (step - before)]
        every = multihost_utils.process_allgather(np.array(own, np.float32))
        return bool(every[:, 0].any()), float(every[:, 1].max())


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
