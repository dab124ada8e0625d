"""Latency and bandwidth from measured points: seconds = latency + bytes / bandwidth. No jax."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from shardlm.errors import ShardlmError

LEAST_SHARE = 0.05  # of the time of the most bytes: what sending them must take for a bandwidth to be told


@dataclasses.dataclass(frozen=True)
class Fit:
    """The line, and how far the points are from it: root mean square and largest relative error."""

    latency_seconds: float
    bytes_per_second: float
    error: float
    largest_error: float


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """The line with the least sum of squared logarithms of predicted / measured, so that a microsecond is as wrong by
    half as a second is, and half as wrong as twice; both figures are positive.

    (By squared relative errors a time that is far too short costs 1 at most, however long it was: on noisy points that
    gave a bandwidth 20 times the measured one.)

    Raises: ShardlmError for fewer than two sizes, and where times do not grow with the size.
    """
    x, t = np.asarray(nbytes, float), np.asarray(seconds, float)
    if len(set(nbytes)) < 2:
        raise ShardlmError(f"latency and bandwidth need two sizes at least, there are {len(set(nbytes))}; see --sizes")
    start = np.log([t.min(), t[x.argmax()] / x.max()])
    found = least_squares(lambda logs: np.log(np.exp(logs[0]) + x * np.exp(logs[1])) - np.log(t), start)
    latency, each = np.exp(found.x)
    if x.max() * each < LEAST_SHARE * (latency + x.max() * each):
        raise ShardlmError(
            f"times do not grow with the size, from {t[x.argmin()]:.3g} s for {x.min():.0f} bytes to "
            f"{t[x.argmax()]:.3g} s for {x.max():.0f}: no bandwidth can be told; give larger --sizes"
        )
    relative = np.abs((latency + x * each) / t - 1)
    return Fit(float(latency), float(1 / each), float(np.sqrt(np.square(relative).mean())), float(relative.max()))
