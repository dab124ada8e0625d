"""Files as torch.save writes them, without torch: a zip archive of a pickle, put together here operation by operation,
and of an entry for each storage. `pickle` takes the place of that of `arrays`."""

import pathlib
import struct
import zipfile
from collections.abc import Mapping

import numpy as np

from shardlm.torch_pickle import STORAGES

KINDS = {dtype: name for name, dtype in STORAGES.items()}


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(values) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def tensor(key: str, kind: str, count: int, shape, strides, offset: int = 0, hooks: bytes = b"N") -> bytes:
    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + integer(count) + b"tQ"
    arguments = storage + integer(offset) + numbers(shape) + numbers(strides) + b"\x89" + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def of(key: str, a: np.ndarray) -> bytes:
    strides = [stride // a.itemsize for stride in a.strides]
    return tensor(key, KINDS[a.dtype], a.size, a.shape, strides)


def dictionary(items: Mapping[str, bytes]) -> bytes:
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in items.items()) + b"u."


def save(
    file: pathlib.Path,
    arrays: Mapping[str, np.ndarray],
    pickle: bytes | None = None,
    compression: int = zipfile.ZIP_STORED,
    **more: bytes,
) -> pathlib.Path:
    """`arrays` that are one and the same share a storage."""
    keys = {id(a): str(number) for number, a in enumerate(arrays.values())}
    told = dictionary({name: of(keys[id(a)], a) for name, a in arrays.items()})
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", told if pickle is None else pickle)
        for a in {id(a): a for a in arrays.values()}.values():
            archive.writestr(f"archive/data/{keys[id(a)]}", np.ascontiguousarray(a).tobytes())
        for name, content in {"version": b"3\n", **more}.items():
            archive.writestr(f"archive/{name}", content)
    return file


def save_folder(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Replaces a folder's weights by pytorch_model.bin."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save(folder / "pytorch_model.bin", arrays)
    return folder
