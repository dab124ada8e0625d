"""Linear attention by the gated delta rule (layers/delta_net.py) as formulas see it: what one device computes of a
layer and moves in its memory. Which products there are is read from the op (ops/gated_delta.py); how often XLA moves
what, from programs compiled for H100s (jax 0.10.2)."""

import dataclasses
import math
from collections.abc import Iterator

from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.ops.gated_delta import CHUNK
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch

WIDE = 4  # bytes of a float32, in which the rule is
# Kernels of the rule and its convolutions that only move memory, forward and for gradients: of all chunks together, and
# of the loop that goes from chunk to chunk, of each; of a forward pass that is made again as many.
KERNELS, KERNELS_BACK = 85, 105
IN_LOOP, IN_LOOP_BACK = 7, 20


@dataclasses.dataclass(frozen=True)
class Rule:
    """Of one layer, one microbatch and one device, which has whole rows of a share of the heads (layers/context.py).

    squares  matrices [C, C]: one for each chunk of tokens and head of values; of_keys: the same for heads of keys
    chunks   that follow each other in a row
    """

    C: int
    H: int
    V: int
    squares: float
    of_keys: float
    chunks: int

    @classmethod
    def of(cls, attention: DeltaNetConfig, sketch: Sketch) -> "Rule":
        """Of a training step."""
        length = sketch.config.train.seq_len
        return cls.of_rows(attention, length, sketch.tokens / length, sketch.mesh.tensor)

    @classmethod
    def of_rows(cls, attention: DeltaNetConfig, length: int, rows: float, ways: int) -> "Rule":
        """Of rows of so many tokens, or of as much of them as all heads of one row, which are split so many ways."""
        C = min(CHUNK, 1 << (length - 1).bit_length())
        chunks = math.ceil(length / C)
        each = rows * chunks / ways
        sizes = attention.head_dim, attention.value_dim
        return cls(C, *sizes, each * attention.num_heads, each * attention.num_kv_heads, chunks)

    @property
    def square(self) -> float:
        """Bytes of all squares."""
        return WIDE * self.squares * self.C**2

    @property
    def wide(self) -> float:
        """Bytes of values, or of keys for each head of values: their mean."""
        return WIDE * self.squares * self.C * (self.H + self.V) / 2

    @property
    def keys(self) -> float:
        """Bytes of keys."""
        return WIDE * self.of_keys * self.C * self.H

    @property
    def states(self) -> float:
        """Bytes of the state before each chunk."""
        return WIDE * self.squares * self.H * self.V


def held(rule: Rule, narrow: float) -> float:
    """Bytes that a layer without recomputation keeps besides its projections and its output, of convolutions of
    `narrow` bytes: each level of the inverse, decays and products, what the loop over chunks reads and writes."""
    return 21 * rule.square + 10 * rule.wide + 6 * rule.keys + rule.states + 7 * narrow


def at_work(rule: Rule) -> float:
    """Bytes in float32 while a layer is made again and done backwards, at the fullest: some of the layer before it are
    there already."""
    return 34 * rule.square + 22 * rule.wide + 8 * rule.keys + 2 * rule.states


def projections(attention: DeltaNetConfig, D: int, tensor: int) -> Iterator[tuple[str, float, float]]:
    """(name, columns, summed) on one device."""
    N, K = attention.num_heads / tensor, attention.num_kv_heads / tensor
    values = N * attention.value_dim
    yield "queries, keys, values, gate and rates", 2 * K * attention.head_dim + 2 * values + 2 * N, D
    yield "output", D, values


def products(rule: Rule) -> Iterator[Op]:
    """The rule's, forward: inside all chunks at once, and from chunk to chunk."""
    C, H, V = rule.C, rule.H, rule.V
    halvings = 2 * (int(math.log2(C)) - 1)  # inverse_of_unit; its first level multiplies by 1
    yield _op("decays between tokens", rule.squares, (C, C, C), "fp32", constant=True)
    yield _op("inverse", rule.squares, (C, C, C), "fp32", halvings)
    yield _op("keys and queries by keys", rule.of_keys, (C, C, H), "tf32", 2)
    yield _op("changes inside chunks", rule.squares, (C, H + V, C), "tf32")
    at_once = rule.squares / rule.chunks
    for what, dims in (("reads of the state", (2 * C, V, H)), ("sums", (C, V, C)), ("writes", (H, V, C))):
        yield _op(f"{what}, from chunk to chunk", at_once, dims, "tf32", rule.chunks)


def _op(what: str, copies: float, dims: tuple[int, int, int], dtype: str, count: int = 1, **how) -> Op:
    rows, n, k = dims
    moved = WIDE * copies * (rows * n + rows * k + n * k)
    flops = 2.0 * copies * rows * n * k
    return Op("linear attention", what, "matmul", flops, moved, count, dims=dims, dtype=dtype, both=True, **how)


def convolved(attention: DeltaNetConfig) -> int:
    """Numbers of a token that go through convolutions."""
    return 2 * attention.num_kv_heads * attention.head_dim + attention.num_heads * attention.value_dim


def moved(rule: Rule, narrow: float) -> Iterator[Op]:
    """What moves memory besides, forward and for gradients, as XLA fuses it: convolutions of `narrow` bytes, lengths of
    queries and keys, decays, what is cut into chunks and put together again, and what of it is kept for the backward
    pass."""
    there, back = 28 * rule.square + 14 * rule.wide + 6 * narrow, 36 * rule.square + 36 * rule.wide + 16 * narrow
    kernels = {"host": (KERNELS - 1) * GAP, "gradient_host": (KERNELS_BACK - 1) * GAP}
    yield Op("linear attention", "convolutions, decays, chunks", "memory", 0, there, 1, gradient_bytes=back, **kernels)
    there, back = 5 * rule.states + 8 * rule.wide, 14 * rule.states + 21 * rule.wide
    kernels = {"host": (IN_LOOP * rule.chunks - 1) * GAP, "gradient_host": (IN_LOOP_BACK * rule.chunks - 1) * GAP}
    yield Op("linear attention", "from chunk to chunk", "memory", 0, there, 1, gradient_bytes=back, **kernels)
