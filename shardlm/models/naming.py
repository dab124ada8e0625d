"""What Hugging Face checkpoints call a weight, and how they lay it out: the language in which an architecture's file
says so, and the reading and writing of one tensor by it. Files and devices are weights.py's."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

_COLUMNS, _AT_ONCE = 64, 1 << 14  # turned at a time; numbers that are copied as they lie


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a weight of ours is in a checkpoint.

    name         of the tensor, with {layer} and {expert} where there is one for each
    layout       theirs and ours by named dimensions: "(N H) D -> D N H" is a matrix whose rows are heads times head
                 dimensions, 1 a dimension of one that ours lacks; "" is the same on both sides. A dimension E of ours
                 that theirs lacks is in the name
    part         (dimension of theirs, first row, one past the last, step): ours is a part of a fused tensor
    inner        (letter, first, size of theirs): the same inside a dimension that is a factor of a product
    pairs        (letter, first, size): rotated dimensions that they keep in adjacent pairs, we in two halves
    group        (dimension of ours, size): heads that they keep in groups of so many, a group and what follows of ours
                 as one dimension of the layout
    dtype        of the file's, where it is not that of weights
    pieces       (name with {piece}, how many): the file has it in so many, rows one after the other (tensor_pieces.py)
    numbers      that stand for {layer}, of each layer of ours, where the file counts otherwise; (): as ours
    told         what every checkpoint of these options has there, of which there is no weight
    """

    name: str
    layout: str = ""
    part: tuple[int, int, int, int] | None = None
    inner: tuple[str, int, int] | None = None
    pairs: tuple[str, int, int] | None = None
    group: tuple[int, int] | None = None
    dtype: str = ""
    pieces: tuple[str, int] | None = None
    numbers: tuple[int, ...] = ()
    told: tuple[int, ...] = ()

    def viewed(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Our shape as the layout has it."""
        if not self.group:
            return tuple(ours)
        axis, size = self.group
        return (*ours[:axis], ours[axis] // size, size * math.prod(ours[axis + 1 :]))

    def theirs(self, ours: Sequence[int]) -> list[list[str]]:
        """Their dimensions, each as the letters of its factors, outermost first."""
        text = self.layout.split("->")[0] if self.layout else " ".join(self.letters(ours))
        groups = (group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", text))
        return [[factor for factor in group if factor != "1"] for group in groups]

    def letters(self, ours: Sequence[int]) -> list[str]:
        """Our dimensions' letters."""
        return self.layout.split("->")[1].split() if self.layout else [f"d{i}" for i in range(len(ours))]

    def per_expert(self) -> bool:
        """Whether our first dimension counts tensors of theirs."""
        return "{expert}" in self.name


Names = Mapping[str, Tensor]  # a weight's path in a block, or in the model, -> where it is


def read(
    tensor: Tensor, shape: Sequence[int], index: Sequence[slice], fetch: Callable[[tuple[slice, ...]], np.ndarray]
):
    """Our slice `index` of a weight [*shape] out of one tensor of theirs. `fetch` reads a slice of theirs; only what is
    needed of each outermost factor is asked for. Without the dimension of experts, where that is in the name."""
    if tensor.group:
        return _read_groups(tensor, shape, index, fetch)
    letters, groups = tensor.letters(shape), tensor.theirs(shape)
    size = dict(zip(letters, shape, strict=True))
    want = {letter: range(*part.indices(size[letter])) for letter, part in zip(letters, index, strict=True)}
    full = dict(size)
    if tensor.inner:
        letter, first, total = tensor.inner
        full[letter] = total
        want[letter] = range(want[letter].start + first, want[letter].stop + first)
    slices, factors, rest = [], [], []
    for dim, group in enumerate(groups):
        if not group:
            slices.append(slice(0, 1))
            continue
        outer, inside = group[0], group[1:]
        each = math.prod(full[letter] for letter in inside)
        start, stop = want[outer].start * each, want[outer].stop * each
        step = 1
        if tensor.part and tensor.part[0] == dim:
            _, first, _, step = tensor.part
            start, stop = first + start * step, first + (stop - 1) * step + 1
        slices.append(slice(start, stop, step))
        factors += [len(want[outer]), *(full[letter] for letter in inside)]
        rest += [slice(None), *(slice(want[letter].start, want[letter].stop) for letter in inside)]
    flat = [letter for group in groups for letter in group]
    found = fetch(tuple(slices)).reshape(factors)[tuple(rest)]
    found = found.transpose([flat.index(letter) for letter in letters])
    return _reorder(found, tensor, letters, halves=True)


def _read_groups(tensor: Tensor, shape: Sequence[int], index: Sequence[slice], fetch) -> np.ndarray:
    """`read` of whole groups of heads, of which what was asked for is taken."""
    axis, size = tensor.group
    first, stop, _ = index[axis].indices(shape[axis])
    groups = slice(first // size, -(-stop // size))
    plain = dataclasses.replace(tensor, group=None)
    found = read(plain, tensor.viewed(shape), (*index[:axis], groups, slice(None)), fetch)
    found = found.reshape(*found.shape[:axis], -1, *shape[axis + 1 :])
    own = slice(first - groups.start * size, stop - groups.start * size)
    return found[(*[slice(None)] * axis, own, *index[axis + 1 :])]


def stacked(count: int, arrays: Iterable[np.ndarray]) -> np.ndarray:
    """So many arrays, as `read` gives them, as one: a copy."""
    out = None
    for place, one in enumerate(arrays):
        out = np.empty((count, *one.shape), one.dtype) if out is None else out
        _copy(one, out[place, ...])  # a view, of numbers too
    return out


def _copy(a: np.ndarray, out: np.ndarray) -> None:
    """Into an array of the same shape. What lies side by side in `a` is far apart in `out` where files have results
    first: a few columns at a time then, whose lines stay in a CPU's cache (4096 x 4096 bytes 0.9 ns each, else 6.3)."""
    if a.ndim < 2 or a.size < _AT_ONCE or abs(a.strides[-1]) <= min(map(abs, a.strides)):
        out[...] = a
        return
    near = min(range(a.ndim), key=lambda axis: abs(a.strides[axis]))
    if middle := [axis for axis in range(a.ndim - 1) if axis != near]:
        a, out = (np.moveaxis(each, middle[0], 0) for each in (a, out))
        for one, place in zip(a, out, strict=True):
            _copy(one, place)
        return
    for first in range(0, a.shape[-1], _COLUMNS):
        some = (..., slice(first, first + _COLUMNS))
        out[some] = a[some]


def write(tensor: Tensor, a: np.ndarray) -> np.ndarray:
    """A weight of ours as (its part of) their tensor; `inner` parts are joined by `join`."""
    a = a.reshape(tensor.viewed(a.shape))
    letters, groups = tensor.letters(a.shape), tensor.theirs(a.shape)
    size = dict(zip(letters, a.shape, strict=True))
    flat = [letter for group in groups for letter in group]
    a = _reorder(a, tensor, letters, halves=False).transpose([letters.index(letter) for letter in flat])
    if tensor.inner:
        return a  # factors are merged once the parts are side by side
    return a.reshape([math.prod(size[letter] for letter in group) for group in groups])


def join(parts: Sequence[tuple[Tensor, np.ndarray]]) -> np.ndarray:
    """Their tensor from the parts of ours that it fuses."""
    tensor, whole = parts[0]
    whole = whole.reshape(tensor.viewed(whole.shape))
    if len(parts) == 1 and not tensor.inner:
        return write(*parts[0])
    written = [(tensor, write(tensor, a)) for tensor, a in parts]
    if tensor.inner:
        groups, letter = tensor.theirs(whole.shape), tensor.inner[0]
        flat = [name for group in groups for name in group]
        ordered = [a for tensor, a in sorted(written, key=lambda item: item[0].inner[1])]
        joined = np.concatenate(ordered, axis=flat.index(letter))
        size = dict(zip(flat, joined.shape, strict=True))
        return joined.reshape([math.prod(size[name] for name in group) for group in groups])
    dim = tensor.part[0]
    shape = list(written[0][1].shape)
    shape[dim] = sum(a.shape[dim] for _, a in written)
    out = np.empty(shape, whole.dtype)
    for part, a in written:
        _, first, stop, step = part.part
        out[(slice(None),) * dim + (slice(first, stop, step),)] = a
    return out


def shape_of(parts: Sequence[tuple[Tensor, Sequence[int]]]) -> tuple[int, ...]:
    """The shape of their tensor, from our shapes of the parts that it fuses."""
    tensor, ours = parts[0]
    ours = tensor.viewed(ours)
    size = dict(zip(tensor.letters(ours), ours, strict=True))
    if tensor.inner:
        size[tensor.inner[0]] = tensor.inner[2]
    shape = [math.prod(size[letter] for letter in group) for group in tensor.theirs(ours)]
    if tensor.part:
        shape[tensor.part[0]] = sum(len(range(*part.part[1:])) for part, _ in parts)
    return tuple(shape)


def _reorder(a: np.ndarray, tensor: Tensor, letters: Sequence[str], halves: bool) -> np.ndarray:
    """Adjacent pairs into two halves, or back, on the rotated part of one dimension."""
    if not tensor.pairs or tensor.pairs[0] not in letters:
        return a
    letter, first, size = tensor.pairs
    axis = letters.index(letter)
    order = np.arange(a.shape[axis])
    pairs = np.arange(size).reshape(-1, 2).T.ravel()  # 0 2 4 .. 1 3 5 ..
    order[first : first + size] = first + (pairs if halves else np.argsort(pairs))
    return np.take(a, order, axis=axis)


LAYER = "model.layers.{layer}."
OF_MODULES = "mtp.layers"  # whose name is LAYER's of modules that predict further tokens, where they are counted apart


@dataclasses.dataclass(frozen=True)
class Modules:
    """Modules that predict further tokens. prefix: of their tensors' names. option: of config.json, their number, which
    may be left out where there is one."""

    prefix: str
    option: str


def linear(path: str, name: str, kind: str) -> dict[str, Tensor]:
    """A projection with its bias: `kind` is "into heads" (q, k, v), "out of heads" (o), "into" or "out of" a hidden
    layer. `path` ends in our weight's name."""
    layout = {"q": "(N H) D -> D N H", "o": "D (N H) -> N H D", "into": "F D -> D F", "out": "D F -> F D"}[kind]
    bias = {"q": "(N H) -> N H"}.get(kind, "")
    where, _, own = path.rpartition(".")
    of_bias = f"{where}.b{own[1:]}" if own.startswith("w") else f"{path}_bias"
    return {path: Tensor(f"{name}.weight", layout), of_bias: Tensor(f"{name}.bias", bias)}


def layer_norms(**norms: str) -> dict[str, Tensor]:
    """Scales and biases, by our name of a norm, two underscores for its dot; theirs without its end."""
    ours = {name.replace("__", "."): theirs for name, theirs in norms.items()}
    found = {f"{name}.scale": Tensor(f"{theirs}.weight") for name, theirs in ours.items()}
    return found | {f"{name}.bias": Tensor(f"{theirs}.bias") for name, theirs in ours.items()}


def fused_by_head(name: str, head_dim: int, group: int) -> dict[str, Tensor]:
    """Queries, keys and values made by one projection, whose heads of keys have all that belongs to each side by side:
    its `group` of queries, then itself and its values."""
    found, first, total = {}, 0, (group + 2) * head_dim
    for letter, size in (("q", group * head_dim), ("k", head_dim), ("v", head_dim)):
        own = {"inner": ("X", first, total)}
        of_weight, of_bias = ((1, group), (0, group)) if letter == "q" else (None, None)
        found[f"attention.w{letter}"] = Tensor(f"{name}.weight", "(K X) D -> D K X", group=of_weight, **own)
        found[f"attention.b{letter}"] = Tensor(f"{name}.bias", "(K X) -> K X", group=of_bias, **own)
        first += size
    return found


def standard(**changes: str) -> dict[str, Tensor]:
    """The names of Llama's checkpoints, which most families share. `changes` are other names of norms."""
    norms = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    } | changes
    names = {
        "embedding": Tensor("model.embed_tokens.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
        "final_norm.scale": Tensor("model.norm.weight"),
    }
    names |= {f"{ours}.scale": Tensor(f"{LAYER}{theirs}.weight") for ours, theirs in norms.items()}
    for letter in "qkv":
        names |= linear(f"attention.w{letter}", f"{LAYER}self_attn.{letter}_proj", "q")
    names |= linear("attention.wo", f"{LAYER}self_attn.o_proj", "o")
    for part, kind in (("gate", "into"), ("up", "into"), ("down", "out")):
        names |= linear(f"mlp.{part}", f"{LAYER}mlp.{part}_proj", kind)
    return names


def gated(
    path: str, name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Tensor]:
    """The three products of a gated feed-forward layer without biases, or of each expert where {expert} is in the name:
    `path` and `name` are what comes before."""
    of = "E " if "{expert}" in name else ""
    return {
        f"{path}gate": Tensor(f"{name}{gate}.weight", f"F D -> {of}D F"),
        f"{path}up": Tensor(f"{name}{up}.weight", f"F D -> {of}D F"),
        f"{path}down": Tensor(f"{name}{down}.weight", f"D F -> {of}F D"),
    }


NUMBERED = {"gate": "w1", "up": "w3", "down": "w2"}  # as Mixtral's and others' files call those products


def experts(block: str, **products: str) -> dict[str, Tensor]:
    """A tensor for each expert, and the router; `products` as in `gated`."""
    router = {"mlp.router": Tensor(f"{LAYER}{block}.gate.weight", "E D -> D E")}
    return router | gated("mlp.", f"{LAYER}{block}.experts.{{expert}}.", **products)


_TOGETHER = re.compile(r"(.*experts\.)(?:gate_up_proj|down_proj)$")


def apart(names: Names) -> dict[str, Tensor]:
    """The same with a matrix for each expert where a family has those of a layer in one tensor, as llm-compressor takes
    them apart to round them. Experts with biases stay together."""
    found = dict(names)
    for path, tensor in names.items():
        where, own, bias = _TOGETHER.match(tensor.name), path.rpartition(".")[2], names.get(f"{path}_bias")
        if where and own in ("gate", "up", "down") and not (bias and "experts" in bias.name):
            layout = "D F -> E F D" if own == "down" else "F D -> E D F"
            name = f"{where[1]}{{expert}}.{own}_proj.weight"
            found[path] = Tensor(name, layout, numbers=tensor.numbers)
    return found


def renamed(name: str, changes: Iterable[tuple[str, str]]) -> str:
    """A tensor's name after each of the changes, (pattern, what comes in its place), in turn."""
    for pattern, to in changes:
        name = re.sub(pattern, to, name)
    return name


def in_pairs(names: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The weights of queries and keys where checkpoints keep the rotated dimensions, so many of each head, in adjacent
    pairs."""
    rotated = ("H", 0, size)
    paths = ("attention.wq", "attention.wk", "attention.bq", "attention.bk")
    return {path: dataclasses.replace(names[path], pairs=rotated) for path in paths}


def fused(names: Mapping[str, Tensor], name: str, sizes: Mapping[str, int], dim: int = 0) -> dict[str, Tensor]:
    """The same weights as parts of one tensor, one after the other along a dimension of theirs; sizes by our path."""
    first, found = 0, {}
    for path, size in sizes.items():
        found[path] = dataclasses.replace(names[path], name=name, part=(dim, first, first + size, 1))
        first += size
    return found
