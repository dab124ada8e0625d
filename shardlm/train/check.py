"""Refuses, before anything compiles, what cannot run: every message gives the values and the choices that work."""

import jax

from shardlm import hardware
from shardlm.errors import ShardlmError
from shardlm.layers.attention import kv_heads_name
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.head_indexer import HeadIndexerConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.ngrams import NgramsConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.quantized_matmul import Matmul
from shardlm.ops.ulysses import fits
from shardlm.precision import Precision
from shardlm.rules import BATCH_AXES, Rules
from shardlm.train.config import PipelineConfig, TrainConfig


def check_batch(train: TrainConfig, mesh: MeshSpec) -> None:
    """Refuses batches and rows that do not divide over microbatches and devices."""
    if not splits_batch(train, mesh):
        rows = mesh.size(*BATCH_AXES) * train.accumulation
        batch_axes = tuple(axis for axis in BATCH_AXES if mesh.size(axis) > 1)
        below = train.global_batch // rows * rows
        near = f"{below} or {below + rows}" if below else str(rows)
        axes = " x ".join([f"{a}={mesh.size(a)}" for a in batch_axes] + [f"accumulation={train.accumulation}"])
        raise ShardlmError(
            f"train.global_batch={train.global_batch} cannot be split over {axes}, {rows} ways; choose {near}"
        )
    check_length(train.seq_len, mesh)


def splits_batch(train: TrainConfig, mesh: MeshSpec) -> bool:
    """Whether `check_batch` does not refuse the rows. Each stage of a pipeline sees all of a microbatch; shares have
    their own check (replicas.py)."""
    return bool(train.shares) or train.global_batch % (mesh.size(*BATCH_AXES) * train.accumulation) == 0


def check_length(seq_len: int, mesh: MeshSpec) -> None:
    """Refuses rows that cannot be split between blocks, or cut into the chunks of a ring."""
    parts, why = mesh.tensor * mesh.context, f"tensor={mesh.tensor} between blocks (sequence parallel)"
    if mesh.context > 1:
        parts *= 2
        why = f"context={mesh.context} x tensor={mesh.tensor}, two chunks on each device (zigzag order)"
    if seq_len % parts:
        below = seq_len // parts * parts
        near = f"{below} or {below + parts}" if below else str(parts)
        raise ShardlmError(f"train.seq_len={seq_len} cannot be split over {why}; choose {near}")


def check_positions(seq_len: int, model: TransformerConfig) -> None:
    """Refuses rows with more positions than a model has learned: those beyond would all be the last one."""
    if model.max_positions and seq_len > model.max_positions:
        raise ShardlmError(
            f"seq_len={seq_len} is more than the {model.max_positions} positions that the model has learned; choose at "
            f"most {model.max_positions}"
        )


def check_context(choice: str, num_heads: int, num_kv_heads: int, mesh: MeshSpec, ring: bool = True) -> None:
    """Refuses Ulysses where a device's heads do not divide over the context axis; `ring`: whether that may be chosen
    instead."""
    if choice != "ulysses" or mesh.context == 1:
        return
    local = num_heads // mesh.tensor, max(1, num_kv_heads // mesh.tensor)
    if not fits(*local, mesh.context):
        works = [c for c in range(1, local[0] + 1) if fits(*local, c)]
        raise ShardlmError(
            f"context_attention=ulysses splits heads={local[0]} and kv_heads={local[1]} of each device (tensor="
            f"{mesh.tensor}) over context={mesh.context}; choose context from {', '.join(map(str, works))}"
            + (", or context_attention=ring" if ring else "; linear and sparse attention take no ring")
        )


def check_choice(mesh: MeshSpec, context_attention: str) -> None:
    """Refuses sparse attention (layers/indexer.py, compressed_attention.py) in a ring."""
    if mesh.context > 1 and context_attention == "ring":
        raise ShardlmError(
            "context_attention=ring: its devices see a part of the keys at a time, and sparse attention chooses among "
            "all; set context_attention to auto or ulysses, or mesh.context to 1"
        )


def check_own_choices(model: TransformerConfig, mesh: MeshSpec) -> None:
    """Refuses choices of each kv head over rows that are split, whose devices have other heads than choose."""
    of_each = any(isinstance(getattr(block.attention, "indexer", None), HeadIndexerConfig) for block in model.kinds)
    if of_each and mesh.context > 1:
        raise ShardlmError(
            f"context={mesh.context}: each kv head of the model attends to blocks of its own, for which devices have "
            "whole rows; set mesh.context to 1 and give its devices to tensor, fsdp or data"
        )


def check_memory(attention: DeltaNetConfig, mesh: MeshSpec, context_attention: str = "auto") -> None:
    """Refuses linear attention whose heads do not divide over tensor and context, over which each device goes through
    whole rows of its share of them. Of Mamba 2 devices may share a group of queries and keys, and a short convolution's
    numbers are split over tensor alone."""
    if mesh.context > 1 and context_attention == "ring":
        raise ShardlmError(
            "context_attention=ring: linear attention goes through a row from its first token to its last, and a ring "
            "has them in another order; set context_attention to auto or ulysses, or mesh.context to 1"
        )
    if isinstance(attention, ShortConvConfig):
        return  # which devices exchange a few tokens for
    ways = mesh.size("tensor", "context")
    num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
    if isinstance(attention, MambaConfig):
        fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and 0 in (num_kv_heads % n, n % num_kv_heads)]
        if ways not in fits or mesh.tensor not in fits:
            raise ShardlmError(
                f"heads={num_heads} in groups={num_kv_heads} of Mamba 2 cannot be split over tensor={mesh.tensor} x "
                f"context={mesh.context}; choose sizes whose product is one of {', '.join(map(str, fits))}"
            )
        return
    if num_kv_heads % ways:
        works = ", ".join(str(n) for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0)
        raise ShardlmError(
            f"heads={num_kv_heads} of the queries and keys of linear attention cannot be split over tensor="
            f"{mesh.tensor} x context={mesh.context}; choose sizes whose product is one of {works}"
        )


def fills_stages(layers: int, train: TrainConfig, pipeline: PipelineConfig, mesh: MeshSpec) -> bool:
    """Whether `check_pipeline` refuses nothing."""
    stages = mesh.pipeline
    return stages == 1 or (stages * pipeline.laps <= layers and train.accumulation % stages == 0)


def check_pipeline(layers: int, train: TrainConfig, pipeline: PipelineConfig, mesh: MeshSpec) -> None:
    """Refuses a pipeline with more places than layers, or microbatches that do not fill the stages. `layers` is
    how often the model's longest run of equal blocks repeats."""
    stages = mesh.pipeline
    if fills_stages(layers, train, pipeline, mesh):
        return
    if stages * pipeline.laps > layers:
        rounds = "" if pipeline.laps == 1 else f" x pipeline.rounds={pipeline.laps}"
        fewer = "" if pipeline.laps == 1 else " or fewer rounds"
        raise ShardlmError(
            f"layers={layers} cannot be split over pipeline={stages}{rounds}: each of {stages * pipeline.laps} places "
            f"needs one; choose pipeline up to {max(1, layers // pipeline.laps)}{fewer}"
        )
    below = train.accumulation // stages * stages
    near = f"{below} or {below + stages}" if below else str(stages)
    raise ShardlmError(
        f"train.accumulation={train.accumulation} microbatches do not fill pipeline={stages} stages in whole "
        f"groups; choose {near}"
    )


def check_outside_stages(model: TransformerConfig, pipeline: PipelineConfig, mesh: MeshSpec, context: str) -> None:
    """Refuses 1F1B with a ring in layers that only the first or the last stage runs: a collective-permute waits for all
    devices of the program, and they would wait for ever. `context` is how attention crosses the context axis."""
    outside = model.cached_layers - model.segments[model.pipelined_segment()].num_layers
    if pipeline.schedule == "1f1b" and mesh.pipeline > 1 and mesh.context > 1 and context == "ring" and outside:
        raise ShardlmError(
            f"pipeline.schedule=1f1b with context={mesh.context}: {outside} of the model's layers are outside the "
            "stages (before or behind the longest run of equal layers, or predicting further tokens), and a ring in "
            "them would wait for stages that do not run them; set pipeline.schedule to circular or gpipe, "
            "context_attention to ulysses, or mesh.context to 1"
        )


def check_remat(remat: str, pipeline: PipelineConfig, mesh: MeshSpec) -> None:
    """Refuses to choose what 1F1B keeps of the layers in its stages."""
    if pipeline.schedule == "1f1b" and mesh.pipeline > 1 and remat != "full":
        raise ShardlmError(
            f"remat={remat} with pipeline.schedule=1f1b: it keeps the input of every layer of the microbatches under "
            "way and makes the rest again; set remat=full, or pipeline.schedule to circular or gpipe"
        )


def check_model(model: TransformerConfig, rules: Rules, context_attention: str = "auto") -> None:
    """Refuses a model whose dimensions do not divide over the mesh."""
    if rules.mesh.expert > 1 and not any(block.mlp.num_experts for block in model.kinds):
        raise ShardlmError(
            f"mesh.expert={rules.mesh.expert}: the model has no experts to split; set mesh.expert=1 and give its "
            "devices to data, fsdp or tensor"
        )
    model.check_stages(rules.mesh.pipeline)
    if model.sparse or model.compressed:
        check_choice(rules.mesh, context_attention)
        check_own_choices(model, rules.mesh)
    for block in model.kinds:
        heads = block.attention.num_heads, block.attention.num_kv_heads
        if block.memory:
            rules.act.check("heads", block.memory.num_heads)
            check_memory(block.memory, rules.mesh, context_attention)
        if isinstance(block.attention, DeltaNetConfig):
            rules.act.check("heads", heads[0])
            check_memory(block.attention, rules.mesh, context_attention)
        elif isinstance(block.attention, CompressedConfig):  # each device has its tokens, and all keys and entries
            rules.act.check("heads", heads[0])
            rules.act.check("heads", block.attention.out_groups)
        else:
            kv_heads_name(heads[1], heads[0], rules.mesh.tensor)  # which tells the sizes that suit both kinds of heads
            rules.act.check("heads", heads[0])
            whole = model.remembers or model.sparse
            check_context("ulysses" if whole else context_attention, *heads, rules.mesh, ring=not whole)
        for width in block.mlp.widths:
            rules.rest.check("mlp", width)
        if block.mlp.num_experts:
            rules.rest.check("experts", block.mlp.num_experts)
            rules.optimizer.check("expert_embed", block.mlp.read_dim(model.embed_dim))
    rules.rest.check("vocab", model.vocab_size)
    rules.optimizer.check("embed", model.embed_dim)
    if model.inputs:
        rules.optimizer.check("embed", model.inputs.dim)
    for own in model.ngrams:
        check_ngrams(own, model.embed_dim, rules)


def check_ngrams(own: NgramsConfig, embed_dim: int, rules: Rules) -> None:
    """Refuses a table of n-grams that does not divide over the mesh, and streams whose numbers do not where a
    convolution goes over whole rows of a share of them."""
    mesh, where = rules.mesh, f"of layer {own.layer}'s n-grams"
    for what, size, name in ((f"{own.width} columns", own.width, "embed"), (f"{own.rows} rows", own.rows, "vocab")):
        axes = rules.optimizer.axes(name)
        if size % mesh.size(*axes):
            over = " x ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
            instead = (
                f"give more of the mesh to {'tensor, or to data with rules=hybrid' if name == 'embed' else 'fsdp'}"
            )
            raise ShardlmError(f"the table {where} has {what}, which cannot be split over {over}; {instead}")
    if embed_dim % mesh.size(*rules.act.axes("seq")):
        raise ShardlmError(
            f"the convolution {where} splits embed={embed_dim} over context={mesh.context} x tensor={mesh.tensor}; "
            "choose sizes whose product divides it"
        )


def check_matmul(matmul: Matmul, precision: Precision, device: jax.Device) -> None:
    """Refuses 8-bit matmuls that the precision cannot hold or the GPU cannot do. A CPU converts as it multiplies."""
    if matmul in ("dtype", "W4A16", "W8A16"):  # whose products are those of the compute dtype
        return
    if precision == "fp16":
        raise ShardlmError(
            f"matmul={matmul} with precision=fp16: sums of 8-bit products are scaled afterwards and before that exceed "
            "float16, which ends at 65,504; set precision to bf16"
        )
    if matmul in ("fp8", "FP8_DYNAMIC") and device.platform != "cpu" and not hardware.multiplies_fp8(device):
        raise ShardlmError(
            f"matmul={matmul} on {device.device_kind}: its matrix units do not take fp8, which came with compute "
            f"capability 8.9 (Ada, Hopper, Blackwell); set matmul to {'int8' if matmul == 'fp8' else 'W8A8'} or dtype"
        )


def check_vocabulary(model: TransformerConfig, vocab_size: int, folder: str = "") -> None:
    """Refuses a tokenizer with more tokens than the model has embeddings. `folder`: of a checkpoint that it is."""
    if vocab_size > model.vocab_size:
        remedy = f"set data.tokenizer to {folder}" if folder else f"set model.vocab_size to at least {vocab_size}"
        raise ShardlmError(f"the tokenizer has {vocab_size} tokens and the model embeds {model.vocab_size}; {remedy}")
