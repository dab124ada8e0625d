"""Several adapters (LoRA) beside the weights that are served. Each is a part of the rank of the same two arrays at
every projection, so that one that comes later is compiled for nothing. Which one a request has is a number in its rows
of a batch (programs.py); what a projection makes of it is layers/param.py's."""

import dataclasses
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm import peft
from shardlm.errors import ShardlmError
from shardlm.layers.lora import TARGETS, A, LoraConfig
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import Found, check_stands, check_trained, describe, rank_of, trained
from shardlm.rules import Rules
from shardlm.serve.adapter_table import AdapterTable, LoRARequest, LoRARequests, Room
from shardlm.serve.followers import everywhere
from shardlm.serve.layers import apart, split
from shardlm.serve.live_weights import differences_of
from shardlm.serve.runner import Runner
from shardlm.state import ModelDef, at_rest, is_adapter, joined
from shardlm.vision.trained import part_of

Tree = Any
Parts = dict[tuple, np.ndarray]  # path of A or B -> [1, *inputs, own rank] or [1, own rank, *outputs], float32
USUAL_RANK = 16  # vLLM's default of max_lora_rank


@dataclasses.dataclass(frozen=True)
class Ready:
    """An adapter that was read: its arrays on the host, and on the devices of runners (runner.shape_of_part)."""

    parts: Parts
    placed: Mapping[Runner, Tree]


def load(
    table: AdapterTable, name: str, path: str, made: Ready, runners: Sequence[Runner], used: Collection[int]
) -> None:
    """One that is `ready`, into all runners, in place of the one of its name where there is one; `used` are the numbers
    that requests have, which go on with theirs. Raises ShardlmError without room."""
    new = table.entering(name, path, used)
    for runner in runners:  # one that came back meanwhile has nothing yet
        runner.write_adapter(made.placed.get(runner) or placed(made.parts, runner), new.number)
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
        made = ready(one.lora_path, engine)
        if name not in adapters:
            adapters.make_room(wanted)
        engine.load_adapter(name, one.lora_path, made)
    return [one.lora_name if one else "" for one in each]


def settled_rank(modules: Mapping[str, str | os.PathLike], rank: int | None) -> int:
    """Of the room for adapters: as given, or the largest of those that are loaded at first, at least USUAL_RANK. Raises
    ShardlmError where one of them is no adapter."""
    return rank or max([USUAL_RANK, *(_adapter(rank_of(path), path) for path in modules.values())])


def with_room(model: ModelDef, params: Tree, room: Room) -> tuple[ModelDef, Tree]:
    """The model with room for adapters at all its projections but those of routed experts, which are 0 until one is
    loaded; call under its mesh. Raises ShardlmError for a model that is an adapter itself."""
    if not room.count:
        return model, params
    refuse_own(model.execution.lora)
    made = ModelDef.make(model.config, executed(model.execution, room))
    held = flatten_dict(made.held_at_rest(jax.sharding.get_mesh()))
    empty = {p: jnp.zeros(s.shape, s.dtype, device=s.sharding) for p, s in held.items() if is_adapter(p)}
    return made, joined(unflatten_dict(empty), params)


def refuse_own(lora: LoraConfig) -> None:
    """Raises ShardlmError for a model that is an adapter itself, where there is to be room for others."""
    if lora.rank:
        raise ShardlmError(
            "the model is an adapter on a checkpoint, and there is to be room for others: serve the checkpoint, and "
            "give this one as one of lora_modules"
        )


def executed(execution: Execution, room: Room) -> Execution:
    """With room for adapters of all targets, of models with experts too, whose dense and shared layers may be trained
    (lora.targets). The factor alpha / rank is within each adapter's own B."""
    rank = room.count * room.rank
    lora = LoraConfig(rank, alpha=float(rank), targets=TARGETS) if rank else execution.lora
    return dataclasses.replace(execution, lora=lora, adapters=room.count)


def check(path: str | os.PathLike, base: Any, length: int, room: Room) -> None:
    """Whether an adapter fits a model of this architecture (opened.Found.source), from what its files say of it: none
    of its weights is read. Raises ShardlmError as `ready`."""
    fitting(path, apart(base.transformer()), base, length, room)


def fitting(
    path: str | os.PathLike, served: TransformerConfig, base: Any, length: int, room: Room
) -> tuple[Found, ModelDef]:
    """What a path names, and the model of it and nothing else, on one device. `served`: the model, its layers apart.
    Raises ShardlmError as `ready`."""
    if not room.count:
        raise ShardlmError(f"no room for the adapter {path}: start with enable_lora=True, max_loras=N")
    if _adapter(rank := rank_of(path), path) > room.rank:
        raise ShardlmError(
            f"the adapter {path} has rank {rank} and max_lora_rank={room.rank}; start with max_lora_rank={rank}"
        )
    found = describe(path, length, base)
    shape = found.source.transformer().without_mtp()
    if wrong := differences_of(shape, served.without_mtp()):
        raise ShardlmError(
            f"the adapter {path} is for another model than what is served: {wrong}. It stands on "
            f"{found.source.folder}; serve that, or leave this adapter out"
        )
    # Served on another folder they may stand on their checkpoint in few bits; in their own it has to be what it was.
    if isinstance(base, Pretrained) and os.path.realpath(base.folder) == os.path.realpath(found.source.folder):
        check_stands(found)
    if part_of(found) != "frozen":
        raise ShardlmError(
            f"the adapter {path} was trained beside an encoder of images (train.encoder={part_of(found)}), and others "
            f"would see by that too; write both whole (python -m launch.convert --checkpoint={path} --output=FOLDER "
            "--merge) and serve that, or serve the run itself"
        )
    model = _alone(shape, found.lora)
    check_trained(found, model)
    return found, model


@functools.lru_cache(maxsize=8)
def _alone(shape: TransformerConfig, lora: LoraConfig) -> ModelDef:
    with jax.sharding.use_abstract_mesh(MeshSpec().abstract()):
        return ModelDef.make(shape, Execution(Rules.make("replicated", MeshSpec()), lora=lora))


def ready(path: str | os.PathLike, engine: Any) -> Ready:
    """An adapter for `load` into an engine, which may run meanwhile: nothing is compiled, and of what it has only the
    places are looked at.

    Raises: ShardlmError for a path that is no adapter, another architecture, a larger rank, tensors that are missing,
      left over or of another shape, or an adapter of what has no room for one.
    """
    parts = read(path, engine.runner, engine.adapters)
    return Ready(parts, {runner: placed(parts, runner) for runner in engine.runners})


def read(path: str | os.PathLike, runner: Runner, table: AdapterTable) -> Parts:
    """An adapter's two arrays at every projection of the model that `runner` serves, on the host; its alpha / rank is
    within B. Raises as `ready`."""
    model, length = (runner.model.config, runner.config.max_model_len) if table.room.count else (None, 0)
    found, alone = fitting(path, model, table.base, length, table.room)
    if found.adapters:
        flat = peft.arrays(alone, found.adapters, found.source)
    else:
        if jax.process_count() > 1:
            raise ShardlmError(
                f"the adapter {path} is a run, and several processes serve the model: write it as a folder of PEFT "
                f"(python -m launch.convert --checkpoint={path} --output=FOLDER), and give that"
            )
        mesh = MeshSpec().build([runner.mesh.devices.flat[0]])
        with jax.set_mesh(mesh):
            tree = trained(found, alone, jax.tree.map(lambda s: at_rest(s, mesh), alone.shapes), mesh)
        flat = {path: np.asarray(a) for path, a in flatten_dict(tree).items()}
    scale = found.lora.alpha / found.lora.rank
    flat = flatten_dict({"segments": split(unflatten_dict(flat)["segments"])})
    return {path: a * np.float32(1.0 if path[-1].endswith(A) else scale) for path, a in flat.items()}


def placed(parts: Parts, runner: Runner) -> Tree:
    """An adapter on the devices of a runner, for `write_adapter`, as wide as there is room for one. Projections that it
    has none of get zeros."""
    return everywhere(runner, "placed", (parts,), lambda: _placed(parts, flatten_dict(runner.shape_of_part)))


def _placed(parts: Parts, shapes: Mapping[tuple, jax.ShapeDtypeStruct]) -> Tree:
    made = {}
    for path, shape in shapes.items():
        whole = np.zeros(shape.shape, shape.dtype)
        if path in parts:
            whole[tuple(map(slice, parts[path].shape))] = parts[path]
        made[path] = jax.make_array_from_callback(shape.shape, shape.sharding, whole.__getitem__, dtype=shape.dtype)
    return unflatten_dict(jax.block_until_ready(made))


def _adapter(rank: int, path: str | os.PathLike) -> int:
    if not rank:
        raise ShardlmError(f"{path} is a whole model and no adapter; give adapters of PEFT, or a run with lora.rank")
    return rank
