"""How long the compiler takes for a step's program, foreseen before anything is traced: it makes code for every layer
that no loop repeats, and of loops twice, as XLA unrolls them so (xla_options.py)."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.plan.sketch import Sketch
from shardlm.plan.sparse_attention import chooser_of

# Seconds of a core (AMD EPYC, XLA of jax 0.10.2, for an H100), tracing and lowering included: of a program without its
# layers, of code for a layer, of one with linear attention (but short convolutions), of experts at all and of a layer
# with them, and of what chooses the tokens that a layer attends to. Measured of programs whose loops have one layer
# (8.1), three, two of them short convolutions (13.7), three, two of them of linear attention (36.0), one with experts
# (23.7), one and four with experts (59.2); a choice, of MiniMax M3's layers (CPU seconds of a machine so busy that the
# first of these takes 14.3: tests/plan/test_compile_time.py has all, and those that nothing was chosen with).
PROGRAM, LAYER, LINEAR, EXPERTS, WITH_EXPERTS, CHOICE = 5.5, 1.3, 7.0, 7.0, 5.6, 4.0
UNROLLED = 2  # how often a loop's layers are in the program
PATIENCE = 60.0  # seconds of a core that a program may be foreseen to take where nobody said how many to compile


def layers_traced(sketch: Sketch) -> list[BlockConfig]:
    """Those that a program has code for: each of a pattern once, and all of them without a loop
    (RunConfig.unroll=0)."""
    shape, found = sketch.shape, []
    for segment in shape.segments:
        found += segment.pattern * (segment.repeats if sketch.config.unroll == 0 else 1)
    return found + ([shape.mtp.block] * shape.mtp.depth if shape.mtp else [])


def compile_seconds(sketch: Sketch) -> float:
    """Of a core, on a machine like that which the constants were measured on, with nothing beside."""
    shape, loops = sketch.shape, sketch.config.unroll != 0
    each = [(one, min(one.repeats, UNROLLED) if loops else one.repeats) for one in shape.segments]
    layers = sum(times * _of_layer(block, sketch) for one, times in each for block in one.pattern)
    further = shape.mtp.depth * _of_layer(shape.mtp.block, sketch) if shape.mtp else 0.0
    experts = any(isinstance(block.mlp, MoeConfig) for block in layers_traced(sketch))
    return PROGRAM + EXPERTS * experts + layers + further


def _of_layer(block: BlockConfig, sketch: Sketch) -> float:
    linear = any(isinstance(own, DeltaNetConfig) and not isinstance(own, ShortConvConfig) for own in block.mixers)
    own = max(LINEAR * linear, WITH_EXPERTS * isinstance(block.mlp, MoeConfig), LAYER)
    return own + CHOICE * (chooser_of(block.attention, sketch) is not None)


def too_long(sketch: Sketch, patience: float) -> str:
    """Why a program is not compiled unasked; "" where it is."""
    seconds = compile_seconds(sketch)
    if seconds <= patience:
        return ""
    return (
        f"a program of {len(layers_traced(sketch))} layers that no loop repeats is foreseen to take {seconds:.0f} s of "
        f"a core to compile, more than the {patience:.0f} that are taken unasked; --verify=1 compiles the best anyway"
    )
