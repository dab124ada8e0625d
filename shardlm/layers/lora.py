"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): which weights have one. What they do to a projection is
layers/param.py's."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from shardlm.errors import ShardlmError
from shardlm.ops.grouped_weights import GroupedFormat
from shardlm.ops.weight_format import PUBLISHED

BASES = (*get_args(GroupedFormat), PUBLISHED)
MLP = ("gate", "up", "down")
TARGETS = (
    *("wq", "wk", "wv", "wo", *MLP),
    *("wg", "decay", "beta"),  # of outputs' gates, and of linear attention
    *("wq_down", "wq_up", "wkv_down", "wk_up", "wv_up"),  # of latent attention
)
A, B = "_lora_a", "_lora_b"  # after the weight's name: [inputs, rank] and [rank, outputs]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """A projection x W becomes x W + alpha / rank * x A B, of which A and B alone are trained.

    rank     of A and B; 0: no adapters, all weights are trained
    targets  weights that have adapters, by their names in layers/; (): all projections of attention and, of models
             without experts, of MLPs. Routed experts have none
    base     what the frozen weights of blocks' projections and experts are held in: the compute dtype, few bits
             (QLoRA, https://arxiv.org/abs/2305.14314), or "checkpoint": few bits as the file has them, number for
             number
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    base: GroupedFormat | Literal["checkpoint"] = "dtype"

    def __post_init__(self):
        if self.rank < 0 or self.alpha <= 0:
            raise ShardlmError(f"lora.rank={self.rank}, alpha={self.alpha}: a rank is at least 0 and alpha positive")
        if unknown := [name for name in self.targets if name not in TARGETS]:
            raise ShardlmError(f"lora.targets: {unknown[0]!r} is no projection; choose from {', '.join(TARGETS)}")
        if self.base not in BASES:
            raise ShardlmError(f"lora.base={self.base!r}; choose from {', '.join(BASES)}")
        if not self.rank and self.base != "dtype":
            raise ShardlmError(f"lora.base={self.base} without lora.rank: integers cannot be trained; set lora.rank")

    def of_model(self, experts: bool) -> "LoraConfig":
        """With the targets that () stands for in a model with or without experts."""
        if not self.rank or self.targets:
            return self
        targets = tuple(name for name in TARGETS if not (experts and name in MLP))
        return dataclasses.replace(self, targets=targets)

    def adapts(self, name: str) -> bool:
        """Whether this weight has an adapter."""
        return bool(self.rank) and name in self.targets


def shares(adapter: jax.Array, count: int, rank: int) -> jax.Array:
    """Of `count` adapters that lie side by side, each in its part of the rank: what rows take of each part, float32
    [B, rank]. adapter int32 [B] counts from 1; 0 is none.

    All rows are multiplied by all adapters, and what is not theirs is made 0: of a few that is less than to read each
    row's own. With n of rank r, weights and FLOPs of a projection of D to F grow by n r (D + F) / D F: 16 of rank 16
    are an eighth of Llama 3 8B's queries. Many adapters want kernels that go by rows (Punica,
    https://arxiv.org/abs/2310.18547)."""
    parts = 1 + jnp.arange(rank, dtype=jnp.int32) // (rank // count)
    return (adapter[:, None] == parts).astype(jnp.float32)


def rank_axis(path: tuple) -> int:
    """Of A or B at `path`, stacked: of A the last dimension, of B the one behind the layers'."""
    return -1 if path[-1].endswith(A) else 1


def beside(path: tuple) -> tuple[tuple, tuple]:
    """Where A and B of the weight at `path` are, in a tree of parameters."""
    return (*path[:-1], path[-1] + A), (*path[:-1], path[-1] + B)
