"""The names under which the time of a step is told apart, measured (profile/) or predicted: kinds of layers, and
collectives by mesh axes. One list for both, so that a prediction can stand beside what was measured."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from shardlm.hlo.text import Frame

Layer = Literal["attention", "linear attention", "mlp", "moe", "norm", "embedding", "head", "optimizer", "other"]
LAYERS: tuple[str, ...] = get_args(Layer)
"""attention  projections, positions, the op itself, latents
linear attention  the same of layers that remember a text by a state: projections, convolutions, the rule
mlp        dense feed-forward
moe        router, exchange of tokens, experts, shared experts
norm       all norms
embedding  lookup of tokens and its gradient
head       vocabulary projection and loss, which computes its gradients in the forward pass
optimizer  all of optax, and what decides on the update
other      residuals, what a scan over layers keeps and fetches, sums of gradients, metrics
"""
COPIES = "copy host"
"""Between a GPU and the memory of its host."""
OUTSIDE = "other programs"
"""What ran on the device beside the training step: an evaluation between two steps."""


def communication(kind: str, axes: Sequence[str]) -> str:
    """The row of a collective, as "all-gather fsdp" or "all-reduce data+fsdp"."""
    return f"{kind} {'+'.join(axes)}"


def exposed(row: str) -> str:
    """The row of that part of a collective's time in which the device computes nothing."""
    return f"{row} exposed"


# A file, below the folder of the package, of a kind. What is not listed says nothing (param.py, stack.py, step.py), so
# that the next frame outwards decides.
_FILES = {
    "linear attention": r"layers/(delta_net|mamba|short_conv)|"
    r"ops/(gated_delta|\w*delta_\w+|states_kernel|summed_\w+|unit_inverse|short_conv)",
    "attention": r"layers/(attention|mla|context|\w*indexer)|"
    r"ops/(attention|attention_pair|\w+_attention|\w+_choice|ulysses|rope)",
    "mlp": r"layers/mlp|ops/swiglu",
    "moe": r"layers/moe|ops/(expert_dispatch|grouped_matmul|grouped_weights|routing)",
    "norm": r"layers/norm|ops/norm",
    "head": r"ops/(cross_entropy|distillation|preference)|train/preference",
    "optimizer": r"optim",
}
_KNOWN = [(re.compile(rf"(^|/)shardlm/({files})\.py$"), kind) for kind, files in _FILES.items()]
_KNOWN.append((re.compile(r"/optax/"), "optimizer"))
# Functions of files that hold several kinds.
_FUNCTIONS = {
    r"\b(Packed|Paged)\.(recur|convolve_heads)\b": "linear attention",
    r"Transformer\.embed\b": "embedding",
    r"Transformer\.logits\b|\btoken_losses\b": "head",
    r"make_train_step.*\.(update|keep_finite)\b": "optimizer",
}
_NAMED = [(re.compile(function), kind) for function, kind in _FUNCTIONS.items()]


def layer_of(frames: Sequence[Frame]) -> str:
    """The kind of layer that computes, by where in the source it does (innermost frame first): the innermost that is
    known. A dense layer inside a mixture of experts, a shared expert, is of the mixture."""
    kinds = [kind for frame in frames if (kind := _kind(frame))]
    if not kinds:
        return "other"
    return "moe" if kinds[0] == "mlp" and "moe" in kinds else kinds[0]


def _kind(frame: Frame) -> str:
    named = (kind for pattern, kind in _NAMED if pattern.search(frame.function))
    found = (kind for pattern, kind in _KNOWN if pattern.search(frame.file))
    return next(named, "") or next(found, "")
