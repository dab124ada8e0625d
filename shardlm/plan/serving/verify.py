"""Compiles the engine's own programs for a plan's GPUs, none of which is there, and reads memory and collectives from
them. What is said here is "compiled"; the plan's own figures are "estimated"."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardlm.execution import execution_of
from shardlm.hlo.bill import Bill
from shardlm.hlo.collectives import collectives
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cudnn_heads import traced_for
from shardlm.ops.kv_format import KvFormat
from shardlm.ops.weight_format import WeightFormat
from shardlm.plan.apart import Failed, each_apart
from shardlm.plan.serving.fused import planned
from shardlm.plan.serving.search import ServingPlan
from shardlm.serve.adapter_table import NO_ROOM, Room
from shardlm.serve.adapters import executed
from shardlm.serve.layers import apart
from shardlm.serve.pool_size import with_split_pages
from shardlm.serve.runner import Runner
from shardlm.serve.speculation.build import DraftModel, by_modules, make_proposer
from shardlm.serve.staged_runner import StagedRunner
from shardlm.serve.stages import Place, stages_on
from shardlm.serve.submeshes import of_replica, submeshes
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest
from shardlm.topology import topology


class _Described:
    """A runner of shapes, on devices that are not there: it lowers programs and runs none."""

    def _new(self, make, mesh: Mesh) -> Any:
        with jax.set_mesh(mesh):
            return jax.tree.map(lambda s: at_rest(s, mesh), jax.eval_shape(make))

    def lower(self, key, function, arguments):
        whole = NamedSharding(self.mesh, jax.P())

        def described(a):
            host = isinstance(a, (np.ndarray, np.generic))
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) if host else a

        return super().lower(key, function, jax.tree.map(described, arguments))


class _Whole(_Described, Runner):
    pass


class _Staged(_Described, StagedRunner):
    pass


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program; bytes are of one device.

    what       decode or prefill
    rows, tokens  of its shape: tokens of each row
    stage      of the pipeline
    arguments  weights, pages, slots and inputs
    temporaries  while it runs, with results that do not take an argument's place
    estimated  the plan's figure for both together
    sent       axes joined by "+" -> kind -> bytes that one device sends, of decode in one step
    """

    what: str
    rows: int
    tokens: int
    stage: int
    arguments: int
    temporaries: int
    estimated: float
    sent: dict[str, dict[str, int]]

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries

    @property
    def difference(self) -> float:
        """Of the estimate, as a share of what is compiled."""
        return self.estimated / self.total - 1


@dataclasses.dataclass(frozen=True)
class VerifiedServing:
    """Compiled. `failure` says why there are no programs; "" where there are."""

    programs: tuple[Program, ...] = ()
    seconds: float = 0.0
    failure: str = ""

    def fits(self, limit: float) -> bool:
        """Whether there are programs, and every one has room in so many bytes (ServingMemory.limit)."""
        return not self.failure and all(program.total <= limit for program in self.programs)

    @property
    def fullest(self) -> Program:
        return max(self.programs, key=lambda program: program.total)


def runner_of(plan: ServingPlan) -> Runner:
    """The engine's runner of one replica on GPUs that are not there, with shapes for weights. Raises ShardlmError where
    nothing can be compiled for them, or without the packages of the kernels."""
    case, mesh = plan.case, of_replica(plan.case.engine.mesh)
    shape, gpus = case.model.shape, plan.gpus_per_replica
    hosts, own = divmod(gpus, case.cluster.gpus_per_host)
    grid = (hosts, case.cluster.gpus_per_host) if hosts and not own else (1, gpus)
    devices = topology(case.cluster.gpu, *grid)
    speculative, kv_cache = case.engine.speculative_config, case.engine.kv_cache_dtype
    if speculative and speculative.method == "mtp":
        shape = dataclasses.replace(shape, mtp=case.model.mtp)
    head = case.draft.head if case.draft else None
    streams = head.streams.of(shape.num_layers) if head else ()
    own = (case.weights, kv_cache, case.engine.room, planned(case), streams)
    model = with_split_pages(_described(shape, mesh.build(devices), case.dtype, *own), case.engine)
    meshes, sizes, draft = submeshes(mesh, devices)[0], plan.memory.sizes, by_modules(speculative, model)
    if case.draft:
        dtype = case.dtype if head else case.engine.dtype or case.draft.dtype
        own = _described(case.draft.shape, meshes[-1], dtype, case.draft_weights, kv_cache)
        draft = DraftModel(own, own.held_at_rest(meshes[-1]), None, streams, head.shared if head else ())
    stages = stages_on(model, meshes) if mesh.pipeline > 1 else []
    proposer, params = None, ()
    if speculative:
        draft = draft.within(stages[-1]) if draft and stages else draft
        proposer, params = make_proposer(speculative, draft, sizes, plan.memory.beside)
    if not stages:
        return _Whole(model, model.held_at_rest(meshes[0]), meshes[0], sizes, proposer, params)
    return _Staged(model, Place(stages, [stage.held for stage in stages], params), sizes, proposer=proposer)


def _described(
    shape: TransformerConfig,
    mesh: Mesh,
    dtype: str,
    weights: WeightFormat,
    kv_cache: KvFormat,
    room: Room = NO_ROOM,
    fused: int = 0,
    streams: tuple[int, ...] = (),
) -> ModelDef:
    """A model on devices that are not there, its layers apart, with room for adapters, whose projections of up to so
    many tokens are fused, and that hands out such streams."""
    device = mesh.devices.flat[0]
    with jax.set_mesh(mesh):
        rules = serving_rules(shape, MeshSpec(**mesh.shape), weights)
        execution = executed(execution_of(shape, rules, dtype, device, weights, LoraConfig()), room)
        more = {"kv_cache": kv_cache, "fused_rows": fused, "handed_out": streams}
        return ModelDef.make(apart(shape), dataclasses.replace(execution, **more))


def verify_apart(plans: Sequence[ServingPlan]) -> list[VerifiedServing]:
    """`verify_serving` of each, in processes of their own."""
    found = each_apart(verify_serving, [(plan,) for plan in plans])
    return [VerifiedServing(failure=one.why) if isinstance(one, Failed) else one for one in found]


def verify_serving(plan: ServingPlan) -> VerifiedServing:
    """Compiles, in this process, the largest decode program and the one of prompts that needs most, of the stages that
    hold most. Takes minutes for a large model. Raises ShardlmError where there is no such program."""
    started = time.perf_counter()
    runner = runner_of(plan)
    work = runner._shapes()
    found = []
    for what, key, rows, tokens, stage in _largest(plan):
        target = runner.mesh.devices.flat[0]  # whose kernels are chosen (tokamax, cuDNN)
        with jax.default_device(target), traced_for(target):
            compiled = runner.lower(key, *work[key]).compile()
        found.append(_program(plan, compiled, what, rows, tokens, stage, _twice(runner, stage)))
    return VerifiedServing(tuple(found), time.perf_counter() - started)


def _largest(plan: ServingPlan) -> list[tuple[str, Any, int, int, int]]:
    """(what, key of the runner, rows, tokens, stage)."""
    sizes, stages, each = plan.memory.sizes, plan.memory.stages, 1 + plan.case.engine.drafts
    if len(stages) == 1:
        key = stages[0].prefill_key
        return [("decode", ("decode", sizes.max_rows), sizes.max_rows, each, 0), ("prefill", key, *key[1], 0)]
    rows = -(-sizes.max_rows // len(stages))
    found = []
    for s in sorted({stages.index(plan.memory.fullest), len(stages) - 1}):
        key = stages[s].prefill_key
        found += [("decode", ("step", rows, s), rows, each, s), ("prefill", (*key, s), *key[1], s)]
    return found


def _twice(runner: Runner, stage: int) -> int:
    """Bytes on a device of what a head shares with the model in this stage: two arguments of a program, one array."""
    last = runner._parts[-1] if stage == len(runner._parts) - 1 else {}
    names = [name for name in getattr(runner.proposer, "shared", ()) if name in last]
    held = [last[name] for name in names]
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in held)


def _program(plan: ServingPlan, compiled, what: str, rows: int, tokens: int, stage: int, twice: int) -> Program:
    memory, own = compiled.memory_analysis(), plan.memory.stages[stage]
    beside = memory.output_size_in_bytes - memory.alias_size_in_bytes
    mesh = dataclasses.replace(of_replica(plan.case.engine.mesh), pipeline=1)
    bill = Bill.of(collectives(compiled.as_text(), mesh.sizes()))
    unused = own.slots if len(plan.memory.stages) > 1 and what == "decode" else 0  # their own programs have them
    return Program(
        what,
        rows,
        tokens,
        stage,
        memory.argument_size_in_bytes - twice,
        memory.temp_size_in_bytes + beside,
        own.held - unused + getattr(own, what),
        bill.by_axis(),
    )
