"""How many steps a decode program runs while requests may come at any time. A request that comes waits for the batches
that are under way, and a stream gets the tokens of a program at once: so programs are kept short, but long enough that
the host is ready with the next one."""

import bisect
import time
from collections.abc import Callable

import numpy as np

# Of a decode program, about. Beside its steps it costs 1 ms, which a GPU spends while the host is a batch behind. On a
# CPU the host's work takes the same cores, and shorter programs gain nothing: 768 x 12 on two quiet cores over HTTP,
# two rounds in turns, tokens/s at 8 and 32 requests at once 201, 307 and 193, 303 with all steps, 192, 307 and 188, 304
# by 0.05 s; the first token after 0.56 to 0.58 and 0.62 to 0.71 s at 8.
SECONDS = {"cpu": 1.0, "gpu": 0.02}
# The most that one measurement raises what a step is held to take, and lowers it: a host that looked late says too much
# of one batch, and of the next one, which ended meanwhile, that it took no time.
SLOWER, FASTER = 1.25, 2.0


def steps_of(step_seconds: float, most: int, platform: str = "gpu") -> int:
    """Of a program that takes about as long as SECONDS says; at most so many."""
    return min(most, max(1, round(SECONDS[platform] / step_seconds)))


def all_steps_of(step_seconds: np.ndarray, most: int, platform: str = "gpu") -> np.ndarray:
    """The same of each of these."""
    return np.clip(np.rint(SECONDS[platform] / step_seconds), 1, most)


class Pace:
    """Learns what a step of so many rows takes from when batches are started and land, in turn."""

    def __init__(self, most: int, platform: str, now: Callable[[], float] = time.monotonic):
        """most: steps of any program. platform: cpu or gpu, as jax says. now: a clock, in seconds."""
        self._most, self._platform, self._now = most, platform, now
        self._began: dict[int, float] = {}  # of batches in flight, by their number
        self._landed = float("-inf")  # the last one
        self._step_seconds: dict[int, float] = {}  # by rows, in powers of two

    def steps(self, rows: int) -> int:
        """Of the next program of so many rows: as those of the nearest number that has run take, at first one."""
        known = sorted(self._step_seconds)
        if not known:
            return 1
        at = bisect.bisect_left(known, rows.bit_length())
        near = min(known[max(0, at - 1) : at + 1], key=lambda size: abs(size - rows.bit_length()))
        return steps_of(self._step_seconds[near], self._most, self._platform)

    def started(self, number: int) -> None:
        self._began[number] = self._now()

    def landed(self, number: int, rows: int, steps: int) -> None:
        """A batch, of so many steps of decoding; 0 where it read prompts too, whose time says nothing of a step."""
        now, began = self._now(), self._began.pop(number, None)
        if steps and began is not None:  # None: started before this pace was kept
            taken = (now - max(began, self._landed)) / steps
            size = rows.bit_length()
            known = self._step_seconds.get(size, taken)
            self._step_seconds[size] = min(max(taken, known / FASTER), SLOWER * known)
        self._landed = now

    def forget(self) -> None:
        """What is in flight will not land."""
        self._began.clear()
