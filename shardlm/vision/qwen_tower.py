"""The encoder of Qwen's models: patches of frames, a tower, and mergers, each of squares of patches into one vector."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal
from shardlm.ops.swiglu import activate
from shardlm.vision.attending import Windows
from shardlm.vision.images import Pixels
from shardlm.vision.tower import Linear, Tower


class QwenEncoder(nnx.Module):
    """`config` is a qwen.QwenConfig. Weights "patches" (frames, size, size, colours, D) and, with learned positions,
    "patches_bias" (D,) and "positions" (side * side, D); modules tower, merger and, with DeepStack, "deep", stacked."""

    def __init__(self, config, params: Params):
        D, patch, merged = config.tower.width, config.patch, config.merge**2
        self.config = config
        shape, names = (config.frames, patch, patch, 3, D), (None, None, None, None, "norm")
        self.patches = params(shape, names, normal((config.frames * 3 * patch**2) ** -0.5), into=4)
        if config.side:
            self.patches_bias = params((D,), ("norm",), constant(0.0))
            self.positions = params((config.side**2, D), (None, "norm"), normal(0.02))
        self.tower = Tower(config.tower, params)
        self.merger = Merger(config.tower.norm, D, merged, config.width, False, params)
        if config.deep:
            stacked = dataclasses.replace(params, stack=(len(config.deep),))
            self.deep = Merger(config.tower.norm, D, merged, config.width, True, stacked)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        """Inputs as qwen_images.QwenImages makes them; returns [P // merged, (1 + deep) * width]."""
        config = self.config
        x = self._embedded(inputs, execution)
        sines = half_by_half(inputs["rows"], inputs["columns"], config.frequencies)
        windows = Windows(inputs["windows"], (config.window * config.merge) ** 2) if config.window else None
        x, kept = self.tower(x, count, execution, sines, windows, config.everywhere, config.deep)
        vectors = self.merger(x, execution)
        if config.deep:
            graph, stacked = nnx.split(self.deep)
            deep = jax.lax.map(lambda one: nnx.merge(graph, one[0])(one[1], execution), (stacked, kept))
            vectors = jnp.concatenate([vectors, *deep], axis=-1)
        return vectors[inputs["source"][:: config.merge**2]] if config.window else vectors

    def _embedded(self, inputs: Mapping[str, jax.Array], execution: Execution) -> jax.Array:
        """[P, D]."""
        x = of_bytes(inputs["pixels"], self.config.pixels, in_use(self.patches, execution), execution)
        if not self.config.side:
            return x
        near = in_use(self.positions, execution).astype(jnp.float32)[inputs["near"]]
        places = jnp.einsum("pnd,pn->pd", near, inputs["shares"], precision=jax.lax.Precision.HIGHEST)
        return x + in_use(self.patches_bias, execution) + places.astype(x.dtype)


def of_bytes(pixels: jax.Array, told: Pixels, kernel: jax.Array, execution: Execution) -> jax.Array:
    """uint8 [P, frames, size, size, colours], made numbers as `told`, by a kernel (frames, size, size, colours, D):
    [P, D]. Of [P, size, size, colours] every frame is the image."""
    repeats = len(kernel) if pixels.ndim == 4 else 1
    pixels = pixels.astype(jnp.float32) * told.factor
    pixels = (pixels - jnp.asarray(told.mean, jnp.float32)) / jnp.asarray(told.std, jnp.float32)
    frames = jnp.concatenate([pixels.reshape(len(pixels), -1).astype(execution.dtype)] * repeats, axis=-1)
    # Made before the product: XLA fails to compile a kernel that multiplies bytes as it makes them numbers (GPUs).
    frames = jax.lax.optimization_barrier(frames)
    return jnp.einsum("pk,kd->pd", frames, kernel.reshape(frames.shape[-1], -1))


def frequencies_of(theta: float, each: int) -> np.ndarray:
    """Radians a row, and a column, of each rotated pair of its, where heads have `each` dimensions: float32 [H / 4], as
    `half_by_half` takes them."""
    dim = each // 2
    return (theta ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)


def half_by_half(rows: jax.Array, columns: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(sines, cosines) float32 [P, 1, H / 2]: the first half of the pairs turns by row, the second by column;
    frequencies [H / 4], radians a row and a column."""
    angles = [at[:, None].astype(jnp.float32) * frequencies for at in (rows, columns)]
    angle = jnp.concatenate(angles, axis=-1)[:, None]
    return jnp.sin(angle), jnp.cos(angle)


class Merger(nnx.Module):
    """x [P, D] -> [P // merged, width]: the norm of each patch, or `together` of those of a square, and two products
    with a GELU between."""

    def __init__(self, norm: NormConfig, width: int, merged: int, out: int, together: bool, params: Params):
        self.merged, self.together = merged, together
        self.norm = Norm(norm, width * merged if together else width, params)
        self.first = Linear(width * merged, width * merged, True, params)
        self.second = Linear(width * merged, out, True, params)

    def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
        square = (x.shape[0] // self.merged, -1)
        x = self.norm(x.reshape(square), execution) if self.together else self.norm(x, execution).reshape(square)
        return self.second(activate(self.first(x, execution), "gelu"), execution)
