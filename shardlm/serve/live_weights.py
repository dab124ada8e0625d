"""New weights for a model that is served: read from another checkpoint of it, or taken from whoever trains it, and put
into the form that the compiled programs take. What does not fit is refused here, before the engine sees it."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.errors import ShardlmError
from shardlm.held_weights import Plain, held_weights, made_of
from shardlm.layers.lora import LoraConfig
from shardlm.layers.param import MADE_FIRST, SCALE
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import describe, load
from shardlm.ops.rope import STRETCHED, Rope
from shardlm.ops.weight_format import AsPublished
from shardlm.optim import ENCODER
from shardlm.published_weights import takes_no
from shardlm.serve.alike import of_files
from shardlm.serve.followers import everywhere
from shardlm.serve.layers import apart, lying, plain_shapes, split
from shardlm.serve.runner import Runner
from shardlm.serve.speculation.draft_model import DraftModelProposer
from shardlm.serve.speculation.eagle import EagleProposer
from shardlm.serve.speculation.eagle_files import describe_head
from shardlm.serve.speculation.eagle_files import read as read_head
from shardlm.state import ModelDef, is_adapter

Tree = Any
SHOWN = 4  # differences that a message names


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is served, whose weights are to be replaced: its parameters, its mesh, and the longest row; of a
    head that drafts, also what it reads of the model and which parameters are that one's."""

    model: ModelDef
    params: Tree
    mesh: MeshSpec
    length: int
    streams: tuple[int, ...] = ()
    shared: tuple[str, ...] = ()


def new_weights(weights: Tree | str | os.PathLike, runner: Runner) -> Tree:
    """The parameters for `runner`, in the dtypes and at the places of those that it has; without those of several
    adapters, which stay.

    Args:
      weights: a checkpoint's path, as `opened.load` takes it; or a tree of arrays, stacked as training has them
        (`TrainState.params`) or with their layers apart. The tree's own arrays are left as they are. Modules that
        predict further tokens are taken where they are served.

    Raises: ShardlmError for a path that is none, another architecture, shapes that differ, or memory that is too small
      for both. The runner goes on with what it has.
    """
    served = Served(runner.model, runner.params, runner.spec, runner.config.max_model_len)
    return _in_all_processes("new_weights", weights, served, runner)


def new_draft(weights: Tree | str | os.PathLike | None, runner: Runner) -> Tree | None:
    """As new_weights, for the draft model or the head that drafts. None stays None: the draft model stays, and what it
    says is verified. Raises ShardlmError where none is served, too."""
    if weights is None:
        return None
    if not isinstance(runner.proposer, DraftModelProposer | EagleProposer):
        raise ShardlmError(
            "draft: no draft model is served whose weights could be replaced; leave it out, or start with "
            "speculative_config={'model': ...}"
        )
    own = Served(runner.proposer.model, runner.proposer_params, runner.spec, runner.config.max_model_len)
    if isinstance(runner.proposer, EagleProposer):
        streams, mesh = runner.model.execution.handed_out, dataclasses.replace(own.mesh, pipeline=1)
        own = dataclasses.replace(own, mesh=mesh, streams=streams, shared=runner.proposer.shared)
    return _in_all_processes("new_draft", weights, own, runner)


def _in_all_processes(name: str, weights: Tree | str | os.PathLike, served: Served, runner: Runner) -> Tree:
    path = isinstance(weights, str | os.PathLike)
    if runner.followers and runner.spec.pipeline > 1:
        raise ShardlmError(
            "pipeline stages in several processes take no new weights while they serve: start them again with these, "
            "or split the model by tensor and expert alone"
        )
    if runner.followers and not path:
        raise ShardlmError(
            "these weights are arrays of one process, and several serve the model, each a part of it: write them as a "
            "checkpoint that all can read, and give its path"
        )
    weights = os.fspath(weights) if path else weights
    told = (weights, of_files(weights)) if runner.followers else ()
    return everywhere(runner, name, told, lambda: in_memory(lambda: _replacing(weights, served), served.params))


def _replacing(weights: Tree | str | os.PathLike, served: Served) -> Tree:
    if isinstance(weights, str | os.PathLike):
        return fitted(read(weights, served), served, release=True)
    return fitted(weights, served)


def in_memory(make: Callable[[], Tree], old: Tree) -> Tree:
    """What `make` makes. Raises ShardlmError where it has no room beside the old weights."""
    try:
        return make()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = sum(a.nbytes for a in jax.tree.leaves(old)) / 2**30
        raise ShardlmError(
            f"the new weights do not fit into memory beside those that are served ({needed:.2f} GiB over all devices): "
            "start the server with a lower gpu_memory_utilization"
        ) from None


def read(path: str | os.PathLike, served: Served) -> Tree:
    """The weights of another checkpoint of the same architecture, held as those that are served. It is compared before
    its weights are read."""
    model = served.model
    if served.streams:
        return _read_head(path, served)
    found = describe(path, served.length)
    execution = model.execution
    if found.run and execution.weights != "dtype" and jax.process_count() > 1:  # it is put together on all devices
        raise ShardlmError(
            f"{path} is a run, and what several processes serve is in few bits: write it as a folder (python -m "
            f"launch.convert --checkpoint={path} --output=FOLDER), and give that"
        )
    mtp, shape = model.config.mtp is not None, found.source.transformer()
    shape = shape if mtp else shape.without_mtp()
    lora = LoraConfig() if execution.adapters else execution.lora
    if wrong := differences_of(shape, model.config) or _some([*_differences(found.lora, lora, "lora.")]):
        raise ShardlmError(f"{path} is another architecture than what is served: {wrong}")
    return load(
        path,
        mesh=served.mesh,
        dtype=jnp.dtype(execution.dtype).name,
        decoding=True,
        quantization="dtype" if lora.rank else execution.weights,
        length=served.length,
        mtp=mtp,
    ).params


def _read_head(path: str | os.PathLike, served: Served) -> Tree:
    head, mesh = describe_head(path, served.length), jax.tree.leaves(served.params)[0].sharding.mesh
    same = head.streams.said in ((), served.streams)
    told = f"it reads the streams behind {head.streams.said} layers, served behind {served.streams}"
    if wrong := differences_of(head.shape, served.model.config) or ("" if same else told):
        raise ShardlmError(f"{path} is another head than what is served: {wrong}")
    with jax.set_mesh(mesh):
        return read_head(head, path, served.mesh, mesh, jnp.dtype(served.model.execution.dtype).name)[1]


def fitted(tree: Tree, served: Served, *, release: bool = False) -> Tree:
    """A tree of parameters with its layers apart, in the dtypes and at the places of those that are served: copies,
    which whoever gave the tree may donate afterwards, or with `release` the tree's own arrays as far as they will do.
    Raises ShardlmError where names or shapes differ, with both shapes."""
    theirs = {*served.shared, *(name.removesuffix(MADE_FIRST) for name in served.shared)}
    left = ({"mtp", ENCODER} - served.params.keys()) | theirs
    tree = {name: part for name, part in _apart(tree, release).items() if name not in left}
    old = {name: part for name, part in served.params.items() if name not in theirs}
    if served.model.execution.adapters:
        tree, old = (_without_adapters(params) for params in (tree, old))
    if served.model.execution.weights != "dtype" and not any(path[-1].endswith(SCALE) for path in flatten_dict(tree)):
        tree = _in_few_bits(tree, old, served.model)
    given, wanted = (plain_shapes(served.model, params) for params in (tree, old))
    _check(given, wanted)
    with jax.set_mesh(jax.tree.leaves(tree)[0].sharding.mesh):
        ours = flatten_dict(lying(served.model, tree, release=release))
    theirs = set() if release else set(flatten_dict(tree))
    placed = {
        path: jax.device_put(_cast(ours[path], own.dtype), own.sharding, may_alias=path not in theirs)
        for path, own in flatten_dict(old).items()
    }
    jax.block_until_ready(placed)
    return {**unflatten_dict(placed), **{name: served.params[name] for name in served.shared}}


def _in_few_bits(tree: Tree, old: Tree, model: ModelDef) -> Tree:
    """Weights as training has them, with layers apart, held as those that are served; made so on the host, a parameter
    at a time."""
    if isinstance(model.execution.weights, AsPublished):
        raise takes_no("other weights have")
    there, given = flatten_dict(old), flatten_dict(tree)
    flat = {
        path: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=there[path].sharding if path in there else None)
        for path, shape in plain_shapes(model, old).items()
    }
    held = held_weights(unflatten_dict(flat), model.execution.weights, model.groups)
    _check(given, {path: one.whole for path, one in held.items()})
    made: dict[tuple, jax.Array] = {}
    for path, one in held.items():
        made |= {path: given[path]} if isinstance(one, Plain) else made_of(path, one, np.asarray(given[path]), flat)
    return unflatten_dict(made)


def _check(given: Mapping[tuple, Any], wanted: Mapping[tuple, Any]) -> None:
    """Whether shapes and kinds are those that are served. Raises ShardlmError with both of some that are not."""
    wrong = [f"{_name(path)} is missing" for path in wanted.keys() - given.keys()]
    wrong += [f"{_name(path)} is not known" for path in given.keys() - wanted.keys()]
    both = [(path, given[path], wanted[path]) for path in wanted.keys() & given.keys()]
    wrong += [
        f"{_name(path)} is {list(a.shape)}, served is {list(b.shape)}" for path, a, b in both if a.shape != b.shape
    ]
    kinds = [(path, a, b) for path, a, b in both if _whole(a) != _whole(b)]
    wrong += [f"{_name(path)} is {a.dtype}, served is {b.dtype}" for path, a, b in kinds]
    if wrong:
        raise ShardlmError(f"these weights do not fit the model that is served: {_some(sorted(wrong))}")


def _apart(tree: Tree, release: bool) -> Tree:
    leaves = jax.tree.leaves(tree)
    if not isinstance(tree, dict) or "segments" not in tree or not all(isinstance(a, jax.Array) for a in leaves):
        raise ShardlmError("these weights are no tree of parameters; give TrainState.params, or a checkpoint's path")
    with jax.set_mesh(leaves[0].sharding.mesh):
        return {**tree, "segments": split(tree["segments"], release=release)}


def _without_adapters(params: Tree) -> Tree:
    return unflatten_dict({path: a for path, a in flatten_dict(params).items() if not is_adapter(path)})


def _cast(a, dtype) -> jax.Array:
    return a if a.dtype == dtype else a.astype(dtype)


def _whole(a) -> bool:
    return jnp.issubdtype(a.dtype, jnp.integer)


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def differences_of(shape: TransformerConfig, served: TransformerConfig) -> str:
    """Between a model as training has it and one that is served, with both values; "" without any."""
    return _some([*_differences(apart(shape), served)])


def _some(found: list[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _differences(a: Any, b: Any, name: str = "") -> Iterator[str]:
    """The fields in which two configurations differ, with both values."""
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            if isinstance(a, Rope) and field.name == "length" and a.kind not in STRETCHED:
                continue  # decides nothing: a run's is 0
            yield from _differences(getattr(a, field.name), getattr(b, field.name), f"{name}{field.name}.")
    elif dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b):
        yield f"{name.rstrip('.')} is a {type(a).__name__}, served is a {type(b).__name__}"
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{name}{i}.")
    elif isinstance(a, tuple) and isinstance(b, tuple):
        yield f"{name.rstrip('.')} has {len(a)} entries, served {len(b)}"
    elif a != b:
        yield f"{name.rstrip('.')} is {a!r}, served is {b!r}"
