"""An encoder's weights out of a checkpoint's folder, whole: parameters by path, tensors by models/naming.py's names."""

import dataclasses
import re
from collections.abc import Callable, Mapping

import jax
import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder
from shardlm.hf_quantised import dequantised
from shardlm.models.naming import Names, Tensor, read, renamed, shape_of

Path = tuple


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Which of a checkpoint's tensors are an encoder's.

    prefixes  that their names begin with
    unused    a pattern of those that no layer uses; "": none
    renames   (pattern, what comes in its place): from names in files to those of the map
    """

    prefixes: tuple[str, ...]
    unused: str = ""
    renames: tuple[tuple[str, str], ...] = ((r"^model\.", ""),)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter, and the tensors that it is read from, one for each layer."""

    path: Path
    tensor: Tensor
    shape: tuple[int, ...]
    layers: int

    @property
    def names(self) -> list[str]:
        return [self.tensor.name.format(layer=layer) for layer in range(self.layers or 1)]

    @property
    def one(self) -> tuple[int, ...]:
        """Our shape of one tensor of theirs."""
        return self.shape[1:] if self.layers else self.shape


def load(
    shapes: Mapping[Path, jax.ShapeDtypeStruct],
    whole: Mapping[Path, jax.ShapeDtypeStruct],
    layers: Mapping[Path, int],
    names: Names,
    tensors: Tensors,
    folder: Folder,
    progress: Callable[[int, int], None],
) -> dict[Path, jax.Array]:
    """The parameters of `shapes`, of an encoder that has those of `whole`; `layers` says of which the first dimension
    counts layers. Tensors in few bits are read as the numbers that they stand for. Raises as Encoder.load."""
    stored = {renamed(name, tensors.renames): one for name, one in dequantised(folder.tensors, folder.config).items()}
    stored = {name: one for name, one in stored.items() if name.startswith(tensors.prefixes)}
    leaves = _leaves(shapes, layers, names)
    _check(needed(whole, layers, names), stored, tensors)
    done, total, made = 0, sum(s.size * s.dtype.itemsize for s in shapes.values()), {}
    for leaf in leaves:
        target = shapes[leaf.path]
        made[leaf.path] = _placed(_read(leaf, stored, target.dtype), target)
        done += made[leaf.path].nbytes
        progress(done, total)
    return made


def needed(
    shapes: Mapping[Path, jax.ShapeDtypeStruct], layers: Mapping[Path, int], names: Names
) -> dict[str, tuple[int, ...]]:
    """The tensors that all parameters are read from, by the names of the map, and their shapes."""
    together: dict[str, list[_Leaf]] = {}
    for leaf in _leaves(shapes, layers, names):
        together.setdefault(leaf.tensor.name, []).append(leaf)
    found = {}
    for group in together.values():
        found |= dict.fromkeys(group[0].names, shape_of([(leaf.tensor, leaf.one) for leaf in group]))
    return found


def _leaves(shapes: Mapping[Path, jax.ShapeDtypeStruct], layers: Mapping[Path, int], names: Names) -> list[_Leaf]:
    return [_Leaf(path, names[".".join(map(str, path))], s.shape, layers.get(path, 0)) for path, s in shapes.items()]


def _read(leaf: _Leaf, stored: Mapping, dtype: np.dtype) -> np.ndarray:
    every = (slice(None),) * len(leaf.one)
    out = np.empty((leaf.layers or 1, *leaf.one), dtype)
    for layer, name in enumerate(leaf.names):
        out[layer] = read(leaf.tensor, leaf.one, every, stored[name].read)
    return out if leaf.layers else out[0]


def _placed(a: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: a[index], dtype=target.dtype)


def _check(needed: Mapping[str, tuple[int, ...]], stored: Mapping, tensors: Tensors) -> None:
    """Refuses what does not fit, with all names."""
    unused = re.compile(tensors.unused or r"(?!)")
    wrong = [
        f"{name} is {list(stored[name].shape)} and the encoder needs {list(shape)}"
        for name, shape in needed.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    missing = [f"{name} is missing" for name in needed if name not in stored]
    extra = [f"{name} is not known" for name in stored if name not in needed and not unused.search(name)]
    if problems := [*wrong, *missing, *extra]:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ShardlmError(
            f"the checkpoint's encoder of images does not fit its config.json: {'; '.join(problems[:8])}{more}. "
            'Download it again; limit_mm_per_prompt={"image": 0} serves its text without'
        )
