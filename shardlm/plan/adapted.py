"""Bytes beside what is there throughout, at the full moments of a step with adapters of dense layers over several
devices (temporaries.py). XLA's scheduler, which there hides behind kernels what is sent (xla_options.py), begins early
with what frozen weights are made into, as that waits for no gradient. How many arrays there are at each moment is read
from the buffer assignments of such programs in tests/plan/compiled_memory.json."""

from collections.abc import Iterator

from shardlm.plan.activations import WIDE, Kinds, Layer, itemsize
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch

# Of a layer's weights, what is read as its MLP begins: of Llama 3 8B two of the MLP's three and attention's two large
# ones, each beside the adapter's that XLA multiplies with it.
READ = 0.7
# Of those of two layers, what is made and not yet used: of Llama 3 8B five or six of the MLP's six, and attention's.
MADE = 1.7
# Tokens of a device from which on, where gradients are summed over data, adapters' are made before the layer in front
# is made again: with 16,384 they are, with 8,192 not (Llama 3 8B); scattered over fsdp, with neither. Between is not
# known, and this is more.
ALL, WAITING = 8_192, 16_384


def applies(sketch: Sketch, parts: Parts) -> bool:
    return bool(sketch.adapters) and sketch.num_gpus > 1 and sketch.mesh.pipeline == 1 and not parts.experts


def at_head(sketch: Sketch, parts: Parts, logits: float) -> Kinds:
    """The head in the compute type, without a gradient, and of a chunk of `logits` numbers both the products and their
    gradient. What layers are made again from waits for that (layers/stack.py) with remat=full; otherwise frozen weights
    of two layers and what those layers kept lie ready, but of weights that are only gathered those of half a layer.
    Where tensor scatters the sequence none of it does, nor zeros for the layers' gradients."""
    size, mesh, one = itemsize(sketch), sketch.mesh, parts.layers[-1][-1]
    ahead = sketch.config.remat != "full"
    masks = mesh.context == 1 or (ahead and not _ring(sketch))
    found = {
        "head": size * parts.gathers * sketch.shape.vocab_size / mesh.tensor * sketch.shape.embed_dim,
        "logits": logits * (size + WIDE),
        "attention": masks * (1 if mesh.tensor > 1 else 2) * one.mask,
        "streams": one.stream + 2 * one.whole,
    }
    if mesh.tensor > 1:
        return found | {"gradients": -parts.resting}
    if not ahead:
        return found
    found["weights in use"] = parts.largest * (2 * READ if _made(sketch, parts) else 0.5)
    if not parts.gathers:
        found |= {"mlp": 2 * one.hidden, "streams": found["streams"] + 6 * one.stream}
    return found


def between_layers(sketch: Sketch, parts: Parts) -> Kinds:
    """The fullest of the moments as the MLP of a layer is made again, beside what is done of the layer behind it."""
    one = max((one for pattern in parts.layers for one in pattern), key=lambda layer: layer.hidden)
    again = {"none": 0, "dots": 1}.get(sketch.config.remat, 3)
    apart = sketch.mesh.context == sketch.mesh.tensor == 1
    moments = _apart(sketch, parts, one, again) if apart else _exchanging(sketch, parts, one, again)
    return max(moments, key=lambda kinds: sum(kinds.values()))


def _apart(sketch: Sketch, parts: Parts, one: Layer, again: int) -> Iterator[Kinds]:
    """Of layers that exchange no tokens: the layer behind has its MLP's gradients still, which its adapters' wait for;
    or both layers' weights, made for the products."""
    if parts.gathers or sketch.tokens < WAITING:
        yield {
            "weights in use": parts.largest * READ,
            "mlp": (6 + again) * one.hidden,
            "attention": 2 * (one.queries + one.keys + one.values + one.output + one.mask),
            "streams": 9 * one.stream,
        }
    yield {
        "weights in use": parts.largest * (MADE if _made(sketch, parts) else READ),
        "mlp": (3 + again) * one.hidden,
        "attention": one.queries + one.output + 2 * (one.keys + one.values + one.mask),
        "streams": 6 * one.stream,
    }


def _exchanging(sketch: Sketch, parts: Parts, one: Layer, again: int) -> Iterator[Kinds]:
    """Of layers that exchange tokens over context or tensor, which adapters' gradients do not wait for: both layers'
    weights are made, or one's; over context the mask of the layer behind is there with that, as its attention waits for
    the exchange."""
    mask, made = 0 if _ring(sketch) else one.mask, _made(sketch, parts)
    always = {
        "mlp": (3 + again) * one.hidden,
        "streams": 9 * one.stream + (4 * one.whole if sketch.mesh.tensor > 1 else 0),
    }
    yield always | {"weights in use": parts.largest * (2 if made else READ), "attention": mask}
    if sketch.mesh.context > 1:
        yield always | {"weights in use": parts.largest * (1 if made else READ), "attention": 2 * mask}


def _ring(sketch: Sketch) -> bool:
    return sketch.mesh.context > 1 and sketch.execution.context_attention == "ring"


def _made(sketch: Sketch, parts: Parts) -> bool:
    """Whether layers use what is made of their weights: joined to adapters', of a device's own, or of few bits."""
    return not parts.gathers or sketch.config.lora.base != "dtype"
