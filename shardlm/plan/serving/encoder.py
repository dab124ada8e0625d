"""What reading one image takes: the operations of an encoder's program (serve/image_encoder.py), which every device of
a replica runs whole, for kernels.py to time. Estimates, from the encoder's parameters and its layers."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

from shardlm.layers.param import Params
from shardlm.mesh import MeshSpec
from shardlm.plan.op import Op
from shardlm.rules import Rules
from shardlm.vision.encoder import Seeing

NAMES = {2: "bf16", 4: "fp32"}  # of numbers of so many bytes, as hardware.Peak has them
BESIDE = 3  # blocks of keys that a block of queries attends to where there are windows (ops/window_attention.py)
# What XLA's kernels beside products and attention read and write in a layer, in arrays of a row's numbers (compiled for
# an H100): both norms and what is added, rotated queries and keys with values, and the activation.
NORMS, HEADS, HIDDEN = 10, 6, 2
# Bytes that attention by XLA reads and writes of each score, copies of keys and values with it (compiled for an H100):
# where all attend to all (heads of 64 and 80, 4,096 and 16,384 patches: 20 to 23), and in windows of 64 patches (28).
SCORES, SCORES_IN_WINDOWS = 21, 28
SMALL_KERNELS = 8  # of a layer, which are neither products nor attention


@dataclasses.dataclass(frozen=True)
class Weight:
    """One that is multiplied by: its path, how often it is there (layers), what is summed and what is made."""

    path: tuple[str, ...]
    layers: int
    summed: int
    made: int

    @property
    def in_tower(self) -> bool:
        return "tower" in self.path


class Made(NamedTuple):
    """What an encoder is made of: weights that are multiplied by, without norms, biases and learned positions, and
    whether tiles have a class token."""

    weights: tuple[Weight, ...]
    classes: bool


@functools.lru_cache(maxsize=64)
def made_of(config: Seeing) -> Made:
    """Needs no devices."""
    rules = Rules.make("replicated", MeshSpec())
    with jax.sharding.use_abstract_mesh(MeshSpec().abstract()):
        flat = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: config.module(Params(None, rules)))))
    weights = tuple(_weight(path, param) for path, param in flat if param.get_metadata("into"))
    return Made(weights, any("of_class" in path for path, _ in flat))


def _weight(path: tuple, param: Any) -> Weight:
    stack, into = len(param.get_metadata("stack_names")), param.get_metadata("into")
    own = param.shape[stack:]
    return Weight(tuple(map(str, path)), math.prod(param.shape[:stack]), math.prod(own[:into]), math.prod(own[into:]))


@dataclasses.dataclass(frozen=True)
class Image:
    """One image in an encoder's program.

    patches  of the program, of which the image has `count`
    merged   patches that one vector is made of
    """

    config: Seeing
    patches: int
    count: int
    merged: int

    @property
    def rows(self) -> int:
        """Of its layers: patches, and a class token for each tile."""
        return self.read + self.tiles * made_of(self.config).classes

    @property
    def across(self) -> int:
        """Patches of a tile's side; 0: there are no tiles."""
        return getattr(getattr(self.config, "eyes", self.config), "across", 0)

    @property
    def tiles(self) -> int:
        """That attend by themselves."""
        return self.patches // self.across**2 if self.across else 1

    @property
    def read(self) -> int:
        """Patches that layers go over: those of whole tiles, behind which is what stands between their vectors."""
        return self.tiles * self.across**2 if self.across else self.patches

    @property
    def seen(self) -> int:
        """Rows that one of a tile attends to, or of all that there are."""
        return self.rows // self.tiles if self.tiles > 1 else self.count + made_of(self.config).classes

    @property
    def windowed(self) -> tuple[int, int]:
        """(layers that attend inside of windows, patches of the longest window)."""
        config = self.config
        if not getattr(config, "window", 0):
            return 0, 0
        return config.tower.layers - len(config.everywhere), (config.window * config.merge) ** 2


def operations(image: Image, itemsize: int, fused: bool) -> Iterator[Op]:
    """Of the program. `fused`: cuDNN attends; else XLA does, as it does in windows always."""
    for weight in made_of(image.config).weights:
        rows = image.rows if weight.in_tower else image.read
        if not weight.in_tower and not {"patches", *getattr(image.config, "by_patch", ())} & set(weight.path):
            rows //= getattr(image.config, "together", image.merged)
        yield _product(weight, rows, itemsize)
    tower = image.config.tower
    narrow, longest = image.windowed
    if tower.layers - narrow:
        attend = _attention if fused else _unfused
        yield from attend(image, image.seen, tower.layers - narrow, itemsize)
    if narrow:
        yield from _unfused(image, min(BESIDE * longest, image.patches), narrow, itemsize, longest)
    yield _moved(image, itemsize)


def _product(weight: Weight, rows: int, itemsize: int) -> Op:
    n, k = weight.made, weight.summed
    moved = itemsize * (rows * (n + k) + n * k)
    flops, dims, what = 2.0 * rows * n * k, (rows, n, k), ".".join(weight.path)
    return Op("other", what, "matmul", flops, moved, weight.layers, dims=dims, dtype=NAMES[itemsize])


def _attention(image: Image, keys: int, layers: int, itemsize: int) -> Iterator[Op]:
    """By cuDNN's kernel."""
    tower, rows = image.config.tower, image.rows
    width = tower.heads * tower.each
    moved = itemsize * 4 * rows * width
    dims = (rows / image.tiles, keys, tower.each)
    yield Op("attention", "cuDNN", "attention", 4.0 * rows * keys * width, moved, layers, dims=dims)


def _unfused(image: Image, keys: int, layers: int, itemsize: int, block: int = 0) -> Iterator[Op]:
    """Two batches of products, and scores in memory between. `block`: queries of one product; 0: all of a tile."""
    tower, rows = image.config.tower, image.rows
    of_score, block = SCORES_IN_WINDOWS if block else SCORES, block or rows // image.tiles
    for n, k in ((keys, tower.each), (tower.each, keys)):
        flops = 2.0 * rows * keys * tower.heads * tower.each
        moved = itemsize * tower.heads * (rows * (n + k) + rows // block * n * k)
        dims = (block, n, k)
        yield Op("attention", "by XLA", "matmul", flops, moved, layers, dims=dims, dtype=NAMES[itemsize])
    yield Op("attention", "scores", "memory", 0, of_score * rows * keys * tower.heads, layers)


def _moved(image: Image, itemsize: int) -> Op:
    """By kernels of a layer that are neither products nor attention."""
    tower = image.config.tower
    numbers = NORMS * tower.width + HEADS * tower.heads * tower.each + HIDDEN * tower.mlp_dim
    nbytes = itemsize * image.rows * numbers / SMALL_KERNELS
    return Op("norm", "norms, rotation, activation", "memory", 0, nbytes, SMALL_KERNELS * tower.layers)
