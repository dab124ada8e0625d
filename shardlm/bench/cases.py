"""The cases of each part of `launch.bench gpu`, those of them that share a process, and the order of these. What
measures them is imported in their own processes: where it lacks a package, the other parts go on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardlm.bench.sizes import Sizes, is_apart
from shardlm.train.config import RunConfig

TORCH = "torch, "  # before the name of the case of training that it is beside
TRANSFORMERS = "transformers"
PROFILE = "profile"
FAMILIES = ("paged attention", "products of a layer", "weights in few bits")  # of kernels that are written here
MODELS = 2  # of training, that are measured before the kernels
TOGETHER = 4  # families of kernels in a process


def cases_of(part: str, sizes: Sizes) -> tuple[str, ...]:
    if part == "train":
        return _trained(sizes)
    return {
        "decode": (*sizes.served, TRANSFORMERS),
        "kernels": tuple(sizes.kernels),
        "plan": (*sizes.plan, PROFILE) if sizes.gpu else (PROFILE, *sizes.plan),  # without a GPU there is no other plan
        "tests": ("pytest",),
        "code": tuple(name for name in sizes.kernels if name in FAMILIES),
    }[part]


def jobs(parts: Sequence[str], sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(part, cases of one process): all of a part, or where sizes are `apart` what matters most first."""
    if not sizes.apart:
        yield from ((part, cases_of(part, sizes)) for part in parts)
        return
    yield from ((part, cases) for part, cases in _by_worth(sizes) if part in parts and cases)


def _by_worth(sizes: Sizes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Some of every part before the rest of any: where time ends, the last of these are left. Cases of one process are
    compiled side by side. Engines need all memory and have variables of their own, and PyTorch needs the memory that a
    process of ours holds: these are alone."""
    served, *others = sizes.served
    trained, trained_apart = _parted(sizes.train)
    planned, planned_apart = _parted(sizes.plan)
    peers = [name for name in _trained(sizes) if name.startswith(TORCH)]
    families = tuple(sizes.kernels)
    yield "decode", (served,)
    yield "plan", (*planned, PROFILE)
    yield "train", trained[:MODELS]
    yield from (("train", (name,)) for name in peers[:MODELS])
    yield from (("kernels", families[i : i + TOGETHER]) for i in range(0, len(families), TOGETHER))
    yield "tests", cases_of("tests", sizes)
    yield from (("decode", (name,)) for name in (*others, TRANSFORMERS))
    yield "train", trained[MODELS:]
    yield from (("train", (name,)) for name in (*peers[MODELS:], *trained_apart))
    yield from (("plan", (name,)) for name in planned_apart)
    yield "code", cases_of("code", sizes)


def _parted(steps: Mapping[str, RunConfig]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(those that are compiled side by side, those that are apart)."""
    apart = tuple(name for name, config in steps.items() if is_apart(config))
    return tuple(name for name in steps if name not in apart), apart


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
