"""Runs scheduled batches on the devices: compiles the programs of all shapes before the first request, calls them with
what inputs.py fills, and hands out what they sampled when it is asked for. Knows pages and slots by number only.

A batch becomes at most one call of a decode program and one call of a chunk program for each group of chunks; they are
handed to a launcher, which starts them in turn, and not waited for.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardlm.mesh import MeshSpec
from shardlm.serve import programs
from shardlm.serve.adapter_parts import shape_of_part, write_part
from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.before_batch import BeforeBatch
from shardlm.serve.carry import alone
from shardlm.serve.chunk_programs import dealt
from shardlm.serve.compiling import compile_all, options_of
from shardlm.serve.followers import Followers, told
from shardlm.serve.host_copies import Bundles, PageCopies, filling, told_of_room
from shardlm.serve.host_pages import Move
from shardlm.serve.image_encoder import ImageEncoder, sized
from shardlm.serve.inputs import Inputs, one
from shardlm.serve.launcher import Later, Launcher, launcher_on
from shardlm.serve.memory_copies import NO_COPIES, copier
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.settings import RequestSettings
from shardlm.serve.snapshots import Copies
from shardlm.serve.speculation import programs as speculation
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.started import Call, Started
from shardlm.serve.state import empty_state
from shardlm.state import ModelDef, adapters_of, at_rest, replaced
from shardlm.xla_options import resolve_profile


class Runner(BeforeBatch):
    """The model, its weights and the state on one mesh. Calls come from one thread."""

    def __init__(
        self,
        model: ModelDef,
        params: Any,
        mesh: Mesh,
        config: RunnerConfig,
        proposer: Proposer | None = None,
        proposer_params: Any = (),
        like: "Runner | None" = None,
        image_encoder: ImageEncoder | None = None,
    ):
        """`compile` comes next. With a proposer, decoding verifies its drafts; None for its parameters are the model's
        own. `like`: a runner of the same model on other devices, whose programs are traced for both. `image_encoder`:
        that of a model that sees."""
        self.model, self._parts, self.mesh, self.config = model, [params], mesh, config
        self.proposer, self.proposer_params, self.image_encoder = proposer, proposer_params, image_encoder
        self._inputs = Inputs(
            config, model.config.vocab_size, proposer is not None, image_encoder and image_encoder.sight
        )
        self._makers = self._state_makers()
        self._state = self._shape_of_empty()
        self._launchers = self._make_launchers()
        self._bundles = [Bundles() for _ in self._launchers]
        self._jitted: dict[Any, Any] = {} if like is None else like._jitted
        self._programs: dict[Any, Callable] = {}
        self.compile_seconds = 0.0
        self.followers: Followers | None = None  # which start the same programs, where this one leads
        self._masked: set[int] = set()  # slots whose masks are not all ones

    @property
    def params(self) -> Any:
        """The weights that programs take next: those of the last `update_weights` and `write_adapter` that were
        `settled`."""
        return self._parts[0]

    def _state_makers(self) -> tuple[Callable[[], Any], ...]:
        sizes = (self.config.layout, self.config.page_size, self.config.max_rows)
        drafts = self.proposer.empty if self.proposer else tuple
        return (jax.jit(functools.partial(empty_state, self.model, *sizes, drafts, **sized(self.image_encoder))),)

    def _shape_of_empty(self) -> Any:
        """Until `allocate`: XLA tries its kernels out while it compiles, in memory that pages would have taken."""
        return self._shaped(self._makers[0], self.mesh)

    def _shaped(self, make: Callable, mesh: Mesh) -> Any:
        with jax.set_mesh(mesh):
            return jax.tree.map(lambda s: at_rest(s, mesh), jax.eval_shape(make))

    def allocate(self) -> None:
        """The state itself, once programs are compiled, and the room for pages in the host's memory; ShardlmError where
        that is not there."""
        self._state = self._empty()
        if count := self.config.bundles:
            for s, bundles in enumerate(self._bundles):
                with told_of_room(count):
                    self._moved(s, filling(count))
                    bundles.filled(count)

    def _empty(self) -> Any:
        return self._new(self._makers[0], self.mesh)

    def _new(self, make: Callable, mesh: Mesh) -> Any:
        """What `make` makes, on the devices of a mesh."""
        with jax.set_mesh(mesh):
            return make()

    @told
    def reset(self) -> None:
        """After a program failed, which may have taken the state with it: an empty one in its place. Raises EngineError
        where another process cannot go on."""
        if self.followers is not None:
            self.followers.settle()
        for launcher in self._launchers:
            launcher.clear()
        for array in jax.tree.leaves(self._state):
            if isinstance(array, jax.Array):  # else the shape of what another process has
                array.delete()  # frames of the error may hold it
        self._state = self._empty()
        for bundles in self._bundles:
            bundles.clear()
        self._masked.clear()

    def _make_launchers(self) -> tuple[Launcher, ...]:
        """Who starts programs; the last one those that sample."""
        return (launcher_on(self.platform),)

    @property
    def platform(self) -> str:
        """Of the devices: cpu or gpu."""
        return self.mesh.devices.flat[0].platform

    # Programs.

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program, several at a time, and allocates the state; `progress` is called with (programs done,
        of how many)."""
        compile_all([self], progress)

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    @property
    def spec(self) -> MeshSpec:
        """Of the devices of this replica."""
        return MeshSpec(**self.mesh.shape)

    def _shapes(self) -> Mapping[Any, tuple[Callable, tuple]]:
        """Key -> (function, example arguments)."""
        work = self._own_shapes() | self._edits() | self._copiers()
        whole = {key: (function, (self._weights, self._state, *rest)) for key, (function, rest) in work.items()}
        looks = self.image_encoder.shapes(self._state) if self.image_encoder else {}
        return whole | self._writers() | self._movers() | looks

    def _own_shapes(self) -> dict[Any, tuple[Callable, tuple]]:
        """Of chunks and steps, (function, example arguments after the weights and the state)."""
        config = self.config
        decode = functools.partial(programs.decode, self.model, config.layout, config.decode_steps)
        chunk = functools.partial(programs.chunk, self.model, config.layout)
        work: dict[Any, tuple] = {}
        if self.proposer:
            sizes = (self.model, config.layout, config.decode_steps, self.proposer)
            decode = functools.partial(speculation.decode, *sizes)
            chunk = functools.partial(speculation.chunk, self.model, config.layout, self.proposer)
        for rows in config.decode_sizes:
            work["decode", rows] = (decode, (self._inputs.decode_rows((), rows), np.int32(1)))
        for (kind, size), how in config.chunk_programs.items():
            example = self._inputs.chunk_rows((), size, kind == "whole")
            work[kind, size] = (functools.partial(chunk, **how), (example,))
        return work

    def _edits(self) -> dict[Any, tuple[Callable, tuple]]:
        """As _own_shapes, of what is set in slots."""
        inputs, work = self._inputs, {}
        if self.proposer and self.proposer.reads_text:
            begin = functools.partial(speculation.begin, self.proposer)
            work["text"] = (lambda params, *rest: begin(*rest), inputs.text(0, ()))
        work["counts"] = (lambda params, *rest: programs.set_counts(*rest), inputs.counts(0, (), ()))
        work["last"] = (lambda params, *rest: programs.set_last(*rest), (one(0),) * 3)
        [masks] = inputs.masks([(0, inputs.everything)])
        work["allowed"] = (lambda params, *rest: programs.set_allowed(*rest), masks)
        return work

    def _copiers(self) -> dict[Any, tuple[Callable, tuple]]:
        """As _own_shapes, of what copies memories."""
        if not self.config.snapshots:
            return {}
        return {"copies": (copier(self.config.layout, self.model.execution.rules, *self._copied_drafts), NO_COPIES)}

    def _movers(self) -> dict[Any, tuple[Callable, tuple]]:
        """Of what moves pages to the host's memory and back, by stage."""
        if not self.config.bundles:
            return {}
        own = PageCopies(self.config.layout.num_pages, self.proposer, self.platform == "gpu")
        each = [own.shapes(*stage) for stage in self._states]
        return {(name, s): work for s, shapes in enumerate(each) for name, work in shapes.items()}

    @property
    def _states(self) -> list[tuple[Any, Mesh]]:
        """Of each stage, with its mesh."""
        return [(self._state, self.mesh)]

    @property
    def _copied_drafts(self) -> tuple[Callable, ...]:
        return (self.proposer.copied,) if self.proposer and self.proposer.remembers else ()

    def _writers(self) -> dict[Any, tuple[Callable, tuple]]:
        """Of the programs that write one of several adapters, one a stage: (function, example arguments)."""
        if not self.model.execution.adapters:
            return {}
        write = functools.partial(write_part, self.model.execution.lora.rank // self.model.execution.adapters)
        each = [adapters_of(params) for params in self._parts]
        parts = [shape_of_part(own, self.model.execution) for own in each]
        return {("adapter", s): (write, (parts[s], own, np.int32(1))) for s, own in enumerate(each)}

    @property
    def shape_of_part(self) -> Any:
        """Of one of several adapters: shapes, at the places of the parameters."""
        return shape_of_part(adapters_of(self.params), self.model.execution)

    def lower(self, key: Any, function: Callable, arguments: tuple) -> jax.stages.Lowered:
        """The program of a key of `_shapes`, not compiled yet."""
        jitted = self._jitted.setdefault(key, self._jit(function, self._options | options_of(self.platform, key)))
        with jax.set_mesh(self._mesh_of(key)), jax.default_matmul_precision(self._precision):
            return jitted.lower(*arguments)

    def _mesh_of(self, key: Any) -> Mesh:
        """Of the devices that a program is for."""
        return self.mesh

    def _jit(self, function: Callable, options: dict[str, Any]) -> Any:
        return jax.jit(function, donate_argnums=1, compiler_options=options)

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        """On CPUs those of training; what it takes on GPUs is for steps that gather weights. An engine of one process
        among several compiles without the others."""
        if self.platform == "cpu":
            return dict(resolve_profile("cpu", self.mesh).options)
        return alone(self.platform) if jax.process_count() > 1 and not self.mesh.is_multi_process else {}

    @property
    def _weights(self) -> Any:
        return (self._parts[0], self.proposer_params) if self.proposer else self._parts[0]

    @property
    def _precision(self) -> str:
        """float32 means float32 products also on a GPU, whose default has a 10-bit mantissa."""
        return "float32" if self.model.execution.dtype == jnp.float32 else "default"

    # Batches.

    def start(
        self,
        batch: ScheduledBatch,
        settings: Mapping[str, RequestSettings],
        masks: Sequence[tuple[int, np.ndarray]] = (),
    ) -> Started:
        """Has the programs of a batch started; `settings` of its requests by id, and what grammars allow next by slot,
        int32 [ceil(V / 32)]. What goes wrong with them is raised where they are waited for."""
        self._prepare_all(batch, settings, masks)
        numbered = list(enumerate(batch.rows))
        decodes = [(n, row) for n, row in numbered if row.tokens is None]
        calls = []
        if decodes:
            calls += self._decode(batch, decodes)
        for size, group in self._grouped([(n, row) for n, row in numbered if row.tokens is not None]):
            own = [(row, batch.page_table[n], settings[row.request.id]) for n, row in group]
            key = "whole" if self._begins([row for _, row in group], size) else "chunk", size
            made = self._run(key, self._inputs.chunk_rows(own, size, key[0] == "whole"))
            calls.append(Call(tuple(n for n, _ in group), made, chunk=True))
        self._copy(batch.saved)
        return Started(batch, tuple(calls))

    def _begins(self, rows: Sequence[Row], size: tuple[int, int]) -> bool:
        """Whether nothing is before these chunks, nor after their tokens, that these see, and a program is for that."""
        both_ways = any(first < row.end and row.start <= last for row in rows for first, last in row.request.blocks)
        return not both_ways and all(row.start == 0 for row in rows) and ("whole", size) in self.config.chunk_programs

    def _decode(self, batch: ScheduledBatch, decodes: Sequence[tuple[int, Row]]) -> list[Call]:
        size = next(size for size in self.config.decode_sizes if size >= len(decodes))
        rows = self._inputs.decode_rows([(row, batch.page_table[n]) for n, row in decodes], size)
        made = self._run(("decode", size), rows, np.int32(batch.steps))
        return [Call(tuple(n for n, _ in decodes), made, chunk=False)]

    def _move(self, moves: Sequence[Move]) -> None:
        """Pages to the host's memory and back."""
        if moves:
            self._move_all(moves)

    @told
    def _move_all(self, moves: Sequence[Move]) -> None:
        for s, launcher in enumerate(self._launchers):
            launcher.submit(functools.partial(self._moved, s, moves))

    def _moved(self, s: int, moves: Sequence[Move]) -> None:
        self._state = self._bundles[s].moved(self._programs, s, self._state, moves)

    def _copy(self, copies: Copies) -> None:
        """Of what layers without pages remember, from slots to slots."""
        for pairs in self._inputs.copies(copies):
            self._run("copies", pairs)

    @told
    def update_weights(self, params: Any, draft: Any = None, encoder: Any = None) -> None:
        """New weights of the same shapes, of the draft model and of the encoder of images too where given; those that
        are not among them stay. Batches that were started keep theirs."""
        held = {name: self.proposer_params[name].sharding for name in getattr(self.proposer, "shared", ())}
        shared = {name: jax.device_put(params[name], at) for name, at in held.items() if name in params}
        for s, part in enumerate(self._cut(params)):
            drafts = (draft, shared) if s == len(self._parts) - 1 else (None, {})
            self._change(s, functools.partial(self._take, s, part, *drafts))
        if encoder is not None:
            self._change(0, functools.partial(self._see_by, encoder))

    def _cut(self, params: Any) -> list[Any]:
        """All parameters, or some, as the stages have them."""
        return [params]

    def _take(self, s: int, params: Any, draft: Any, shared: Mapping[str, Any]) -> None:
        self._parts[s] = replaced(self._parts[s], params)
        if draft is not None:
            self.proposer_params = draft
        if shared:
            self.proposer_params = {**self.proposer_params, **shared}

    def _see_by(self, encoder: Any) -> None:
        self.image_encoder = dataclasses.replace(self.image_encoder, params=encoder)

    @told
    def write_adapter(self, part: Any, number: int) -> None:
        """One of several adapters, as in `shape_of_part`, in the place of this number; batches that were started keep
        what was there."""
        for s, own in enumerate(self._cut(part)):
            self._change(s, functools.partial(self._write, s, own, number))

    def _write(self, s: int, part: Any, number: int) -> None:
        write = self._programs["adapter", s]
        self._parts[s] = replaced(self._parts[s], write(part, adapters_of(self._parts[s]), np.int32(number)))

    def _change(self, s: int, change: Callable[[], None]) -> None:
        """Of what the programs of a stage take, behind all that was started: a launcher may be behind this thread, and
        what it has yet to start must find its arrays, which a write takes. Raises what goes wrong at once."""
        made = self._launchers[s].submit(change, regardless=True)
        if made.done():
            made.result()

    def settled(self) -> None:
        """Waits until what was asked for is started, and `params` is what came of it."""
        for launcher in self._launchers:
            launcher.submit(lambda: None, regardless=True).result()

    @told
    def _run(self, key: Any, *arguments) -> Later:
        """What a program gives besides the state, a list."""
        run = self._programs[key]

        def call() -> list:
            made = run(self.image_encoder.params if key[0] == "look" else self._weights, self._state, *arguments)
            self._state, *found = made if isinstance(made, tuple) else (made,)
            return found

        return self._launchers[-1].submit(call)

    def _grouped(self, rows: list[tuple[int, Row]]) -> list[tuple[tuple[int, int], list[tuple[int, Row]]]]:
        """Chunks in programs: (size, rows)."""
        left = iter(rows)
        parts = dealt([len(row.tokens) for _, row in rows], self.config.chunk_sizes, self.config.platform)
        return [(size, list(itertools.islice(left, count))) for size, count in parts]
