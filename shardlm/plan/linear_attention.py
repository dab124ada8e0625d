"""Linear attention by the gated delta rule (layers/delta_net.py) as formulas see it: what one device computes of a
layer and moves in its memory. Which products there are is read from the op (ops/gated_delta_chunks.py); how often XLA
moves what, from programs compiled for H100s (jax 0.10.2). What kernels compute is summed_states.py's (Mamba 2) and
delta_kernels.py's (the gated delta rule, in 16 bits and without decays by channel)."""

import dataclasses
import functools
import math
from collections.abc import Iterator

from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.lightning import LightningConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.mesh import MeshSpec
from shardlm.ops.channel_delta_chunks import BLOCK
from shardlm.ops.gated_delta import CHUNK, SUMMED
from shardlm.ops.summed_sizes import has_kernels
from shardlm.ops.unit_inverse import WHOLE
from shardlm.plan import delta_kernels, short_convs, summed_states
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

WIDE = 4  # bytes of a float32: of decays, the inverse and sums; factors are in the compute type
# Kernels of the rule and its convolutions that only move memory, forward and for gradients; of a forward pass that is
# made again as many.
KERNELS, KERNELS_BACK = 37, 46
# Besides, by channel, in arrays as large as values: what was left until each block of tokens began is made for every
# block of a chunk, in float32 (7 layers of 8 heads of 128, 2,048 tokens: 530 MiB forward, 810 for gradients).
OF_CHANNELS, OF_CHANNELS_BACK = 96, 116
# Seconds in which the kernel that carries states (ops/states_kernel.py) goes on by a chunk: a product of 128 x 32 x 128
# in one core, which waits for the one before. An estimate without a source.
TURN = 1e-6


@dataclasses.dataclass(frozen=True)
class Rule:
    """Of one layer, one microbatch and one device, which has whole rows of a share of the heads (layers/context.py).

    squares  matrices [C, C]: one for each chunk of tokens and head of values; of_keys: the same for heads of keys
    chunks   that follow each other in a row
    itemsize of the compute type
    by_channel  whether decays are of each number of a key
    summed   whether nothing is taken back (Mamba 2 and lightning attention, summed_states.py)
    on_cpu   whether XLA:CPU runs it, which has no kernels of ours
    convolves  whether what it reads was convolved: not of lightning attention
    """

    C: int
    H: int
    V: int
    squares: float
    of_keys: float
    chunks: int
    itemsize: int
    by_channel: bool = False
    summed: bool = False
    on_cpu: bool = False
    convolves: bool = True

    @classmethod
    def of(cls, attention: DeltaNetConfig, sketch: Sketch) -> "Rule":
        """Of a training step."""
        length, mesh = sketch.config.train.seq_len, sketch.mesh
        rows = sketch.tokens / length * mesh.context  # of a share of the heads
        one = cls.of_rows(attention, length, rows, mesh.size("tensor", "context"), sketch.itemsize)
        return dataclasses.replace(one, on_cpu=sketch.gpu.generation == "cpu")

    @classmethod
    def of_rows(cls, attention: DeltaNetConfig, length: int, rows: float, ways: int, itemsize: int) -> "Rule":
        """Of rows of so many tokens, or of as much of them as all heads of one row, which are split so many ways."""
        summed = not attention.takes_back
        C = min(SUMMED if summed else CHUNK, 1 << (length - 1).bit_length())
        chunks = math.ceil(length / C)
        each = rows * chunks / ways
        sizes = attention.head_dim, attention.value_dim
        heads = each * attention.num_heads, each * key_heads(attention, ways)
        how = {"summed": summed, "convolves": not isinstance(attention, LightningConfig)}
        return cls(C, *sizes, *heads, chunks, itemsize, attention.by_channel, **how)

    @property
    def kernels(self) -> bool:
        """Whether kernels of ours compute it."""
        sizes = self.C, self.H, self.V, self.itemsize
        return not self.on_cpu and has_kernels(*sizes) if self.summed else delta_kernels.fits(self)

    @property
    def square(self) -> float:
        """Bytes of all squares."""
        return WIDE * self.squares * self.C**2

    @property
    def values(self) -> float:
        """Bytes of values, or of keys for each head of values, in the compute type: their mean."""
        return self.itemsize * self.squares * self.C * (self.H + self.V) / 2

    @property
    def states(self) -> float:
        """Bytes of the state before each chunk, in the compute type."""
        return self.itemsize * self.squares * self.H * self.V


def key_heads(attention: DeltaNetConfig, ways: int) -> int:
    """Heads of queries and keys of all devices that split heads so many ways: groups of Mamba 2 that are fewer are
    repeated, one for each (layers/mamba.py)."""
    K = attention.num_kv_heads
    return max(K, ways) if isinstance(attention, MambaConfig) else K


def divides(attention: DeltaNetConfig, ways: int) -> bool:
    """Whether heads can be split over so many devices (train/check.py): of Mamba 2 these may share groups. Short
    convolutions are split over tensor alone (`ways_of`)."""
    N, K = attention.num_heads, attention.num_kv_heads
    if isinstance(attention, MambaConfig):
        return N % ways == 0 and 0 in (K % ways, ways % K)
    return K % ways == 0


def ways_of(attention: DeltaNetConfig, mesh: MeshSpec) -> int:
    """Devices that split heads: of context those that exchange rows for them."""
    return mesh.tensor if isinstance(attention, ShortConvConfig) else mesh.size("tensor", "context")


def operations(attention: DeltaNetConfig, sketch: Sketch) -> Iterator[Op]:
    """The rule's of a layer in a training step."""
    if not isinstance(attention, ShortConvConfig):
        yield from products(Rule.of(attention, sketch))


def moved_by(attention: DeltaNetConfig, sketch: Sketch) -> Iterator[Op]:
    """What moves memory besides."""
    if isinstance(attention, ShortConvConfig):
        yield short_convs.moved(short_convs.convolved_bytes(attention, sketch))
    else:
        yield from moved(Rule.of(attention, sketch), convolved_bytes(attention, sketch))


def needs(attention: DeltaNetConfig, sketch: Sketch) -> tuple[float, float]:
    """(`at_work`, `held`) of a layer in a training step."""
    if isinstance(attention, ShortConvConfig):
        narrow = short_convs.convolved_bytes(attention, sketch)
        return short_convs.AT_WORK * narrow, short_convs.HELD * narrow
    rule, narrow = Rule.of(attention, sketch), convolved_bytes(attention, sketch)
    return at_work(rule, narrow), held(rule, narrow)


def held(rule: Rule, narrow: float) -> float:
    """Bytes that a layer without recomputation keeps besides its projections and its output, of convolutions of
    `narrow` bytes: the inverse, states, what chunks read, and of convolutions and lengths what each step made."""
    if rule.kernels:
        return (summed_states if rule.summed else delta_kernels).held(rule, narrow)
    return 2 * rule.square + (10 if rule.by_channel else 1) * rule.values + rule.states + 11 * narrow


def at_work(rule: Rule, narrow: float) -> float:
    """Bytes while a layer is made again and done backwards, at the fullest, of convolutions of `narrow` bytes; by
    channel, of each layer of a pattern."""
    if rule.by_channel:
        return 65 * rule.values
    if rule.kernels:
        return summed_states.at_work(narrow) if rule.summed else delta_kernels.at_work(rule, narrow)
    return 4 * rule.square + 18 * rule.values + 4 * rule.states


def projections(attention: DeltaNetConfig, D: int, tensor: int) -> Iterator[tuple[str, float, float]]:
    """(name, columns, summed) on one device."""
    N, K, H = attention.num_heads / tensor, attention.num_kv_heads / tensor, attention.head_dim
    values = N * attention.value_dim
    if isinstance(attention, ShortConvConfig):
        yield from short_convs.projections(attention, D, tensor)
        return
    if isinstance(attention, MambaConfig):  # fewer groups than devices are made on all
        K = attention.num_kv_heads if attention.num_kv_heads % tensor else K
        yield "queries, keys, values, gate and steps", 2 * K * H + 2 * values + N, D
        yield "output", D, values
        return
    if isinstance(attention, LightningConfig):
        yield "queries, keys, values and gate", 4 * values, D
        yield "output", D, values
        return
    if attention.straight:
        yield "queries, keys, values, gate, decays and rates", 2 * K * H + 2 * values + N * H + N, D
        yield "output", D, values
        return
    if attention.by_channel:
        yield "queries, keys, values and rates", 2 * K * H + values + N, D
        yield "latents of gate and decays", 2 * H / tensor, D  # of tokens that tensor splits
        yield "gate and decays", values + N * H, H
        yield "output", D, values
        return
    yield "queries, keys, values, gate and rates", 2 * K * H + 2 * values + 2 * N, D
    yield "output", D, values


def products(rule: Rule) -> Iterator[Op]:
    """The rule's (ops/gated_delta_chunks.py, channel_delta_chunks.py). What the backward pass needs of the forward one
    it makes by itself, but for what states need, so that with recomputation XLA has it once."""
    C, H, V, s = rule.C, rule.H, rule.V, rule.squares
    own = functools.partial(_op, rule)
    if rule.summed:
        yield from summed_states.by_kernels(rule) if rule.kernels else summed_states.by_xla(rule, _op)
        return
    if rule.kernels:
        yield from delta_kernels.products(rule)
        return
    yield from _of_keys(rule)
    yield from _inverse(rule)
    # Gradients: made anew, back through the inverse, and the inverse's own.
    yield own("changes by values", s, (C, V, C), narrow=True, gradients=3, anew=False)
    yield own("changes by states", s, (C, H, C), narrow=True, gradients=3, anew=False)
    yield own("writes", s, (H, V, C), narrow=True, gradients=2)
    yield own("writes of what is read", s, (H, H, C), narrow=True, gradients=1, anew=False)
    yield own("states", s, (H, V, H), narrow=True, gradients=1)
    yield own("reads", s, (C, V, H), 2, gradients=2.5, anew=False)
    yield own("sums", s, (C, V, C), gradients=2, anew=False)


def _of_keys(rule: Rule) -> Iterator[Op]:
    """Queries and keys by keys. Queries' products are made anew for gradients, keys' with the inverse; then three
    gradients. By channel both are made anew, and there are four: of rows and of columns, between blocks of tokens;
    within them sums are no products."""
    C, H, what = rule.C, rule.H, "keys and queries by keys"
    if not rule.by_channel:
        yield _op(rule, what, rule.of_keys, (C, C, H), 2, gradients=2.5, anew=False)
    elif C > BLOCK:
        yield _op(rule, what, rule.squares * C / BLOCK, (BLOCK, C, H), 2, gradients=3, anew=False)


def _inverse(rule: Rule) -> Iterator[Op]:
    """ops/unit_inverse.py: halves of small blocks as whole blocks, the first by 1; pairs of larger blocks."""
    C, squares = rule.C, rule.squares
    small = min(WHOLE, C)
    own = functools.partial(_op, dataclasses.replace(rule, itemsize=WIDE), dtype="fp32", gradients=0)
    if small > 2:
        halvings = 2 * (int(math.log2(small)) - 1)
        yield own("inverse", squares * C / small, (small, small, small), halvings)
    while small < C:
        yield own("inverse", squares * C / (2 * small), (small, small, small), 2)
        small *= 2


def _op(
    rule: Rule,
    what: str,
    copies: float,
    dims: tuple[int, int, int],
    count: int = 1,
    narrow: bool = False,
    dtype: str = "",
    **how,
) -> Op:
    """`copies` products at once; what they make is float32, or rounded at once if `narrow`."""
    rows, n, k = dims
    moved = copies * (rule.itemsize * (rows * k + n * k) + (rule.itemsize if narrow else WIDE) * rows * n)
    dtype = dtype or ("bf16" if rule.itemsize < WIDE else "tf32")
    return Op(
        *("linear attention", what, "matmul", 2.0 * copies * rows * n * k, moved, count),
        dims=dims,
        dtype=dtype,
        both=True,
        **how,
    )


def convolved(attention: DeltaNetConfig, ways: int) -> int:
    """Numbers of a token that go through convolutions, of all devices that split heads so many ways."""
    return 2 * key_heads(attention, ways) * attention.head_dim + attention.num_heads * attention.value_dim


def convolved_bytes(attention: DeltaNetConfig, sketch: Sketch) -> float:
    """Of them on one device, in a training step."""
    ways = sketch.mesh.size("tensor", "context")
    return sketch.itemsize * sketch.tokens / sketch.mesh.tensor * convolved(attention, ways)


def moved(rule: Rule, narrow: float) -> Iterator[Op]:
    """What moves memory besides, forward and for gradients, as XLA fuses it: convolutions of `narrow` bytes, lengths of
    queries and keys, decays, what is cut into chunks and put together again. And what states wait for each other."""
    if rule.kernels:
        yield (summed_states if rule.summed else delta_kernels).moved(rule, narrow)
        if not rule.summed:
            yield delta_kernels.turns(rule, TURN)
        return
    there = 10.5 * rule.square + 15 * rule.values + 3.5 * narrow
    back = 17.5 * rule.square + 24 * rule.values + 15 * narrow
    if rule.by_channel:
        there += OF_CHANNELS * rule.values
        back += OF_CHANNELS_BACK * rule.values
    kernels = {"host": (KERNELS - 1) * GAP, "gradient_host": (KERNELS_BACK - 1) * GAP}
    yield Op("linear attention", "convolutions, decays, chunks", "memory", 0, there, 1, gradient_bytes=back, **kernels)
    turns = {"host": rule.chunks * TURN, "gradient_host": rule.chunks * TURN}
    yield Op("linear attention", "from chunk to chunk", "memory", 0, 0, 1, gradient_bytes=0, **turns)
