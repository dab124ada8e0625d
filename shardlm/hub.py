"""Models on the Hugging Face hub (https://huggingface.co): OWNER/NAME, and of a repository with files of llama.cpp the
one of a quantisation, OWNER/NAME:Q4_K_M, as llama.cpp and Ollama write it."""

import fnmatch
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.gguf_files import shards
from shardlm.gguf_files.choose import BY_TORCH, SAFE, models, tag, tagged
from shardlm.hf_files import BESIDE, OF_IMAGES, OF_VIDEOS, QUANTISATION
from shardlm.weight_files import in_place_of, pickled

_NAME = re.compile(r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?([\w-][\w.-]*/[\w.-]+?)(?::([\w./-]+))?/?")


def is_name(path: str) -> bool:
    """Whether it may be the name of a repository."""
    return _NAME.fullmatch(path) is not None


def fetch(path: str, also: Sequence[str] = (), older: Sequence[str] = ()) -> pathlib.Path:
    """The local copy of a repository, or of one file of llama.cpp in it, fetched where needed; `also`: names of further
    files, `older`: of those that are fetched where there are no safetensors, beside PyTorch's weights. Raises
    ShardlmError where the hub does not give it, and where it is not clear which of several is meant."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ShardlmError(
            f"there is no folder {path}; to fetch it from the Hugging Face hub, pip install 'shardlm[hub]'"
        ) from None
    repository, wanted = _NAME.fullmatch(path).groups()
    if wanted:
        return _of_several(hub, repository, wanted)
    files = ["config.json", SAFE, f"{SAFE}.index.json", *BESIDE, *OF_IMAGES, OF_VIDEOS, *QUANTISATION, *also]
    folder = pathlib.Path(_asked(path, lambda: hub.snapshot_download(repository, allow_patterns=files)))
    if any(folder.glob(SAFE)):
        return folder
    there = _listed(hub, path, repository, BY_TORCH, *older)
    if any(fnmatch.fnmatch(name, pattern) for name in there for pattern in (BY_TORCH, *older)):
        files = [BY_TORCH, f"{BY_TORCH}.index.json", *older]
        return pathlib.Path(_asked(path, lambda: hub.snapshot_download(repository, allow_patterns=files)))
    found = models(there)
    if len(found) == 1:
        return _downloaded(hub, repository, found[0])
    if found:
        raise ShardlmError(f"{path} holds models for llama.cpp; say which one: {_tags(repository, found)}")
    if others := pickled(there):
        raise ShardlmError(
            f"{path} holds no {SAFE} and no {BY_TORCH}; {in_place_of(others)}, with its tokenizer, and name that"
        )
    return folder


def _of_several(hub: Any, repository: str, wanted: str) -> pathlib.Path:
    there = models(_listed(hub, f"{repository}:{wanted}", repository))
    found = [name for name in there if name == wanted] or tagged(there, wanted)
    if len(found) == 1:
        return _downloaded(hub, repository, found[0])
    why = f"has several, {', '.join(found)}" if found else "has no such file of llama.cpp"
    raise ShardlmError(f"{repository}:{wanted}: the repository {why}; there are {_tags(repository, there) or 'none'}")


def _tags(repository: str, names: Sequence[str]) -> str:
    """Of each of these files what it is asked for by: its quantisation where that is no other's."""
    own = [tag(name) for name in names]
    return ", ".join(
        f"{repository}:{kind if kind and own.count(kind) == 1 else name}" for kind, name in zip(own, names, strict=True)
    )


def _downloaded(hub: Any, repository: str, name: str) -> pathlib.Path:
    """A file, with the others of its model."""
    own = [str(part) for part in shards.siblings(pathlib.PurePosixPath(name))]
    folder = _asked(f"{repository}:{name}", lambda: hub.snapshot_download(repository, allow_patterns=own))
    return pathlib.Path(folder) / name


def _listed(hub: Any, path: str, repository: str, *more: str) -> list[str]:
    """Names of a repository's files; where the hub is not reached, of those of llama.cpp and `more` that are here."""
    own = ["*.gguf", *more]
    try:
        return hub.HfApi().list_repo_files(repository)
    except Exception as error:  # the library raises its own, httpx's and the operating system's
        try:
            folder = pathlib.Path(hub.snapshot_download(repository, allow_patterns=own, local_files_only=True))
        except Exception:
            raise _refused(path, error) from error
        return [file.relative_to(folder).as_posix() for kind in own for file in folder.rglob(kind)]


def _asked(path: str, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # as above
        raise _refused(path, error) from error


def _refused(path: str, error: Exception) -> ShardlmError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ShardlmError(
        f"there is no folder {path}, and the Hugging Face hub did not give it: {reason}. Name a run or a folder that "
        f"is there (from {pathlib.Path.cwd()}), or OWNER/NAME of the hub"
    )
