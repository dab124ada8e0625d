"""What a client saw of its requests, and what is reported of many: percentiles of times, rates, goodput. No jax."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError

PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "itl", "e2e")


@dataclasses.dataclass
class Seen:
    """Of one request, in seconds: to its first text, between events that brought text (which may hold several tokens),
    to its end; `error` where it failed. images: that it had."""

    first: float = math.nan
    gaps: list[float] = dataclasses.field(default_factory=list)
    whole: float = math.nan
    tokens: int = 0
    error: str = ""
    images: int = 0

    @property
    def per_token(self) -> float:
        """After the first."""
        return (self.whole - self.first) / (self.tokens - 1) if self.tokens > 1 else math.nan

    def times(self) -> dict[str, float]:
        """What a limit can be set for: of ITL the worst."""
        return {"ttft": self.first, "tpot": self.per_token, "itl": max(self.gaps, default=0.0), "e2e": self.whole}

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """A time that there is not, as of one token, breaks no limit."""
        times = self.times()
        return not self.error and not any(times[name] > limit for name, limit in limits.items())


def limits_of(words: Sequence[str]) -> dict[str, float]:
    """{"ttft": seconds, ...} of `ttft:0.5` and the like. Raises ShardlmError for what is none."""
    found = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in TIMES or not found[name] > 0:
            raise ShardlmError(f"goodput={word!r}: a limit is NAME:SECONDS, of {', '.join(TIMES)}")
    return found


def summary(seen: Sequence[Seen], seconds: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Percentiles in seconds of the requests that succeeded, rates, and where there are limits the goodput: requests a
    second, and their share, that keep all of them."""
    done = [one for one in seen if not one.error]
    tokens = sum(one.tokens for one in done)
    found = {
        "requests": len(seen),
        "failed": len(seen) - len(done),
        "first_error": next((one.error for one in seen if one.error), None),
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        "ttft_seconds": _percentiles([one.first for one in done]),
        "tpot_seconds": _percentiles([one.per_token for one in done]),
        "itl_seconds": _percentiles([gap for one in done for gap in one.gaps]),
        "e2e_seconds": _percentiles([one.whole for one in done]),
    }
    if any(one.images for one in seen):
        images = sum(one.images for one in done)
        found |= {"images": images, "images_per_second": images / seconds}
    if limits:
        good = sum(one.keeps(limits) for one in done)
        found["goodput"] = {
            "limits_seconds": dict(limits),
            "share": good / len(seen),
            "requests_per_second": good / seconds,
        }
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    there = [value for value in values if not math.isnan(value)]
    if not there:
        return {}
    return {"mean": float(np.mean(there)), **{f"p{p}": float(np.percentile(there, p)) for p in PERCENTILES}}
