"""Layers of linear attention in a served model: what a request is remembered by, and what a pass through a layer
computes and moves (serve/programs.py, layers/paged.py)."""

import math
from collections.abc import Iterable, Iterator

from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.ops.delta_drafts import MOST
from shardlm.plan import delta_kernels, linear_attention
from shardlm.plan.linear_attention import WIDE, Rule
from shardlm.plan.op import Op
from shardlm.rules import Rules

# Of a row's state, how often a decode program reads or writes it, and the layer's kernels beside its projections
# (compiled for an H100, 64 rows): once each in ops/delta_step_kernel.py and, where two drafts are verified,
# ops/delta_drafts_kernel.py. Of more tokens than that takes, XLA reads it three times and writes it twice; of prompts
# as much is counted, which is little beside their chunks.
PASSES, KERNELS = 2, 9
VERIFYING = 30
PASSES_OF_MANY, KERNELS_OF_MANY = 5, 12
# The same of a short convolution: what is kept is read and written, and one kernel gates, convolves and gates again
# (compiled for an H100: LFM2 1.2B, 64 rows).
KERNELS_OF_CONVOLUTION, PASSES_OF_TOKENS = 3, 4


def state_bytes(attention: DeltaNetConfig, rules: Rules, itemsize: int, drafts: int = 0) -> float:
    """Of one layer and request on one device: its state, the tokens that convolutions go on from, and where drafts are
    verified those of a step, with their decays and betas."""
    N, H, V = attention.num_heads, attention.head_dim, attention.value_dim
    ways, unsure = rules.mesh.size(*rules.use.axes("heads")), 1 + drafts if drafts else 0
    if isinstance(attention, ShortConvConfig):
        return itemsize * (attention.conv_width - 1 + unsure) * N * V / ways
    tokens = (attention.conv_width - 1 + unsure) * linear_attention.convolved(attention, ways)
    decays = N * H if attention.by_channel else N
    own = WIDE * N * H * V + itemsize * tokens + WIDE * unsure * (decays + N)
    return own / ways


def operations(
    attention: DeltaNetConfig, rules: Rules, rows: float, each: float, itemsize: int, drafts: int = 0
) -> Iterator[Op]:
    """Of rows of so many tokens each: one goes through the rule as it is written, more go in chunks, and those of which
    all but one are drafts through that of few tokens, whose sums are little beside reading the state."""
    if isinstance(attention, ShortConvConfig):
        yield _convolution(attention, rules, rows, each, itemsize, drafts)
        return
    by_kernel = 2 * each <= MOST if drafts else each == 1
    passes = PASSES if by_kernel else PASSES_OF_MANY
    kernels = VERIFYING if drafts else KERNELS if by_kernel else KERNELS_OF_MANY
    own = rows * state_bytes(attention, rules, itemsize, drafts)
    yield Op("linear attention", "states", "memory", 0, passes * own / kernels, kernels)
    if each > 1 and not drafts:
        ways = rules.mesh.size(*rules.use.axes("heads"))
        rule = Rule.of_rows(attention, math.ceil(each), rows, ways, itemsize)
        narrow = rows * each * itemsize * linear_attention.convolved(attention, ways) / ways
        if delta_kernels.fits(rule):
            yield from delta_kernels.operations(rule, narrow, linear_attention.TURN)
            return
        yield from linear_attention.products(rule)
        yield from linear_attention.moved(rule, narrow)


def _convolution(attention: ShortConvConfig, rules: Rules, rows: float, each: float, itemsize: int, drafts: int) -> Op:
    ways = rules.mesh.size(*rules.use.axes("heads"))
    token = itemsize * attention.num_heads * attention.value_dim / ways
    kept = PASSES * state_bytes(attention, rules, itemsize, drafts)
    moved = rows * (kept + PASSES_OF_TOKENS * each * token)
    count = KERNELS_OF_CONVOLUTION
    return Op("linear attention", "gates and convolution", "memory", 0, moved / count, count)


def joined_bytes(blocks: Iterable[BlockConfig], rules: Rules, D: int, itemsize: int) -> float:
    """Of the weights that a prompt's tokens are multiplied by first: XLA joins those of a layer to one, of all layers
    before any is used (9B's 24 layers, compiled for an H100: 2.0 GiB)."""
    ways = rules.mesh.size(*rules.use.axes("heads"))
    mixers = (mixer for block in blocks for mixer in block.mixers)
    found = (mixer for mixer in mixers if isinstance(mixer, DeltaNetConfig))
    first = (next(linear_attention.projections(attention, D, ways)) for attention in found)
    return sum(itemsize * D * columns for _, columns, _ in first)
