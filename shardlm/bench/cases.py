"""The cases of each part of `launch.bench gpu`, in their order. What measures them is imported in their own processes:
where it lacks a package, the other parts go on."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from shardlm.bench.sizes import Sizes
from shardlm.train.config import RunConfig

TORCH = "torch, "  # before the name of the case of training that it is beside
TRANSFORMERS = "transformers"
PROFILE = "profile"
FAMILIES = ("paged attention", "weights in few bits")  # of kernels that are written here


def cases_of(part: str, sizes: Sizes) -> tuple[str, ...]:
    if part == "train":
        return _trained(sizes)
    return {
        "decode": (*sizes.served, TRANSFORMERS),
        "kernels": tuple(sizes.kernels),
        "plan": (PROFILE, *sizes.plan),
        "tests": ("pytest",),
        "code": tuple(name for name in sizes.kernels if name in FAMILIES),
    }[part]


def jobs(parts: Sequence[str], sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(part, cases of one process): the first case of each part, then the second of each: time that ends leaves the
    last cases of all parts and not whole parts."""
    if not sizes.apart:
        yield from ((part, cases_of(part, sizes)) for part in parts)
        return
    for cases in itertools.zip_longest(*(cases_of(part, sizes) for part in parts)):
        yield from ((part, (case,)) for part, case in zip(parts, cases, strict=True) if case is not None)


def _trained(sizes: Sizes) -> tuple[str, ...]:
    """PyTorch multiplies the compute dtype alone, and each model once."""
    shapes = {name: torch_shape(config) for name, config in sizes.train.items() if config.matmul == "dtype"}
    first = [name for name, shape in shapes.items() if list(shapes.values()).index(shape) == list(shapes).index(name)]
    return (*sizes.train, *(TORCH + name for name in first))


def torch_shape(config: RunConfig) -> dict[str, Any]:
    """As benchmarks/peers/torch_train.py takes it."""
    model, train = config.model, config.train
    return {
        "hidden": model.embed_dim,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "ffn": model.mlp_dim,
        "vocab": model.vocab_size,
        "tied": model.tie_embeddings,
        "batch": train.global_batch,
        "seq": train.seq_len,
    }
