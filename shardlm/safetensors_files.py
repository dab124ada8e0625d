"""The header of a safetensors file (https://huggingface.co/docs/safetensors): what tensors it has, and where."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.stored import DTYPES, Stored, unreadable

POINTER = b"version "  # that Git LFS leaves in place of a file begins so


def header(file: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, each checked to lie inside it, beside the others."""
    try:
        size, opened = file.stat().st_size, open(file, "rb")  # noqa: SIM115
    except OSError as error:
        raise unreadable(file, error) from None
    with opened as stream:
        first = stream.read(8)
        if first.startswith(POINTER):
            raise ShardlmError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 0 < length <= size - 8:
            of_header = f"its header alone has {8 + length}" if len(first) == 8 else "the length of its header takes 8"
            raise ShardlmError(
                f"{file} is {'not a safetensors file or is cut off' if size else 'empty'}: it has {size} bytes, and "
                f"{of_header}; download it again"
            )
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError):
            raise ShardlmError(f"{file}: the header is damaged; download the file again") from None
    tensors = {name: _stored(file, name, entry, 8 + length, size) for name, entry in entries.items()}
    _check_places(file, tensors, 8 + length, size)
    return tensors


def _stored(file: pathlib.Path, name: str, entry: Mapping[str, Any], start: int, size: int) -> Stored:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ShardlmError(f"{file}: {name} is described by {json.dumps(entry)[:200]}; download the file again")
    dtype = DTYPES.get(kind)
    if dtype is None:
        raise ShardlmError(
            f"{file}: {name} has dtype {kind}; supported: {', '.join(DTYPES)}; save the checkpoint in one of these"
        )
    stored = Stored(file, dtype, shape, start + begin)
    if end - begin != stored.nbytes:
        raise ShardlmError(
            f"{file}: {name} has {end - begin} bytes, and {kind}{list(shape)} needs {stored.nbytes}; download it again"
        )
    if start + end > size:
        raise ShardlmError(f"{file} is cut off: {name} ends at byte {start + end} of {size}; download it again")
    return stored


def _check_places(file: pathlib.Path, tensors: Mapping[str, Stored], start: int, size: int) -> None:
    """Tensors follow each other with nothing between and nothing after, as the format demands
    (https://github.com/huggingface/safetensors#format)."""
    end, before = start, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if stored.begin != end:
            fault = "overlaps" if stored.begin < end else "leaves a gap after"
            raise ShardlmError(
                f"{file}: {name} {fault} {before}: it begins at byte {stored.begin} and that ends at {end}; download "
                "the file again"
            )
        end, before = end + stored.nbytes, name
    if end != size:
        raise ShardlmError(f"{file} has {size} bytes and its tensors end at {end}; download the file again")
