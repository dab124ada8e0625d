"""One trainer a run directory: two would write each other's checkpoints and logs."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import socket
from collections.abc import Iterator

from shardlm.errors import ShardlmError
from shardlm.files import cannot_write

log = logging.getLogger(__name__)

LOCK = ".lock"


@contextlib.contextmanager
def only_trainer(run_dir: pathlib.Path) -> Iterator[None]:
    """Holds RUN/.lock, which the system gives back with the process, however that ends; in one process of a job.

    Raises:
        ShardlmError: another process holds it, or the directory cannot be written.
    """
    path = run_dir / LOCK
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115
    except OSError as error:
        raise cannot_write(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            by = holder(run_dir) or "another process"
            raise ShardlmError(
                f"{run_dir} is being trained by {by}: two trainers would write each other's checkpoints. "
                "Stop that one, or set --config.run_dir to another directory"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise cannot_write(path, error) from error
            log.warning("%s: this file system has no locks, so nothing keeps a second trainer away", run_dir)
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        file.flush()
        yield


def holder(run_dir: pathlib.Path) -> str:
    """Who trains, or last trained, in the directory, as its lock says; "" where it says nothing."""
    try:
        found = json.loads((run_dir / LOCK).read_text())
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
