"""Weights between Hugging Face folders and parameter trees, each device reading its own slices only. What tensors are
called is the architectures' business (models/naming.py), what files hold hf_files.py's."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.errors import ShardlmError
from shardlm.held_weights import (
    ByResult,
    Held,
    Index,
    InGroups,
    Part,
    Plain,
    View,
    as_read,
    assembled,
    check_kept,
    held_weights,
    numbers_of,
    paths_of,
    scales_of,
)
from shardlm.hf_files import Folder, Planned, Stored
from shardlm.hf_quantised import dequantised
from shardlm.layers.block import BlockConfig
from shardlm.models import registry
from shardlm.models.expert_tensors import one_by_one
from shardlm.models.naming import LAYER, OF_MODULES, Names, Tensor, apart, join, read, shape_of, stacked
from shardlm.models.tensor_pieces import check_told, cuts, joined
from shardlm.models.transformer_config import TransformerConfig
from shardlm.state import ModelDef
from shardlm.text_names import text_name
from shardlm.unread import Unread
from shardlm.weight_copies import Readable, check_copies, copies

Tree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its tensor, and the layer that each index of its stack dimension is; () where it has none."""

    path: tuple
    tensor: Tensor
    layers: tuple[int, ...]

    @property
    def block(self) -> tuple:
        """Where the weights are that may share a tensor with this one."""
        if not self.layers:
            return ()
        return self.path[:4] if self.path[0] == "segments" else self.path[:1]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its layers as their names count them."""
        return tuple(self.tensor.numbers[n] for n in self.layers) if self.tensor.numbers else self.layers

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """The tensors of theirs that it is read from."""
        layers = self.numbers or (0,)
        experts = range(shape[bool(self.layers)]) if self.tensor.per_expert() else (0,)
        return [self.tensor.name.format(layer=layer, expert=e) for layer in layers for e in experts]


def leaves(config: TransformerConfig, shapes: Tree, names: Callable[[BlockConfig], Names]) -> list[Leaf]:
    """All parameters of a model with these shapes. Raises ShardlmError for one that the architecture does not name."""
    found = []
    first = list(itertools.accumulate((s.num_layers for s in config.segments), initial=0))
    for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        keys = tuple(key.key for key in path)
        layers, own, block = (), keys, next(config.blocks())
        if keys[0] == "segments":
            _, number, _, offset, *rest = keys
            segment, own = config.segments[number], tuple(rest)
            period = len(segment.pattern)
            block = segment.pattern[offset]
            layers = tuple(first[number] + repeat * period + offset for repeat in range(segment.repeats))
        elif keys[0] == "mtp":
            layers, block = tuple(range(config.num_layers, config.num_layers + config.mtp.depth)), config.mtp.block
            own = keys[2:] if keys[1] == "block" else keys
        dotted = ".".join(map(str, own))
        known = names(block)
        if dotted not in known:
            raise ShardlmError(f"this architecture's checkpoints have no place for {dotted}; it cannot be exchanged")
        tensor = known[dotted]
        if keys[0] == "mtp" and OF_MODULES in known:
            tensor = dataclasses.replace(tensor, name=tensor.name.replace(LAYER, known[OF_MODULES].name))
            layers = tuple(range(config.mtp.depth))
        found.append(Leaf(keys, tensor, layers))
    return found


def load(
    model: ModelDef, folder: Folder, shapes: Tree, progress: Callable[[int, int], None] = lambda done, total: None
) -> Tree:
    """The parameters of a checkpoint, in the dtypes and at rest where `shapes` (with shardings on real devices) says;
    what is in few bits there is made so on the host, slice by slice. `progress` is called with (bytes read, bytes to
    read) of the files.

    Layers that predict further tokens are left alone by a model without them. Raises ShardlmError for tensors that are
    missing, left over, of another shape, or copies that differ from what they repeat, all named, and for one that is
    not held as it is to be served.
    """
    reader = _Reader.of(model, folder, shapes, progress)
    flat, made = flatten_dict(shapes), {}
    for leaf, one, parts in reader.work:
        made |= reader.arrays(leaf, one, {path: flat[path] for path in paths_of(leaf.path, flat)}, parts)
    return unflatten_dict(made)


def unread(model: ModelDef, folder: Folder, shapes: Tree) -> Tree:
    """The same as `Unread`, for `shapes` on one device: weights in few bits as the numbers that they stand for, in the
    compute dtype. Raises as `load`."""
    reader, made = _Reader.of(model, folder, shapes, lambda done, total: None), {}
    for leaf, one, (part,) in reader.work:
        dtype = one.whole.dtype if isinstance(one, Plain) else model.execution.dtype
        read = functools.partial(reader.read, leaf, one)
        fetch = functools.partial(numbers_of, one, part, read=read, dtype=dtype)
        made[leaf.path] = Unread(one.whole.shape, jnp.dtype(dtype), fetch)
    return unflatten_dict(made)


def unpacked(model: ModelDef) -> Tree:
    """The shapes of the weights of a model that has adapters, without those and as a checkpoint has them."""
    return as_read(held_weights(model.frozen_shapes, model.execution.weights, model.groups))


def own_tensors(folder: Folder) -> dict[str, Readable]:
    """The language model's tensors, by the names of a checkpoint of it alone."""
    called = text_name(folder.config)
    named = ((called(name), stored) for name, stored in dequantised(folder.tensors, folder.config).items())
    found = {name: stored for name, stored in named if name is not None}
    return one_by_one(registry.text_config(folder.config), joined(found))


def names_in(folder: Folder, stored: Collection[str], config: TransformerConfig) -> Callable[[BlockConfig], Names]:
    """What a folder with tensors of these names calls the weights of a block."""

    def of(block: BlockConfig) -> Names:
        known = registry.names(folder.config, config, block)
        single = {path: tensor for path, tensor in apart(known).items() if known[path] != tensor}
        layers = range(config.num_layers)
        here = any(t.name.format(layer=layer, expert=0) in stored for t in single.values() for layer in layers)
        return {**known, **single} if here else known

    return of


def _check(
    config: TransformerConfig, named: list[Leaf], shapes: Tree, stored: Mapping[str, Stored], head: str, hint: str = ""
) -> None:
    """Refuses what does not fit, with all names and a hint. A head that repeats the embedding may be there."""
    tied = config.tie_embeddings
    flat = jax.tree.leaves(shapes)
    needed: dict[str, tuple[int, ...]] = {}
    for group in by_tensor(named, flat).values():
        shape = their_shape(group)
        for name in {name for leaf, ours in group for name in leaf.names(ours)}:
            needed[name] = shape
    extra = [name for name in stored if name not in needed and not (tied and name == head)]
    extra = [name for name in extra if not _bias_of_zeros(name, stored)]
    missing = [name for name in needed if name not in stored]
    wrong = [
        f"{name} is {list(stored[name].shape)} and the model needs {list(shape)}"
        for name, shape in needed.items()
        if name in stored and stored[name].shape != shape
    ]
    problems = [*wrong, *(f"{name} is missing" for name in missing), *(f"{name} is not known" for name in extra)]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        advice = f". {hint}" if hint else ""
        raise ShardlmError(f"the checkpoint does not fit its config.json: {'; '.join(problems[:8])}{more}{advice}")


def _bias_of_zeros(name: str, stored: Mapping[str, Stored]) -> bool:
    """Whether it is what AutoGPTQ wrote beside all packed weights, also of models without biases."""
    weight = stored.get(f"{name.removesuffix('.bias')}.weight")
    packed = weight is not None and not isinstance(weight, Stored)
    return packed and name.endswith(".bias") and not stored[name].read(...).any()


def _further(config: TransformerConfig, options: Mapping[str, Any], stored: Mapping[str, Stored]) -> list[str]:
    """The tensors of the layers after the last, which predict the tokens after the next (DeepSeek V3, section 2.2 of
    https://arxiv.org/abs/2412.19437): as many as config.json says; or of modules with names of their own."""
    if modules := registry.modules(options):
        return [name for name in stored if name.startswith(modules.prefix)]
    count = registry.text_config(options).get("num_nextn_predict_layers") or 0
    layers = tuple(f"model.layers.{config.num_layers + i}." for i in range(count))
    return [name for name in stored if name.startswith(layers)]


def by_tensor(named: list[Leaf], flat: list) -> dict[str, list[tuple[Leaf, tuple[int, ...]]]]:
    """The leaves that share a tensor, by its name before layers and experts are filled in, segment by segment."""
    groups: dict[str, list] = {}
    for leaf, shape in zip(named, flat, strict=True):
        groups.setdefault(f"{leaf.block} {leaf.numbers[:1]} {leaf.tensor.name}", []).append((leaf, shape.shape))
    return groups


def _one(leaf: Leaf, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Our shape of one tensor of theirs: without the stack's dimension and, where each has its own, the experts'."""
    return shape[bool(leaf.layers) :]


def their_shape(group: list[tuple[Leaf, tuple[int, ...]]]) -> tuple[int, ...]:
    ones = [(leaf.tensor, _one(leaf, shape)[leaf.tensor.per_expert() :]) for leaf, shape in group]
    return shape_of([(without_experts(tensor), one) for tensor, one in ones])


def without_experts(tensor: Tensor) -> Tensor:
    """The layout of one expert's tensor."""
    if not tensor.per_expert():
        return tensor
    theirs, ours = tensor.layout.split("->")
    return dataclasses.replace(tensor, layout=f"{theirs}->{ours.replace('E ', '', 1)}")


def _sums_inputs(tensor: Tensor, held: ByResult) -> bool:
    """Whether what is summed over are the inputs of theirs, [results, inputs]: then a scale of a row is a result's."""
    shape = held.whole.shape[1:]
    return tensor.theirs(tensor.viewed(shape))[-1] == tensor.letters(shape)[: len(held.summed)]


def _bytes(stored: Mapping[str, Stored], leaf: Leaf, shape: tuple[int, ...], indices: list[Index]) -> float:
    """Bytes of the files that slices of a parameter take."""
    sizes = ([len(range(n)[cut]) for cut, n in zip(index, shape, strict=True)] for index in indices)
    return sum(map(math.prod, sizes)) * _each(stored, leaf)


def _each(stored: Mapping[str, Stored], leaf: Leaf) -> float:
    """Bytes of the files for one number, those of its scale included."""
    layer = leaf.numbers[0] if leaf.layers else 0
    one = stored[leaf.tensor.name.format(layer=layer, expert=0)]
    return one.nbytes / math.prod(one.shape)


@dataclasses.dataclass
class _Reader:
    """Reads parameters slice by slice, and tells how many bytes of the files are done. `work`: all of them, how they
    are held, and of what parts."""

    stored: Mapping[str, Stored]
    progress: Callable[[int, int], None]
    work: list[tuple[Leaf, Held, list[Part]]] = dataclasses.field(default_factory=list)
    total: float = 0.0
    done: float = 0.0

    @classmethod
    def of(cls, model: ModelDef, folder: Folder, shapes: Tree, progress: Callable[[int, int], None]) -> "_Reader":
        """Raises ShardlmError for a folder that does not fit (`load`)."""
        stored = own_tensors(folder)
        if not model.config.mtp:
            for name in _further(model.config, folder.config, stored):
                del stored[name]
        held = held_weights(shapes, model.execution.weights, model.groups)
        whole = as_read(held)
        names_of = names_in(folder, stored, model.config)
        named = leaves(model.config, whole, names_of)
        originals = {leaf.path: leaf.tensor.name for leaf in named if not leaf.layers}
        known = names_of(next(model.config.blocks()))
        repeated = {name: originals[ours,] for name, ours in copies(model.config, known) if name in stored}
        told = {tensor.name: tensor.told for tensor in known.values() if tensor.told}
        check_told(told, stored)
        own = {name: a for name, a in stored.items() if name not in repeated and name not in told}
        head = known["head"].name if "head" in known else "lm_head.weight"
        _check(model.config, named, whole, own, head, registry.otherwise_written(folder.config))
        check_copies(repeated, stored)
        reader = cls(stored, progress)
        for leaf in named:
            one = held[leaf.path]
            if isinstance(one, InGroups) and one.how.published:
                check_kept(one.how, {name: stored[name] for name in leaf.names(one.whole.shape)})
            elif isinstance(one, ByResult) and _sums_inputs(leaf.tensor, one):
                one = one.as_held(stored[name] for name in leaf.names(one.whole.shape))
            parts = one.parts(leaf.path, functools.cache(functools.partial(reader.scales, leaf, one)))
            reader.work.append((leaf, one, parts))
            indices = [part.index for part in parts] + [(slice(None),) * one.whole.ndim] * one.reads_twice
            reader.total += _bytes(stored, leaf, one.whole.shape, indices)
        return reader

    def arrays(self, leaf: Leaf, held: Held, shapes: Mapping[tuple, jax.ShapeDtypeStruct], parts: list[Part]):
        """{path: an array} of one parameter: the host holds one slice at a time, and devices that hold the same share
        one reading."""
        return assembled(shapes, parts, lambda part: self.read(leaf, held, part.index))

    def read(self, leaf: Leaf, held: Held, index: Index) -> list[np.ndarray]:
        """What a slice of a parameter is made of."""
        return [self._slice(leaf, view) for view in held.views(index)]

    def scales(self, leaf: Leaf, held: ByResult) -> np.ndarray:
        """Of all results, read layer by layer: [L, *made]."""
        whole = jax.ShapeDtypeStruct(held.whole.shape[1:], held.whole.dtype)
        every = (slice(None),) * len(whole.shape)
        return scales_of(held, (self._layer(leaf, n, View("read", whole, every)) for n in leaf.numbers))

    def _slice(self, leaf: Leaf, view: View) -> np.ndarray:
        if not leaf.layers:
            return self._layer(leaf, 0, view)
        layers, whole = leaf.numbers[view.index[0]], view.whole
        of_layer = view._replace(whole=jax.ShapeDtypeStruct(whole.shape[1:], whole.dtype), index=view.index[1:])
        return stacked(len(layers), (self._layer(leaf, layer, of_layer) for layer in layers))

    def _layer(self, leaf: Leaf, layer: int, view: View) -> np.ndarray:
        """What is read as numbers in the dtype of `view.whole`, else in its own."""
        tensor, plain, shape, index = leaf.tensor, without_experts(leaf.tensor), view.whole.shape, view.index

        def part(tensor: Tensor, shape: tuple[int, ...], index: Index, **which: int) -> np.ndarray:
            fetch = getattr(self.stored[tensor.name.format(layer=layer, **which)], view.name)
            a = read(tensor, shape, index, functools.partial(fetch, every=view.every) if view.every else fetch)
            return a.astype(view.whole.dtype) if view.name == "read" else a

        if tensor.per_expert():
            experts = range(*index[0].indices(shape[0]))
            one = stacked(len(experts), (part(plain, shape[1:], index[1:], expert=expert) for expert in experts))
        else:
            one = part(tensor, shape, index)
        if not view.every:
            self.done += one.size * _each(self.stored, leaf)
            self.progress(round(self.done), round(self.total))
        return one


def planned(
    config: TransformerConfig,
    params: Tree,
    names: Callable[[BlockConfig], Names],
    dtype: np.dtype,
    rounds: Collection[str] = (),
) -> Iterator[Planned]:
    """The tensors of a checkpoint of these parameters, arrays or `Unread`, in `dtype`; each is brought to the host when
    it is written. `rounds`: the names of those that will be rounded, which are float32."""
    flat = jax.tree.leaves(params)
    named = leaves(config, params, names)
    arrays = {leaf.path: a for leaf, a in zip(named, flat, strict=True)}
    for group in by_tensor(named, flat).values():
        shape = their_shape(group)
        first, ours = group[0]
        own = np.dtype(first.tensor.dtype or dtype)
        if first.tensor.pieces:
            yield from _in_pieces(first.tensor, arrays[first.path], own)
            continue
        for place, layer in enumerate(first.numbers or (0,)):
            for expert in range(_one(first, ours)[0]) if first.tensor.per_expert() else (0,):
                name = first.tensor.name.format(layer=layer, expert=expert)
                held = np.dtype("float32") if name in rounds else own

                def make(group=group, place=place, expert=expert, dtype=held) -> np.ndarray:
                    parts = []
                    for leaf, _ in group:
                        at = (place,) * bool(leaf.layers) + (expert,) * leaf.tensor.per_expert()
                        parts.append((without_experts(leaf.tensor), _on_host(arrays[leaf.path], at, dtype)))
                    return join(parts)

                yield Planned(name, held, shape, make, name in rounds)
    known = names(next(config.blocks()))
    for tensor in (tensor for tensor in known.values() if tensor.told):
        own = np.dtype(tensor.dtype)
        yield Planned(tensor.name, own, (len(tensor.told),), functools.partial(np.array, tensor.told, own))
    of_all = {leaf.path: leaf for leaf in named if not leaf.layers}
    for name, ours in copies(config, known):
        leaf, a = of_all[ours,], arrays[ours,]

        def repeat(leaf=leaf, a=a) -> np.ndarray:
            return join([(leaf.tensor, _on_host(a, (), dtype))])

        yield Planned(name, dtype, shape_of([(leaf.tensor, a.shape)]), repeat)


def _in_pieces(tensor: Tensor, a: jax.Array | np.ndarray | Unread, dtype: np.dtype) -> Iterator[Planned]:
    """The tensors that a checkpoint has in place of one that is ours as it lies."""
    assert not tensor.layout, "no layout but ours is written in pieces"
    pattern, count = tensor.pieces
    for piece, first, stop in cuts(a.shape[0], count):

        def make(first=first, stop=stop) -> np.ndarray:
            if isinstance(a, Unread):
                return a.fetch((slice(first, stop), *(slice(0, n) for n in a.shape[1:]))).astype(dtype)
            return np.asarray(a[first:stop]).astype(dtype)

        yield Planned(pattern.format(piece=piece), dtype, (stop - first, *a.shape[1:]), make)


def _on_host(a: jax.Array | np.ndarray | Unread, at: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return a.part(at, dtype) if isinstance(a, Unread) else np.asarray(a[at]).astype(dtype)
