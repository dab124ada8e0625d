"""What becomes of an engine of which a batch fails, while it is started or read.

What programs keep on the device may be gone with the batch, as it was donated to them: it is made anew, and all
requests are computed anew from the tokens that they have, those of the batch apart from each other until one fails
alone (suspects.py). Where a request of the engine's own fails then, or after several failures in a row, nothing runs
any more: the engine ends.
"""

import logging

from shardlm.serve.batch import ScheduledBatch
from shardlm.serve.outputs import EngineError
from shardlm.serve.probe import probe
from shardlm.serve.request import Request
from shardlm.serve.runner import Runner
from shardlm.serve.scheduler import Scheduler
from shardlm.serve.suspects import Suspects

log = logging.getLogger(__name__)

FAILURES = 3  # batches that fail, none landing between them, before it is tried whether anything runs


class Recovery:
    """Of one runner. failed: batches so far."""

    def __init__(self, runner: Runner):
        self.failed = 0
        self._runner, self._suspects = runner, Suspects()
        self._failures = 0  # since a batch last landed

    def landed(self) -> None:
        """A batch did."""
        self._failures = 0

    def let_go(self, scheduler: Scheduler) -> None:
        """Others may run again, where those that were tried have passed."""
        if self._suspects.passed():
            scheduler.restrict(self._suspects.trial)

    def forget(self) -> None:
        """Who was to be tried."""
        self._suspects = Suspects()

    def after(self, error: Exception, batch: ScheduledBatch | None, scheduler: Scheduler) -> Request | None:
        """The request that a batch failed of, or where there was none yet, if it is known. The runner is as new for the
        others, which wait. Raises EngineError, and leaves all requests, where nothing runs any more."""
        self._failures += 1
        self.failed += 1
        self._reset(reason := f"{type(error).__name__}: {error}")
        ran = scheduler.lose()
        whom = ran or scheduler.upcoming()  # it was about to run, where there was no batch yet
        ends = {row.request: row.end for row in batch.rows} if batch else dict.fromkeys(whom, 0)
        guilty = self._suspects.accuse(ends)
        scheduler.restrict(self._suspects.trial)
        if guilty or self._failures >= FAILURES:  # nobody is answered with an error that is the device's
            self._check_whether_anything_runs(reason)
        return guilty

    def restart(self) -> None:
        """Raises what still fails."""
        self._runner.reset()
        probe(self._runner)
        self._failures = 0

    def _reset(self, reason: str) -> None:
        try:
            self._runner.reset()
        except EngineError as gone:  # another process
            raise _ended(str(gone)) from gone
        except Exception as again:
            lost = f"a batch failed with {reason}, and what programs keep could not be made anew: {again}"
            raise _ended(lost) from again

    def _check_whether_anything_runs(self, reason: str) -> None:
        """Raises EngineError where a request of the engine's own fails too, until it is FAILURES in a row and one."""
        while self._failures:
            try:
                probe(self._runner)
                self._failures = 0
            except Exception as error:
                self._failures += 1
                if self._failures > FAILURES:
                    many = f"{self._failures} batches failed one after another, one with {reason}"
                    raise _ended(f"{many}, the engine's own with {error}") from error
                self._reset(reason)
        log.warning("a request of the engine's own ran: what failed is due to a request")


def _ended(message: str) -> EngineError:
    return EngineError(f"the engine ended: {message}. Its log says more; start it again")
