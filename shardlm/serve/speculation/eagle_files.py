"""Heads that draft by a model's streams, from their folders: what they say, whether they fit the model, and their
weights."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardlm import weights
from shardlm.errors import ShardlmError
from shardlm.execution import execution_of
from shardlm.hf_files import Folder, holds_weights, read_config
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models import eagle
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import find
from shardlm.ops.kv_format import KvFormat
from shardlm.progress_bar import bytes_bar
from shardlm.serve.layers import taken_apart
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef

Tree = Any
EMBEDDING, HEAD = "embedding", "head"


@dataclasses.dataclass(frozen=True)
class Head:
    """What a folder says of its head, before its weights are read.

    source   its configuration, as models/eagle.py reads it
    streams  that it reads
    shared   names of parameters that it has none of its own: they are the model's
    """

    source: Pretrained
    streams: eagle.Streams
    shared: tuple[str, ...]

    @functools.cached_property
    def shape(self) -> TransformerConfig:
        return self.source.transformer()

    @functools.cached_property
    def folder(self) -> Folder:
        return dataclasses.replace(Folder.open(self.source.folder), config=self.source.options)


def holds_head(path: str | os.PathLike) -> bool:
    """Whether a folder is a head's, whatever it calls itself. Raises ShardlmError where there is none."""
    folder = find(path)
    if not (folder / "config.json").is_file() or not holds_weights(folder):
        return False
    return eagle.is_head(read_config(folder), Folder.open(folder).tensors)


def describe_head(path: str | os.PathLike, length: int = 0) -> Head:
    """Raises ShardlmError for a folder that holds none, or one that is not supported."""
    folder = find(path)
    config, tensors = read_config(folder), Folder.open(folder).tensors
    if not eagle.is_head(config, tensors):
        raise ShardlmError(
            f"{path} holds no head of EAGLE-3, which has the tensors fc.weight and midlayer.hidden_norm.weight or "
            "layers.0.hidden_norm.weight beside its layer: give the folder of such a head as model, or method "
            "'draft_model' for a smaller model"
        )
    options, streams = _told(path, lambda: eagle.plain(config))
    there = {eagle.published_name(name) for name in tensors}
    names = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
    shared = tuple(own for own, name in names.items() if name not in there)
    if HEAD in shared and options.get("tie_word_embeddings") and EMBEDDING not in shared:
        shared = ()
    else:
        options["tie_word_embeddings"] = False
    return Head(Pretrained(str(folder), length, json.dumps(options)), streams, shared)


def open_head(
    path: str | os.PathLike,
    target: TransformerConfig,
    length: int,
    mesh: MeshSpec,
    dtype: str,
    kv_cache: KvFormat = "auto",
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Head, ModelDef, Tree]:
    """The head of a folder for a model of this shape: (what it is, with its layers apart, its parameters at rest, but
    for those that are the model's). Raises ShardlmError, before its weights are read, where it does not fit."""
    head = describe_head(path, length)
    check(head, path, target)
    built = mesh.build((jax.devices() if devices is None else devices)[: mesh.size(*mesh.sizes())])
    with jax.set_mesh(built):
        return head, *taken_apart(*read(head, path, mesh, built, dtype), kv_cache)


def read(head: Head, path: str | os.PathLike, spec: MeshSpec, mesh: Mesh, dtype: str) -> tuple[ModelDef, Tree]:
    """The head, and its parameters as a checkpoint's: stacked, and without what is the model's; under its mesh."""
    shape = head.shape
    execution = execution_of(shape, serving_rules(shape, spec), dtype, mesh.devices.flat[0], "dtype", LoraConfig())
    model = ModelDef.make(shape, execution)
    held = {name: part for name, part in model.held_at_rest(mesh).items() if name not in head.shared}
    place = held["eagle"].pop("proposed", None)
    with bytes_bar("reading the head that drafts", jax.process_index() == 0) as progress:
        params = _told(path, lambda: weights.load(model, head.folder, held, progress))
    if place is not None:
        proposed = _proposed(head, path)
        made = jax.make_array_from_callback(proposed.shape, place.sharding, proposed.__getitem__)
        params["eagle"]["proposed"] = made
    return model, params


def check(head: Head, path: str | os.PathLike, target: TransformerConfig) -> None:
    """Whether a head can draft for a model of this shape. Raises ShardlmError."""
    own, width, count = _told(path, lambda: head.shape), target.embed_dim, head.streams.count
    if target.streams is not None:
        raise ShardlmError(
            f"{path} reads the stream between the model's layers, and these have several, or what is added later: "
            "choose method 'ngram', or 'draft_model' with a smaller model"
        )
    if own.vocab_size != target.vocab_size:
        raise ShardlmError(
            f"the head {path} is for a vocabulary of {own.vocab_size} tokens, and the model has one of "
            f"{target.vocab_size}: give the head that was trained for this model"
        )
    if own.eagle.reads != count * width:
        raise ShardlmError(
            f"the head {path} reads streams of {own.eagle.reads // count} numbers, and the model's has {width}: give "
            "the head that was trained for this model"
        )
    if head.shared and own.embed_dim != width:
        raise ShardlmError(
            f"the head {path} has no {head.shared[0]} of its own, and the model's has {width} numbers a token where "
            f"the head has {own.embed_dim}: its files lack "
            f"{'embed_tokens' if head.shared[0] == EMBEDDING else 'lm_head'}.weight"
        )
    fewer = own.head_size < own.vocab_size
    if (own.tie_embeddings and fewer) or (HEAD in head.shared and (fewer or target.tie_embeddings)):
        raise ShardlmError(f"the head {path} lacks lm_head.weight, and the model has none that could stand for it")
    _told(path, lambda: head.streams.of(target.num_layers))
    if fewer:
        _proposed(head, path)


def _proposed(head: Head, path: str | os.PathLike) -> np.ndarray:
    """Of each of the model's tokens its place among those that are proposed, -1: it is not. Raises ShardlmError where
    the file does not say it."""
    count, known = head.shape.head_size, head.shape.vocab_size
    tensor: Mapping[str, Any] = head.folder.tensors.get(eagle.MAP)
    if tensor is None or tensor.shape != (count,):
        told = "is missing" if tensor is None else f"is {list(tensor.shape)}"
        raise ShardlmError(
            f"{path}: tensor {eagle.MAP} {told}, and the head needs [{count}], how far each of the tokens that it "
            f"proposes is from its place among the model's {known}"
        )
    tokens = np.arange(count) + tensor.read((slice(None),)).astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= known or len(np.unique(tokens)) < count:
        raise ShardlmError(
            f"{path}: tensor {eagle.MAP} names tokens from {tokens.min()} to {tokens.max()}, "
            f"{count - len(np.unique(tokens))} of them twice; each is to be one of the model's {known}"
        )
    place = np.full(known, -1, np.int32)
    place[tokens] = np.arange(count, dtype=np.int32)
    return place


def _told(path: str | os.PathLike, make):
    """What `make` gives; its errors name the folder."""
    try:
        return make()
    except ShardlmError as error:
        raise ShardlmError(f"the head {path}: {error}") from None
