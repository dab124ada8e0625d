"""Other weights for a checkpoint's folder: its own, in another order."""

import json
import pathlib
import shutil

import numpy as np


def rolled(folder: pathlib.Path, into: pathlib.Path, *parts: str) -> pathlib.Path:
    """A copy in which the numbers of tensors with any of `parts` in their names stand some places on."""
    shutil.copytree(folder, into)
    for path in into.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, one in json.loads(data[8:begin]).items():
            if any(part in name for part in parts):
                own = slice(*(begin + at for at in one["data_offsets"]))
                data[own] = np.roll(np.frombuffer(data[own], np.uint16), 6).tobytes()  # 6 of 2 bytes, or 3 of 4
        path.write_bytes(data)
    return into
