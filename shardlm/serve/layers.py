"""A model for serving whose layers are arrays of their own. A scan over stacked weights copies each layer's weights out
of the stack before it multiplies, and decoding, that does little else than read weights, pays with twice the time: on a
CPU 39 tokens a second became 63 (768 x 12 layers, one row, measured), and for an H100 each weight was sliced and copied
once more (Llama 3 8B, 64 rows, compiled)."""

import dataclasses
from typing import Any

import jax

from shardlm.layers.stack import Segment
from shardlm.models.transformer import TransformerConfig
from shardlm.ops.kv_format import KvFormat
from shardlm.state import ModelDef

Tree = Any


def apart(config: TransformerConfig) -> TransformerConfig:
    """The same decoder, each layer a segment of its own."""
    return dataclasses.replace(config, segments=tuple(Segment((block,), 1) for block in config.blocks()))


def taken_apart(model: ModelDef, params: Tree, kv_cache: KvFormat = "auto") -> tuple[ModelDef, Tree]:
    """(the model with its layers apart, such a cache, and products as a single CPU likes them, its parameters); call
    under the mesh. Each stacked parameter is let go of once its layers are copied, so that the device holds one
    parameter twice at most."""
    mesh = jax.sharding.get_mesh()
    one_row = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    execution = dataclasses.replace(model.execution, unroll=1, kv_cache=kv_cache, one_row=one_row)
    segments = split(params["segments"], release=True)
    return ModelDef.make(apart(model.config), execution), {**params, "segments": segments}


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
