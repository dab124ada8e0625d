"""Bytes that a training state and a batch take on one device, and those that rest in its host's memory instead: exactly
what the arguments of the compiled step are, but for scalars."""

import dataclasses
import functools
import math

import jax.numpy as jnp

from shardlm.errors import ShardlmError
from shardlm.moments import Moments, block, kind_of
from shardlm.optim import ENCODER, OptimConfig, is_muons, moments_of
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.spread import Spread
from shardlm.rules import Table
from shardlm.train import powersgd
from shardlm.train.config import SlowLinkConfig
from shardlm.train.kto import Prospect
from shardlm.train.policy import Policy
from shardlm.train.replicas import apart, shares

MASTER = 4  # bytes of a number at rest
BATCH_ARRAYS = 5  # of 4 bytes a token: tokens, targets, segments, positions, mask (Program.batch_shapes)
FACTORED = 128  # the least size of both dimensions that optax's adafactor factors by


@dataclasses.dataclass(frozen=True)
class State:
    """What rests between steps, in bytes of one device; the batch with it.

    weights    trained, float32
    frozen     that no step changes: under adapters, of preference training's reference, or of a teacher
    optimizer  its moments
    average    of the weights (optim.ema_decay)
    replicas   what replicas behind a slow link keep of their own
    images     what reads images, and the vectors of a batch
    host       of all these, what rests in host memory; it is not in the others
    """

    weights: int
    frozen: int
    optimizer: int
    average: int
    replicas: int
    batch: int
    host: int
    images: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.frozen + self.optimizer + self.average + self.replicas + self.batch + self.images


def state(sketch: Sketch) -> State:
    """Of one device's part of the training state and the batch, scalars left out."""
    config = sketch.config
    trained, own = sketch.spread.trained, sketch.spread
    local = config.local_sgd.inner_steps > 0  # replicas have the optimizer's state, and no average
    weights = MASTER * own.trained_rest
    optimizer = 0 if local else _moments(own, config.optim)
    average = MASTER * own.trained_optimizer if config.optim.ema_decay else 0
    host = config.offload.params * weights + config.offload.optimizer * (optimizer + average)
    return State(
        weights=weights * (not config.offload.params),
        frozen=_frozen(sketch),
        optimizer=optimizer * (not config.offload.optimizer),
        average=average * (not config.offload.optimizer),
        replicas=_replicas(sketch, trained) if apart(config) else 0,
        batch=_batch(sketch),
        host=host,
        images=sketch.images.added(sketch).nbytes if sketch.images else 0,
    )


@functools.lru_cache(maxsize=4096)
def _moments(own: Spread, optim: OptimConfig) -> int:
    return moments(own.trained, optim, own.rules.optimizer)


def moments(weights: list[Weight], optim: OptimConfig, table: Table) -> int:
    """Bytes of an optimizer's state for these weights."""
    if optim.name == "adafactor":
        return MASTER * sum(_factored(weight, table) for weight in weights)
    return math.ceil(sum(_held(weight, optim, weight.numbers(table)) for weight in weights))


def _held(weight: Weight, optim: OptimConfig, numbers: int) -> float:
    """Bytes of the moments of so many of a weight's numbers, with scales of blocks and the keys of layers."""
    kind, own = moments_kind(weight, optim)
    if kind == "float32":
        return MASTER * _moments_of(weight, optim) * numbers
    each = 2 if kind == "bfloat16" else 1 + 4 / math.prod(own)
    keys = 4 * math.prod(weight.shape[: weight.stacked]) if weight.stacked else 0
    return _moments_of(weight, optim) * numbers * each + keys


def updated_bytes(own: Spread, optim: OptimConfig) -> float:
    """What an update reads and writes: gradient, weight and AdamW's moments, and the new ones of the latter two. Of
    blocks gradients and moments are read once more before, for their scales (moments.py; compiled for H100)."""
    if optim.moments == "float32":
        return 7.0 * MASTER * own.trained_optimizer
    return sum(_updated_bytes(w, optim) * n for w, n in zip(own.weights, own.optimizer, strict=True) if w.trained)


def _updated_bytes(weight: Weight, optim: OptimConfig) -> float:
    """For each number of a weight."""
    kind, own = moments_kind(weight, optim)
    moment = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / math.prod(own)}[kind] * _moments_of(weight, optim)
    return 3 * MASTER + 2 * moment + (MASTER + moment if kind == "int8" else 0)


@functools.lru_cache(maxsize=4096)
def moments_kind(weight: Weight, optim: OptimConfig) -> tuple[Moments, tuple[int, ...]]:
    """What a weight's moments are held in, and the sizes of a block."""
    names, shape = weight.names[weight.stacked :], weight.shape[weight.stacked :]
    kind = kind_of(moments_of(optim.moments, names, weight.path == ENCODER), names, shape)
    return kind, block(names, shape) if kind == "int8" else ()


def _moments_of(weight: Weight, optim: OptimConfig) -> int:
    """Numbers that the optimizer keeps for each number of a weight."""
    if optim.name == "adamw":
        return 2
    if optim.name == "lion":
        return 1
    if optim.name == "sgd":
        return 1 if optim.b1 else 0
    if optim.name == "muon":  # adamw for what is no matrix of a layer (optim.py)
        return 1 if is_muons(weight.names[int(weight.stacked) :]) else 2
    raise ShardlmError(f"the memory of optim.name={optim.name} is not known here")


def _factored(weight: Weight, table: Table) -> int:
    """Sums over the rows and over the columns of a weight's two largest dimensions, where both are large; else a number
    for each of its own (https://arxiv.org/abs/1804.04235, algorithm 4, as optax has it)."""
    by_size = sorted(range(len(weight.shape)), key=lambda i: (weight.shape[i], i))
    if len(by_size) < 2 or weight.shape[by_size[-2]] < FACTORED:
        return weight.numbers(table)
    sizes = [n // table.mesh.size(*table.axes(name)) for n, name in zip(weight.shape, weight.names, strict=True)]
    return sum(math.prod(sizes) // sizes[dim] for dim in by_size[-2:])


def _frozen(sketch: Sketch) -> int:
    """Under adapters all else, as it is held; in the compute dtype, or in float32 where they are rounded, a teacher's
    weights, and the checkpoint's of preference training and of that on rewards with a beta, but for what adapters stand
    on."""
    table = sketch.rules.rest
    frozen = [weight for weight in sketch.weights if not weight.trained]
    nbytes = sum(weight.numbers(table) * weight.itemsize for weight in frozen)
    if sketch.beside and (sketch.config.distill.teacher or not frozen):
        one = sketch.beside
        nbytes += sum(weight.numbers(one.rules.rest) * _held_bytes(weight, one) for weight in one.weights)
    return nbytes


def _held_bytes(weight: Weight, sketch: Sketch) -> int:
    """Of a number that no step changes (state.held_as)."""
    exact = sketch.execution.by_scheme or weight.path.endswith("router_bias")
    return MASTER if exact else jnp.dtype(sketch.execution.dtype).itemsize


def _replicas(sketch: Sketch, trained: list[Weight]) -> int:
    """`TrainState.link`: errors of compressed exchanges (train/compression.py) and, where replicas meet seldom, their
    weights and moments, the outer momentum and what is on its way (train/diloco.py)."""
    config, one = sketch.config, sketch.rules.inside("data")
    errors = sum(_error(weight, config.slow_link, one.optimizer) for weight in trained)
    if not config.local_sgd.inner_steps:
        return MASTER * errors
    own = MASTER * sum(weight.numbers(one.rest) for weight in trained) + moments(trained, config.optim, one.optimizer)
    split = MASTER * sum(weight.numbers(one.optimizer) for weight in trained)
    return MASTER * errors + own + split * (2 if config.local_sgd.overlap else 1)


def _error(weight: Weight, link: SlowLinkConfig, table: Table) -> int:
    """Numbers of what a replica has yet to send of a weight, and of PowerSGD's basis for it."""
    if link.compression == "none":
        return 0
    if link.compression != "powersgd":
        return weight.numbers(table)
    names = weight.names[: weight.stacked], weight.names[weight.stacked :]
    if not powersgd.pays(weight.shape, names, link.rank):
        return 0
    matrices, rows = powersgd.split(names)
    sizes = [n // table.mesh.size(*table.axes(name)) for n, name in zip(weight.shape, weight.names, strict=True)]
    rank = powersgd.thin(weight.shape, names, link.rank)[2]
    return math.prod(sizes) + math.prod(sizes[:matrices]) * math.prod(sizes[rows:]) * rank


def _batch(sketch: Sketch) -> int:
    train, act = sketch.config.train, sketch.rules.act
    counts = shares(train, sketch.mesh.data)
    rows = len(counts) * (max(counts) * train.global_batch // sum(counts))  # as batches.slots places them
    split = sketch.mesh.size(*act.axes("batch"), *act.axes("whole_seq"))
    labelled = sketch.config.preference.loss == "kto"
    columns = Policy.columns if sketch.config.grpo.reward else Prospect.columns if labelled else ()
    arrays = BATCH_ARRAYS + len(columns)
    return arrays * 4 * rows * train.seq_len // split
