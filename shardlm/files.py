"""Writing small files so that a reader never meets half of one, and what to say when the disk refuses. Who
writes checkpoints or datasets has its own protocol; this is for the JSON, text and pictures beside them.
"""

import contextlib
import errno
import os
import pathlib
import shutil

from shardlm.errors import ShardlmError


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Replaces `path` by `content` in one move: after a crash it holds the old bytes or the new ones.

    Raises:
        ShardlmError: the file cannot be written (disk full, no permission); the old file is untouched.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # as where a file is in the place of its folder
            draft.unlink()
        raise cannot_write(path, error) from error


def cannot_write(path: pathlib.Path, error: OSError) -> ShardlmError:
    """The error for a write that the operating system refused: what, why, the room left, the remedy."""
    remedy = "Free some space or set the permissions"
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        remedy = "A file is where a folder belongs, or a folder where a file does: choose another place or move it"
    return ShardlmError(
        f"Cannot write {path}: {error.strerror or error} ({free_space(path)}). {remedy}, then run the same command "
        "again: a training run continues from its last checkpoint."
    )


def free_space(path: pathlib.Path) -> str:
    """The room on the file system of `path`, for messages: "1.2 GiB free on its file system"."""
    return f"{format_bytes(shutil.disk_usage(_existing(path)).free)} free on its file system"


def _existing(path: pathlib.Path) -> pathlib.Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def user_cache(room: str, what: str) -> pathlib.Path:
    """A folder in the user's cache, XDG_CACHE_HOME/shardlm/ROOM, of which the first is ~/.cache by default. `what`, for
    messages, is to be there. Raises ShardlmError for a user without a home."""
    try:
        root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in containers
        raise ShardlmError(
            f"neither HOME nor XDG_CACHE_HOME says where {what}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return root / "shardlm" / room


def check_room(path: pathlib.Path, nbytes: int) -> None:
    """Refuses to write so many bytes below `path` before the first of them, where they cannot all be there."""
    if shutil.disk_usage(_existing(path)).free < nbytes:
        raise ShardlmError(
            f"{path} needs {format_bytes(nbytes)} and there are {free_space(path)}; free some space or write it to "
            "another disk"
        )


def format_bytes(count: float) -> str:
    """Bytes in the unit that suits them: 1536 -> "1.5 KiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
