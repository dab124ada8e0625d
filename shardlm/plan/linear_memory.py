"""Bytes that a step needs beside what rests and what layers keep, while a layer of linear attention is done backwards:
its float32 arrays are most of it. How many there are is read from the buffer assignments of the programs in
tests/plan/compiled_memory.json."""

from shardlm.plan.activations import Kinds, kept
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch


def at_work(sketch: Sketch, parts: Parts) -> Kinds:
    """Of the fullest such layer; {} where the model has none.

    Weights that are gathered leave XLA's scheduler time to begin the next layer of a pattern meanwhile: it is there in
    part, and weights of all layers of two repeats are. Tokens exchanged over context are there in both orders. Of
    several rows whose sequence tensor splits, all that chunks are cut from and put together of is copied. Of a pattern
    more than layers' inputs is copied out of what all keep; without recomputation the rule's is not made again.
    """
    found = [(one, pattern) for pattern in parts.layers for one in pattern if one.rule]
    if not found:
        return {}
    one, pattern = max(found, key=lambda pair: pair[0].rule)
    remat = sketch.config.remat
    rule = one.rule - (one.rule_kept if remat == "none" else 0)
    taken = sum(sum(kept(layer, sketch).values()) for layer in pattern) if remat in ("none", "dots") else 0
    mesh, narrow = sketch.mesh, one.queries + one.keys + one.values + one.output + one.gate
    exchanged = 10 * narrow if mesh.context > 1 else 0
    copied = 32 * one.rule_wide if mesh.tensor > 1 and sketch.rows > 1 else 0
    return {
        "linear attention": (1.4 if parts.gathers else 1) * rule + 4 * narrow + exchanged + copied,
        "mlp": 8 * one.hidden,
        "streams": 14 * one.whole,
        "attention": taken,
        "weights in use": parts.largest * (2 * len(pattern) if parts.gathers else 1),
    }
