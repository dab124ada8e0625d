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
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.generate import make_pages
from shardlm.mesh import MeshSpec
from shardlm.serve import stage_drafts, stage_programs
from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.carry import alone, carry, is_here
from shardlm.serve.followers import told
from shardlm.serve.host_pages import Move
from shardlm.serve.launcher import Later, Launcher, Part, launcher_on
from shardlm.serve.memory_copies import NO_COPIES, copier
from shardlm.serve.programs import ChunkRows
from shardlm.serve.runner import Runner
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.stage_programs import Steps
from shardlm.serve.stages import Place, part_of, together
from shardlm.serve.started import Call
from shardlm.serve.state import empty_state
from shardlm.state import ModelDef, at_rest

UNTRIED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}  # options of XLA


class StagedRunner(Runner):
    """As Runner, with a state of each stage."""

    def __init__(
        self,
        model: ModelDef,
        place: Place,
        config: RunnerConfig,
        like: "StagedRunner | None" = None,
        proposer: Proposer | None = None,
    ):
        """As Runner's. What proposes drafts is in the last stage."""
        self.stages = tuple(place.stages)
        self._whole = [NamedSharding(stage.mesh, PartitionSpec()) for stage in self.stages]
        self._here = [is_here(stage.mesh) for stage in self.stages]
        self._carries = [carry(self.stages[s - 1].mesh, stage.mesh) for s, stage in enumerate(self.stages)]
        self._fed: dict[tuple, tuple[jax.ShapeDtypeStruct, ...]] = {}  # what enters a stage, by program and stage
        super().__init__(model, (), self.stages[-1].mesh, config, proposer, place.draft, like=like)
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
        """Of the pages of each stage; of the last one with its slots."""
        config, makers = self.config, []
        for stage in self.stages:
            sizes = (stage.layout(config.layout), config.page_size)
            make = functools.partial(make_pages, stage.model, *sizes)
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
        work = self._edits_of_last() | self._writers() | self._copiers() | self._movers()
        for rows in self.group_sizes:
            work |= self._step_shapes(self._decoding, self._inputs.decode_rows((), rows).where)
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

    def _edits_of_last(self) -> dict[Any, tuple[Callable, tuple]]:
        last, edits = len(self.stages) - 1, self._edits()
        return {(key, last): (function, ((), self._state[-1], *rest)) for key, (function, rest) in edits.items()}

    def _step_shapes(self, steps: Steps, empty: np.ndarray) -> dict[Any, tuple[Callable, tuple]]:
        """Of rows that are described by such an array, int32 [rows, ...]."""
        last, rows = len(self.stages) - 1, empty.shape[0]
        kept = (self._state[-1].slots, self._state[-1].drafts)
        with jax.set_mesh(self.mesh):
            _, held, entering = jax.eval_shape(steps.begin, self._drafting, kept, empty)
            held = jax.tree.map(lambda s: at_rest(s, self.mesh), held)
        stream = jax.ShapeDtypeStruct((*entering[0].shape, self.model.config.embed_dim), self.model.execution.dtype)
        work = {}
        for s, stage in enumerate(self.stages):
            entered = entering if stage.first else (stream, *entering[1:])
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
        rows = self._inputs.chunk_rows((), size)
        for s, stage in enumerate(self.stages):
            last = functools.partial(stage_programs.last_chunk, proposer=self.proposer)
            function = last if stage.last else stage_programs.chunk
            where = rows if stage.last else rows.where
            own, entering = self._shapes_on(s, where), self._entering(s, size)
            if not stage.first:
                self._fed[(kind, size), s] = (jax.ShapeDtypeStruct(entering.shape, entering.dtype),)
            function = functools.partial(function, stage, stage.layout(self.config.layout), **how)
            work[kind, size, s] = function, (self._own(s), self._state[s], own, entering)
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

    def _mesh_of(self, key: Any) -> Mesh:
        return self.stages[key[-1]].mesh

    # Batches.

    @told
    def _run(self, key: Any, *arguments) -> Later:
        if key in self.config.chunk_programs:
            return self._chunk(*key, *arguments)
        if key == "copies":
            return self._copied(*arguments)

        def call() -> list:
            if not self._here[-1]:
                return []
            run = self._programs[key, len(self.stages) - 1]
            made = run((), self._state[-1], *arguments)
            self._state[-1], *found = made if isinstance(made, tuple) else (made,)
            return found

        return self._launchers[-1].submit(call)

    def _chunk(self, kind: str, size: tuple[int, int], rows: ChunkRows) -> Later:
        def call(s: int, before: Later | None) -> list | None:
            carried = self._carries[s](before.result(), self._fed[(kind, size), s]) if before else None
            if not self._here[s]:
                return None
            entering = carried[0] if before else self._on(s, rows.tokens)
            where = self._on(s, rows if self.stages[s].last else rows.where)
            self._state[s], *found = self._programs[kind, size, s](self._own(s), self._state[s], where, entering)
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
        rows = [self._inputs.decode_rows([(row, batch.page_table[n]) for n, row in own], size).where for own in dealt]
        found = self._in_turn(rows, batch.steps)
        return [
            Call(tuple(n for n, _ in own), Part(held, lambda held: held[1:]), chunk=False)
            for own, held in zip(dealt, found, strict=True)
        ]

    @told
    def _in_turn(self, rows: Sequence[np.ndarray], steps: int) -> list[Later]:
        """Groups of rows, whose steps alternate: what each holds after the last one."""
        groups, stages = [self._begun(where) for where in rows], len(self.stages)
        turn = max(len(groups), stages)  # ticks from a group's step to its next
        for tick in range((steps - 1) * turn + len(groups) + stages - 1):
            now = [(s, *divmod(tick - s, turn)) for s in range(min(stages, tick + 1))]
            now = [(s, i, groups[g]) for s, i, g in now if i < steps and g < len(groups)]
            # Between processes what is sent waits for who takes it: first all of it, or a group's would wait for the
            # program of another.
            for s, _, group in now:
                group.entering = self._launchers[s].submit(functools.partial(self._arrive, s, group, group.entering))
            for s, i, group in now:
                # Where drafts are made, steps count down to the last one, which makes none.
                step = functools.partial(self._step_of, s, group, group.entering, steps - 1 - i if self.proposer else i)
                group.entering = self._launchers[s].submit(step)
        return [self._launchers[-1].submit(functools.partial(self._ended, group)) for group in groups]

    def _ended(self, group: "_Group") -> tuple:
        if not self._here[-1]:
            return ()
        end = self._programs["end", group.size, len(self.stages) - 1]
        self._keep(end((), self._kept, group.where[-1], group.held[0]))
        return group.held

    @property
    def _kept(self) -> tuple:
        """What the last stage keeps of requests."""
        return self._state[-1].slots, self._state[-1].drafts

    def _keep(self, kept: tuple) -> None:
        self._state[-1] = dataclasses.replace(self._state[-1], slots=kept[0], drafts=kept[1])

    def _begun(self, rows: np.ndarray) -> "_Group":
        where = [self._on(s, rows) for s in range(len(self.stages))]
        group = _Group(len(rows), where)

        def call() -> tuple | None:
            if not self._here[-1]:
                return None
            begin = self._programs["begin", group.size, len(self.stages) - 1]
            kept, group.held, entering = begin(self._drafting, self._kept, where[-1])
            self._keep(kept)
            return entering

        group.entering = self._launchers[-1].submit(call)
        return group

    def _arrive(self, s: int, group: "_Group", before: Later) -> tuple | None:
        """What enters a stage, on its devices."""
        return self._carries[s](before.result(), self._fed[group.size, s])

    def _step_of(self, s: int, group: "_Group", arrived: Later, i: int) -> tuple | None:
        """Of one stage: what enters the next one, or the first one at the next step."""
        if not self._here[s]:
            return None
        weights, rest = self._own(s), (group.where[s], arrived.result(), self._steps[s][i])
        run, state = self._programs["step", group.size, s], self._state[s]
        if not self.stages[s].last:
            self._state[s], leaving = run(weights, state, *rest)
            return leaving
        (pages, drafts, group.held), leaving = run(weights, (state.pages, state.drafts, group.held), *rest)
        self._state[s] = dataclasses.replace(state, pages=pages, drafts=drafts)
        return leaving


@dataclasses.dataclass
class _Group:
    """Rows whose steps run as one.

    size      of the programs
    where     what describes the rows (DecodeRows.where) on each stage's devices
    entering  what enters the first stage next, or the stage after the one whose start was last asked for
    held      the slots of the rows, first, and what was sampled so far; for the last stage's launcher alone
    """

    size: int
    where: list[jax.Array]
    entering: Later | None = None
    held: tuple = ()
