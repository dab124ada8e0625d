"""One image through an encoder's program beside the same in float32, for kernels.py: random weights and pixels, and all
else as images are prepared, of a square that has as many patches as the program."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from shardlm.bench.kernel import Arrays, Kernel
from shardlm.bench.kernel_cases import Looked
from shardlm.bench.published_encoders import sight_named
from shardlm.layers.param import Params
from shardlm.mesh import MeshSpec
from shardlm.vision.encoder import Encoder
from shardlm.vision.picture import Picture
from shardlm.vision.sight import Sight

# Roundings of up to 32 layers, one after the other. With 1,024 patches on a CPU (measured) off by 0.011 (Qwen3-VL),
# 0.015 (Qwen2.5-VL) and 0.019 (Mistral Small 3.1, with 4,096 too).
ALLOWED = 0.03


def looked(s: Looked, on_gpu: bool) -> Kernel:
    """What is measured of an encoder."""
    sight, attention = sight_named(s.encoder), "cudnn" if on_gpu else "xla"
    picture, encoder = square(sight, s.patches), Encoder.make(sight.encoder, jnp.bfloat16, _one_device())

    def inputs(key: jax.Array) -> Arrays:
        of_weights, of_pixels = jax.random.split(key)
        module = sight.encoder.module(Params(nnx.Rngs(of_weights), encoder.execution.rules))
        weights = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.to_pure_dict(nnx.state(module)))
        rest = {name: jnp.asarray(a) for name, a in picture.inputs.items() if name != "pixels"}
        pixels = _pixels(of_pixels, picture.inputs["pixels"])
        return weights, rest | {"pixels": pixels}, jnp.int32(picture.patches)

    def by(dtype: jnp.dtype, attention: str):
        execution = dataclasses.replace(encoder.execution, dtype=jnp.dtype(dtype), attention=attention)
        return dataclasses.replace(encoder, execution=execution)

    vectors = picture.vectors * sight.encoder.width * (1 + sight.deep) * 2
    return Kernel(
        what=attention + (", windows by XLA" if "windows" in picture.inputs and on_gpu else ""),
        inputs=inputs,
        run=by(jnp.bfloat16, attention),
        reference=by(jnp.float32, "xla"),
        flops=products(encoder, picture, sight.merged) + attended(sight, picture),
        nbytes=encoder.bytes + sum(a.nbytes for a in picture.inputs.values()) + vectors,
        peak="bf16",
        allowed=ALLOWED,
    )


def square(sight: Sight, patches: int) -> Picture:
    """Of an image whose patches are as many as the program's."""
    pixels, _ = sight.encoder.inputs["pixels"]
    side = math.isqrt(patches) * pixels[-2]
    found = sight.prepare(np.zeros((side, side, 3), np.uint8))
    if found.patches != patches or patches > sight.sizes[-1]:
        raise ValueError(f"a square of {side} pixels makes {found.patches} patches, not {patches}")
    return found


def products(encoder: Encoder, picture: Picture, merged: int) -> float:
    """FLOPs: two for each weight of the patches and of the tower by patch, and of what comes after by vector; learned
    positions are read."""
    flat = flatten_dict(encoder.shapes)
    of = {path: math.prod(shape.shape) for path, shape in flat.items() if "positions" not in path}
    by_patch = sum(size for path, size in of.items() if {"patches", "tower"} & set(path))
    return 2.0 * (by_patch * picture.patches + (sum(of.values()) - by_patch) * picture.patches // merged)


def attended(sight: Sight, picture: Picture) -> float:
    """FLOPs of scores and sums: of all pairs, or in layers with windows of those inside of one."""
    tower = sight.encoder.tower
    pairs, everywhere = picture.patches**2, tower.layers
    of_windows = 0
    if "windows" in picture.inputs:
        of_windows, everywhere = int(np.sum(np.bincount(picture.inputs["windows"]) ** 2)), len(sight.encoder.everywhere)
    every = everywhere * pairs + (tower.layers - everywhere) * of_windows
    return 4.0 * tower.heads * tower.each * every


def _pixels(key: jax.Array, like: np.ndarray) -> jax.Array:
    """Any, as bytes or as numbers of size 1."""
    if like.dtype == np.uint8:
        return jax.random.bits(key, like.shape, jnp.uint8)
    return jax.random.normal(key, like.shape, like.dtype)


def _one_device():
    """For shapes alone: where it runs is the mesh that it is called under."""
    return MeshSpec().build(jax.devices()[:1])
