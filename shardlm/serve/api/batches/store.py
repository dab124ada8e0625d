"""A folder of files and batches, as OpenAI's clients know them: what was sent, what came of it, and how far it is. One
server has it; what it holds outlives that."""

import fcntl
import pathlib
import time
import uuid
from typing import Any

import msgspec

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.http import encode

FILES = 1000  # that there may be, also of answers
BATCHES = 1000  # that are remembered; of more the oldest that have ended are forgotten
UNFINISHED = 100  # of batches that may wait
OPEN = ("validating", "in_progress", "finalizing", "cancelling")  # statuses of those that have not ended
Record = dict[str, Any]


class Store:
    """files, batches: by id, as clients are told of them, the oldest first."""

    def __init__(self, folder: str):
        """Raises ShardlmError where the folder cannot be written, or is another server's."""
        self._folder = pathlib.Path(folder)
        self.files: dict[str, Record] = {}
        self.batches: dict[str, Record] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._folder / ".lock", "a")  # noqa: SIM115 as long as this server
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for kept, ending in ((self.files, "file.json"), (self.batches, "batch.json")):
                found = [msgspec.json.decode(path.read_bytes()) for path in self._folder.glob(f"*.{ending}")]
                kept.update((one["id"], one) for one in sorted(found, key=lambda one: (one["created_at"], one["id"])))
        except BlockingIOError:
            self._lock.close()
            raise ShardlmError(f"batch_dir={folder} is another server's; give each its own") from None
        except OSError as error:
            said = f"batch_dir={folder} cannot be used: {error.strerror or error}; name a folder that can be written"
            raise ShardlmError(said) from None

    def content(self, id: str) -> pathlib.Path:
        return self._folder / f"{id}.jsonl"

    def file(self, id: str) -> Record:
        """Raises ApiError for one that is not here."""
        if id not in self.files:
            raise ApiError(f"there is no file {id!r:.100}", 404, param="id")
        return self.files[id]

    def batch(self, id: str) -> Record:
        """Raises ApiError for one that is not here."""
        if id not in self.batches:
            raise ApiError(f"there is no batch {id!r:.100}", 404, param="id")
        return self.batches[id]

    def check_room(self) -> None:
        """Raises ApiError where there are as many files as there may be."""
        if len(self.files) >= FILES:
            raise ApiError(
                f"this server has {FILES} files, as many as it keeps; delete some", 429, code="too_many_files"
            )

    def add(self, filename: str, content: bytes) -> Record:
        """A file that a client sends. Raises ApiError as `check_room`, ShardlmError where there is no space."""
        self.check_room()
        id = f"file-{uuid.uuid4().hex}"
        write_atomically(self.content(id), content)
        return self.keep(id, filename, "batch")

    def keep(self, id: str, filename: str, purpose: str) -> Record:
        """A file whose content is there."""
        about = {"id": id, "object": "file", "bytes": self.content(id).stat().st_size, "created_at": int(time.time())}
        about |= {"filename": filename, "purpose": purpose, "status": "processed", "expires_at": None}
        write_atomically(self._folder / f"{id}.file.json", encode(about))
        self.files[id] = about
        return about

    def delete(self, id: str) -> None:
        """Raises ApiError for a file that is not here, or that a batch reads."""
        self.file(id)
        if reads := [
            one["id"] for one in self.batches.values() if id == one["input_file_id"] and one["status"] in OPEN
        ]:
            raise ApiError(f"the batch {reads[0]} reads the file {id}; cancel it first", 409)
        (self._folder / f"{id}.file.json").unlink(missing_ok=True)
        self.content(id).unlink(missing_ok=True)
        del self.files[id]

    def begin(self, endpoint: str, input_file_id: str, window: str, metadata: dict[str, str] | None) -> Record:
        """A batch that waits. Raises ApiError where too many do."""
        waiting = [one for one in self.batches.values() if one["status"] in OPEN]
        if len(waiting) >= UNFINISHED:
            raise ApiError(f"{UNFINISHED} batches wait; try again later", 429, code="too_many_batches")
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled", "expires")
        batch = {"id": f"batch_{uuid.uuid4().hex}", "object": "batch", "endpoint": endpoint, "errors": None}
        batch |= {"input_file_id": input_file_id, "completion_window": window, "status": "validating"}
        batch |= {"output_file_id": None, "error_file_id": None, "created_at": int(time.time())}
        batch |= {f"{stage}_at": None for stage in stages} | {"metadata": metadata}
        batch["request_counts"] = {"total": 0, "completed": 0, "failed": 0}
        self.batches[batch["id"]] = batch
        self.save(batch)
        ended = [one for one in self.batches if self.batches[one]["status"] not in OPEN]
        for id in ended[: max(0, len(self.batches) - BATCHES)]:
            (self._folder / f"{id}.batch.json").unlink(missing_ok=True)
            del self.batches[id]
        return batch

    def save(self, batch: Record, status: str | None = None) -> None:
        """As it is now, with another status where one is given."""
        if status:
            batch |= {"status": status, f"{status}_at": int(time.time())}
        write_atomically(self._folder / f"{batch['id']}.batch.json", encode(batch))

    def answers(self, batch: Record) -> dict[str, str]:
        """The ids of what a batch writes, by the field that tells of it when it has ended."""
        own = batch["id"].removeprefix("batch_")
        return {"output_file_id": f"file-output-{own}", "error_file_id": f"file-errors-{own}"}

    def end(self, batch: Record, status: str, errors: list[Record] | None = None) -> None:
        """With what was answered. `errors`: why it was not."""
        for field, id in self.answers(batch).items():
            path = self.content(id)
            if path.exists() and path.stat().st_size:
                name = f"{batch['id']}_{field.partition('_')[0]}.jsonl"
                batch[field] = self.keep(id, name, "batch_output")["id"]
            else:
                path.unlink(missing_ok=True)
        batch["errors"] = errors and {"object": "list", "data": errors}
        self.save(batch, status)

    def close(self) -> None:
        self._lock.close()
