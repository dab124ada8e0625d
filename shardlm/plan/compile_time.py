"""How long the compiler takes for a step's program, foreseen before anything is traced: it makes code for every layer
that no loop repeats."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.plan.sketch import Sketch

# Seconds of a core (AMD EPYC, busy, XLA of jax 0.10.2, for an H100), tracing and lowering included: of a program
# without its layers, of a layer, of one with linear attention (but short convolutions), of experts at all and of a
# layer with them. Measured of programs whose loops have one layer (8.1), three, two of them short convolutions (13.7),
# three, two of them of linear attention (36.0), one with experts (23.7), one and four with experts (59.2).
# More layers take more each: LFM2 8B-A1B, one and seven with experts, is foreseen with 92 and takes more than 160.
PROGRAM, LAYER, LINEAR, EXPERTS, WITH_EXPERTS = 5.3, 2.8, 13.9, 7.5, 10.9
PATIENCE = 60.0  # seconds of a core that a program may be foreseen to take where nobody said how many to compile


def layers_traced(sketch: Sketch) -> list[BlockConfig]:
    """Those that a program has code for: each of a pattern once, and all of them without a loop
    (RunConfig.unroll=0)."""
    shape, found = sketch.shape, []
    for segment in shape.segments:
        found += segment.pattern * (segment.repeats if sketch.config.unroll == 0 else 1)
    return found + ([shape.mtp.block] * shape.mtp.depth if shape.mtp else [])


def compile_seconds(sketch: Sketch) -> float:
    """Of a core, on a machine like that which the constants were measured on."""
    layers = layers_traced(sketch)
    experts = any(isinstance(block.mlp, MoeConfig) for block in layers)
    return PROGRAM + EXPERTS * experts + sum(map(_of_layer, layers))


def _of_layer(block: BlockConfig) -> float:
    linear = any(isinstance(own, DeltaNetConfig) and not isinstance(own, ShortConvConfig) for own in block.mixers)
    return max(LINEAR * linear, WITH_EXPERTS * isinstance(block.mlp, MoeConfig), LAYER)


def too_long(sketch: Sketch, patience: float) -> str:
    """Why a program is not compiled unasked; "" where it is."""
    seconds = compile_seconds(sketch)
    if seconds <= patience:
        return ""
    return (
        f"a program of {len(layers_traced(sketch))} layers that no loop repeats is foreseen to take {seconds:.0f} s of "
        f"a core to compile, more than the {patience:.0f} that are taken unasked; --verify=1 compiles the best anyway"
    )
