"""Small checkpoints that see, as transformers writes them, and what transformers makes of images by them."""

import __future__

import ast
import functools
import json
import logging
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.hf_files import Folder
from shardlm.mesh import MeshSpec
from shardlm.vision.encoder import Encoder
from shardlm.vision.picture import Picture
from shardlm.vision.registry import sight_of

CLOSE = 2e-5  # of the largest number, float32; measured at most 3.9e-6


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]: smooth in places, so that ways of resizing differ by little."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3))
    smooth = np.kron(coarse, np.ones((8, 8, 1)))[:height, :width]
    return np.clip(smooth + rng.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)


def written(model, folder: pathlib.Path, tokens: dict[str, int], **files: dict) -> pathlib.Path:
    """`model` of transformers (None: what is there) with ids of special tokens and further files of JSON, by name
    without its end."""
    if model is not None:
        model.save_pretrained(folder)
    added = [{"content": content, "id": id} for content, id in tokens.items()]
    for name, content in {"tokenizer": {"added_tokens": added}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def lively(model):
    """`model` of transformers with weights that make a difference: as they begin, layers add a thousandth, and norms
    and factors are one."""
    import torch

    for name, a in (*model.named_parameters(), *model.named_buffers()):
        if not a.is_floating_point() or name.endswith(("inv_freq", "freqs_ci", "embed_scale")):
            continue
        if name.endswith(("_min", "_max")):
            a.data.fill_(-1.5 if name.endswith("min") else 1.2)
        elif "time_position_embeddings" in name:
            continue
        elif a.ndim > 1 and not any(part in name for part in ("position", "embedding_table", "cls_token")):
            torch.nn.init.normal_(a.data, 0.0, a[0].numel() ** -0.5)
        elif "norm" in name or "ln_pre" in name or "lambda" in name or "std_" in name:
            torch.nn.init.normal_(a.data, 0.0 if name.endswith("bias") else 1.0, 0.3)
        else:
            torch.nn.init.normal_(a.data, 0.0, 0.3)
    return model


def functions_of(file: str, *names: str, **modules) -> list:
    """Functions, and methods without what they are given as self, of a file of transformers' models whose module needs
    torchvision; `modules` are others that they use."""
    import transformers

    source = (pathlib.Path(transformers.__file__).parent / "models" / file).read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list = []
    told = {"np": np, "math": math, "lru_cache": functools.lru_cache, "torch": sys.modules.get("torch")}
    told |= {"logger": logging.getLogger("transformers"), **modules}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(found, []), file, "exec", flags, True), told)
    return [told[name] for name in names]


class Eyes:
    """A folder's encoder, loaded, on one device or more."""

    def __init__(self, folder: pathlib.Path, mesh: MeshSpec | None = None):
        opened = Folder.open(folder)
        self.sight = sight_of(folder, opened.config)
        mesh = mesh or MeshSpec()
        self.mesh = mesh.build(jax.devices()[: mesh.size(*mesh.sizes())])
        self.encoder = Encoder.make(self.sight.encoder, jnp.float32, self.mesh)
        self.params = self.encoder.load(opened)
        self._run = jax.jit(self.encoder)

    def vectors(self, picture: Picture, patches: int = 0) -> np.ndarray:
        """Of a picture, by a program of so many patches (0: of the first that it fits)."""
        patches = patches or next(size for size in self.sight.sizes if size >= picture.patches)
        shapes = self.encoder.inputs(patches)
        assert {name: (a.dtype, a.shape[1:]) for name, a in picture.inputs.items()} == {
            name: (s.dtype, s.shape[1:]) for name, s in shapes.items()
        }
        pad = patches - picture.patches
        inputs = {name: np.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) for name, a in picture.inputs.items()}
        with jax.set_mesh(self.mesh):
            out = self._run(self.params, inputs, jnp.int32(picture.patches))
        assert out.shape[0] == patches // self.sight.merged
        return np.asarray(out)[: picture.vectors]


def close(found: np.ndarray, expected: np.ndarray, least: float = CLOSE) -> None:
    """Within CLOSE of the largest."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= least * np.abs(expected).max()
