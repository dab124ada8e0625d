"""From a checkpoint's folder to an engine that is ready: mesh, weights, pages and programs."""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.errors import ShardlmError
from shardlm.hf_quantised import supported
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import Opened, describe, load, usual_dtype
from shardlm.ops.weight_format import PUBLISHED, QUANTIZATIONS
from shardlm.progress_bar import waiting
from shardlm.rules import Rules
from shardlm.serve.adapter_table import AdapterTable
from shardlm.serve.adapters import check, ready, refuse_own, with_room
from shardlm.serve.alike import asked
from shardlm.serve.classifier_files import apart
from shardlm.serve.compiling import compile_all
from shardlm.serve.deterministic import DeterministicRunner
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.entries import fitted, paged
from shardlm.serve.facts import ModelFacts
from shardlm.serve.few_bits import few_bits_of
from shardlm.serve.followers import refuse_second
from shardlm.serve.following import join
from shardlm.serve.host_pages import BUNDLE
from shardlm.serve.image_encoder import ImageEncoder
from shardlm.serve.layers import taken_apart
from shardlm.serve.lines import agree
from shardlm.serve.memories import refuse
from shardlm.serve.open_image_encoder import open_image_encoder, sight_for
from shardlm.serve.pool_size import all_pages, check_cache, scheduler_of, sizes_of, use_memory, with_split_pages
from shardlm.serve.pooling import Pooling
from shardlm.serve.prefill import choose
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.runner import Runner
from shardlm.serve.speculation.build import DraftModel, by_modules, make_proposer, open_draft_model, wants_modules
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.staged_deterministic import StagedDeterministicRunner
from shardlm.serve.staged_runner import StagedRunner
from shardlm.serve.stages import cut, repeated
from shardlm.serve.submeshes import in_several_processes, of_replica, of_stage, submeshes
from shardlm.serve.try_out import like_model, settled
from shardlm.state import ModelDef
from shardlm.tokenizer import Tokenizer

_SHORT = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def build(
    path: str | os.PathLike,
    config: EngineConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Engine | EngineGroup, Opened]:
    """The engine of a checkpoint over `devices`, all by default, its programs compiled, and what was opened. Raises
    ShardlmError for what does not fit or is not there. Over devices of several processes, each of which calls it, this
    is where those but the first stay until that ends (following.join)."""
    use_memory(config.kv_offloading_size)
    several = in_several_processes(devices)
    if several or devices is None:
        refuse_second()
    if -1 in config.mesh.sizes().values():
        config = dataclasses.replace(config, mesh=config.mesh.resolve(len(devices or jax.devices())))
    submeshes(config.mesh, devices)  # says where devices are too few
    room = config.room
    mesh = of_replica(config.mesh)
    found, classifier = apart(describe(path))
    longest = found.longest
    length = config.max_model_len or longest
    if longest and length > longest:
        raise ShardlmError(f"max_model_len={length} is more than the model's {longest} positions; choose at most that")
    if not length:
        raise ShardlmError(f"{path} does not say how long its texts may be; give max_model_len")
    if several:
        agree(asked(config, found), jax.process_index())
    if room.count:
        refuse_own(found.lora)
    for adapter in config.lora_modules.values():
        check(adapter, found.source, length, room)
    speculative, shape = config.speculative_config, found.source.transformer()
    if speculative:
        speculative.check_room(length)
        _check_processes(speculative, config.mesh.pipeline if several else 1)
    refuse(shape)
    config = fitted(paged(config, (devices or jax.devices())[0].platform), shape)
    shape.check_stages(config.mesh.pipeline)
    modules = wants_modules(speculative, shape, path)
    dtype = config.dtype
    if speculative and speculative.method == "eagle3":  # its head is in the dtype of the model
        dtype = dtype or usual_dtype(found, (devices or jax.devices())[0])
    beside = (of_stage(mesh), dtype, config.kv_cache_dtype, devices)
    draft = open_draft_model(speculative, shape, length, *beside)
    options = {"dtype": config.dtype, "quantization": config.quantization, "mtp": modules}
    sight = sight_for(found, config)
    cache = functools.partial(check_cache, config=config, length=length)
    options |= {"length": length, "check": cache, "devices": devices}
    opened = load(found if classifier else path, mesh=mesh, decoding=True, **options)
    if said := grown(opened, config.quantization):
        logging.warning("%s %s", path, said)
    dtype = opened.model.execution.dtype
    first = submeshes(config.mesh, devices)[0][0]  # of the stage that embeds
    image_encoder = open_image_encoder(sight, found, dtype, shape.embed_dim, first) if sight else None
    how = (opened.tokenizer, opened.stop_ids, length, config, progress, draft, devices, image_encoder)
    engine = assemble(opened, *how)
    pooling = Pooling.of(shape.embed_dim, opened.options, classifier)
    for one in (engine, *(engine.engines if isinstance(engine, EngineGroup) else ())):
        one.pooling = pooling
    for name, adapter in config.lora_modules.items():
        engine.load_adapter(name, str(adapter), ready(adapter, engine))
    if several:
        join(engine)
    return engine, dataclasses.replace(opened, model=engine.runner.model, params=None)  # the runner has them


def _check_processes(speculative: SpeculativeConfig, stages: int) -> None:
    """Raises ShardlmError for a head over so many pipeline stages, in several processes."""
    if speculative.method == "eagle3" and stages > 1:
        raise ShardlmError(
            f"speculative_config: method 'eagle3' does not go with pipeline={stages} over several processes, as the "
            "head is read by the first stage's, and drafts in the last: split the model over them by tensor and "
            "expert, or choose method 'ngram' or 'mtp'"
        )


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
    devices: Sequence[jax.Device] | None = None,
    image_encoder: ImageEncoder | None = None,
) -> Engine | EngineGroup:
    """The engine of a model that is opened for decoding on the mesh of one replica, whose parameters it takes over, of
    its draft model and of its encoder of images."""
    meshes, speculative = submeshes(config.mesh, devices), config.speculative_config
    config = paged(config, opened.mesh.devices.flat[0].platform)
    adapters = AdapterTable(config.room, opened.source)
    with jax.set_mesh(opened.mesh):
        model = with_split_pages(opened.model, config)
        model, params = with_room(model, opened.params, adapters.room)
        model, params = taken_apart(model, params, config.kv_cache_dtype)
        model = settled(config.fused_products, model, params, config.deterministic)
    if draft:
        own = like_model(draft.model, draft.params, model.execution.fused_rows)
        with jax.set_mesh(opened.mesh):
            model, draft = dataclasses.replace(draft, model=own).listening(model, params)
    draft = draft or by_modules(speculative, model)
    first = cut(model, params, meshes[0], draft.params if draft else ())
    del params  # the stages have their own, and pages want the room
    draft = draft.within(first.stages[-1]) if draft else None
    places = [first, *(repeated(first, replica) for replica in meshes[1:])]
    places = [draft.beside(place) for place in places] if draft else places
    seen = {"seen": functools.partial(image_encoder.buffer_bytes, length)} if image_encoder else {}
    sizes, *beside = sizes_of(model, draft, places, length, config, **seen)
    prefill = choose(config.prefill_attention, model, config.deterministic)
    sizes = dataclasses.replace(sizes, prefill=prefill.whole, in_parts=prefill.in_parts)
    few_bits = few_bits_of(model.config, model.execution.weights, model.execution.few_bits)
    sizes = dataclasses.replace(sizes, few_bits=few_bits)
    if image_encoder:
        image_encoder, sizes = image_encoder.fitted(sizes, config.drafts)
    schedulers = [scheduler_of(sizes, config) for _ in places]  # before anything is compiled: they refuse sizes
    proposer = make_proposer(speculative, draft, sizes, *beside)[0] if speculative else None
    runners: list[Runner] = []
    for place in places:
        like = runners[0] if runners else None
        own = image_encoder and image_encoder.on(place.stages[0].mesh)
        if len(place.stages) > 1:
            make = StagedDeterministicRunner if config.deterministic else StagedRunner
            runners.append(make(model, place, sizes, like, proposer, own))
        else:
            make = DeterministicRunner if config.deterministic else Runner
            sizes_of_one = (place.stages[0].mesh, sizes, proposer, place.draft)
            runners.append(make(model, place.params[0], *sizes_of_one, like, own))
    with waiting("compiling", jax.process_index() == 0):
        compile_all(runners, progress)
    engines = [Engine(*pair, tokenizer, stop_ids, adapters) for pair in zip(runners, schedulers, strict=True)]
    return engines[0] if len(engines) == 1 else EngineGroup(engines)


def facts_of(engine: Engine | EngineGroup) -> ModelFacts:
    """What is served, of one replica. Nothing is computed: shapes are."""
    model, source = engine.runner.model, engine.adapters.base
    shape: TransformerConfig = source.transformer()
    with jax.sharding.use_abstract_mesh(MeshSpec().abstract()):
        whole = ModelDef.make(shape, Execution(Rules.make("replicated", MeshSpec())))
    options = source.options if isinstance(source, Pretrained) else {}
    method, weights = supported(options), model.execution.weights
    held = _SHORT.get(name := jnp.dtype(model.execution.dtype).name, name)
    if weights != "dtype":
        held = weights if isinstance(weights, str) else method
    return ModelFacts(
        family=options.get("model_type") or type(source).__name__.removesuffix("Config").lower(),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(whole.shapes)),
        nbytes=sum(array.nbytes for array in jax.tree.leaves(engine.runner.params)),
        held_in=held.upper(),
        format=method if method == "gguf" else "safetensors",
        on_gpu=engine.runner.platform == "gpu",
        embed_dim=shape.embed_dim,
        layers=shape.num_layers,
        vocab_size=shape.vocab_size,
    )


def described(engine: Engine | EngineGroup, name: str, asked: EngineConfig) -> str:
    """One line on what is ready; `name` is what clients call the model, `asked` what was to be made of it."""
    config, execution = engine.runner.config, engine.runner.model.execution
    layout, longest = config.layout, config.max_model_len
    fit = (layout.num_pages - 1) / layout.pages_of(longest, config.page_size, config.decode_steps)
    which = "of them" if layout.both else "others"
    replicas = f"{len(engine.engines)} replicas of " if isinstance(engine, EngineGroup) else ""
    held = jnp.dtype(execution.dtype).name if execution.kv_cache == "auto" else execution.kv_cache
    more = ""
    if asked.kv_cache_bytes and all_pages(config, asked):
        more = f", all that can be used, so that {asked.kv_cache_bytes / 2**30:g} GiB (kv_cache_gib) are not taken"
    return (
        f"serving {json.dumps(name)}: {replicas}{layout.num_pages - 1:,} pages of {config.page_size} "
        f"tokens in {layout.layers} layers, keys and values of {int(fit * longest):,} tokens in {held}, for {fit:,.1f} "
        f"requests of {longest:,} tokens{more}; "
        f"{f'memories in {layout.memories} {which}, copies of {config.snapshots}; ' if layout.memories else ''}"
        f"{f'{config.bundles * BUNDLE:,} pages in the host memory; ' if config.bundles else ''}"
        f"{config.max_rows} requests at once; {'images are read; ' if engine.sight else ''}"
        f"{engine.runner.num_programs} programs compiled in {engine.runner.compile_seconds:.1f} s"
    )
