"""references/NAME/: small checkpoints that see, saved by transformers, images, and what it said to prompts with them,
so that tests need neither it nor torch. Made by the tests that ask transformers itself:

    REFERENCES=tests/vision/references pytest -m "wide or not wide" tests/vision -k "of_transformers and not references"
"""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

HOME = pathlib.Path(__file__).parent / "references"
EVERY = sorted(path.name for path in HOME.iterdir()) if HOME.is_dir() else []
NAMES = [name for name in EVERY if not name.endswith("-video")]  # the others are families once more, asked of videos


def asks(name: str) -> list[tuple]:
    """Prompts, in which the image token stands for an image, and their images; where there are some, videos too."""
    said = json.loads((HOME / name / "said.json").read_text())
    images, films = (_arrays(HOME / name / f"{kind}.npz") for kind in ("images", "films"))
    found = [(ids, [images[key] for key in sorted(images) if key[0] == i]) for i, ids in enumerate(said["prompts"])]
    if not films:
        return found
    rates = {tuple(map(int, key.split("."))): rate for key, rate in said["rates"].items()}
    return [(*one, [(films[key], rates[key]) for key in sorted(films) if key[0] == i]) for i, one in enumerate(found)]


def _arrays(file: pathlib.Path) -> dict[tuple[int, int], np.ndarray]:
    if not file.is_file():
        return {}
    with np.load(file) as arrays:
        return {tuple(map(int, key.split("."))): arrays[key] for key in arrays.files}


def said(name: str) -> list[dict[str, Any]]:
    """What transformers said to each, as served.Said has it."""
    return json.loads((HOME / name / "said.json").read_text())["said"]


def folder(name: str, into: pathlib.Path) -> pathlib.Path:
    """The checkpoint, copied."""
    return shutil.copytree(HOME / name, into / name)


def keep(checkpoint: pathlib.Path, asked: Sequence[tuple], told: Sequence[dict[str, Any]]) -> None:
    """Writes one, where the environment says so."""
    if not (home := os.environ.get("REFERENCES")):
        return
    from safetensors.torch import load_file, save_file

    kind = json.loads((checkpoint / "config.json").read_text())["model_type"]
    [own] = re.findall(r"\[(.+?)\]", os.environ["PYTEST_CURRENT_TEST"]) or [kind]
    path = pathlib.Path(home) / (own if own.startswith(kind) else f"{kind}-{own}")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(checkpoint, path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        halves = {name: a.bfloat16() for name, a in tensors.items()}
        exact = {name: a if (a.float() == tensors[name]).all() else tensors[name] for name, a in halves.items()}
        save_file({name: a.contiguous() for name, a in exact.items()}, file, {"format": "pt"})
    images = {f"{i}.{j}": image for i, (_, own, *_) in enumerate(asked) for j, image in enumerate(own)}
    np.savez_compressed(path / "images.npz", **images)
    films = {f"{i}.{j}": film for i, one in enumerate(asked) for j, film in enumerate(one[2] if one[2:] else ())}
    if films:
        np.savez_compressed(path / "films.npz", **{key: frames for key, (frames, _) in films.items()})
    rates = {"rates": {key: rate for key, (_, rate) in films.items()}} if films else {}
    rounded = [one | {"prompt": [round(n, 6) for n in one["prompt"]]} for one in told]
    prompts = [list(map(int, ids)) for ids, *_ in asked]
    (path / "said.json").write_text(json.dumps({"prompts": prompts, "said": rounded} | rates))
