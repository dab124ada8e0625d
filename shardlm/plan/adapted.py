"""Bytes beside what is there throughout, at the full moments of a step with adapters of dense layers over several
devices (temporaries.py). XLA's scheduler, which there hides behind kernels what is sent (xla_options.py), begins early
with what frozen weights are made into, as that waits for no gradient. How many arrays there are at each moment is read
from the buffer assignments of such programs in tests/plan/compiled_memory.json."""

from collections.abc import Iterator

from shardlm.plan.activations import WIDE, Kinds, Layer, exchanges, itemsize, kept
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch

# Of a layer's weights, what is read as its MLP begins: of Llama 3 8B two of the MLP's three and attention's two large
# ones, each beside the adapter's that XLA multiplies with it.
READ = 0.7
# Of those of two layers, what is made and not yet used: of Llama 3 8B five or six of the MLP's six, and attention's.
MADE = 1.7
# Of a layer's, what has been gathered as the head is at work, and the parts of the next layers' that will be. Where
# tokens are exchanged over context, nearly all has been (8B with rank 8 and 16: 0.5 to 0.6; 0.86 and 0.92).
GATHERED = {False: 0.6, True: 0.9}
# Of a layer's experts, what lies ready as rows are to be multiplied: gathered, turned for the product and for the way
# back; in 8 bits what is gathered is half as many bytes, those in 4 are unpacked first (DeepSeek V3's and Mixtral's in
# 16 bits are six arrays of three, in 8 bits four to five, in 4 four or six).
EXPERTS = {"int8": 5 / 3}
# Tokens of a device from which on, where gradients are summed over data, adapters' are made before the layer in front
# is made again: with 16,384 they are, with 8,192 not (Llama 3 8B); scattered over fsdp, with neither. Between is not
# known, and this is more.
ALL, WAITING = 8_192, 16_384


def applies(sketch: Sketch, parts: Parts) -> bool:
    return bool(sketch.adapters) and sketch.num_gpus > 1 and sketch.mesh.pipeline == 1 and not parts.experts


def at_head(sketch: Sketch, parts: Parts, logits: float) -> Kinds:
    """The head in the compute type, without a gradient, and of a chunk of `logits` numbers both the products and their
    gradient; turned for its gathers throughout, where microbatches share it. What layers are made again from waits for
    that (layers/stack.py) with remat=full; otherwise frozen weights of two layers lie ready, but of weights that are
    only gathered those of most of a layer. Over several hosts gathers go a layer ahead, so that they lie ready with any
    policy and those of another layer are under way (xla_options.py), and the last layer is in no loop: what it keeps is
    written beside all others' behind the head, and of names its attention's output is in two parts. Where tensor
    scatters the sequence none of it lies ready, nor do zeros for the layers' gradients."""
    size, mesh, one, remat = itemsize(sketch), sketch.mesh, parts.layers[-1][-1], sketch.config.remat
    numbers = sketch.shape.vocab_size / mesh.tensor * sketch.shape.embed_dim
    ways = mesh.size(*sketch.rules.rest.axes("embed"))
    turned = size * numbers / ways if parts.gathers and sketch.passes > 1 else 0
    found = {
        "head": size * parts.gathers * numbers + turned,
        "logits": logits * (size + WIDE),
        "streams": one.stream + 2 * one.whole,
    }
    masks = mesh.context == 1 or (remat != "full" and not _ring(sketch))
    found["attention"] = masks * (1 if mesh.tensor > 1 else 2) * one.mask
    if mesh.tensor > 1:
        return found | {"gradients": -parts.resting}
    several = bool(parts.gathers) and sketch.num_gpus > sketch.gpus_per_host
    if remat == "full" and not several:
        return found
    if several:
        found |= kept(one, sketch) | {"streams": found["streams"] + (one.stream if remat == "names" else 0)}
    ready = 2 * READ if _made(sketch, parts) else GATHERED[mesh.context > 1]
    found["weights in use"] = parts.largest * (ready + several)
    if not parts.gathers:
        found |= {"mlp": 2 * one.hidden, "streams": found["streams"] + 6 * one.stream}
    return found


def with_experts(sketch: Sketch, parts: Parts, found: Kinds) -> tuple[Kinds, Kinds]:
    """The full moments of a layer whose experts' frozen weights are gathered, of `found` as it is without adapters: as
    they have come and are turned for their kernels, while attention is made again; and as rows are multiplied
    backwards, which keeps none for gradients of weights. Tokens of all devices are there when weights come. While rows
    are sent all weights come, but of few bits gate and up alone are made into numbers."""
    one = max((one for pattern in parts.layers for one in pattern), key=lambda layer: layer.rows)
    base, sent, others = sketch.config.lora.base, exchanges(sketch), parts.largest - parts.experts
    again = {"attention": one.mask + one.queries + one.keys + one.values + one.output}
    come = again | {"experts": 0.0, "weights in use": others + EXPERTS.get(base, 2) * parts.experts}
    backwards = again | {"experts": 4 * one.expert_hidden + 2 * one.rows, "weights in use": parts.largest}
    if "gather" in sent:
        come["experts"] = 2 * one.expert_hidden + 3 * one.rows
    if "all_to_all" in sent:  # of five arrays of rows, four are zeros that are there throughout
        backwards["experts"] = 4 * one.expert_hidden + one.rows + 3 * one.pairs
        backwards["weights in use"] = others + parts.experts * (2 if base == "dtype" else 2 / 3)
    return found | come, found | backwards


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
    weights are made, or one's; over context XLA's scores of the layer behind are there with that, as its attention
    waits for the exchange."""
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
