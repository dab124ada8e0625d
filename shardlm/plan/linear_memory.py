"""Bytes that a step with linear attention needs, beside what rests and what layers keep, while layers are done
backwards. How many arrays there are is read from the buffer assignments of the programs in
tests/plan/compiled_memory.json."""

from shardlm.plan.activations import Kinds, kept
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch


def at_work(sketch: Sketch, parts: Parts) -> Kinds:
    """{} where the model has none.

    All layers of a pattern are in one loop, and XLA does the products that make weights' gradients late, so that all
    of their MLPs' arrays and inputs are there; not inside stages, nor where nothing is made again. Of a pattern's
    layers all weights that are gathered are there, and some of the next repeat. More than layers' inputs is copied out
    of what all keep, but of two repeats, which XLA's unrolled loop leaves in no loop.
    """
    segments = zip(parts.layers, sketch.shape.segments, strict=True)
    found = [(one, pattern, segment.repeats) for pattern, segment in segments for one in pattern if one.rule]
    if not found:
        return {}
    one, pattern, repeats = max(found, key=lambda each: each[0].rule)
    again, copies = sketch.config.remat != "none", sketch.config.remat in ("none", "dots") and repeats > 2
    rule = one.rule - (0 if again else one.rule_kept)
    taken = sum(sum(kept(layer, sketch).values()) for layer in pattern) if copies else 0
    late = pattern if again and sketch.mesh.pipeline == 1 else (one,)
    return {
        "linear attention": rule,
        "mlp": (8 if again else 4) * sum(layer.hidden for layer in late),
        "streams": 8 * sum(layer.stream for layer in late) / sketch.mesh.tensor,
        "attention": taken,
        "weights in use": parts.largest * (1.5 * len(pattern) if parts.gathers else 1),
    }
