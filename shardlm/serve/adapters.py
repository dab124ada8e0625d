"""Several adapters (LoRA) beside the weights that are served. Each is a part of the rank of the same two arrays at
every projection, so that one that comes later is compiled for nothing. Which one a request has is a number in its rows
of a batch (programs.py); what a projection makes of it is layers/param.py's."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.errors import ShardlmError
from shardlm.layers.lora import A, LoraConfig
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.opened import Found, describe, trained
from shardlm.rules import Rules
from shardlm.serve.adapter_table import AdapterTable, LoRARequest, LoRARequests, Room
from shardlm.serve.layers import split
from shardlm.serve.live_weights import differences_of
from shardlm.serve.runner import Runner
from shardlm.state import ModelDef, at_rest, is_adapter, joined

Tree = Any
Parts = dict[tuple, np.ndarray]  # path of A or B -> [1, *inputs, own rank] or [1, own rank, *outputs], float32
USUAL_RANK = 16  # vLLM's default of max_lora_rank


def load(
    table: AdapterTable, name: str, path: str, parts: Parts, runners: Sequence[Runner], used: Collection[int]
) -> None:
    """One that `read` has read, into all runners, in place of the one of its name where there is one; `used` are the
    numbers that requests have, which go on with theirs. Raises ShardlmError without room."""
    new = table.entering(name, path, used)
    made = [written(runner.params, parts, new.number, table.room) for runner in runners]
    for runner, params in zip(runners, made, strict=True):
        runner.update_weights(params)
    table.enter(new)


def names_of(engine: Any, given: LoRARequests, count: int) -> list[str]:
    """The adapters of `count` prompts by name, "" for none, once they are loaded into an engine without requests; those
    that were used longest ago leave where there is no room. Raises ShardlmError, and then some may be loaded."""
    each = list(given) if isinstance(given, Sequence) else [given] * count
    if len(each) != count:
        raise ShardlmError(f"{count} prompts and {len(each)} in lora_request; give one, or one or None for each")
    if wrong := [one for one in each if not isinstance(one, LoRARequest | None)]:
        raise ShardlmError(f"lora_request has a {type(wrong[0]).__name__}; give shardlm.LoRARequest(name, 1, folder)")
    wanted: dict[str, LoRARequest] = {}
    for one in each:
        if one is not None and wanted.setdefault(one.lora_name, one) != one:
            raise ShardlmError(f"lora_request has two adapters of the name {one.lora_name!r}; give each its own")
    adapters: AdapterTable = engine.adapters
    if 0 < adapters.room.count < len(wanted):
        raise ShardlmError(
            f"{len(wanted)} adapters in one call and max_loras={adapters.room.count}; ask for fewer at a time, or make "
            f"LLM with max_loras={len(wanted)}"
        )
    for name, one in wanted.items():
        if name in adapters and adapters.of(name).path == one.lora_path:
            continue
        if not one.lora_path:
            adapters.of(name)
            continue
        parts = read(one.lora_path, engine.runner, adapters.room)
        if name not in adapters:
            adapters.make_room(wanted)
        engine.load_adapter(name, one.lora_path, parts)
    return [one.lora_name if one else "" for one in each]


def settled_rank(modules: Mapping[str, str | os.PathLike], rank: int | None) -> int:
    """Of the room for adapters: as given, or the largest of those that are loaded at first, at least USUAL_RANK. Raises
    ShardlmError where one of them is no adapter."""
    return rank or max([USUAL_RANK, *(_described(path).lora.rank for path in modules.values())])


def with_room(model: ModelDef, params: Tree, room: Room) -> tuple[ModelDef, Tree]:
    """The model with room for adapters at all its projections but those of routed experts, which are 0 until one is
    loaded; call under its mesh. Raises ShardlmError for a model that is an adapter itself."""
    if not room.count:
        return model, params
    if model.execution.lora.rank:
        raise ShardlmError(
            "the model is an adapter on a checkpoint, and there is to be room for others: serve the checkpoint, and "
            "give this one as one of lora_modules"
        )
    made = ModelDef.make(model.config, executed(model.execution, room))
    held = flatten_dict(made.held_at_rest(jax.sharding.get_mesh()))
    empty = {p: jnp.zeros(s.shape, s.dtype, device=s.sharding) for p, s in held.items() if is_adapter(p)}
    return made, joined(unflatten_dict(empty), params)


def executed(execution: Execution, room: Room) -> Execution:
    """With room for adapters of all targets. The factor alpha / rank is within each adapter's own B."""
    rank = room.count * room.rank
    lora = LoraConfig(rank, alpha=float(rank)) if rank else execution.lora
    return dataclasses.replace(execution, lora=lora, adapters=room.count)


def read(path: str | os.PathLike, runner: Runner, room: Room) -> Parts:
    """An adapter's two arrays at every projection of the model that `runner` serves, on the host; its alpha / rank is
    within B.

    Raises: ShardlmError for a path that is no adapter, another architecture, a larger rank, or an adapter of what has
      no room for one.
    """
    if not room.count:
        raise ShardlmError(f"no room for the adapter {path}: start with enable_lora=True, max_loras=N")
    found = _described(path, runner.config.max_model_len)
    if found.lora.rank > room.rank:
        raise ShardlmError(
            f"the adapter {path} has rank {found.lora.rank} and max_lora_rank={room.rank}; start with "
            f"max_lora_rank={found.lora.rank}"
        )
    shape = found.source.transformer().without_mtp()
    if wrong := differences_of(shape, runner.model.config):
        raise ShardlmError(f"the adapter {path} is for another model than what is served: {wrong}")
    mesh = MeshSpec().build([runner.mesh.devices.flat[0]])
    with jax.set_mesh(mesh):
        execution = Execution(Rules.make("replicated", MeshSpec()), lora=found.lora)
        model = ModelDef.make(shape, execution)
        tree = trained(found, model, jax.tree.map(lambda s: at_rest(s, mesh), model.shapes), mesh)
        tree = split(tree["segments"])
    flat, scale = flatten_dict({"segments": tree}), found.lora.alpha / found.lora.rank
    served = flatten_dict(runner.params).keys()
    if unknown := sorted({path[-1].removesuffix(A) for path in flat.keys() - served if path[-1].endswith(A)}):
        raise ShardlmError(f"the adapter {path} adapts {', '.join(unknown)}, for which a server has no room")
    return {path: np.asarray(a) * (1.0 if path[-1].endswith(A) else scale) for path, a in flat.items()}


def written(params: Tree, parts: Parts, number: int, room: Room) -> Tree:
    """Parameters that are served, with an adapter in the place of this number. Projections that it has none of get
    zeros."""
    flat = flatten_dict(params)
    for path in [path for path in flat if is_adapter(path)]:
        new = np.array(flat[path])
        # The rank is A's last dimension, and of B the one behind that of the layer.
        place = np.moveaxis(new, -1 if path[-1].endswith(A) else 1, 0)[(number - 1) * room.rank : number * room.rank]
        place[:] = 0
        if path in parts:
            own = np.moveaxis(parts[path], -1 if path[-1].endswith(A) else 1, 0)
            place[: len(own)] = own
        flat[path] = jax.device_put(new, flat[path].sharding)
    return jax.block_until_ready(unflatten_dict(flat))


def _described(path: str | os.PathLike, length: int = 0) -> Found:
    found = describe(path, length)
    if not found.lora.rank:
        raise ShardlmError(f"{path} is a whole model and no adapter; give adapters of PEFT, or a run with lora.rank")
    return found
