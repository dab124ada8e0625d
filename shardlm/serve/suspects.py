"""Who broke a batch? The requests of one that failed are tried apart, half and half again, until one fails alone: it is
guilty, and the others go on. Owns who is tried next; that nobody else runs meanwhile is scheduler.py's part. No jax.

A set has passed once each of its requests is past the place where its batch failed, so that one which only fails in
company comes further at each round too, and everything ends.
"""

import collections
from collections.abc import Collection, Mapping

from shardlm.serve.request import Request


class Suspects:
    """Sets of requests to be tried, the first of which is running."""

    def __init__(self):
        self._trials: collections.deque[dict[Request, int]] = collections.deque()

    @property
    def trial(self) -> Collection[Request] | None:
        """The only requests that may run; None: all."""
        return self._trials[0].keys() if self._trials else None

    def accuse(self, ends: Mapping[Request, int]) -> Request | None:
        """`ends`: of the requests of a batch that failed, one past the last position it might have written. Returns the
        one that is guilty: it has failed before, and now alone. A request that is alone when it first fails is tried
        again, as the failure may have been nobody's."""
        failed = {request: max(len(request.tokens), end) + 1 for request, end in ends.items()}
        before = any(request in trial for trial in self._trials for request in failed)
        for trial in self._trials:
            for request in failed:
                trial.pop(request, None)
        left = [(request, until) for request, until in failed.items() if not request.finished]
        if left and len(ends) == 1 and before:
            return left[0][0]
        half = -(-len(left) // 2)
        self._trials.extendleft(dict(part) for part in (left[half:], left[:half]) if part)
        return None

    def passed(self) -> bool:
        """Lets those go that have passed or ended. Returns whether that changes who may run."""
        count = len(self._trials)
        while self._trials and all(r.finished or len(r.tokens) >= until for r, until in self._trials[0].items()):
            self._trials.popleft()
        return len(self._trials) < count
