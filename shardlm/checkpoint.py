"""Checkpoints of a run: asynchronous, sharded, kept by recency and by validation loss, restored onto any
mesh. The one place that knows Orbax, whose files `checkpoint_slices` knows. When to save, and what a state is
made of, is for the training loop; `run_files` owns the files beside the checkpoints.

A checkpoint is DIRECTORY/<step>/ and appears in one rename when it is whole, so that a killed save leaves
only a temporary directory. In it:

    state/                        the arrays, each process's slices (OCDBT over Zarr 3, uncompressed)
    data/process_<i>-of-<n>.json  where each process stands in its data
    shardlm.json                  metrics, and the sizes of the files above, which show damage before loading
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from shardlm.checkpoint_files import (
    DataState,
    Tree,
    check_fit,
    check_room,
    faults,
    manifest,
    read_data_state,
    write_manifest,
)
from shardlm.checkpoint_messages import quiet_orbax, reason, save_failed
from shardlm.checkpoint_slices import StoredArray, first_chunk
from shardlm.errors import ShardlmError
from shardlm.files import cannot_write
from shardlm.life import while_growing
from shardlm.unread import Unread

BEST_METRIC = "validation_loss"
REST = "*"  # among names that may be left out: all that is not asked for
TEMPORARY = ".orbax-checkpoint-tmp"  # follows the step in the name of a directory that is being written


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a checkpoint is saved and which ones stay on disk."""

    every_steps: int = 500
    keep: int = 2  # the latest ones
    keep_best: int = 1  # besides those, the ones with the lowest validation loss

    def __post_init__(self):
        if self.every_steps < 1 or self.keep < 1 or self.keep_best < 0:
            raise ShardlmError(
                f"checkpoint.every_steps={self.every_steps}, keep={self.keep}, keep_best={self.keep_best}: "
                "every_steps and keep must be at least 1 and keep_best at least 0. "
                "To save only at the end, set every_steps to the number of steps of the run."
            )


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint in memory. `data_state` is this process's own position in the data."""

    step: int
    state: Tree
    data_state: dict[str, Any]
    metrics: dict[str, float]


def retained(losses: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """The steps to keep, given the validation loss of each one on disk (None or NaN where it has none)."""
    ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None and not math.isnan(loss))
    return {*sorted(losses)[-config.keep :], *(-step for _, step in ranked[: config.keep_best])}


class Checkpoints:
    """The checkpoints in one directory; a context manager, whose end waits for the save in flight.

    With a configuration it belongs to the run that trains: what a killed save left is removed (`removed`
    names it) and old checkpoints make way for new ones. Without one it only reads, also beside a run that
    trains. In a job of several processes each makes the same calls.
    """

    def __init__(self, directory: str | os.PathLike, config: CheckpointConfig | None = None):
        """Opens `directory`; with a configuration it is made where it does not exist.

        Raises:
            ShardlmError: the directory cannot be made.
        """
        self.directory = pathlib.Path(directory).absolute()
        self.removed: tuple[str, ...] = ()
        self._config = config
        self._writer: ocp.training.Checkpointer | None = None
        self._saving: _Save | None = None
        self._step: int | None = None  # where this object last saved or restored
        self._log_filter = contextlib.ExitStack()
        if config:
            self._open_writer()

    def _open_writer(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.directory, error) from error
        self.removed = tuple(sorted(path.name for path in self.directory.glob(f"*{TEMPORARY}*")))
        # Orbax's own thread for this outlives `close`: a run that ended soon after printed its traceback.
        for name in self.removed * (jax.process_index() == 0):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        self._log_filter.enter_context(quiet_orbax())
        context = _saving()
        # A lambda because Orbax copies its context deeply, and a bound method would take this object along.
        context.asynchronous.post_finalization_callback = lambda: self._write_manifest()
        policy = _Retention(self._retained)
        self._writer = ocp.training.Checkpointer(self.directory, context=context, preservation_policy=policy)

    # Saving

    def due(self, step: int) -> bool:
        """Whether the configuration wants a checkpoint after `step` steps."""
        return step % self._config.every_steps == 0

    def save(self, step: int, state: Tree, data_state: dict[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts to save and returns once `state` is copied: its buffers may be donated at once.

        `data_state` is what JSON can hold, and may differ between processes; `metrics` may not, and its
        "validation_loss" is what `keep_best` goes by. Saving twice at one step does nothing.

        Raises:
            ShardlmError: this save or the one before it failed, or the directory holds a later checkpoint.
        """
        self.wait()
        if step == self._step:
            return
        if (latest := self.latest()) is not None and step <= latest:
            raise ShardlmError(
                f"{self.directory} already holds a checkpoint of step {latest}, and this run is at {step}: "
                "it did not continue from there. Resume from it, or choose another run directory."
            )
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._saving = _Save(step, {name: float(value) for name, value in metrics.items()}, nbytes)
        items = {"state": state, "data": DataState(data_state)}
        with self._explained(everywhere=True):
            check_room(self.directory, nbytes)
        with self._explained():
            self._writer.save_checkpointables_async(step, items, force=True)
        self._step = step

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
            ShardlmError: it failed; the earlier checkpoints are intact.
        """
        if self._saving:
            with self._explained(), while_growing(self.directory / f"{self._saving.step}{TEMPORARY}"):
                self._writer.wait()
            self._saving = None

    def close(self) -> None:
        """Waits for the save in flight and lets go of the directory. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._writer:
                self._writer.close()
            self._log_filter.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        try:
            self.close()
        except ShardlmError as failed_save:
            if error is None:
                raise
            error.add_note(str(failed_save))  # what ended the run comes first

    @contextlib.contextmanager
    def _explained(self, everywhere: bool = False) -> Iterator[None]:
        """Turns what goes wrong in a save into an error for the user; `everywhere`: in all processes if in any."""
        try:
            yield
        except Exception as error:
            save, self._saving, self._step = self._saving, None, None
            self._writer.reload()
            failed = save_failed(self.directory / str(save.step), self.steps(), save.nbytes, error)
            failed.everywhere = everywhere or jax.process_count() == 1
            raise failed from error

    def _retained(self) -> set[int]:
        metrics = {step: manifest(self.directory / str(step)).get("metrics", {}) for step in self.steps()}
        metrics[self._saving.step] = self._saving.metrics
        return retained({step: values.get(BEST_METRIC) for step, values in metrics.items()}, self._config)

    def _write_manifest(self) -> None:
        """Orbax calls this in process 0 when all else is written, before it renames the directory."""
        write_manifest(self.directory / f"{self._saving.step}{TEMPORARY}", self._saving.metrics)

    # Reading

    def steps(self) -> list[int]:
        """The steps of the checkpoints whose save was completed, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def latest(self) -> int | None:
        """The newest of `steps`: what `restore` takes unless told otherwise."""
        return max(self.steps(), default=None)

    def restore(self, abstract_state: Tree, step: int | None = None) -> Restored:
        """Loads the checkpoint at `step`, the latest by default, into the form of `abstract_state`.

        That is a tree of `jax.ShapeDtypeStruct` with shardings, which may be of any mesh: each device reads
        its own slices. The result has the same tree, NamedTuples and all.

        Raises:
            ShardlmError: there is no such checkpoint; it is damaged (another one is never taken instead); it
                is of a model with other names, shapes or dtypes; or a run would continue before its latest.
        """
        step = self._find(step)
        later = [str(other) for other in self.steps() if other > step]
        if self._config and later:
            raise ShardlmError(
                f"{self.directory} holds later checkpoints than step {step}: {', '.join(later)}. To continue "
                f"from step {step}, move or delete those directories, then run the same command again."
            )
        path = self.directory / str(step)
        state = self._load(step, abstract_state)
        data_state = self._read(step, lambda: read_data_state(path))
        self._step = step
        return Restored(step, state, data_state, manifest(path)["metrics"])

    def restore_params(
        self,
        abstract_params: Tree,
        step: int | None = None,
        name: str = "params",
        optional: Collection[str] = (),
    ) -> Tree:
        """Loads one part of the state and reads nothing else: the parameters, or their average as "ema". What is saved
        under the names `optional` (REST: any) and not asked for is left out.

        As `restore`, except that values are cast to the dtypes of `abstract_params`.
        """
        return self._load(self._find(step), {name: abstract_params}, part=name, optional=optional)[name]

    def restore_some(self, abstract_params: Tree, step: int, name: str = "params") -> Tree:
        """Some of the parameters of a step that `check_params` has found whole."""
        return self._read(step, lambda: ocp.load(self.directory / str(step), {name: abstract_params}))[name]

    def unread_params(
        self, abstract_params: Tree, step: int | None = None, name: str = "params", optional: Collection[str] = ()
    ) -> Tree:
        """What `restore_params` loads as `Unread`, where it rests left aside. Raises as it does, also where it is
        read."""
        found = self.check_params(abstract_params, step, name, optional)

        def unread(path: tuple, a: jax.ShapeDtypeStruct) -> Unread:
            stored = StoredArray(self.directory / str(found) / "state", _dotted((jax.tree_util.DictKey(name), *path)))
            read = functools.partial(self._read, found)
            return Unread(a.shape, a.dtype, lambda index: read(lambda: stored.read(index)).astype(a.dtype))

        return jax.tree_util.tree_map_with_path(unread, abstract_params)

    def check_params(
        self, abstract_params: Tree, step: int | None = None, name: str = "params", optional: Collection[str] = ()
    ) -> int:
        """Whether `restore_params` will find the parameters, in these shapes, and at which step; nothing of them is
        read. Raises as it does."""
        found = self._find(step)
        self._check(found, {name: abstract_params}, name, optional)
        return found

    def _find(self, step: int | None) -> int:
        self.wait()
        steps = self.steps()
        if not steps:
            raise ShardlmError(f"There is no checkpoint in {self.directory}: no save was completed there.")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps))
            raise ShardlmError(f"There is no checkpoint at step {step} in {self.directory}; there are {there}.")
        return steps[-1] if step is None else step

    def _load(self, step: int, abstract: Tree, part: str | None = None, optional: Collection[str] = ()) -> Tree:
        path = self.directory / str(step)
        if any(leaf.sharding is None for leaf in jax.tree.leaves(abstract)):
            raise ValueError("every array to restore needs a sharding")
        self._check(step, abstract, part, optional)
        return self._read(step, lambda: ocp.load(path, abstract))

    def _check(self, step: int, abstract: Tree, part: str | None, optional: Collection[str]) -> None:
        path = self.directory / str(step)
        if damage := faults(path):
            raise self._damaged(step, damage)
        saved = self._read(step, lambda: ocp.metadata(path).metadata)
        if saved is not None:  # else damage that only loading will name
            if part and saved.get(part) is None:
                there = ", ".join(sorted(name for name, tree in saved.items() if tree is not None))
                raise ShardlmError(f"Checkpoint {path} has no {part!r}; it has {there}.")
            saved = {part: saved[part]} if part else saved
            if part and optional:
                left = saved[part].keys() - abstract[part].keys() if REST in optional else optional
                saved = {part: {k: a for k, a in saved[part].items() if k in abstract[part] or k not in left}}
            check_fit(path, saved, abstract, same_dtype=part is None)

    def _read(self, step: int, read: Callable[[], Any]) -> Any:
        context = ocp.Context()
        context.pytree.loading.partial_load = True  # `check_fit` has said what may be left out
        try:
            with quiet_orbax(), context:
                return read()
        except (ShardlmError, jax.errors.JaxRuntimeError):  # the latter: out of memory, a lost device
            raise
        except Exception as error:
            raise self._damaged(step, [reason(error)]) from error

    def _damaged(self, step: int, damage: list[str]) -> ShardlmError:
        path = self.directory / str(step)
        more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
        whole = [s for s in self.steps() if s != step and not faults(self.directory / str(s))]
        remedy = "There is no other whole one: start again in a new run directory."
        if whole:
            remedy = (
                f"Whole ones are at step {', '.join(map(str, whole))}: to continue from step {whole[-1]}, "
                f"move or delete {path}, then run the same command again."
            )
        return ShardlmError(f"Checkpoint {path} is damaged: {damage[0]}{more}. {remedy}")


def save_unread(
    directory: pathlib.Path,
    step: int,
    state: Tree,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Saves a state of `Unread` arrays as a checkpoint in `directory`, without a position in data; a part of one array
    at a time is in memory, and the first chunk of each. `progress` is called with (bytes written, bytes to write).

    Raises ShardlmError where it cannot be written; there is no such checkpoint then.
    """
    path = directory.absolute() / str(step)
    draft = path.with_name(f"{step}.unfinished")
    leaves = {_dotted(keys): a for keys, a in jax.tree_util.tree_flatten_with_path(state)[0]}
    done, total = 0, sum(a.nbytes for a in leaves.values())
    try:
        check_room(directory, total)
        first = jax.tree.map(lambda a: jnp.asarray(first_chunk(a)), state)
        with quiet_orbax(), _saving():
            ocp.save_checkpointables(draft, {"state": first, "data": DataState({})}, overwrite=True)
        del first
        for name, a in leaves.items():
            for written in StoredArray(draft / "state", name).grow(a):
                progress(done := done + written, total)
        write_manifest(draft, {})
        draft.rename(path)
    except (ShardlmError, jax.errors.JaxRuntimeError):  # of what was to be saved
        raise
    except Exception as error:
        raise save_failed(path, [], total, error) from error


def _saving() -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = False  # saves in a third of the time
    context.array.saving.use_replica_parallel = False  # would block for seconds on replicated arrays
    return context


def _dotted(path: tuple) -> str:
    """The name of an array by its place in a tree, as Orbax makes it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save in flight: what its manifest and a message about its failure need."""

    step: int
    metrics: dict[str, float]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _Retention:
    """Orbax's protocol of a preservation policy around a function that returns the steps to keep."""

    keep: Callable[[], set[int]]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        kept = self.keep()
        return [checkpoint.step in kept for checkpoint in checkpoints]
