"""What is said of checkpoints that fail, and what is not: Orbax's own words."""

import contextlib
import errno
import logging
import os
import pathlib
import sys
from collections.abc import Iterator

from absl import logging as absl_logging

from shardlm.errors import ShardlmError
from shardlm.files import format_bytes, free_space


class SaveFailed(ShardlmError):
    """A checkpoint that could not be written. `what`: that, without what to do about it. `everywhere`: whether all
    processes of the job know, each of which has this error."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what} {remedy}")
        self.what, self.everywhere = what, True


def save_failed(path: pathlib.Path, intact: list[int], nbytes: int, error: Exception) -> SaveFailed:
    """A save of so many bytes to `path`, beside which there are those of the steps `intact`."""
    why = reason(error)
    if any(os.strerror(code) in why for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
        limit = " (or files may not become so large: ulimit -f)" if os.strerror(errno.EFBIG) in why else ""
        why = f"the disk is full: it needs {format_bytes(nbytes)}, and there are {free_space(path)}{limit}"
    steps = ", ".join(map(str, intact))
    earlier = f"The checkpoints at step {steps} are intact" if intact else "It was the first"
    otherwise = "lower checkpoint.keep" if intact else "set run_dir to another disk"  # fewer than none cannot be kept
    return SaveFailed(
        f"Checkpoint {path} could not be written: {why}. {earlier}.",
        f"Free some space or {otherwise}, then run the same command again.",
    )


def reason(error: BaseException) -> str:
    """The message of the first error of a chain, which says more than what Orbax makes of it."""
    earlier = error.__cause__ or error.__context__
    return (earlier and reason(earlier)) or str(error)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps what Orbax and TensorStore write to the terminal for ``--verbosity=1``: dozens of lines a save,
    and tracebacks of the tasks that a failure abandons. The failure itself is raised all the same."""

    def wanted(record: logging.LogRecord) -> bool:
        abandoned = record.name == "asyncio" and record.getMessage().startswith("Task exception was never")
        return absl_logging.level_debug() or not (abandoned or f"{os.sep}orbax{os.sep}" in record.pathname)

    def report(info: "sys.UnraisableHookArgs") -> None:
        if absl_logging.level_debug() or str(info.exc_value) != "Event loop is closed":
            reporter(info)

    loggers = absl_logging.get_absl_logger(), logging.getLogger("asyncio")
    reporter, sys.unraisablehook = sys.unraisablehook, report
    for logger in loggers:
        logger.addFilter(wanted)
    try:
        yield
    finally:
        sys.unraisablehook = reporter
        for logger in loggers:
            logger.removeFilter(wanted)
