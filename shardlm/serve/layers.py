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
    """(the model with its layers apart and such a cache, its parameters); call under the mesh. Each stacked parameter
    is let go of once its layers are copied, so that the device holds one parameter twice at most."""
    segments, layers = dict(params["segments"]), {}
    first = 0
    for number, segment in enumerate(model.config.segments):
        period = len(segment.pattern)
        for offset in range(period):
            flat, tree = jax.tree.flatten(segments[number]["blocks"][offset])
            split = []
            for i, stacked in enumerate(flat):
                if segment.repeats == 1:
                    split.append([stacked])
                    continue
                split.append([stacked[repeat : repeat + 1] for repeat in range(segment.repeats)])
                flat[i] = None
                stacked.delete()
            for repeat in range(segment.repeats):
                block = jax.tree.unflatten(tree, [parts[repeat] for parts in split])
                layers[first + repeat * period + offset] = {"blocks": {0: block}}
        first += segment.num_layers
    execution = dataclasses.replace(model.execution, unroll=1, kv_cache=kv_cache)
    return ModelDef.make(apart(model.config), execution), {**params, "segments": dict(sorted(layers.items()))}
