"""Which files of a folder hold its weights, and what tensors are in them: safetensors, else PyTorch's own, as
transformers chooses."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping

from shardlm import safetensors_files, torch_files
from shardlm.errors import ShardlmError
from shardlm.gguf_files.choose import BY_TORCH, SAFE
from shardlm.stored import Stored, read_json

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Form:
    """one, index, pattern  of the names of files: of the only one, of the one that says what is where, of all
    header               gives the tensors of a file
    """

    one: str
    index: str
    pattern: str
    header: Callable[[pathlib.Path], dict[str, Stored]]


FORMS = (
    Form(ONE, INDEX, SAFE, safetensors_files.header),
    Form("pytorch_model.bin", "pytorch_model.bin.index.json", BY_TORCH, torch_files.header),
)


def hold(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of a folder that may hold weights; none: it has none."""
    return next((found for form in FORMS if (found := sorted(path.glob(form.pattern)))), [])


def tensors(path: pathlib.Path) -> dict[str, Stored]:
    """All tensors of a folder, from the files that transformers would read: model.safetensors, else those that its
    index names, else every *.safetensors that is there; without any, PyTorch's pytorch_model.bin in the same way."""
    for form in FORMS:
        if not (path / form.one).exists() and (path / form.index).exists():
            return _indexed(path, form)
        files = [path / form.one] if (path / form.one).exists() else sorted(path.glob(form.pattern))
        if files:
            _check_numbers(files)
            return _together((file, form.header(file)) for file in files)
    found = "the weights are those files: download them too, or name the folder that has them"
    if others := pickled(file.name for file in path.iterdir()):
        found = in_place_of(others)
    raise ShardlmError(f"{path} holds no *.safetensors and no {BY_TORCH}; {found}")


def pickled(names: Iterable[str]) -> list[str]:
    """Of files' names those of PyTorch's that may hold anything."""
    return sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))


def in_place_of(names: Iterable[str]) -> str:
    """What to do with such files."""
    how = "transformers' AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) does"
    return f"{', '.join(names)} may hold anything: save the weights as safetensors ({how})"


def _together(headers: Iterable[tuple[pathlib.Path, Mapping[str, Stored]]]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file, found in headers:
        for name, stored in found.items():
            if name in tensors:
                raise ShardlmError(f"{file}: tensor {name} is in {tensors[name].file.name} too; remove one of them")
            tensors[name] = stored
    return tensors


def _check_numbers(files: list[pathlib.Path]) -> None:
    """Files named -00001-of-00003 have to be three."""
    names = {file.name for file in files}
    for match in filter(None, (re.fullmatch(r"(.*)-(\d+)-of-(\d+)(\.\w+)", file.name) for file in files)):
        stem, number, total, suffix = match.groups()
        for i in range(1, int(total) + 1):
            expected = f"{stem}-{i:0{len(number)}}-of-{total}{suffix}"
            if expected not in names:
                raise ShardlmError(
                    f"{files[0].parent} holds {match[0]}, of {int(total)} files, and not {expected}; download it too"
                )


def _indexed(path: pathlib.Path, form: Form) -> dict[str, Stored]:
    index = path / form.index
    places = read_json(index, "").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ShardlmError(f"{index} has no weight_map from tensors to files; download it again")
    names = sorted(set(places.values()))
    for name in names:
        if pathlib.PurePath(name).name != name:
            raise ShardlmError(f"{index} names {name}, which is not a file of {path}; download it again")
        if not (path / name).exists():
            raise ShardlmError(f"{index} names {name}, which is not in {path}; download it too")
    tensors = _together((path / name, form.header(path / name)) for name in names)
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ShardlmError(f"{index} says that {name} is in {file}, and it is not; download both again")
    return tensors
