"""How many pages there are, from what one takes and what is free; with them the sizes of an engine's programs."""

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from shardlm.distributed import least_of_all, of_all
from shardlm.errors import ShardlmError
from shardlm.host_memory import host_gib, use_host_memory, whose_memory
from shardlm.layers.page_layout import PageLayout
from shardlm.ops.kv_format import held
from shardlm.serve.chunk_programs import Cuts
from shardlm.serve.engine_config import PROGRAMS, EngineConfig
from shardlm.serve.host_pages import BUNDLE, HostPages
from shardlm.serve.memories import left_beside, request_bytes, rows_beside, snapshots_beside
from shardlm.serve.page_table import PageTable
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.snapshots import Snapshots
from shardlm.serve.speculation.build import DraftModel, layouts_of
from shardlm.serve.stages import Place
from shardlm.serving_rules import split_pages
from shardlm.state import ModelDef, cache_entries

log = logging.getLogger(__name__)
STAGE_AXES = ("expert", "tensor")  # over which the devices of one stage of one replica differ
CHUNK_TOKENS = {True: 512, False: 2048}  # of prompts in a step, on a CPU or not
ALLOCATED = 0.95  # of a GPU's memory; jax takes 0.75 unless told, and CUDA, NCCL and cuBLAS need some besides


def sizes_of(
    model: ModelDef,
    draft: DraftModel | None,
    places: Sequence[Place],
    length: int,
    config: EngineConfig,
    seen: Callable[[int], int] = lambda tokens: 0,
) -> tuple[RunnerConfig | PageLayout, ...]:
    """(the sizes of a replica's programs, the page layout of the layers that draft, where there are any), once the
    weights are on the devices. `seen`: what images take beside of each device of the first stage, of the tokens of a
    batch."""
    stages = [stage for place in places for stage in place.stages]
    cpu = stages[0].mesh.devices.flat[0].platform == "cpu"
    layouts = layouts_of(model, draft, length, config.block_size, config.decoded, config.drafts)
    each = [page_bytes(stage.model, stage.layout(layouts[0]), config.block_size) for stage in places[0].stages]
    each[-1] += page_bytes(draft.model, layouts[1], config.block_size) if draft else 0
    beside = seen(config.max_num_batched_tokens or CHUNK_TOKENS[False])
    sees = [beside * stage.mesh.devices.size * stage.first for stage in stages]
    rooms = None if cpu else [free_bytes(one.mesh, config) - own for one, own in zip(stages, sees, strict=True)]
    check_host(config.kv_offloading_size)
    slots = [request_bytes(stage.model, stage.layout(layouts[0])) for stage in places[0].stages]
    slots[-1] += request_bytes(draft.model, layouts[1]) if draft else 0
    return sized(layouts, each, rooms, length, config, len(places), slots)


def sized(
    layouts: Sequence[PageLayout],
    each: Sequence[int],
    rooms: Sequence[int] | None,
    length: int,
    config: EngineConfig,
    replicas: int,
    slots: Sequence[int] = (0,),
) -> tuple[RunnerConfig | PageLayout, ...]:
    """The same from what a page takes of the devices of each stage and from what is free there, of all replicas' stages
    in turn; None on CPUs. `slots`: what layers without pages remember one text by in each stage. Needs no devices."""
    cpu = rooms is None
    if config.kv_cache_bytes or cpu:  # which stands for all stages of a replica
        rooms, each, slots = [(config.kv_cache_bytes or 2**30) // replicas], [sum(each)], [sum(slots)]
    rows = config.max_num_seqs or rows_beside(slots, rooms, 32 if cpu else 256)
    tokens = max(config.max_num_batched_tokens or CHUNK_TOKENS[cpu], rows * (1 + config.drafts) + 1)
    usable = usable_pages(layouts[0], rows, length, config.block_size, max(tokens, config.decoded))
    bundles = bundles_of(each, config.kv_offloading_size / replicas) if config.kv_offloading_size else 0
    snapshots = snapshots_beside(slots, rows, rooms, length) if config.enable_prefix_caching else 0
    if bundles and layouts[0].memories and not snapshots:
        log.warning("kv_offloading_size is without effect: no memory is left to copy what linear attention remembers")
        bundles = 0
    count = min(pages_of(each, left_beside(slots, rows + snapshots, rooms)), usable)
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
        snapshots=snapshots,
        bundles=bundles,
        platform="cpu" if cpu else "gpu",
    )
    return own, *(own.as_own(layout) for layout in beside)


def usable_pages(layout: PageLayout, rows: int, length: int, block_size: int, longest_step: int) -> int:
    """How many pages all requests can make use of, with the scrap page and those that running requests leave free
    (holdings.py)."""
    return 1 + rows * (layout.pages_of(length, block_size, longest_step) + len(layout.windows))


def all_pages(sizes: RunnerConfig, config: EngineConfig) -> bool:
    """Whether a replica has all pages that its requests can make use of, so that more memory for them changes
    nothing."""
    longest = max(sizes.max_batch_tokens, config.decoded)
    most = usable_pages(sizes.layout, sizes.max_rows, sizes.max_model_len, sizes.page_size, longest)
    return sizes.layout.num_pages >= most


def scheduler_of(sizes: RunnerConfig, config: EngineConfig) -> Scheduler:
    """Of one replica."""
    layout, steps = sizes.layout, tuple(range(1, sizes.decode_steps + 1))
    cuts = Cuts() if config.deterministic else sizes.cuts
    how = (sizes.max_model_len, steps, config.drafts, cuts, layout.memories > 0)
    own = SchedulerConfig(sizes.max_rows, sizes.max_batch_tokens, *how, sizes.image_places)
    caching, snapshots = config.enable_prefix_caching, None
    if layout.memories:
        caching = caching and sizes.snapshots > 0
        snapshots = Snapshots(sizes.max_rows + 1, sizes.snapshots, sizes.page_size) if caching else None
    table = PageTable(
        layout.num_pages,
        sizes.page_size,
        windows=layout.windows,
        strides=layout.strides,
        longest_step=own.longest_step,
        caching=caching,
        snapshots=snapshots,
        host=HostPages(sizes.bundles) if sizes.bundles and caching else None,
    )
    return Scheduler(own, table)


def page_bytes(model: ModelDef, layout: PageLayout, block_size: int) -> int:
    """Of one page in the layers that it has room for, over all devices of a stage: those over which neither the heads
    of a pool nor the positions of a page are split have a copy each."""
    execution = model.execution
    pools = held(cache_entries(model), execution.kv_cache, execution.dtype, execution.paged_attention).values()
    rules = model.execution.rules
    devices = rules.mesh.size(*STAGE_AXES)
    position = sum(
        heads * width * dtype.itemsize * devices // rules.act.ways((kv_name, "slots"))
        for (heads, width), kv_name, dtype in pools
    )
    return layout.layers * block_size * position


def pages_of(each: Sequence[int], rooms: Sequence[int]) -> int:
    """How many pages the memory of a replica holds, scrap page included: each stage has so much room, and a page takes
    so much of it. Raises ShardlmError where it holds none."""
    pairs = [(room, own) for room, own in zip(rooms, itertools.cycle(each), strict=False) if own]
    nbytes, own = min(pairs, key=lambda one: one[0] / one[1])  # the stage with the least room for its own layers
    if nbytes < 2 * own:
        raise ShardlmError(
            f"{max(0, nbytes) / 2**30:.2f} GiB hold no page of {own:,} bytes: raise kv_cache_bytes (--kv_cache_gib) or "
            "gpu_memory_utilization, split the model over more devices, or quantise it"
        )
    return nbytes // own


def bundles_of(each: Sequence[int], gib: float) -> int:
    """How many bundles of pages so much of the host's memory holds, where a page takes so much of each stage. Raises
    ShardlmError where it holds none."""
    own = BUNDLE * sum(each) / 2**30
    if gib < own:
        raise ShardlmError(
            f"{gib:g} GiB of the host's memory for each replica hold no bundle of {BUNDLE} pages, {own:.4g} GiB: raise "
            "kv_offloading_size, or leave it out"
        )
    return int(gib / own)


def check_host(gib: float | None) -> None:
    """Raises ShardlmError where the hosts of all processes do not have so much memory together. All must call it."""
    if not gib:
        return
    hosts = dict(zip(of_all(whose_memory()), of_all(int(host_gib() * 2**30)), strict=True))  # each once
    if gib > (most := sum(hosts.values()) / 2**30):
        raise ShardlmError(
            f"kv_offloading_size={gib:g} GiB is more than the memory of {len(hosts)} "
            f"host{'s' * (len(hosts) > 1)}, {most:.1f} GiB; choose less than that"
        )


def check_cache(model: ModelDef, config: EngineConfig, length: int) -> None:
    """Raises ShardlmError, before weights are read, where pages are not split as asked, or kv_cache_bytes holds no page
    of the model's own layers, or not those of one request."""
    model = with_split_pages(model, config)
    if not config.kv_cache_bytes:
        return
    layouts = layouts_of(model, None, length, config.block_size, config.decoded, config.drafts)
    execution = dataclasses.replace(model.execution, kv_cache=config.kv_cache_dtype)
    own = page_bytes(dataclasses.replace(model, execution=execution), layouts[0], config.block_size)
    rooms = None if jax.devices()[0].platform == "cpu" else [0]  # which kv_cache_bytes stands for
    slots = [request_bytes(model, layouts[0])]
    scheduler_of(sized(layouts, [own], rooms, length, config, config.mesh.data, slots)[0], config)


def with_split_pages(model: ModelDef, config: EngineConfig) -> ModelDef:
    """The model, its pages' positions split as the configuration, whose block_size is known, says. Raises ShardlmError
    for what cannot be."""
    execution, ways = model.execution, config.decode_context_parallel_size
    rules = split_pages(execution.rules, model.config, ways, config.block_size)
    return dataclasses.replace(model, execution=dataclasses.replace(execution, rules=rules))


def use_memory(offloaded: float | None = None) -> None:
    """Lets jax have ALLOCATED of each GPU, unless the environment says how much, and so many GiB of the host's for
    pages, where it is to keep some there; before its backend starts."""
    if offloaded:
        use_host_memory(offloaded)
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
