"""From a checkpoint's folder to an engine that is ready: mesh, weights, the pool of pages, and the programs."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from shardlm.distributed import least_of_all
from shardlm.errors import ShardlmError
from shardlm.hf_quantised import METHODS, supported
from shardlm.layers.page_layout import PageLayout
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.opened import Opened, describe, load
from shardlm.ops.kv_format import KvFormat, held
from shardlm.ops.weight_format import PUBLISHED, QUANTIZATIONS
from shardlm.progress_bar import waiting
from shardlm.serve.adapter_table import AdapterTable, Room
from shardlm.serve.adapters import check, ready, refuse_own, settled_rank, with_room
from shardlm.serve.alike import asked
from shardlm.serve.chunk_programs import Cuts
from shardlm.serve.compiling import compile_all
from shardlm.serve.deterministic import DeterministicRunner
from shardlm.serve.engine import Engine
from shardlm.serve.few_bits import few_bits_of
from shardlm.serve.followers import refuse_second
from shardlm.serve.following import join
from shardlm.serve.layers import taken_apart
from shardlm.serve.lines import agree
from shardlm.serve.option_types import check_types
from shardlm.serve.page_table import PageTable
from shardlm.serve.prefill import Wanted, choose
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.runner import Runner
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.scheduler_config import most_decoded
from shardlm.serve.speculation.build import (
    DraftModel,
    by_modules,
    layouts_of,
    make_proposer,
    open_draft_model,
    wants_modules,
)
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.staged_deterministic import StagedDeterministicRunner
from shardlm.serve.staged_runner import StagedRunner
from shardlm.serve.stages import Place, cut, repeated
from shardlm.serve.submeshes import of_replica, of_stage, submeshes
from shardlm.state import ModelDef
from shardlm.tokenizer import Tokenizer

STAGE_AXES = ("expert", "tensor")  # over which the devices of one stage of one replica differ
PROGRAMS = 0.05  # of what jax has of a GPU's memory
ALLOCATED = 0.95  # of a GPU's memory; jax takes 0.75 unless told, and CUDA, NCCL and cuBLAS need some besides


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How a model is served; names and defaults are vLLM's where it has them.

    mesh                    of the devices: tensor, expert and pipeline split the model, data counts its replicas
    dtype                   that is computed in; None: the checkpoint's, on a CPU float32
    quantization            weights in "fp8", "int8" or "int4" (ops/grouped_weights.py); "fp8_dynamic", "int8_dynamic":
                            projections multiply 8-bit numbers too (ops/dynamic_matmul.py); "checkpoint": those in few
                            bits as its file has them (ops/weight_format.py); "dtype": all in dtype; None: the last but
                            one on GPUs, the last on a CPU
    kv_cache_dtype          of keys and values: "bfloat16", "fp8" or "int8" (ops/kv_format.py); auto: dtype
    max_model_len           tokens of prompt and reply together; None: what the model was made for
    block_size              tokens of a page
    gpu_memory_utilization  share of what jax may take of a GPU (use_memory) for weights, pages and what programs need
    kv_cache_bytes          of all pages, over all devices; None: what is left of a GPU's memory, 1 GiB on a CPU
    max_num_seqs            requests that run at once, of each replica; None: 256, on a CPU 32
    max_num_batched_tokens  of the prompts in one step; None: 2048, on a CPU 512
    decode_steps            tokens that a request decodes between two looks of the host, at most (pace.py)
    enable_prefix_caching   equal beginnings of prompts are computed once
    prefill_attention       of prompts without a cached beginning: "auto" (cuDNN on GPUs where it can, prefill.py) or
                            "pages", so that a hit and a miss of the prefix cache run the same kernel
    deterministic           a reply and its log-probabilities are the same bits whatever else runs (deterministic.py)
    speculative_config      drafts to verify, as a mapping with vLLM's keys (speculation/config.py); None: none
    enable_lora             room for adapters beside the weights, of which each request has one or none (adapters.py)
    max_loras               at once, at least as many as lora_modules
    max_lora_rank           of each; None: the largest of lora_modules, at least 16
    lora_modules            adapters that are loaded at first, by name: folders of PEFT or runs with lora.rank
    """

    mesh: MeshSpec = MeshSpec()
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: KvFormat = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    decode_steps: int = 8
    enable_prefix_caching: bool = True
    prefill_attention: Wanted = "auto"
    deterministic: bool = False
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int | None = None
    lora_modules: Mapping[str, str | os.PathLike] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_types(self)
        if not isinstance(self.mesh, MeshSpec):
            raise ShardlmError(f"mesh={self.mesh!r} must be a MeshSpec, such as MeshSpec(tensor=2)")
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.parse(self.speculative_config))
            if self.deterministic:
                raise ShardlmError(
                    "deterministic=True computes each token alone and speculative_config several at once; choose one"
                )
        if self.quantization in METHODS and self.quantization not in QUANTIZATIONS:
            raise ShardlmError(
                f"quantization={self.quantization!r} is what a checkpoint says of itself, and is read without it: "
                f"leave it out, or choose what its weights are to be held in, {', '.join(QUANTIZATIONS)}"
            )
        choices = (*QUANTIZATIONS, PUBLISHED, "dtype")
        if self.quantization not in (None, *choices):
            raise ShardlmError(f"quantization={self.quantization!r}; choose from {', '.join(choices)}, or None")
        if self.kv_cache_dtype not in get_args(KvFormat):
            raise ShardlmError(f"kv_cache_dtype={self.kv_cache_dtype!r}; choose from {', '.join(get_args(KvFormat))}")
        if self.prefill_attention not in get_args(Wanted):
            raise ShardlmError(f"prefill_attention={self.prefill_attention!r}; choose from auto, pages")
        if not PROGRAMS < self.gpu_memory_utilization <= 1:
            raise ShardlmError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} is a share above {PROGRAMS} (of programs), at "
                "most 1"
            )
        if not (self.enable_lora or self.lora_modules) and (self.max_loras > 1 or self.max_lora_rank):
            raise ShardlmError(
                f"max_loras={self.max_loras}, max_lora_rank={self.max_lora_rank} without room for adapters: give "
                "enable_lora=True or lora_modules"
            )
        split = [axis for axis in ("fsdp", "context") if getattr(self.mesh, axis) > 1]
        if split:
            raise ShardlmError(
                f"mesh {self.mesh}: {', '.join(split)} does not split a model that is served; give its devices to "
                "tensor, expert, pipeline or data"
            )

    @property
    def room(self) -> Room:
        """For adapters."""
        if not (self.enable_lora or self.lora_modules):
            return Room()
        rank = settled_rank(self.lora_modules, self.max_lora_rank)
        return Room(max(self.max_loras, len(self.lora_modules)), rank)

    @property
    def drafts(self) -> int:
        """Tokens that each step drafts."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    @property
    def decoded(self) -> int:
        """The most tokens of a row that are decoded and not known."""
        return most_decoded(self.decode_steps, self.drafts)


def build(
    path: str | os.PathLike, config: EngineConfig, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Engine | EngineGroup, Opened]:
    """The engine of a checkpoint, its programs compiled, and what was opened. Raises ShardlmError for what does not fit
    or is not there. Over several processes, each of which calls it, this is where those but the first stay until that
    ends (following.join)."""
    refuse_second()
    use_memory()
    if -1 in config.mesh.sizes().values():
        config = dataclasses.replace(config, mesh=config.mesh.resolve(jax.device_count()))
    submeshes(config.mesh)  # says where devices are too few
    room = config.room
    found, mesh = describe(path), of_replica(config.mesh)
    longest = found.longest
    length = config.max_model_len or longest
    if longest and length > longest:
        raise ShardlmError(f"max_model_len={length} is more than the model's {longest} positions; choose at most that")
    if not length:
        raise ShardlmError(f"{path} does not say how long its texts may be; give max_model_len")
    if jax.process_count() > 1:
        agree(asked(config, found), jax.process_index())
    if room.count:
        refuse_own(found.lora)
    for adapter in config.lora_modules.values():
        check(adapter, found.source, length, room)
    speculative, shape = config.speculative_config, found.source.transformer()
    if speculative:
        speculative.check_room(length)
    modules = wants_modules(speculative, shape, path)
    beside = (of_stage(mesh), config.dtype, config.kv_cache_dtype)
    draft = open_draft_model(speculative, shape.vocab_size, length, *beside)
    options = {"dtype": config.dtype, "quantization": config.quantization, "mtp": modules}
    cache = functools.partial(check_cache, config=config, length=length)
    opened = load(path, mesh=mesh, decoding=True, length=length, check=cache, **options)
    if said := grown(opened, config.quantization):
        logging.warning("%s %s", path, said)
    engine = assemble(opened, opened.tokenizer, opened.stop_ids, length, config, progress, draft)
    for name, adapter in config.lora_modules.items():
        engine.load_adapter(name, str(adapter), ready(adapter, engine))
    if jax.process_count() > 1:
        join(engine)
    return engine, dataclasses.replace(opened, model=engine.runner.model, params=None)  # the runner has them


def grown(opened: Opened, quantization: str | None) -> str:
    """What to tell of a checkpoint in few bits that is served in more; "" where there is nothing to tell."""
    execution, source = opened.model.execution, opened.source
    of_file = isinstance(source, Pretrained) and opened.folder == pathlib.Path(source.folder)  # no run
    method = supported(source.options) if of_file or execution.lora.base == PUBLISHED else ""
    dtype, left = jnp.dtype(execution.dtype).name, getattr(execution.weights, "left", ())
    if left:
        return f"is served as its file has it ({method}), but for {', '.join(left)}, which are in {dtype}"
    if not method or quantization or execution.weights != "dtype":
        return ""
    return (
        f"holds weights in few bits ({method}); they are served in {dtype}, as the numbers they stand for. "
        f"In less memory with quantization={PUBLISHED} (as the file has them, where their kind is "
        f"held so), {', '.join(QUANTIZATIONS)}"
    )


def assemble(
    opened: Opened,
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    length: int,
    config: EngineConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
    draft: DraftModel | None = None,
) -> Engine | EngineGroup:
    """The engine of a model that is opened for decoding on the mesh of one replica, whose parameters it takes over, and
    of its draft model."""
    meshes, speculative = submeshes(config.mesh), config.speculative_config
    adapters = AdapterTable(config.room, opened.source)
    with jax.set_mesh(opened.mesh):
        model, params = with_room(opened.model, opened.params, adapters.room)
        model, params = taken_apart(model, params, config.kv_cache_dtype)
    draft = draft or by_modules(speculative, model)
    first = cut(model, params, meshes[0], draft.params if draft else ())
    del params  # the stages have their own, and pages want the room
    draft = draft.within(first.stages[-1]) if draft else None
    places = [first, *(repeated(first, replica) for replica in meshes[1:])]
    sizes, *beside = sizes_of(model, draft, places, length, config)
    sizes = dataclasses.replace(sizes, prefill=choose(config.prefill_attention, model, config.deterministic))
    few_bits = few_bits_of(model.config, model.execution.weights, model.execution.few_bits)
    sizes = dataclasses.replace(sizes, few_bits=few_bits)
    schedulers = [scheduler_of(sizes, config) for _ in places]  # before anything is compiled: they refuse sizes
    proposer = make_proposer(speculative, draft, sizes, *beside)[0] if speculative else None
    runners: list[Runner] = []
    for place in places:
        like = runners[0] if runners else None
        if len(place.stages) > 1:
            make = StagedDeterministicRunner if config.deterministic else StagedRunner
            runners.append(make(model, place, sizes, like, proposer))
        else:
            make = DeterministicRunner if config.deterministic else Runner
            runners.append(make(model, place.params[0], place.stages[0].mesh, sizes, proposer, place.draft, like))
    with waiting("compiling", jax.process_index() == 0):
        compile_all(runners, progress)
    engines = [Engine(*pair, tokenizer, stop_ids, adapters) for pair in zip(runners, schedulers, strict=True)]
    return engines[0] if len(engines) == 1 else EngineGroup(engines)


def sizes_of(
    model: ModelDef, draft: DraftModel | None, places: Sequence[Place], length: int, config: EngineConfig
) -> tuple[RunnerConfig | PageLayout, ...]:
    """(the sizes of a replica's programs, the page layout of the layers that draft, where there are any), once the
    weights are on the devices."""
    stages = [stage for place in places for stage in place.stages]
    cpu = stages[0].mesh.devices.flat[0].platform == "cpu"
    layouts = layouts_of(model, draft, length, config.block_size, config.decoded)
    each = [page_bytes(stage.model, stage.layout(layouts[0]), config.block_size) for stage in places[0].stages]
    each[-1] += page_bytes(draft.model, layouts[1], config.block_size) if draft else 0
    rooms = None if cpu else [free_bytes(stage.mesh, config) for stage in stages]
    return sized(layouts, each, rooms, length, config, len(places))


def sized(
    layouts: Sequence[PageLayout],
    each: Sequence[int],
    rooms: Sequence[int] | None,
    length: int,
    config: EngineConfig,
    replicas: int,
) -> tuple[RunnerConfig | PageLayout, ...]:
    """The same from what a page takes of the devices of each stage and from what is free there, of all replicas' stages
    in turn; None on CPUs. Needs no devices."""
    cpu = rooms is None
    rows = config.max_num_seqs or (32 if cpu else 256)
    tokens = max(config.max_num_batched_tokens or (512 if cpu else 2048), rows * (1 + config.drafts) + 1)
    usable = 1 + rows * layouts[0].pages_of(length, config.block_size, max(tokens, config.decoded))
    count = min(pages_of(each, rooms, config, replicas), usable)
    layout, *beside = (dataclasses.replace(layout, num_pages=count) for layout in layouts)
    # Of one row XLA makes 20 kernels a layer of Llama 3 8B, of two 15 (compiled for H100): one row's norms and products
    # are reductions, and nothing is merged with them. The weights that are read are the same.
    least = 1 if cpu else 2
    own = RunnerConfig(
        layout,
        config.block_size,
        rows,
        tokens,
        length,
        config.decode_steps,
        least_rows=least,
        platform="cpu" if cpu else "gpu",
    )
    return own, *beside


def scheduler_of(sizes: RunnerConfig, config: EngineConfig) -> Scheduler:
    """Of one replica."""
    layout, steps = sizes.layout, tuple(range(1, sizes.decode_steps + 1))
    cuts = Cuts() if config.deterministic else sizes.cuts
    own = SchedulerConfig(sizes.max_rows, sizes.max_batch_tokens, sizes.max_model_len, steps, config.drafts, cuts)
    table = PageTable(
        layout.num_pages,
        sizes.page_size,
        windows=layout.windows,
        longest_step=own.longest_step,
        caching=config.enable_prefix_caching,
    )
    return Scheduler(own, table)


def page_bytes(model: ModelDef, layout: PageLayout, block_size: int) -> int:
    """Of one page in the layers that it has room for, over all devices of a stage: those over which the heads of a pool
    are not split have a copy each."""
    entries = model.outline().segments[0].blocks[0].attention.cache_entries()
    execution = model.execution
    pools = held(entries, execution.kv_cache, execution.dtype, execution.paged_attention).values()
    rules = model.execution.rules
    devices = rules.mesh.size(*STAGE_AXES)
    position = sum(
        heads * width * dtype.itemsize * devices // rules.mesh.size(*rules.act.axes(kv_name))
        for (heads, width), kv_name, dtype in pools
    )
    return layout.layers * block_size * position


def pages_of(each: Sequence[int], rooms: Sequence[int] | None, config: EngineConfig, replicas: int) -> int:
    """How many pages the memory of a replica holds, scrap page included; arguments as of `sized`. Raises ShardlmError
    where it holds none."""
    if config.kv_cache_bytes or rooms is None:
        nbytes, own = (config.kv_cache_bytes or 2**30) // replicas, sum(each)
    else:  # the stage with the least room for its own layers decides
        nbytes, own = min(zip(rooms, itertools.cycle(each), strict=False), key=lambda one: one[0] / one[1])
    if nbytes < 2 * own:
        raise ShardlmError(
            f"{nbytes / 2**30:.2f} GiB hold no page of {own:,} bytes: raise kv_cache_bytes (--kv_cache_gib) or "
            "gpu_memory_utilization, split the model over more devices, or quantise it"
        )
    return nbytes // own


def check_cache(model: ModelDef, config: EngineConfig, length: int) -> None:
    """Raises ShardlmError, before weights are read, where kv_cache_bytes holds no page of the model's own layers, or
    not those of one request."""
    if not config.kv_cache_bytes:
        return
    layouts = layouts_of(model, None, length, config.block_size, config.decoded)
    execution = dataclasses.replace(model.execution, kv_cache=config.kv_cache_dtype)
    own = page_bytes(dataclasses.replace(model, execution=execution), layouts[0], config.block_size)
    rooms = None if jax.devices()[0].platform == "cpu" else [0]  # which kv_cache_bytes stands for
    scheduler_of(sized(layouts, [own], rooms, length, config, config.mesh.data)[0], config)


def use_memory() -> None:
    """Lets jax have ALLOCATED of each GPU, unless the environment says how much; before its backend starts."""
    if not any(name in os.environ for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(ALLOCATED)


def free_bytes(mesh: Mesh, config: EngineConfig) -> int:
    """What is left of these GPUs' memory for pages, measured once the weights are there."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    least = least_of_all([room_beside(s["bytes_in_use"], s["bytes_limit"], config) for s in stats])
    return least * mesh.devices.size


def room_beside(in_use: float, limit: float, config: EngineConfig) -> int:
    """Bytes for pages on a GPU that holds so many already, of those that jax may take; PROGRAMS is for programs."""
    return max(0, int(limit * (config.gpu_memory_utilization - PROGRAMS) - in_use))


def described(engine: Engine | EngineGroup, name: str) -> str:
    """One line on what is ready; `name` is what clients call the model."""
    config = engine.runner.config
    layout, longest = config.layout, config.max_model_len
    fit = (layout.num_pages - 1) / layout.pages_of(longest, config.page_size, config.decode_steps)
    replicas = f"{len(engine.engines)} replicas of " if isinstance(engine, EngineGroup) else ""
    return (
        f"serving {json.dumps(name)}: {replicas}{layout.num_pages - 1:,} pages of {config.page_size} "
        f"tokens in {layout.layers} layers, for {fit:,.1f} requests of {longest:,} tokens; "
        f"{config.max_rows} requests at once; "
        f"{engine.runner.num_programs} programs compiled in {engine.runner.compile_seconds:.1f} s"
    )
