"""A training step as formulas see it: what it is made of, on a mesh and for a GPU, with nothing traced or compiled. One
takes about a millisecond, where tracing takes fifty, so that thousands of meshes can be looked at."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from shardlm.errors import ShardlmError
from shardlm.hardware import Gpu
from shardlm.layers.block_indexer import BlockIndexerConfig
from shardlm.layers.gated_streams import GatedStreamsConfig
from shardlm.layers.lora import LoraConfig
from shardlm.layers.param import Execution
from shardlm.layers.pipeline import Schedule
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.moments import check_split
from shardlm.ops.schemes import SCHEMES
from shardlm.optim import moments_of
from shardlm.plan.spread import Spread, Weights, spread
from shardlm.rules import BATCH_AXES, Rules, Table
from shardlm.state import ModelDef
from shardlm.train.config import GrpoConfig, PreferenceConfig, RunConfig
from shardlm.train.settled import Settled, settle

if TYPE_CHECKING:
    from shardlm.plan.training_images import RowImages

T = TypeVar("T")
CAPABILITY = {"ampere": "8.0", "ada": "8.9", "hopper": "9.0", "blackwell": "10.0"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter.

    path     in the tree of parameters, joined by dots: segments.0.blocks.0.attention.wq
    shape    with its stack first
    names    of the dimensions, those of the stack first
    stacked  how many of them are the stack's: 1 for a layer's, 0 for the embedding's
    itemsize bytes of a number at rest
    trained  whether the optimizer has it
    packed   numbers that lie in one of `shape`, which are 4 bits each
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: int
    itemsize: int
    trained: bool
    packed: int = 1

    def axes(self, table: Table) -> tuple[str, ...]:
        """Mesh axes that it is split over, each larger than 1."""
        return table.split(self.names)

    def numbers(self, table: Table) -> int:
        """How many of its numbers one device holds. Scales of weights in few bits are whole along a dimension that does
        not divide (layers/param.py)."""
        if self._is_scale:
            sizes = [(n, table.mesh.size(*table.axes(name))) for n, name in zip(self.shape, self.names, strict=True)]
            return math.prod(n if n % ways else n // ways for n, ways in sizes)
        return self._all // table.ways(self.names)

    @property
    def unasked(self) -> bool:
        """Whether no loss asks for its gradient, which is zeros, sent to nobody: of what chooses tokens or entries, and
        of a table of experts by token."""
        return ".indexer." in self.path or self.path.endswith("experts_of_token")

    @functools.cached_property
    def _is_scale(self) -> bool:
        return self.path.endswith("_scale")

    @functools.cached_property
    def _all(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def is_matrix(self) -> bool:
        """Neither a norm nor a bias."""
        return len(self.names) - self.stacked > 1

    @functools.cached_property
    def segment(self) -> int | None:
        """The segment of layers that it belongs to."""
        head, _, rest = self.path.partition(".")
        return int(rest.partition(".")[0]) if head == "segments" else None


def refuse(shape: TransformerConfig, length: int, mesh: MeshSpec | None = None) -> None:
    """Raises ShardlmError for models whose memory and time have no formulas, with rows of this length: trained on a
    mesh, or served."""
    foreseen = *BATCH_AXES, "tensor"
    split = [axis for axis, size in mesh.sizes().items() if size > 1 and axis not in foreseen] if mesh else []
    over = f" over {', '.join(split)}"
    chunks = {getattr(block.attention, "chunk", 0) for block in shape.kinds} - {0}
    reasons = {
        f"layers that read the keys and values of others{over}": shape.reads and bool(split),
        f"inputs of each layer's own{over}": shape.inputs is not None and bool(split),
        f"attention within chunks of {', '.join(map(str, chunks))} tokens in rows of {length}": any(
            length > chunk for chunk in chunks
        ),
        f"queries that attend to chosen blocks of tokens in rows of {length}": mesh is not None
        and any(
            isinstance(own := getattr(block.attention, "indexer", None), BlockIndexerConfig) and length > own.top_k
            for block in shape.kinds
        ),
        "layers that look up n-grams": mesh is not None and bool(shape.ngrams),
        "gated streams between layers": mesh is not None and isinstance(shape.streams, GatedStreamsConfig),
    }
    if lacking := [reason for reason, holds in reasons.items() if holds]:
        instead = "a mesh of data, fsdp and tensor, or one without a plan" if split else "a mesh without a plan"
        raise ShardlmError(
            f"the planner has no formulas for {' and '.join(lacking)}, which this model has: choose {instead}"
        )


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A run on a mesh of GPUs.

    config     with every size of its mesh given
    weights    all parameters, trained or not
    gpus_per_host  of the hosts over which the mesh lies
    images     of each row; None: rows have none
    beside     of a run that would train the model whose forward pass stands beside this one's (beside.py); None: none
    made       what it came to whatever a GPU's rates and memory are, by the function that made it
    """

    config: RunConfig
    gpu: Gpu
    shape: TransformerConfig
    rules: Rules
    execution: Execution
    weights: tuple[Weight, ...]
    gpus_per_host: int = 8
    images: "RowImages | None" = None
    beside: "Sketch | None" = None
    made: dict[Callable, Any] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, config: RunConfig, gpu: Gpu, gpus_per_host: int = 8, images: "RowImages | None" = None) -> "Sketch":
        """Raises ShardlmError as `Program.make` does, for whatever does not divide or does not exist."""
        joined = gpu.joined(min(gpus_per_host, config.mesh.size(*config.mesh.sizes())))
        settled = settle(config, config.mesh, Described.of(gpu), traced=False, joined=joined)
        refuse(settled.shape, config.train.seq_len, config.mesh)
        weights = _weights(settled)
        if config.optim.moments == "int8":
            _check_blocks(weights, settled.rules.optimizer)
        made = settled.shape, settled.rules, settled.execution, weights
        other = _beside(settled)
        if other:
            refuse(other.shape, config.train.seq_len, config.mesh)
            own = other.shape, other.rules, other.execution, _weights(other)
            other = cls(other.config, gpu, *own, gpus_per_host)
        return cls(config, gpu, *made, gpus_per_host, images, other)

    def on(self, gpu: Gpu, gpus_per_host: int) -> "Sketch":
        """The same on a GPU that has the same programs, and what it came to with it."""
        found = object.__new__(Sketch)
        found.__dict__.update(self.__dict__)
        found.__dict__.update(gpu=gpu, gpus_per_host=gpus_per_host)
        return found

    def once(self, make: Callable[["Sketch"], T]) -> T:
        """make(self), which goes neither by a GPU's rates nor by its memory."""
        if make not in self.made:
            self.made[make] = make(self)
        return self.made[make]

    @property
    def mesh(self) -> MeshSpec:
        return self.rules.mesh

    @property
    def products(self) -> str:
        """Numbers that projections multiply forward."""
        return multiplied(self.config.matmul)

    @functools.cached_property
    def spread(self) -> Spread:
        """Its weights on its mesh."""
        return spread(self.weights, self.rules)

    @property
    def parameters(self) -> int:
        """Of the model, however they are held, without adapters."""
        return parameters_of(self.shape, self.execution.dtype)

    @property
    def adapters(self) -> int:
        """Numbers in adapters, which are all that is trained where there are any."""
        trained = self.config.lora.rank and [weight for weight in self.weights if weight.trained]
        return sum(math.prod(weight.shape) for weight in trained or ())

    @property
    def num_gpus(self) -> int:
        return math.prod(self.mesh.sizes().values())

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of a number in use."""
        return np.dtype(self.execution.dtype).itemsize

    @functools.cached_property
    def rows(self) -> float:
        """Of one microbatch on one device, where a layer works; in a pipeline each stage sees all rows."""
        return self.config.train.global_batch / self.passes / self.mesh.size(*BATCH_AXES)

    @property
    def passes(self) -> int:
        """Microbatches of a step."""
        return self.execution.microbatches

    @functools.cached_property
    def tokens(self) -> float:
        """Of one microbatch on one device inside attention and MLP, where the sequence is whole over tensor."""
        return self.rows * self.config.train.seq_len / self.mesh.context

    @functools.cached_property
    def loops(self) -> bool:
        """Whether layers are in loops, as they are but where a run asks for none or no layer is like another (MiniMax,
        whose decays are each layer's own)."""
        return bool(self.config.unroll) and any(segment.repeats > 1 for segment in self.shape.segments)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """When the stages of the pipeline run what; one stage where there is none."""
        repeats = self.shape.segments[self.shape.pipelined_segment()].repeats
        pipeline = self.config.pipeline
        if self.mesh.pipeline == 1:  # whatever the configuration has for stages: nothing is idle, or goes both ways
            return Schedule(repeats, 1, 1, self.passes)
        return Schedule(repeats, self.mesh.pipeline, pipeline.laps, self.passes, pipeline.schedule == "1f1b")

    def staged(self, weight: Weight) -> bool:
        """Whether a pipeline stage holds its own part of it while it is in use."""
        return self.mesh.pipeline > 1 and weight.segment == self.shape.pipelined_segment()


def multiplied(matmul: str) -> str:
    """Numbers that projections multiply forward: "dtype", "fp8" or "int8"."""
    scheme = SCHEMES.get(matmul)
    return matmul if scheme is None else scheme.numbers if scheme.served_as else "dtype"


def parameters_of(shape: TransformerConfig, dtype: Any = np.float32) -> int:
    """Of a model, however they are held."""
    return sum(math.prod(weight.shape) for weight in _traced(shape, dtype, LoraConfig(), "dtype", 1))


def active_parameters(shape: TransformerConfig) -> int:
    """What a token takes part in, with the embedding that it is looked up in, as sizes of mixtures are told."""
    embedding = 0 if shape.tie_embeddings else shape.vocab_size * shape.embed_dim
    return shape.parameters_per_token() + embedding


@dataclasses.dataclass(frozen=True)
class Described:
    """A device that is not there, as train/settled.py asks for one."""

    device_kind: str
    compute_capability: str
    platform: str

    @classmethod
    def of(cls, gpu: Gpu) -> "Described":
        cpu = gpu.generation == "cpu"
        return cls(gpu.name, "0.0", "cpu") if cpu else cls(gpu.name, CAPABILITY[gpu.generation], "cuda")

    def addressable_memories(self) -> list[Any]:
        return []


def _beside(settled: Settled) -> Settled | None:
    """What would train the teacher, or the checkpoint that the run is compared with, all of it."""
    config = settled.config
    if settled.teacher or not (config.preference.compares or config.grpo.beta):
        return settled.teacher
    alone = {"lora": LoraConfig(), "preference": PreferenceConfig(), "grpo": GrpoConfig()}
    execution = dataclasses.replace(settled.execution, lora=LoraConfig())
    return dataclasses.replace(settled, config=dataclasses.replace(config, **alone), execution=execution)


@functools.lru_cache(maxsize=4096)
def _check_blocks(weights: Weights, table: Table) -> None:
    """optim.check_moments of weights as they are here."""
    for weight in weights:
        names, shape = weight.names[weight.stacked :], weight.shape[weight.stacked :]
        if weight.trained and moments_of("int8", names) == "int8":
            check_split(weight.path, names, shape, [table.mesh.size(*table.axes(name)) for name in names])


def _weights(settled: Settled) -> tuple[Weight, ...]:
    """Names depend on the mesh only by the tensor axis, over which few KV heads are copied and not split."""
    execution, plain = settled.execution, settled.shape.mtp is None
    how = execution.dtype, execution.lora, execution.weights, settled.mesh.tensor
    return _of_model(settled.config.model, plain, *how)


@functools.lru_cache(maxsize=256)
def _of_model(model: Any, plain: bool, *how: Any) -> tuple[Weight, ...]:
    """A model's configuration is smaller than the shape that it stands for, and is asked for thousands of times."""
    shape = model.transformer()
    return _traced(shape.without_mtp() if plain else shape, *how)


@functools.lru_cache(maxsize=64)
def _traced(shape: TransformerConfig, dtype, lora, held, tensor: int) -> tuple[Weight, ...]:
    mesh = MeshSpec(tensor=tensor)
    execution = Execution(rules=Rules.make("replicated", mesh), dtype=dtype, lora=lora, weights=held)
    with jax.sharding.use_abstract_mesh(mesh.abstract()):
        model = ModelDef.make(shape, execution)
    found = []
    for shapes, names, trained in ((model.shapes, model.names, True), (model.frozen_shapes, model.frozen_names, False)):
        named = flatten_dict(names or {})
        for path, leaf in flatten_dict(shapes or {}).items():
            stack, own = named[path]
            where = ".".join(map(str, path))
            packed = model.groups[path].a_byte if path in model.groups else 1
            found.append(Weight(where, leaf.shape, (*stack, *own), len(stack), leaf.dtype.itemsize, trained, packed))
    return Weights(found)
