"""Copies of the model that is trained, which sample on the same devices: engines of shardlm/serve that have weights and
pages only while they sample. Each copy is within one process, which samples with its own copies alone."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.merge import added
from shardlm.mesh import MeshSpec, physical_order
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.precision import COMPUTE_DTYPE
from shardlm.progress_bar import compiling
from shardlm.reinforce.copied_weights import CopiedWeights, of_copies
from shardlm.serve.engine import Engine
from shardlm.serve.llm import LLM
from shardlm.serve.outputs import CompletionOutput, whole
from shardlm.serve.prompts import Prompt
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.rest import rest
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import ModelDef
from shardlm.train.config import RunConfig
from shardlm.train.seeing import prepared_as
from shardlm.vision.picture import Picture

MAX_ROWS = 256  # that a copy samples at once; no more than its share of the replies, so that fewer programs compile


@dataclasses.dataclass(frozen=True)
class Sampler:
    """This process's copies.

    llm      their engines
    model    whose weights they are given
    weights  as they hold them
    copies   how many each process has
    """

    llm: LLM
    model: ModelDef
    weights: CopiedWeights
    copies: tuple[int, ...]

    @classmethod
    def make(cls, config: RunConfig, model: ModelDef, mesh: Mesh, sees: bool = False) -> "Sampler":
        """Of config.model's checkpoint, over all devices of the mesh that trains; says how far compiling is. `sees`:
        some prompts have images. Raises ShardlmError for what does not fit."""
        grpo, first = config.grpo, jax.process_index() == 0
        devices = physical_order(list(mesh.devices.flat))
        copies = copies_of([device.process_index for device in devices], grpo.tensor)
        check_longest(config.model, config.train.seq_len)
        check_rotation(config.model, config.train.seq_len)
        own = [device for device in devices if device.process_index == jax.process_index()]
        if first:
            print(f"compiling what samples: {sum(copies)} copies over {grpo.tensor} devices each", flush=True)
        llm = LLM(
            config.model.folder,
            mesh=MeshSpec(data=len(own) // grpo.tensor, tensor=grpo.tensor),
            devices=own,
            progress=compiling(what="programs that sample", enabled=first),
            max_num_seqs=min(MAX_ROWS, -(-config.train.global_batch // sum(copies))),
            dtype=jnp.dtype(COMPUTE_DTYPE[config.precision]).name,
            quantization="dtype",
            max_model_len=config.train.seq_len,
            kv_cache_bytes=int(grpo.kv_cache_gib * 2**30 * len(own)),
            # An encoder is held while a step trains, too: it reads the images of rows (`eyes`).
            **({"mm_processor_kwargs": prepared_as(config)} if sees else {"limit_mm_per_prompt": {"image": 0}}),
        )
        every = MeshSpec(data=sum(copies), tensor=grpo.tensor).build(devices)
        made = cls(llm, model, CopiedWeights.of(llm.engine.runner, every), copies)
        made.rest()
        return made

    @property
    def _engines(self) -> tuple[Engine, ...]:
        engine = self.llm.engine
        return engine.engines if isinstance(engine, EngineGroup) else (engine,)

    def eyes(self, mesh: Mesh) -> Any:
        """The weights of the encoder of images, which all copies hold whole on each device, as arrays over the mesh
        that trains: in the same memory."""
        place = NamedSharding(mesh, PartitionSpec())

        def over(*copies: jax.Array) -> jax.Array:
            shards = [shard.data for copy in copies for shard in copy.addressable_shards]
            return jax.make_array_from_single_device_arrays(copies[0].shape, place, shards)

        return jax.tree.map(over, *(engine.runner.image_encoder.params for engine in self._engines))

    def prepare(self, file: bytes) -> Picture:
        """An image as the encoder reads it; those that copies were shown last are prepared already."""
        return self.llm.prepared(file)

    @contextlib.contextmanager
    def holding(self, params: Any, frozen: Any) -> Iterator[None]:
        """Samples with these weights of a training state inside; of several processes all must come. Outside neither
        weights nor pages are held. Raises ShardlmError where they have no room beside the state."""
        try:
            self._take(params, frozen)
            yield
        finally:
            self.rest()

    def _take(self, params: Any, frozen: Any) -> None:
        lora = self.model.execution.lora
        try:
            if lora.rank:
                params = added(frozen, params, factor=lora.alpha / lora.rank)
            placed = jax.block_until_ready(self.weights.placed(params))
            del params  # of adapters the sums, which are all weights
            each = of_copies(placed, [engine.runner.mesh for engine in self._engines])
            for engine, own in zip(self._engines, each, strict=True):
                engine.update_weights(own)
                engine.runner.allocate()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ShardlmError(
                f"the copies that sample do not fit into memory beside the training state: {self.weights.gib:.2f} GiB "
                "of weights on each device, and grpo.kv_cache_gib of pages; set that to less, grpo.tensor to more, or "
                "split the state over more devices (rules, mesh.fsdp)"
            ) from None

    def rest(self) -> None:
        """Gives the memory back."""
        for engine in self._engines:
            rest(engine)

    def sample(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[list[CompletionOutput]]:
        """The replies to each prompt (serve/prompts.py), by as many copies as can be. Raises EngineError where one
        broke."""
        if not prompts:
            return []
        parts = [parts_of(one, len(prompts), len(self._engines)) for one in params]
        asked = [prompt for prompt, own in zip(prompts, parts, strict=True) for _ in own]
        found = iter(whole(self.llm.generate(asked, list(itertools.chain(*parts)), use_tqdm=False)))
        return [[reply for _ in own for reply in next(found).outputs] for own in parts]


def parts_of(params: SamplingParams, prompts: int, copies: int) -> list[SamplingParams]:
    """Requests that together have the replies of one of `prompts` alike: a request is one copy's, and in the fewest
    that copies have equally many of, none waits for another. Reply i has the seed of params and i more."""
    n = params.n
    count = next((k for k in range(1, n) if n % k == 0 and prompts * k % copies == 0), n)
    if count == 1:
        return [params]
    each = range(0, n, n // count)
    return [dataclasses.replace(params, n=n // count, seed=params.seed + first) for first in each]


def copies_of(processes: Sequence[int], tensor: int) -> tuple[int, ...]:
    """How many copies over `tensor` devices each process has, of the process of each device. Raises ShardlmError where
    a copy would have devices of several, or some would be left."""
    counts = collections.Counter(processes)
    if any(count % tensor for count in counts.values()):
        least = min(counts.values())
        choices = [str(n) for n in range(1, least + 1) if all(count % n == 0 for count in counts.values())]
        of = f"the {least} devices of a process, in which a copy samples" if len(counts) > 1 else f"{least} devices"
        more = ", or start fewer processes of more devices" if len(counts) > 1 else ""
        raise ShardlmError(f"grpo.tensor={tensor} does not divide {of}; choose from {', '.join(choices)}{more}")
    return tuple(counts[process] // tensor for process in sorted(counts))


def check_longest(model: Pretrained, seq_len: int) -> None:
    """Refuses rows beyond the positions that a checkpoint is said to be made for, to which what samples keeps."""
    longest = registry.longest(model.options)
    if longest and seq_len > longest:
        raise ShardlmError(
            f"train.seq_len={seq_len} is more than the {longest} positions that {model.folder} is made for, beyond "
            f"which no reply is sampled; set train.seq_len to at most {longest}"
        )


def check_rotation(model: Pretrained, seq_len: int) -> None:
    """Refuses a model that is trained with another rotation than it samples with: what samples has that of rows of
    seq_len, and what is trained that of model.length."""
    trained, sampling = (dataclasses.replace(model, length=n).transformer() for n in (model.length, seq_len))
    for one, other in zip(trained.attention_kinds, sampling.attention_kinds, strict=True):
        if not one.rope:
            continue
        a, b = (kind.rope.frequencies(getattr(kind, "rope_dim", kind.head_dim)) for kind in (one, other))
        if not np.array_equal(a, b) or one.rope.magnitude != other.rope.magnitude:
            raise ShardlmError(
                f"model.length={model.length} with train.seq_len={seq_len}: the rotation of {model.folder} depends on "
                "the longest row, and replies would be sampled with another than is trained; set model.length to "
                f"{seq_len}"
            )
