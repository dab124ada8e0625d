"""Signs of life of what may rightly take long: who watches a run (train/stuck.py) ends it only where there are none."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

LOOK_SECONDS = 60.0  # between two looks at files: whose sizes are asked of a file system that is slow

_last = 0.0


def alive() -> None:
    """What goes on is further than it was: a batch is validated, tokens are sampled."""
    global _last
    _last = time.monotonic()


def last() -> float:
    """When there was the last sign, by time.monotonic; 0: never."""
    return _last


@contextlib.contextmanager
def while_growing(directory: str | os.PathLike) -> Iterator[None]:
    """Inside, a sign of life now and then, as long as what is in the directory becomes more, or is moved away whole."""
    over = threading.Event()

    def look() -> None:
        before = None
        while not over.wait(LOOK_SECONDS):
            now = _size(directory)
            if before is not None and now != before:
                alive()
            before = now

    thread = threading.Thread(target=look, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)  # no longer: it may hang in the file system


def _size(directory: str | os.PathLike) -> int:
    found = 0
    for path, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):  # moved meanwhile
                found += os.stat(os.path.join(path, name)).st_size
    return found
