"""Everything a run compiles: mesh, rules, model, optimizer and the jitted functions over them. Nothing here holds
weights or reads data, so the same program serves training, benchmarks and compile-only checks."""

import contextlib
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from shardlm import weights
from shardlm.hf_files import Folder
from shardlm.layers.moe import MoeConfig, dispatch_of
from shardlm.layers.pipeline import Schedule
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.ops.cudnn_heads import traced_for
from shardlm.optim import ELEMENTWISE, ENCODER, check_moments, make_optimizer, make_schedule
from shardlm.progress_bar import bytes_bar
from shardlm.rules import Rules
from shardlm.state import TEACHER, ModelDef, TrainState, at_rest, make_state
from shardlm.train import offload
from shardlm.train.batches import slots, to_devices
from shardlm.train.config import OffloadConfig, RunConfig
from shardlm.train.learning import SHOWN, Shown, learning
from shardlm.train.objectives import objective_of
from shardlm.train.replicas import shares
from shardlm.train.seeing import Seeing, check_images
from shardlm.train.settled import settle
from shardlm.train.step import Objective, StepConfig, make_eval_step
from shardlm.train.strategy import Step, Strategy
from shardlm.train.strategy import choose as choose_strategy
from shardlm.vision.sight import Sight
from shardlm.xla_options import XlaOptions, joined_in_host, resolve_profile


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's functions on its mesh. What it compiles is called under `jax.set_mesh(program.mesh)`. `trained`: what a
    state has the weights of, the model alone or an encoder of images beside it. `seeing`: how the images of its data
    are read, None where they have none."""

    config: RunConfig
    mesh: Mesh
    rules: Rules
    model: ModelDef
    tx: optax.GradientTransformation
    objective: Objective
    strategy: Strategy
    trained: ModelDef
    seeing: Seeing | None = None

    @classmethod
    def make(cls, config: RunConfig, mesh: Mesh, mtp: bool = True) -> "Program":
        """Checks the configuration against the mesh and traces the model; compiles nothing. Without `mtp` the model is
        held without the modules that predict further tokens, as it is under adapters, which leave those as they are.

        Raises ShardlmError for whatever does not divide or does not exist.
        """
        spec = MeshSpec(**dict(mesh.shape))
        settled = settle(config, spec, mesh.devices.flat[0], mtp, joined=joined_in_host(mesh))
        with jax.set_mesh(mesh):
            model = ModelDef.make(settled.shape, settled.execution)
            check_moments(config.optim.moments, model.names, model.shapes, settled.rules.optimizer)
            tx = make_optimizer(config.optim, config.train.steps, model.names)
            rate = make_schedule(config.optim, config.train.steps)
            objective = objective_of(settled, model)
            strategy = choose_strategy(config, model, tx, rate, _step_config(config, spec, objective))
        return cls(config, mesh, settled.rules, model, tx, objective, strategy, model)

    def that_sees(self, sight: Sight) -> "Program":
        """The same for batches with images. Raises ShardlmError for what does not go with them."""
        config = self.config
        check_images(config, self.model.config, sight, self.model.execution.context_attention)
        shape, width = (len(self.slots), config.train.seq_len), self.model.config.embed_dim
        how = self.batch_sharding, shape, width, self.model.execution.dtype, config.train.encoder, self.rules
        seeing = Seeing.make(sight, *how, compares=config.preference.compares)
        if not seeing.learned:
            return dataclasses.replace(self, seeing=seeing)
        with jax.set_mesh(self.mesh):
            dims = {**self.model.names, ENCODER: seeing.learned.dims}
            tx, trained = make_optimizer(config.optim, config.train.steps, dims), seeing.learned.beside(self.model)
        program = dataclasses.replace(self, seeing=seeing, tx=tx, trained=trained)
        step = _step_config(config, self.rules.mesh, self.objective)
        strategy = learning(program, make_schedule(config.optim, config.train.steps), step)
        return dataclasses.replace(program, strategy=strategy)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of every array of a batch, [B, T]."""
        return NamedSharding(self.mesh, self.rules.act.spec("batch", "whole_seq"))

    @property
    def slots(self) -> tuple[int, ...]:
        """The row of the global batch in each row of the arrays on the devices (batches.py)."""
        return slots(shares(self.config.train, self.rules.mesh.data), self.config.train.global_batch)

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch."""
        shape = (len(self.slots), self.config.train.seq_len)
        names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
        dtypes = {name: jnp.float32 if name == "loss_mask" else jnp.int32 for name in names}
        dtypes |= dict.fromkeys(self.objective.columns, jnp.float32)
        found = {n: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding) for n, dtype in dtypes.items()}
        return found | (self.seeing.shapes() if self.seeing else {})

    def looking(self) -> dict[str, Any]:
        """What loaders are told of images."""
        return {"sight": self.seeing.sight, "look": self.seeing.readers(self.slots)} if self.seeing else {}

    def on_devices(self, batch: Mapping[str, Any], rows: tuple[int, ...], eyes: Any = None) -> dict[str, jax.Array]:
        """A batch of the loader's, of which this process has these rows, as arrays on the devices; its images are read
        by the weights `eyes`. Data of text beside others with images have none. Called under the mesh."""
        images = batch.get("images", ())
        arrays = {name: a for name, a in batch.items() if name != "images"}
        found = to_devices(arrays, rows, self.batch_sharding, self.slots)
        if not self.seeing:
            return found
        with self.tracing():
            return found | self.seeing(eyes, images)

    def eyes(self, params: Any, still: Any) -> Any:
        """The weights that read images, of a state's parameters and what `Seeing.load` gives."""
        return self.seeing.eyes(params, still) if self.seeing else None

    def shown(self, batch: Mapping[str, Any], still: Any) -> dict[str, Any]:
        """What a step that trains the encoder is told of a batch's images besides; nothing in other runs."""
        return {SHOWN: Shown(tuple(batch.get("images", ())), still)} if self._learns else {}

    def state_shapes(self) -> TrainState:
        """The training state, with each array's dtype and resting sharding on this mesh."""

        with jax.set_mesh(self.mesh):
            # Of parameters that are there: drawing them is most of what would be traced.
            encoder = self.seeing.learned.shapes if self._learns else None
            shapes = jax.eval_shape(self._make_state, 0, self.model.shapes, encoder)
            shapes = jax.tree.map(lambda s: at_rest(s, self.mesh), shapes)
        shapes = dataclasses.replace(shapes, frozen=self.frozen_shapes())
        return offload.at_rest(shapes, self.config.offload, self.mesh)

    def init(self, params: Any = None, frozen: Any = None, encoder: Any = None) -> TrainState:
        """A new training state of these parameters and those of an encoder (donated, unless the state's are in the
        host's memory), or of new ones from config.train.seed, created in its shards."""
        # What is on the device makes no room in the host's memory.
        donated = () if self.config.offload.params else (1, 2)
        with jax.set_mesh(self.mesh):
            state = jax.jit(self._make_state, donate_argnums=donated)(self.config.train.seed, params, encoder)
        return dataclasses.replace(state, frozen=frozen)

    def frozen_shapes(self) -> Any:
        """Of `TrainState.frozen`, at rest: the weights that adapters stand on, or those that preferences and rewarded
        replies are measured from, and a teacher's; None where there are none. What training rounds is measured from
        what is rounded of the same float32 weights."""
        config = self.config
        compared = config.preference.compares or config.grpo.beta
        own = self.model.held_at_rest(self.mesh) if config.lora.rank or compared else None
        if config.preference.compares and self.model.execution.by_scheme:
            own = self._as_trained()
        return {**(own or {}), TEACHER: self.teacher.held_at_rest(self.mesh)} if self.teacher else own

    @property
    def teacher(self) -> ModelDef | None:
        """The model that the run learns from."""
        return getattr(self.objective, "teacher", None)

    def frozen(self) -> Any:
        """`TrainState.frozen`, read from the checkpoints that config.model and config.distill name."""
        shapes = self.frozen_shapes()
        if not self.teacher:
            return None if shapes is None else self._read(shapes)
        taught = self._read(shapes.pop(TEACHER), self.teacher, self.config.distill.teacher)
        return {**(self._read(shapes) if shapes else {}), TEACHER: taught}

    def pretrained(self) -> Any:
        """The trained parameters of the checkpoint that config.model names, in float32; None for those that begin anew,
        as adapters do."""
        if self.config.lora.rank or not isinstance(self.config.model, Pretrained):
            return None
        return self._read(self._as_trained())

    def _as_trained(self) -> Any:
        return jax.tree.map(lambda s: at_rest(s, self.mesh), self.model.shapes)

    def encoder(self) -> Any:
        """What is trained of that checkpoint's encoder of images, as it begins; None where nothing is."""
        return self.seeing.load_trained(self.config.model.folder) if self._learns else None

    @property
    def _learns(self) -> bool:
        return bool(self.seeing and self.seeing.learned)

    def _read(self, shapes: Any, model: ModelDef | None = None, folder: str = "") -> Any:
        """Parameters of config.model's checkpoint, or of another model in its folder, each device reading its own."""
        opened, what = Folder.open(folder or self.config.model.folder), "the teacher's weights" if model else "weights"
        with jax.set_mesh(self.mesh), bytes_bar(f"reading {what}", jax.process_index() == 0) as progress:
            return weights.load(model or self.model, opened, shapes, progress)

    def lower_step(self) -> jax.stages.Lowered:
        """(state, batch) -> (state, metrics), the state donated: of the strategy's programs the one run most."""
        return self.lower("step")

    def lower(self, name: str) -> jax.stages.Lowered:
        """One of the strategy's programs, the state donated."""
        part = self.strategy.programs[name]
        batch = (self.batch_shapes(),) if part.takes_batch else ()
        given = part.beside() if part.beside else batch
        program = part.function
        if self.config.offload != OffloadConfig() and part.changes:
            program = offload.returning(program)
        with jax.set_mesh(self.mesh), self.tracing():
            return jax.jit(program, donate_argnums=0 if part.changes else ()).lower(self.state_shapes(), *given)

    def compile_step(self, options: dict[str, Any]) -> Step:
        """The training step: (its number from 1, state, batch) -> (state, metrics), the state donated."""
        return self.strategy.assemble(self.compile_all(options))

    def compile_all(self, options: dict[str, Any]) -> dict[str, jax.stages.Compiled]:
        """The strategy's programs by name, "step" among them: what `assemble` makes the training step of."""
        return {name: self.compile(name, options) for name in self.strategy.programs}

    def compile(self, name: str, options: dict[str, Any]) -> jax.stages.Compiled:
        """One of the strategy's programs, with the options that it needs beside these."""
        return self.lower(name).compile(options | self.strategy.programs[name].options)

    def lower_eval(self) -> jax.stages.Lowered:
        """(params, frozen, batch) -> sums of the batch's losses."""
        with jax.set_mesh(self.mesh), self.tracing():
            state = self.state_shapes()
            return jax.jit(make_eval_step(self.model, self.objective)).lower(
                state.params, state.frozen, self.batch_shapes()
            )

    def schedule(self) -> Schedule:
        """When the stages of the mesh's pipeline run what; one stage where there is no pipeline."""
        shape, train = self.model.config, self.config.train
        layers = shape.segments[shape.pipelined_segment()].repeats
        return Schedule(
            layers,
            self.rules.mesh.pipeline,
            self.config.pipeline.laps,
            train.accumulation,
            self.config.pipeline.schedule == "1f1b",
        )

    def xla_options(self) -> XlaOptions:
        """Compiler options of config.xla_profile that the installed jaxlib takes, for `Lowered.compile`."""
        moes = [block.mlp for block in self.model.config.blocks() if isinstance(block.mlp, MoeConfig)]
        ragged = any(dispatch_of(moe, self.model.execution).sends_ragged for moe in moes)
        return resolve_profile(self.config.xla_profile, self.mesh, ragged)

    def decoder(self) -> ModelDef:
        """The same model for generating from the same parameters on the same mesh."""
        execution = dataclasses.replace(self.model.execution, rules=self.rules.for_decoding())
        with jax.set_mesh(self.mesh):
            return ModelDef.make(self.model.config, execution)

    @contextlib.contextmanager
    def tracing(self):
        """fp32 means float32 products: by default a GPU multiplies float32 in TF32, with a 10-bit mantissa. Kernels ask
        the default device what they are for: it is this mesh's, which may not be there (topology.py). jax's checks of
        cuDNN ask the GPUs of this process instead, unless they are told."""
        here = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        precision = "float32" if self.config.precision == "fp32" else "default"
        with jax.default_matmul_precision(precision), jax.default_device(here[0]), traced_for(here[0]):
            yield

    @property
    def _make_state(self) -> Any:
        make = partial(
            make_state,
            self.trained,
            self.tx,
            ema=self.config.optim.ema_decay > 0,
            loss_scaling=self.config.precision == "fp16",
        )

        def begun(seed, params=None, encoder=None):
            return offload.store(self.strategy.begin(make(seed, params, encoder)), self.config.offload)

        return begun


def _step_config(config: RunConfig, mesh: MeshSpec, objective: Objective) -> StepConfig:
    train, optim = config.train, config.optim
    one_f_one_b = config.pipeline.schedule == "1f1b" and mesh.pipeline > 1
    microbatches = max(shares(train, mesh.data))
    elementwise = optim.name in ELEMENTWISE
    return StepConfig(microbatches, optim.clip_norm, optim.ema_decay, objective, one_f_one_b, elementwise)
