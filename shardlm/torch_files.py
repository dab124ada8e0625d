"""Weights as PyTorch saves them since 1.6 (`torch.save`): a zip archive, stored as it is, of a pickle that says what
tensors there are and of one entry for each storage. The pickle is torch_pickle.py's; numbers stay in the file."""

import os
import pathlib
import struct
import zipfile
from typing import BinaryIO

from shardlm.errors import ShardlmError
from shardlm.safetensors_files import POINTER
from shardlm.stored import Stored, unreadable
from shardlm.torch_pickle import Storage, View, read

# What zipfile raises for archives that are damaged, or of kinds that it does not know.
_OF_DAMAGE = (zipfile.BadZipFile, struct.error, ArithmeticError, LookupError, ValueError, EOFError, RuntimeError)
_LOCAL = 30  # bytes of an entry's own header, before its name and what else there is


def header(file: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one file, each checked to lie inside its entry. Raises ShardlmError for PyTorch's form before 1.6,
    for a file that asks to run anything, and for a damaged one."""
    try:
        with open(file, "rb") as stream:
            _check_form(file, stream)
            return _tensors(file, stream)
    except OSError as error:
        raise unreadable(file, error) from None
    except _OF_DAMAGE as error:
        raise ShardlmError(f"{file} is cut off or damaged ({error}); download it again") from None


def _check_form(file: pathlib.Path, stream: BinaryIO) -> None:
    first = stream.read(512)
    if first.startswith(POINTER):
        raise ShardlmError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    legacy = "pickle" if first.startswith(b"\x80") else "tar file" if first[257:262] == b"ustar" else ""
    if legacy:
        raise ShardlmError(
            f"{file} is of PyTorch's form before 1.6 (a {legacy}), which is not read; with PyTorch "
            "torch.save(torch.load(FILE, weights_only=True), FILE) writes it anew, and transformers' "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) as safetensors"
        )
    if not first.startswith(b"PK\x03\x04"):
        found = f"it begins with {first[:8]!r}" if first else "it is empty"
        raise ShardlmError(f"{file} is not a file of PyTorch's (a zip archive): {found}; download it again")


def _tensors(file: pathlib.Path, stream: BinaryIO) -> dict[str, Stored]:
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise ShardlmError(
                f"{file} has several entries of one name, and readers differ in which they take; save anew"
            )
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ShardlmError(
                f"{file} is a zip archive with {len(pickles)} entries data.pkl, and torch.save writes one; if it is a "
                "model of TorchScript, save its state_dict() instead"
            )
        root = pickles[0].removesuffix("data.pkl")
        for name in (pickles[0], f"{root}byteorder"):
            if name in entries and entries[name].compress_type != zipfile.ZIP_STORED:
                raise _packed(file, name)
        if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
            raise ShardlmError(f"{file} was saved on a machine with another order of bytes; save it on a usual one")
        found = _named(file, read(archive.read(pickles[0]), f"{file}: {pickles[0]}"))
    begins: dict[str, int] = {}
    for view in found.values():
        key = view.storage.key
        if key not in begins:
            entry = entries.get(f"{root}data/{key}")
            if entry is None:
                raise ShardlmError(f"{file} has no entry {root}data/{key}, which a tensor is in; download it again")
            begins[key] = _begin(file, stream, entry)
        _check_size(file, view.storage, entries[f"{root}data/{key}"])
    return {name: _stored(file, view, begins[view.storage.key]) for name, view in found.items()}


def _named(file: pathlib.Path, found: object) -> dict[str, View]:
    """Raises ShardlmError for what is not a dictionary of tensors."""
    if not isinstance(found, dict):
        raise ShardlmError(f"{file} holds a {type(found).__name__} and not tensors by their names; save a state_dict()")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, View):
            raise ShardlmError(
                f"{file}: {name!r:.100} is a {type(value).__name__} and not a tensor. Weights of a Hugging Face folder "
                "are tensors alone: save the model's state_dict()"
            )
    return found


def _begin(file: pathlib.Path, stream: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin; its own header says how long that is."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise _packed(file, entry.filename)
    stream.seek(entry.header_offset)
    own = stream.read(_LOCAL)
    begin = entry.header_offset + _LOCAL + sum(int.from_bytes(own[at : at + 2], "little") for at in (26, 28))
    size = os.fstat(stream.fileno()).st_size
    if not own.startswith(b"PK\x03\x04") or begin + entry.file_size > size:
        raise ShardlmError(f"{file} is cut off or damaged at {entry.filename}; download it again")
    return begin


def _packed(file: pathlib.Path, name: str) -> ShardlmError:
    return ShardlmError(
        f"{file}: {name} is compressed, as torch.save writes none; save the weights with torch.save or as safetensors"
    )


def _check_size(file: pathlib.Path, storage: Storage, entry: zipfile.ZipInfo) -> None:
    needed = storage.count * storage.dtype.itemsize
    if entry.file_size < needed:
        raise ShardlmError(
            f"{file}: {entry.filename} has {entry.file_size} bytes, and {storage.count} numbers of {storage.dtype} "
            f"need {needed}; download it again"
        )


def _stored(file: pathlib.Path, view: View, begin: int) -> Stored:
    begin += view.offset * view.storage.dtype.itemsize
    stored = Stored(file, view.storage.dtype, view.shape, begin)
    return stored if _follow(view) else Stored(file, view.storage.dtype, view.shape, begin, view.strides)


def _follow(view: View) -> bool:
    """Whether its numbers lie one after the other."""
    expected = 1
    for n, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if n > 1 and stride != expected:
            return 0 in view.shape
        expected *= n
    return True
