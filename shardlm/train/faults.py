"""What interrupts a run: signals to stop, and steps whose loss is not finite."""

import signal
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlm.errors import ShardlmError


class StopSignal:
    """Catches SIGINT (Ctrl-C) and SIGTERM, so that the loop can save and leave between steps: from `listen` on, until
    it is left. Before that there is no step to save, and a signal ends the process at once, also while XLA compiles
    for minutes; except in a job of several, where a process that goes alone leaves the others waiting for it.

    A second SIGINT interrupts at once, as usual.
    """

    def __init__(self):
        self.name: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if jax.process_count() > 1:
            self.listen()
        return self

    def listen(self) -> None:
        """Catches them from now on."""
        if self._previous:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._caught)

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _caught(self, number, frame) -> None:
        del frame
        if self.name == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether any process was told to stop. With several processes all must call it at the same step."""
        if jax.process_count() == 1:
            return self.name is not None
        return bool(np.any(multihost_utils.process_allgather(np.array(self.name is not None))))


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
