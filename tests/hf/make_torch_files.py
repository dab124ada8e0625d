"""Writes torch_files/: weights as torch.save writes them, in every dtype and with views of all kinds, and what they
are. Needs torch; the tests do not: `python tests/hf/make_torch_files.py`."""

import collections
import json
import pathlib

import torch

HERE = pathlib.Path(__file__).parent / "torch_files"
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def tensors() -> dict[str, torch.Tensor]:
    a = torch.arange(12.0).reshape(3, 4)
    found = {
        "a": a,
        "tied": a,
        "parameter": torch.nn.Parameter(a),
        "turned": a.T,
        "part": a[1:, ::2],
        "row": a[2],
        "repeated": a[:1].expand(5, 4),
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    return found | {name: (torch.arange(6) % 5 - int(name[0] in "fi")).to(getattr(torch, name)) for name in DTYPES}


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    state = collections.OrderedDict(tensors())
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    torch.save(state, HERE / "views.bin")
    torch.save(dict(state), HERE / "protocol4.bin", pickle_protocol=4)
    torch.save({"a": state["a"]}, HERE / "before.bin", _use_new_zipfile_serialization=False)
    told = {name: [str(a.dtype)[6:], list(a.shape), a.tolist()] for name, a in state.items()}
    (HERE / "views.json").write_text(json.dumps(told, indent=1) + "\n")
