"""Bytes that a step needs beside what rests and what layers keep, while a layer of linear attention is done backwards:
its float32 arrays are most of it. How many there are is read from the buffer assignments of the programs in
tests/plan/compiled_memory.json."""

from shardlm.plan.activations import Kinds, kept
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch


def at_work(sketch: Sketch, parts: Parts) -> Kinds:
    """Of the fullest such layer; {} where the model has none.

    Of a pattern's layers all weights that are gathered are there, those of the next repeat and, where layers are made
    again, gradients of the last one's. Tokens exchanged over context are there in both orders. Of several rows whose
    sequence tensor splits, all that chunks are cut from and put together of is copied. More than layers' inputs is
    copied out of what all keep, but of two repeats, which XLA's unrolled loop leaves in no loop.
    """
    segments = zip(parts.layers, sketch.shape.segments, strict=True)
    found = [(one, pattern, segment.repeats) for pattern, segment in segments for one in pattern if one.rule]
    if not found:
        return {}
    one, pattern, repeats = max(found, key=lambda each: each[0].rule)
    again, copies = sketch.config.remat != "none", sketch.config.remat in ("none", "dots") and repeats > 2
    rule = one.rule - (0 if again else one.rule_kept)
    taken = sum(sum(kept(layer, sketch).values()) for layer in pattern) if copies else 0
    mesh, narrow = sketch.mesh, one.queries + one.keys + one.values + one.output + one.gate
    exchanged = 4 * narrow if mesh.context > 1 else 0
    copied = 32 * one.rule_wide if mesh.tensor > 1 and sketch.rows > 1 else 0
    return {
        "linear attention": (1.1 if parts.gathers else 1) * rule + 4 * narrow + exchanged + copied,
        "mlp": (8 if again else 4) * one.hidden,
        "streams": 14 * one.whole,
        "attention": taken,
        "weights in use": parts.largest * ((3 if again else 2) * len(pattern) if parts.gathers else 1),
    }
