"""From a checkpoint's folder to an engine that is ready: mesh, weights, the pool of pages, and the programs."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax

from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import PageLayout
from shardlm.mesh import MeshSpec
from shardlm.opened import Opened, describe, load
from shardlm.ops.kv_format import KvFormat, held
from shardlm.progress_bar import waiting
from shardlm.serve.deterministic import DeterministicRunner
from shardlm.serve.engine import Engine
from shardlm.serve.layers import taken_apart
from shardlm.serve.page_table import PageTable
from shardlm.serve.runner import Runner, RunnerConfig
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.speculation.build import DraftModel, layouts_of, make_proposer, open_draft_model
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.state import ModelDef
from shardlm.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How a model is served; names and defaults are vLLM's where it has them.

    mesh                    of the devices; its tensor and expert axes split the model
    dtype                   that is computed in; None: the checkpoint's, on a CPU float32
    quantization            weights in "int8" or "int4" (ops/grouped_weights.py); None: in dtype
    kv_cache_dtype          of keys and values: "bfloat16", "fp8" or "int8" (ops/kv_format.py); auto: dtype
    max_model_len           tokens of prompt and reply together; None: what the model was made for
    block_size              tokens of a page
    gpu_memory_utilization  share of a GPU's memory for weights, pages and what programs need
    kv_cache_bytes          of all pages, over all devices; None: what is left of a GPU's memory, 1 GiB on a CPU
    max_num_seqs            requests that run at once; None: 256, on a CPU 32
    max_num_batched_tokens  of the prompts in one step; None: 2048, on a CPU 512
    decode_steps            tokens that a request decodes between two looks of the host
    enable_prefix_caching   equal beginnings of prompts are computed once
    deterministic           a reply and its log-probabilities are the same bits whatever else runs (deterministic.py)
    speculative_config      drafts to verify, as a mapping with vLLM's keys (speculation/config.py); None: none
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
    deterministic: bool = False
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None

    def __post_init__(self):
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.parse(self.speculative_config))
            if self.deterministic:
                raise ShardlmError(
                    "deterministic=True computes each token alone and speculative_config several at once; choose one"
                )
        if self.quantization not in (None, "int8", "int4"):
            raise ShardlmError(f"quantization={self.quantization!r}; choose from int8, int4, or None")
        if self.kv_cache_dtype not in get_args(KvFormat):
            raise ShardlmError(f"kv_cache_dtype={self.kv_cache_dtype!r}; choose from {', '.join(get_args(KvFormat))}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ShardlmError(f"gpu_memory_utilization={self.gpu_memory_utilization} is a share above 0, at most 1")
        split = [axis for axis in ("data", "fsdp", "context", "pipeline") if getattr(self.mesh, axis) > 1]
        if split:
            raise ShardlmError(
                f"mesh {self.mesh}: {', '.join(split)} does not split a model that is served; give its devices to "
                "tensor or expert, or run replicas"
            )


def build(
    path: str | os.PathLike, config: EngineConfig, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Engine, Opened]:
    """The engine of a checkpoint, its programs compiled, and what was opened. Raises ShardlmError for what does not fit
    or is not there."""
    found = describe(path)
    longest = found.longest
    length = config.max_model_len or longest
    if longest and length > longest:
        raise ShardlmError(f"max_model_len={length} is more than the model's {longest} positions; choose at most that")
    if not length:
        raise ShardlmError(f"{path} does not say how long its texts may be; give max_model_len")
    vocab = found.source.transformer().vocab_size
    draft = open_draft_model(config.speculative_config, vocab, config.mesh, config.dtype, length)
    opened = load(
        path, mesh=config.mesh, dtype=config.dtype, decoding=True, quantization=config.quantization, length=length
    )
    engine = assemble(opened, opened.tokenizer, opened.stop_ids, length, config, progress, draft)
    return engine, dataclasses.replace(opened, model=engine.runner.model, params=None)  # the runner has them


def assemble(
    opened: Opened,
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    length: int,
    config: EngineConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
    draft: DraftModel | None = None,
) -> Engine:
    """The engine of a model that is opened for decoding, whose parameters it takes over, and of its draft model."""
    speculative = config.speculative_config
    with jax.set_mesh(opened.mesh):
        model, params = taken_apart(opened.model, opened.params, config.kv_cache_dtype)
    cpu = opened.mesh.devices.flat[0].platform == "cpu"
    rows = config.max_num_seqs or (32 if cpu else 256)
    drafts = speculative.num_speculative_tokens if speculative else 0
    tokens = max(config.max_num_batched_tokens or (512 if cpu else 2048), rows * (1 + drafts) + 1)
    decoded = config.decode_steps * (1 + drafts)
    layouts = layouts_of(model, draft, length, config.block_size, decoded)
    models = [model, draft.model] if draft else [model]
    each = sum(page_bytes(*one, config.block_size) for one in zip(models, layouts, strict=True))
    step = max(tokens, decoded)
    usable = 1 + rows * layouts[0].pages_of(length, config.block_size, step)
    count = min(pages_of(each, config, cpu), usable)
    layout, *beside = (dataclasses.replace(layout, num_pages=count) for layout in layouts)
    sizes = RunnerConfig(layout, config.block_size, rows, tokens, length, config.decode_steps)
    make = DeterministicRunner if config.deterministic else Runner
    proposer = make_proposer(speculative, draft, sizes, *beside) if speculative else ()
    runner = make(model, params, opened.mesh, sizes, *proposer)
    table = PageTable(
        layout.num_pages,
        config.block_size,
        windows=layout.windows,
        longest_step=step,
        caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(SchedulerConfig(rows, tokens, length, (1, config.decode_steps), drafts), table)
    with waiting("compiling", jax.process_index() == 0):
        runner.compile(progress)
    return Engine(runner, scheduler, tokenizer, stop_ids)


def page_bytes(model: ModelDef, layout: PageLayout, block_size: int) -> int:
    """Of one page in the layers that it has room for, over all devices."""
    entries = model.outline().segments[0].blocks[0].attention.cache_entries()
    pools = held(entries, model.execution.kv_cache, model.execution.dtype).values()
    position = sum(heads * width * dtype.itemsize for (heads, width), _, dtype in pools)
    return layout.layers * block_size * position


def pages_of(each: int, config: EngineConfig, cpu: bool) -> int:
    """How many pages of `each` bytes the memory holds, scrap page included. Raises ShardlmError where it holds none."""
    if config.kv_cache_bytes:
        nbytes = config.kv_cache_bytes
    elif cpu:
        nbytes = 2**30
    else:
        nbytes = free_bytes(config)
    if nbytes < 2 * each:
        raise ShardlmError(
            f"{nbytes / 2**30:.2f} GiB hold no page of {each:,} bytes: raise kv_cache_bytes or gpu_memory_utilization, "
            "split the model over more devices, or quantise it"
        )
    return nbytes // each


def free_bytes(config: EngineConfig) -> int:
    """What is left of the GPUs' memory for pages, measured once the weights are there; a twentieth of the memory is for
    programs."""
    count = config.mesh.size(*config.mesh.sizes())
    stats = [device.memory_stats() for device in jax.devices()[:count]]
    left = min(s["bytes_limit"] * (config.gpu_memory_utilization - 0.05) - s["bytes_in_use"] for s in stats)
    return max(0, int(left)) * count


def described(opened: Opened, engine: Engine) -> str:
    """One line on what is ready."""
    config: Any = engine.runner.config
    layout, longest = config.layout, config.max_model_len
    fit = (layout.num_pages - 1) / layout.pages_of(longest, config.page_size, config.decode_steps)
    return (
        f"serving {json.dumps(opened.folder.name)}: {layout.num_pages - 1:,} pages of {config.page_size} tokens in "
        f"{layout.layers} layers, for {fit:,.1f} requests of {longest:,} tokens; {config.max_rows} requests at once; "
        f"{engine.runner.num_programs} programs compiled in {engine.runner.compile_seconds:.1f} s"
    )
