"""A runner whose model is cut into pipeline stages: each program of runner.py's is a chain of programs here, one a
stage, with what leaves a stage copied to the next one's devices. Nothing is waited for: the host starts chains far
ahead, and each stage runs what has reached it.

Chunks follow each other through the stages. Rows that decode are dealt into as many groups as there are stages, whose
steps alternate: while a group's token is on its way, the stage runs the other groups.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlm.generate import make_pages
from shardlm.mesh import MeshSpec
from shardlm.ops.batch_sampling import Sampled
from shardlm.serve import stage_programs
from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.programs import ChunkRows
from shardlm.serve.runner import Call, Runner, RunnerConfig
from shardlm.serve.stages import Place, part_of, together
from shardlm.serve.state import Slots, empty_state
from shardlm.state import ModelDef, at_rest


class StagedRunner(Runner):
    """As Runner, with a state of each stage."""

    def __init__(self, model: ModelDef, place: Place, config: RunnerConfig, like: "StagedRunner | None" = None):
        self.stages = tuple(place.stages)
        self._whole = [NamedSharding(stage.mesh, PartitionSpec()) for stage in self.stages]
        self._parts = place.params
        params = together(place.params, self.stages)
        super().__init__(model, params, self.stages[-1].mesh, config, like=like)

    @functools.cached_property
    def _steps(self) -> list[list[jax.Array]]:
        """The number of each step, on the devices of each stage."""
        steps = [np.int32(i) for i in range(self.config.decode_steps)]
        return [jax.device_put(steps, whole) for whole in self._whole]

    @property
    def spec(self) -> MeshSpec:
        return dataclasses.replace(super().spec, pipeline=len(self.stages))

    def update_weights(self, params: Any, draft: Any = None) -> None:
        """All parameters, each on the devices of its stage, as `params` has them. There are no drafts."""
        super().update_weights(params)
        self._parts = [part_of(params, stage) for stage in self.stages]

    def _state_makers(self) -> tuple[Callable[[], Any], ...]:
        """Of the pages of each stage; of the last one with its slots."""
        config, makers = self.config, []
        for stage in self.stages:
            sizes = (stage.layout(config.layout), config.page_size)
            make = functools.partial(make_pages, stage.model, *sizes)
            if stage.last:
                make = functools.partial(empty_state, stage.model, *sizes, config.max_rows)
            makers.append(jax.jit(make))
        return tuple(makers)

    def _empty(self) -> list[Any]:
        return [self._new(make, stage.mesh) for stage, make in zip(self.stages, self._makers, strict=True)]

    # Programs: the stage is last in the key.

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Rows of a group's programs."""
        most = -(-self.config.max_rows // len(self.stages))
        return tuple(sorted({min(size, most) for size in self.config.decode_sizes}))

    def _shapes(self) -> Mapping[Any, tuple[Callable, tuple]]:
        """Key -> (function, its arguments)."""
        last = len(self.stages) - 1
        edits = {key: what for key, what in super()._shapes().items() if key in ("counts", "allowed")}
        work = {(key, last): (function, ((), self._state[-1], *rest)) for key, (function, rest) in edits.items()}
        for rows in self.group_sizes:
            work |= self._decode_shapes(rows)
        for size in self.config.chunk_sizes:
            work |= self._chunk_shapes(size)
        return work

    def _decode_shapes(self, rows: int) -> dict[Any, tuple[Callable, tuple]]:
        last = len(self.stages) - 1
        slots = self._state[-1].slots
        begin = functools.partial(stage_programs.begin, self.config.decode_steps)
        with jax.set_mesh(self.mesh):
            empty = np.zeros((rows, 3 + self.config.row_pages), np.int32)
            _, own, found = jax.eval_shape(begin, (), slots, empty)
            own, found = jax.tree.map(lambda s: at_rest(s, self.mesh), (own, found))
        work = {}
        for s, stage in enumerate(self.stages):
            where, step = self._shapes_on(s, (empty, np.int32(0)))
            entering = self._entering(s, (rows,)) if stage.first else self._entering(s, (rows, 1))
            function = stage_programs.last_step if stage.last else stage_programs.step
            function = functools.partial(function, stage, stage.layout(self.config.layout))
            held = (self._state[s].pages, own, found) if stage.last else self._state[s]
            work["step", rows, s] = function, (self._parts[s], held, where, entering, step)
        work["begin", rows, last] = begin, ((), slots, where)
        work["end", rows, last] = stage_programs.end, ((), slots, where, own)
        return work

    def _chunk_shapes(self, size: tuple[int, int]) -> dict[Any, tuple[Callable, tuple]]:
        work = {}
        rows = self._chunk_rows((), size)
        for s, stage in enumerate(self.stages):
            function = stage_programs.last_chunk if stage.last else stage_programs.chunk
            where = rows if stage.last else rows.where
            own = self._shapes_on(s, where)
            function = functools.partial(function, stage, stage.layout(self.config.layout))
            work["chunk", size, s] = function, (self._parts[s], self._state[s], own, self._entering(s, size))
        return work

    def _shapes_on(self, s: int, arguments: Any) -> Any:
        """Of arrays of the host, whole on each device of a stage."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._whole[s]), arguments)

    def _entering(self, s: int, tokens: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """What comes into a stage for these rows (and columns) of tokens."""
        if self.stages[s].first:
            return jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=self._whole[s])
        shape = (*tokens, self.model.config.embed_dim)
        return jax.ShapeDtypeStruct(shape, self.model.execution.dtype, sharding=self._whole[s])

    def lower(self, key: Any, function: Callable, arguments: tuple) -> jax.stages.Lowered:
        jitted = self._jitted.setdefault(key, jax.jit(function, donate_argnums=1))
        with jax.set_mesh(self.stages[key[-1]].mesh), jax.default_matmul_precision(self._precision):
            return jitted.lower(*arguments)

    # Batches.

    def _run(self, key: Any, *arguments) -> list:
        if key[0] == "chunk":
            return self._chunk(key[1], *arguments)
        self._state[-1] = self._programs[key, len(self.stages) - 1]((), self._state[-1], *arguments)
        return []

    def _chunk(self, size: tuple[int, int], rows: ChunkRows) -> list:
        entering, found = rows.tokens, []
        for s, whole in enumerate(self._whole):
            entering = jax.device_put(entering, whole)
            where = jax.device_put(rows if self.stages[s].last else rows.where, whole)
            run = self._programs["chunk", size, s]
            self._state[s], *found = run(self._parts[s], self._state[s], where, entering)
            entering = found[0]
        return found

    def _decode(self, batch: ScheduledBatch, decodes: Sequence[tuple[int, Row]]) -> list[Call]:
        count = min(len(self.stages), len(decodes))
        groups = [self._begun(batch, decodes[number::count]) for number in range(count)]
        for i in range(batch.steps):
            for group in groups:
                self._step(group, i)
        last = len(self.stages) - 1
        for group in groups:
            slots = self._state[-1].slots
            (slots,) = self._programs["end", group.size, last]((), slots, group.where[-1], group.own)
            self._state[-1] = dataclasses.replace(self._state[-1], slots=slots)
        return [Call(group.rows, group.found) for group in groups]

    def _begun(self, batch: ScheduledBatch, decodes: Sequence[tuple[int, Row]]) -> "_Group":
        size = next(size for size in self.group_sizes if size >= len(decodes))
        rows = self._decode_rows([(row, batch.page_table[n]) for n, row in decodes], size)
        where = [jax.device_put(rows.where, whole) for whole in self._whole]
        begin = self._programs["begin", size, len(self.stages) - 1]
        slots, own, found = begin((), self._state[-1].slots, where[-1])
        self._state[-1] = dataclasses.replace(self._state[-1], slots=slots)
        return _Group(tuple(n for n, _ in decodes), size, where, own.last, own, found)

    def _step(self, group: "_Group", i: int) -> None:
        """Starts a step in all stages."""
        entering = group.token
        for s, stage in enumerate(self.stages):
            entering = jax.device_put(entering, self._whole[s])
            run, rest = self._programs["step", group.size, s], (group.where[s], entering, self._steps[s][i])
            if not stage.last:
                self._state[s], entering = run(self._parts[s], self._state[s], *rest)
                continue
            held = (self._state[s].pages, group.own, group.found)
            (pages, group.own, group.found), group.token = run(self._parts[s], held, *rest)
            self._state[s] = dataclasses.replace(self._state[s], pages=pages)


@dataclasses.dataclass
class _Group:
    """Rows whose steps run as one.

    rows   of the batch
    size   of the programs
    where  DecodeRows.where on each stage's devices
    token  that was sampled last, int32 [size]
    own    slots of the rows
    found  what was sampled so far
    """

    rows: tuple[int, ...]
    size: int
    where: list[jax.Array]
    token: jax.Array
    own: Slots
    found: Sampled
