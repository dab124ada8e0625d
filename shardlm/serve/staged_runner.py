"""A runner whose model is cut into pipeline stages: each program of runner.py's is a chain of programs here, one a
stage, with what leaves a stage copied to the next one's devices. Nothing is waited for: the host asks for chains far
ahead, the launcher of each stage starts its programs in turn, and the stage runs what has reached it.

Chunks follow each other through the stages. Rows that decode are dealt into as many groups as there are stages, whose
steps alternate: while a group's token is on its way, the stage runs the other groups.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.mesh import MeshSpec
from shardlm.serve import stage_drafts, stage_programs
from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.carry import alone, carry, is_here
from shardlm.serve.followers import told
from shardlm.serve.host_pages import Move
from shardlm.serve.image_encoder import ImageEncoder
from shardlm.serve.image_rows import shifts
from shardlm.serve.launcher import Later, Launcher, Part, launcher_on
from shardlm.serve.memory_copies import NO_COPIES, copier
from shardlm.serve.programs import ChunkRows
from shardlm.serve.runner import Runner
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.stage_groups import Groups
from shardlm.serve.stage_programs import StageRows, Steps
from shardlm.serve.stages import Place, part_of, together
from shardlm.serve.started import Call
from shardlm.serve.state import empty_stage, empty_state
from shardlm.state import ModelDef, at_rest

UNTRIED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}  # options of XLA


class StagedRunner(Groups, Runner):
    """As Runner, with a state of each stage."""

    def __init__(
        self,
        model: ModelDef,
        place: Place,
        config: RunnerConfig,
        like: "StagedRunner | None" = None,
        proposer: Proposer | None = None,
        image_encoder: ImageEncoder | None = None,
    ):
        """As Runner's. What proposes drafts is in the last stage, what reads images in the first."""
        self.stages = tuple(place.stages)
        self._whole = [NamedSharding(stage.mesh, PartitionSpec()) for stage in self.stages]
        self._here = [is_here(stage.mesh) for stage in self.stages]
        self._carries = [carry(self.stages[s - 1].mesh, stage.mesh) for s, stage in enumerate(self.stages)]
        self._fed: dict[tuple, tuple[jax.ShapeDtypeStruct, ...]] = {}  # what enters a stage, by program and stage
        super().__init__(model, (), self.stages[-1].mesh, config, proposer, place.draft, like, image_encoder)
        self._parts = list(place.params)

    @property
    def params(self) -> Any:
        return together(self._parts, self.stages)

    @functools.cached_property
    def _steps(self) -> list[list[jax.Array]]:
        """The number of each step, on the devices of each stage."""
        steps = [np.int32(i) for i in range(self.config.decode_steps)]
        return [self._on(s, steps) for s in range(len(self.stages))]

    def _on(self, s: int, arrays: Any) -> Any:
        """Arrays of the host on the devices of a stage; None where it is in other processes."""
        return jax.device_put(arrays, self._whole[s]) if self._here[s] else None

    def _make_launchers(self) -> tuple[Launcher, ...]:
        """One a stage, so that one that waits for its devices keeps no other from starting. Of several processes one
        for all: what one sends to another has its turn among their programs, the same in both."""
        if jax.process_count() > 1:
            return (launcher_on(self.platform),) * len(self.stages)
        return tuple(launcher_on(self.platform) for _ in self.stages)

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        """As Runner's; where stages are in several processes each compiles its own. Processes that share a stage have
        to make the same of it without having tried the same kernels out, or their collectives could differ in order
        (https://github.com/openxla/xla/issues/7716). Untried, matmuls of XLA's own are left at 16 x 16 numbers a block,
        8 bytes read at a time and none ahead (compiled), and cuBLAS has its own choice."""
        if jax.process_count() == 1 or self.platform == "cpu":
            return super()._options
        shared = any(0 < len(stage.mesh.local_devices) < stage.mesh.size for stage in self.stages)
        return super()._options | alone(self.platform) | (UNTRIED if shared else {})

    @property
    def spec(self) -> MeshSpec:
        return dataclasses.replace(super().spec, pipeline=len(self.stages))

    def _cut(self, params: Any) -> list[Any]:
        return [part_of(params, stage) for stage in self.stages]

    def _write(self, s: int, part: Any, number: int) -> None:
        if self._here[s]:
            super()._write(s, part, number)

    def _state_makers(self) -> tuple[Callable[[], Any], ...]:
        """Of the pages of each stage; of the last one with its slots, of the first with what images are read to."""
        config, makers = self.config, []
        for stage in self.stages:
            sizes = (stage.layout(config.layout), config.page_size)
            seen = self.image_encoder.vectors if self.image_encoder and stage.first else None
            make = functools.partial(empty_stage, stage.model, *sizes, seen)
            if stage.last:
                drafts = self.proposer.empty if self.proposer else tuple
                make = functools.partial(empty_state, stage.model, *sizes, config.max_rows, drafts)
            makers.append(jax.jit(make))
        return tuple(makers)

    def _shape_of_empty(self) -> list[Any]:
        return [self._shaped(make, stage.mesh) for stage, make in zip(self.stages, self._makers, strict=True)]

    def _empty(self) -> list[Any]:
        states = self._shape_of_empty()
        for s, stage in enumerate(self.stages):
            if self._here[s]:
                states[s] = self._new(self._makers[s], stage.mesh)
        return states

    def allocate(self) -> None:
        for (_, s), shapes in self._fed.items():
            self._carries[s].compile(shapes)
        super().allocate()

    # Programs: the stage is last in the key.

    def _own(self, s: int) -> Any:
        """The parameters of a stage, in the last one with the proposer's."""
        return (self._parts[s], self.proposer_params) if self.proposer and self.stages[s].last else self._parts[s]

    @property
    def _drafting(self) -> Any:
        """The parameters of what proposes; of modules of the model they are the last stage's."""
        return self._parts[-1] if self.proposer and self.proposer_params is None else self.proposer_params

    @property
    def _decoding(self) -> Steps:
        most = self.config.decode_steps
        if self.proposer:
            begin = functools.partial(stage_drafts.begin, self.proposer, most)
            last_step = functools.partial(stage_drafts.last_step, self.proposer)
            return Steps(begin, stage_drafts.step, last_step, stage_programs.end)
        begin = functools.partial(stage_programs.begin, most)
        return Steps(begin, stage_programs.step, stage_programs.last_step, stage_programs.end)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Rows of a group's programs."""
        most = -(-self.config.max_rows // len(self.stages))
        return tuple(sorted({min(size, most) for size in self.config.decode_sizes}))

    def _shapes(self) -> Mapping[Any, tuple[Callable, tuple]]:
        """The stage is last in each key."""
        work = self._edits_of_last() | self._writers() | self._copiers() | self._movers() | self._looks()
        for rows in self.group_sizes:
            work |= self._step_shapes(self._decoding, self._decoded((), rows))
        for key, how in self.config.chunk_programs.items():
            work |= self._chunk_shapes(*key, how)
        return {key: one for key, one in work.items() if self._here[key[-1]]}

    @property
    def _states(self) -> list[tuple[Any, Mesh]]:
        return [(state, stage.mesh) for state, stage in zip(self._state, self.stages, strict=True)]

    def _copiers(self) -> dict[Any, tuple[Callable, tuple]]:
        rules, work = self.model.execution.rules, {}
        for s in self._copying:
            stage = self.stages[s]
            copy = copier(stage.layout(self.config.layout), rules, *(self._copied_drafts if stage.last else ()))
            work["copies", s] = copy, ((), self._state[s], *NO_COPIES)
        return work

    @functools.cached_property
    def _copying(self) -> list[int]:
        """Stages some of whose layers remember texts."""
        if not self.config.snapshots:
            return []
        return [
            s
            for s, stage in enumerate(self.stages)
            if stage.layout(self.config.layout).memories or (stage.last and self._copied_drafts)
        ]

    def _looks(self) -> dict[Any, tuple[Callable, tuple]]:
        looks = self.image_encoder.shapes(self._state[0]) if self.image_encoder else {}
        return {(*key, 0): one for key, one in looks.items()}

    def _edits_of_last(self) -> dict[Any, tuple[Callable, tuple]]:
        last, edits = len(self.stages) - 1, self._edits()
        return {(key, last): (function, ((), self._state[-1], *rest)) for key, (function, rest) in edits.items()}

    def _step_shapes(self, steps: Steps, empty: StageRows) -> dict[Any, tuple[Callable, tuple]]:
        """Of rows that are described so."""
        last, rows = len(self.stages) - 1, len(empty.where)
        kept = (self._state[-1].slots, self._state[-1].drafts)
        with jax.set_mesh(self.mesh):
            _, held, entering = jax.eval_shape(steps.begin, self._drafting, kept, empty)
            held = jax.tree.map(lambda s: at_rest(s, self.mesh), held)
        stream = jax.ShapeDtypeStruct((*entering[0].shape, self.model.config.embed_dim), self.model.execution.dtype)
        work = {}
        for s, stage in enumerate(self.stages):
            heard = self._heard(s, entering[0].shape)
            entered = entering if stage.first else (stream, *entering[1:], *heard, *self._left(s, empty.seen))
            self._fed[rows, s] = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in entered)
            where, entered, step = self._shapes_on(s, (empty, entered, np.int32(0)))
            function = functools.partial(steps.last_step if stage.last else steps.step, stage)
            function = functools.partial(function, stage.layout(self.config.layout))
            state = self._state[s]
            donated = (state.pages, state.drafts, held) if stage.last else state
            work["step", rows, s] = function, (self._own(s), donated, where, entered, step)
        work["begin", rows, last] = steps.begin, (self._drafting, kept, where)
        work["end", rows, last] = steps.end, ((), kept, where, held[0])
        return work

    def _chunk_shapes(self, kind: str, size: tuple[int, int], how: dict[str, str]) -> dict[Any, tuple[Callable, tuple]]:
        work = {}
        rows = self._inputs.chunk_rows((), size, kind == "whole")
        for s, stage in enumerate(self.stages):
            last = functools.partial(stage_programs.last_chunk, proposer=self.proposer)
            function = last if stage.last else stage_programs.chunk
            own = self._shapes_on(s, rows if stage.last else StageRows.of(rows))
            entering = self._entering(s, rows)
            if not stage.first:
                self._fed[(kind, size), s] = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in entering)
            function = functools.partial(function, stage, stage.layout(self.config.layout), **how)
            work[kind, size, s] = function, (self._own(s), self._state[s], own, entering)
        return work

    def _shapes_on(self, s: int, arguments: Any) -> Any:
        """Of arrays of the host, whole on each device of a stage."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._whole[s]), arguments)

    def _entering(self, s: int, rows: ChunkRows) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What comes into a stage for chunks."""
        if self.stages[s].first:
            return self._shapes_on(s, (rows.tokens,))
        stream = jax.ShapeDtypeStruct((*rows.tokens.shape, self.model.config.embed_dim), self.model.execution.dtype)
        return self._shapes_on(s, (stream, *self._heard(s, rows.tokens.shape), *self._left(s, rows.seen)))

    def _heard(self, s: int, rows: tuple[int, int]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The streams that stages before this one hand out of so many tokens (stage_programs.heard_of)."""
        if not (count := self.stages[s].heard):
            return ()
        return (jax.ShapeDtypeStruct((*rows, count * self.model.config.embed_dim), self.model.execution.dtype),)

    def _left(self, s: int, places: np.ndarray | None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What is left of images' vectors for a stage but the first (stage_programs.left_of)."""
        deep = self.image_encoder.sight.deep if places is not None else 0
        if deep <= (before := self.stages[s].layers.start):
            return ()
        shape = (*places.shape, (1 + deep - before) * self.model.config.embed_dim)
        return (jax.ShapeDtypeStruct(shape, self.model.execution.dtype),)

    def _mesh_of(self, key: Any) -> Mesh:
        return self.stages[key[-1]].mesh

    # Batches.

    @told
    def _run(self, key: Any, *arguments) -> Later:
        if key in self.config.chunk_programs:
            return self._chunk(*key, *arguments)
        if key == "copies":
            return self._copied(*arguments)
        if key[0] == "look":
            return self._looked((*key, 0), *arguments)

        def call() -> list:
            if not self._here[-1]:
                return []
            run = self._programs[key, len(self.stages) - 1]
            made = run((), self._state[-1], *arguments)
            self._state[-1], *found = made if isinstance(made, tuple) else (made,)
            return found

        return self._launchers[-1].submit(call)

    def _looked(self, key: Any, *arguments) -> Later:
        def call() -> list:
            if self._here[0]:
                self._state[0] = self._programs[key](self.image_encoder.params, self._state[0], *arguments)
            return []

        return self._launchers[0].submit(call)

    def _chunk(self, kind: str, size: tuple[int, int], rows: ChunkRows) -> Later:
        def call(s: int, before: Later | None) -> list | None:
            carried = self._carries[s](before.result(), self._fed[(kind, size), s]) if before else None
            if not self._here[s]:
                return None
            entering = carried if before else self._on(s, (rows.tokens,))
            own = self._on(s, rows if self.stages[s].last else StageRows.of(rows))
            self._state[s], *found = self._programs[kind, size, s](self._own(s), self._state[s], own, entering)
            return found

        made = None
        for s, launcher in enumerate(self._launchers):
            made = launcher.submit(functools.partial(call, s, made))
        return made

    def _moved(self, s: int, moves: Sequence[Move]) -> None:
        if self._here[s]:
            self._state[s] = self._bundles[s].moved(self._programs, s, self._state[s], moves)

    def _copied(self, pairs: np.ndarray) -> Later:
        def call(s: int) -> None:
            if s in self._copying and self._here[s]:
                self._state[s] = self._programs["copies", s]((), self._state[s], pairs)

        return [launcher.submit(functools.partial(call, s)) for s, launcher in enumerate(self._launchers)][-1]

    def _decode(self, batch: ScheduledBatch, decodes: Sequence[tuple[int, Row]]) -> list[Call]:
        count = min(len(self.stages), len(decodes))
        dealt = [decodes[number::count] for number in range(count)]
        size = next(size for size in self.group_sizes if size >= len(dealt[0]))
        rows = [self._decoded([(row, batch.page_table[n]) for n, row in own], size) for own in dealt]
        found = self._in_turn(rows, batch.steps)
        return [
            Call(tuple(n for n, _ in own), Part(held, lambda held: held[1:]), chunk=False)
            for own, held in zip(dealt, found, strict=True)
        ]

    def _decoded(self, rows: Sequence[tuple[Row, np.ndarray]], size: int) -> StageRows:
        """As Inputs.decode_rows."""
        shift = shifts(self._inputs.sight, [row for row, _ in rows], size)
        return StageRows(self._inputs.decode_rows(rows, size).where, **shift)
