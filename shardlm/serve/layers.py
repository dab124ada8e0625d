"""A model for serving whose layers are arrays of their own. A scan over stacked weights copies each layer's weights out
of the stack before it multiplies, and decoding, that does little else than read weights, pays with twice the time: on a
CPU 39 tokens a second became 63 (768 x 12 layers, one row, measured), and for an H100 each weight was sliced and copied
once more (Llama 3 8B, 64 rows, compiled)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.layers.param import MADE_FIRST
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.kv_format import KvFormat
from shardlm.state import ModelDef

Tree = Any


def apart(config: TransformerConfig) -> TransformerConfig:
    """The same decoder, each layer a segment of its own."""
    return config.apart()


def taken_apart(model: ModelDef, params: Tree, kv_cache: KvFormat = "auto") -> tuple[ModelDef, Tree]:
    """(the model with its layers apart, such a cache, and products as a single CPU likes them, its parameters); call
    under the mesh. Each stacked parameter is let go of once its layers are copied, so that the device holds one
    parameter twice at most."""
    mesh = jax.sharding.get_mesh()
    cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    execution = dataclasses.replace(model.execution, unroll=1, kv_cache=kv_cache, made_first=cpu)
    segments = split(params["segments"], release=True)
    model = ModelDef.make(apart(model.config), execution)
    return model, lying(model, {**params, "segments": segments}, release=True)


def lying(model: ModelDef, params: Tree, *, release: bool = False) -> Tree:
    """Parameters with layers apart, whose weights lie as the model has them (Params.weight); call under the mesh. Those
    that do already are left as they are. With `release` a weight is let go of once it is turned."""
    flat = flatten_dict(params)
    for path, (plain, names, into) in made_first(model).items():
        if plain not in flat:
            continue
        weight = flat.pop(plain)
        flat[path] = turned(weight, names, into)
        if release:
            weight.delete()
    return unflatten_dict(flat)


def plain_shapes(model: ModelDef, params: Tree) -> dict[tuple, jax.ShapeDtypeStruct]:
    """{path: shape and dtype} of parameters with layers apart, by the names and in the order that training has."""
    found = {path: jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in flatten_dict(params).items()}
    for path, (plain, names, into) in made_first(model).items():
        if path in found:
            held = found.pop(path)
            *stack, made, summed = *held.shape[:-names], held.shape[-names:-into], held.shape[-into:]
            found[plain] = jax.ShapeDtypeStruct((*stack, *summed, *made), held.dtype)
    return found


def turned(weight: jax.Array, names: int, into: int) -> jax.Array:
    """A weight as one that lies made first; its numbers as `made_first` has them."""
    return jnp.moveaxis(weight, range(-names, into - names), range(-into, 0))


def made_first(model: ModelDef) -> dict[tuple, tuple[tuple, int, int]]:
    """{path of each weight that lies made first: (its path in training, its dimensions in a layer, how many of them are
    summed over)}."""
    params = nnx.to_flat_state(nnx.state(model.outline(), nnx.Param))
    return {
        path: ((*path[:-1], path[-1].removesuffix(MADE_FIRST)), len(p.get_metadata("names")), p.get_metadata("into"))
        for path, p in params
        if str(path[-1]).endswith(MADE_FIRST)
    }


def split(segments: Tree, *, release: bool = False) -> Tree:
    """Parameters of stacked segments, by layer: {layer: {"blocks": {0: its parameters}}}; call under the mesh. With
    `release` a stacked parameter is let go of once its layers are copied."""
    layers: dict[int, Tree] = {}
    first = 0
    for number in sorted(segments):
        blocks = segments[number]["blocks"]
        repeats = 0
        for offset in sorted(blocks):
            flat, tree = jax.tree.flatten(blocks[offset])
            repeats = flat[0].shape[0]
            parts = []
            for i, stacked in enumerate(flat):
                if repeats == 1:
                    parts.append([stacked])
                    continue
                parts.append([stacked[repeat : repeat + 1] for repeat in range(repeats)])
                if release:
                    flat[i] = None
                    stacked.delete()
            for repeat in range(repeats):
                block = jax.tree.unflatten(tree, [part[repeat] for part in parts])
                layers[first + repeat * len(blocks) + offset] = {"blocks": {0: block}}
        first += repeats * len(blocks)
    return dict(sorted(layers.items()))
