"""Refuses, before anything compiles, what cannot run: every message gives the values and the choices that work."""

import math

from shardlm.errors import ShardlmError
from shardlm.layers.attention import kv_heads_name
from shardlm.mesh import MeshSpec
from shardlm.models.transformer import TransformerConfig
from shardlm.rules import Rules
from shardlm.train.config import PipelineConfig, TrainConfig


def check_axes(mesh: MeshSpec) -> None:
    """Refuses mesh axes that nothing in a dense model is split over yet."""
    for axis in ("context", "expert"):
        if mesh.size(axis) > 1:
            raise ShardlmError(
                f"mesh.{axis}={mesh.size(axis)}: training does not split anything over {axis} yet; "
                f"set mesh.{axis}=1 and give its devices to data, fsdp or tensor"
            )


def check_batch(train: TrainConfig, rules: Rules) -> None:
    """Refuses batches and rows that do not divide over microbatches and devices."""
    # Each stage of a pipeline sees all rows of a microbatch.
    batch_axes = tuple(axis for axis in rules.act.axes("batch") if axis != "pipeline")
    rows = rules.mesh.size(*batch_axes) * train.accumulation
    if train.global_batch % rows:
        below = train.global_batch // rows * rows
        near = f"{below} or {below + rows}" if below else str(rows)
        axes = " x ".join([f"{a}={rules.mesh.size(a)}" for a in batch_axes] + [f"accumulation={train.accumulation}"])
        raise ShardlmError(
            f"train.global_batch={train.global_batch} cannot be split over {axes}, {rows} ways; choose {near}"
        )
    tensor = rules.mesh.tensor
    if train.seq_len % tensor:
        below = train.seq_len // tensor * tensor
        raise ShardlmError(
            f"train.seq_len={train.seq_len} cannot be split over tensor={tensor} between blocks (sequence parallel); "
            f"choose {below or tensor} or {below + tensor}"
        )


def check_pipeline(layers: int, train: TrainConfig, pipeline: PipelineConfig, mesh: MeshSpec) -> None:
    """Refuses a pipeline that leaves a stage without layers, or microbatches that do not fill the stages. `layers` is
    how often the model's longest run of equal blocks repeats."""
    stages = mesh.pipeline
    if stages == 1:
        return
    places = stages * pipeline.laps
    slots = math.ceil(layers / places)
    if slots * (places - 1) >= layers:
        works = [s for s in range(1, layers // pipeline.laps + 1) if _fills(layers, s * pipeline.laps)]
        rounds = "" if pipeline.laps == 1 else f" x pipeline.rounds={pipeline.laps}"
        fewer = "" if pipeline.laps == 1 else ", or fewer rounds"
        raise ShardlmError(
            f"layers={layers} cannot be split over pipeline={stages}{rounds}: {slots} a place would leave the last of "
            f"{places} places empty; choose pipeline from {', '.join(map(str, works))}{fewer}"
        )
    if train.accumulation % stages:
        below = train.accumulation // stages * stages
        near = f"{below} or {below + stages}" if below else str(stages)
        raise ShardlmError(
            f"train.accumulation={train.accumulation} microbatches do not fill pipeline={stages} stages in whole "
            f"groups; choose {near}"
        )


def _fills(layers: int, places: int) -> bool:
    return math.ceil(layers / places) * (places - 1) < layers


def check_model(model: TransformerConfig, rules: Rules) -> None:
    """Refuses a model whose dimensions do not divide over the mesh."""
    for block in dict.fromkeys(model.blocks()):
        kv_heads_name(block.attention.num_kv_heads, block.attention.num_heads, rules.mesh.tensor)
        rules.act.check("heads", block.attention.num_heads)
        rules.rest.check("mlp", block.mlp.mlp_dim)
    rules.rest.check("vocab", model.vocab_size)
    rules.optimizer.check("embed", model.embed_dim)


def check_vocabulary(model: TransformerConfig, vocab_size: int) -> None:
    """Refuses a tokenizer with more tokens than the model has embeddings."""
    if vocab_size > model.vocab_size:
        raise ShardlmError(
            f"the tokenizer has {vocab_size} tokens and the model embeds {model.vocab_size}; "
            f"set model.vocab_size to at least {vocab_size}"
        )
