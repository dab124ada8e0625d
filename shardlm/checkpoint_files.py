"""What lies in the directory of one checkpoint besides Orbax's arrays, and whether it is whole and fits a
model: the manifest, the positions in the data, and the comparison of names, shapes and dtypes. When any of it
is written or read, `shardlm.checkpoint` decides.
"""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
from collections.abc import Awaitable
from typing import Any

import jax

from shardlm.distributed import of_all
from shardlm.errors import ShardlmError

MANIFEST = "shardlm.json"
Tree = Any  # a pytree: nested dicts, optax's NamedTuples, registered dataclasses


class DataState:
    """One process's position in its data, by Orbax's protocol of a stateful checkpointable: its JSON file."""

    def __init__(self, state: dict[str, Any]):
        self._text = json.dumps(state)

    async def save(self, directory) -> Awaitable[None]:
        return self._write(directory)

    async def _write(self, directory) -> None:
        path = await directory.await_creation()
        (path / f"process_{jax.process_index()}-of-{jax.process_count()}.json").write_text(self._text)

    async def load(self, directory) -> Awaitable[None]:
        raise NotImplementedError("read by read_data_state")


def check_room(directory: pathlib.Path, nbytes: int) -> None:
    """Makes the directory where it is not there, since somebody removed it: what is in memory is all. Raises OSError
    where that cannot be, or there is no room for so many bytes, rather than after gigabytes; in every process where it
    is so for one, for which the others would wait. All must call it."""
    own = 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(directory).free < nbytes:
            own = errno.ENOSPC
    except OSError as error:
        own = error.errno or errno.EIO
    if worst := max(of_all(own)):
        raise OSError(worst, os.strerror(worst))


def read_data_state(path: pathlib.Path) -> dict[str, Any]:
    """This process's position; where the number of processes has changed, the one on which all of them agree.

    Raises:
        ShardlmError: the number has changed and they do not agree.
    """
    index, count = jax.process_index(), jax.process_count()
    own = path / "data" / f"process_{index}-of-{count}.json"
    if own.exists():
        return json.loads(own.read_text())
    saved = [json.loads(file.read_text()) for file in (path / "data").glob("process_*.json")]
    if all(state == saved[0] for state in saved):
        return saved[0]
    raise ShardlmError(
        f"Checkpoint {path} was saved by {len(saved)} processes, each at its own place in the data, and this "
        f"run has {count}: which documents are done cannot be told. Resume with {len(saved)} processes."
    )


def write_manifest(path: pathlib.Path, metrics: dict[str, float]) -> None:
    """Lists the files below `path`, where all but this one are written, with their sizes in bytes."""
    files = {str(f.relative_to(path)): f.stat().st_size for f in sorted(path.glob("*/**/*")) if f.is_file()}
    (path / MANIFEST).write_text(json.dumps({"metrics": metrics, "files": files}, indent=1))


def manifest(path: pathlib.Path) -> dict[str, Any]:
    """The manifest of a checkpoint; empty where it is missing or damaged."""
    try:
        return json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}


def faults(path: pathlib.Path) -> list[str]:
    """What is wrong with the files of a checkpoint. The processes of a job share the work of looking."""
    sizes = manifest(path).get("files")
    if sizes is None:
        return [f"{MANIFEST}, the list of its files, is missing or damaged"]
    share = sorted(sizes)[jax.process_index() :: jax.process_count()]
    found = {name: os.path.getsize(path / name) if (path / name).exists() else None for name in share}
    return [
        f"{name} is missing" if size is None else f"{name} has {size} bytes instead of {sizes[name]}"
        for name, size in found.items()
        if size != sizes[name]
    ]


@dataclasses.dataclass(frozen=True)
class _Array:
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def check_fit(path: pathlib.Path, saved: Tree, wanted: Tree, same_dtype: bool) -> None:
    """Refuses a checkpoint of another model.

    Raises:
        ShardlmError: names, shapes or (with `same_dtype`) dtypes differ; it names the first ones.
    """
    have, want = _arrays(saved, same_dtype), _arrays(wanted, same_dtype)
    names = sorted(have.keys() | want.keys(), key=lambda name: (not name.startswith("params"), name))
    differ = [
        f"{name} is {have.get(name, 'not')} in the checkpoint and {want.get(name, 'not')} in this model"
        for name in names
        if have.get(name) != want.get(name)
    ]
    if differ:
        more = f"; and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ShardlmError(
            f"Checkpoint {path} is of another model or optimizer: {'; '.join(differ[:3])}{more}. Use the "
            "configuration it was saved with (config.json beside the checkpoints) or another run directory."
        )


def _arrays(tree: Tree, dtypes: bool) -> dict[str, _Array]:
    """The arrays of a tree by their dotted names, which are the same in the checkpoint and in the model."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _Array(
            tuple(leaf.shape), str(leaf.dtype) if dtypes else ""
        )
        for path, leaf in leaves
    }
