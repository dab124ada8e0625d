"""What a search tries: the ways to lay a run over the GPUs of a cluster that may be worth it and that the constraints
allow, one after another. Nothing is reckoned here (search.py)."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.moments import Moments
from shardlm.ops.ulysses import fits
from shardlm.plan.changed import changed
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import Constraints
from shardlm.plan.linear_attention import divides, ways_of
from shardlm.rules import BATCH_AXES
from shardlm.train.config import OffloadConfig, PipelineConfig, RunConfig, TrainConfig

REMATS = ("none", "dots", "full")
PRESETS = ("zero3", "hybrid", "zero1", "zero2", "replicated")
SHORTEST_CHUNK = 1024  # tokens of a row that a device of the context axis should have at least
MOST_ROWS = 16  # of a device's microbatch: beyond, memory grows and nothing runs faster
ROUNDS = (2, 4)


def laid_out(config: RunConfig, cluster: Cluster, constraints: Constraints) -> Iterator[RunConfig]:
    """The configuration on each mesh, with each preset that differs there."""
    shape, train = config.model.transformer(), config.train
    for tensor, pipeline, context, expert in _inner(shape, train.seq_len, cluster, constraints):
        rest = cluster.num_gpus // (tensor * pipeline * context * expert)
        for rules, data in itertools.product(constraints.choices("rules", PRESETS), divisors(rest)):
            mesh = MeshSpec(data, rest // data, context, pipeline, expert, tensor)
            if _differs(rules, mesh, constraints) and _allowed(mesh, constraints):
                yield changed(config, mesh=mesh, rules=rules)


def _inner(
    shape: TransformerConfig, seq_len: int, cluster: Cluster, constraints: Constraints
) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, pipeline, context, expert) that the model divides over."""
    experts = [block.mlp.num_experts for block in shape.kinds if block.mlp.num_experts]
    repeats = shape.segments[shape.pipelined_segment()].repeats
    heads, linear = math.gcd(*(block.attention.num_heads for block in shape.kinds)), memories(shape)
    longest = max(1, seq_len // SHORTEST_CHUNK)
    for tensor in divisors(cluster.num_gpus):
        if heads % tensor or not all(divides(one, tensor) for one in linear):
            continue
        if tensor > cluster.island and not constraints.names("mesh.tensor"):
            continue
        for pipeline in divisors(cluster.num_gpus // tensor):
            if pipeline > repeats:
                continue
            for context in divisors(cluster.num_gpus // tensor // pipeline):
                if linear and not _by_heads(shape, linear, tensor, context):
                    continue
                if context > longest and not constraints.names("mesh.context"):
                    continue
                for expert in divisors(cluster.num_gpus // tensor // pipeline // context):
                    if expert == 1 or (experts and math.gcd(*experts) % expert == 0):
                        yield tensor, pipeline, context, expert


@functools.lru_cache(maxsize=64)
def layers_in_stages(model: Any) -> int:
    """Of a configuration's model, how often the layers that stages divide are repeated."""
    shape = model.transformer()
    return shape.segments[shape.pipelined_segment()].repeats


def memories(shape: TransformerConfig) -> list[DeltaNetConfig]:
    """Linear attention, whose heads tensor and context together have to divide."""
    mixers = (mixer for block in shape.kinds for mixer in block.mixers)
    return list(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, DeltaNetConfig)))


def _by_heads(shape: TransformerConfig, linear: Sequence[DeltaNetConfig], tensor: int, context: int) -> bool:
    """Whether rows that context splits can be exchanged by heads, as beside linear attention all are."""
    attending = {(a.num_heads // tensor, max(1, a.num_kv_heads // tensor)) for a in shape.attention_kinds}
    by_context = all(divides(one, ways_of(one, MeshSpec(context=context, tensor=tensor))) for one in linear)
    return by_context and all(fits(*heads, context) for heads in attending)


def _differs(rules: str, mesh: MeshSpec, constraints: Constraints) -> bool:
    """Of presets and splits that mean the same on a mesh, one: zero3 over fsdp alone, the replicated ones over data."""
    if constraints.names("mesh.data") or constraints.names("mesh.fsdp"):
        return True
    if rules == "zero3":
        return mesh.data == 1
    if rules == "hybrid":
        return mesh.data > 1 and mesh.fsdp > 1
    if rules == "replicated":
        return mesh.fsdp == 1
    return mesh.fsdp == 1 and mesh.size("data", "context", "expert") > 1


def _allowed(mesh: MeshSpec, constraints: Constraints) -> bool:
    return all(constraints.allow(f"mesh.{axis}", size) for axis, size in mesh.sizes().items())


def variants_of(config: RunConfig, constraints: Constraints) -> Iterator[RunConfig]:
    """The configuration on its mesh with every schedule, number of microbatches and kind of product."""
    schedules, trains, matmuls = choices_of(config, constraints)
    for pipeline, train in itertools.product(schedules, trains):
        for matmul in matmuls:
            yield changed(config, train=train, pipeline=pipeline, matmul=matmul)


def choices_of(
    config: RunConfig, constraints: Constraints
) -> tuple[list[PipelineConfig], list[TrainConfig], list[str]]:
    """Schedules, numbers of microbatches and kinds of product, each of which goes with each."""
    schedules = _schedules(constraints) if config.mesh.pipeline > 1 else [config.pipeline]
    trains = [_in_microbatches(config.train, n) for n in _accumulations(config, constraints)]
    return schedules, trains, constraints.choices("matmul", [config.matmul])


@functools.lru_cache(maxsize=1024)
def _in_microbatches(train: TrainConfig, count: int) -> TrainConfig:
    return dataclasses.replace(train, accumulation=count)


def moments_allowed(config: RunConfig, constraints: Constraints) -> list[RunConfig]:
    """With the optimizer's moments in each type that the constraints name, those of most bytes first; else as they are,
    since fewer bits make other numbers. Raises ShardlmError where an optimizer has none in fewer."""
    if not constraints.names("optim.moments"):
        return [config]
    kinds = constraints.choices("optim.moments", get_args(Moments))
    return [dataclasses.replace(config, optim=dataclasses.replace(config.optim, moments=kind)) for kind in kinds]


def places(config: RunConfig, constraints: Constraints) -> list[OffloadConfig]:
    """What of the state rests in host memory: what is to be tried, one after the other until anything fits. Where the
    constraints say nothing, as the configuration has it and then, except for adapters, whose state is small, the
    optimizer's state and then the weights too; weights alone, which are less, only where they are asked for."""
    own, fields = config.offload, {name: f"offload.{name}" for name in ("optimizer", "params")}
    named = [name for name, field in fields.items() if constraints.names(field)]
    if config.lora.rank and not named:
        return [own]

    def may(place: OffloadConfig) -> bool:
        if place.params and not place.optimizer and not ("params" in named or own.params):
            return False
        said = all(constraints.allow(fields[name], getattr(place, name)) for name in named)
        return said and all(getattr(place, name) >= getattr(own, name) for name in fields if name not in named)

    every = (OffloadConfig(optimizer, params) for params, optimizer in itertools.product((False, True), repeat=2))
    return list(filter(may, every))


def away_in(place: OffloadConfig) -> tuple[bool, bool]:
    """As it is compared: by its fields, as hashing it whole takes longer."""
    return place.optimizer, place.params


def keeping(config: RunConfig, remats: Sequence[str], offload: Sequence[OffloadConfig]) -> Iterator[RunConfig]:
    """With every place of the state and every remat policy, those that keep most on the device first."""
    for kept in keeps(config, remats, offload):
        yield changed(config, **kept)


def keeps(config: RunConfig, remats: Sequence[str], offload: Sequence[OffloadConfig]) -> Iterator[dict[str, Any]]:
    """The same as what is replaced."""
    for away in offload:
        for remat in (name for name in remats if _can_keep(name, config)):
            yield {"remat": remat, "offload": away}


def _can_keep(remat: str, config: RunConfig) -> bool:
    """1F1B keeps what it keeps (train/one_f_one_b.py)."""
    return remat == "full" or config.mesh.pipeline == 1 or config.pipeline.schedule != "1f1b"


def _schedules(constraints: Constraints) -> list[PipelineConfig]:
    """Of pipelines; one round of the circular schedule is GPipe's."""
    found = []
    for schedule in constraints.choices("pipeline.schedule", ["circular", "gpipe", "1f1b"]):
        rounds = constraints.choices("pipeline.rounds", ROUNDS) if schedule == "circular" else [1]
        found += [PipelineConfig(schedule, count) for count in rounds]
    return found


def _accumulations(config: RunConfig, constraints: Constraints) -> list[int]:
    """Numbers of microbatches that leave each device a power of two of rows, and others where they are asked for."""
    mesh = config.mesh
    rows, over = divmod(config.train.global_batch, mesh.size(*BATCH_AXES))
    if over or not rows:
        return [config.train.accumulation]  # refused with the reason
    counts = [rows // 2**i for i in range(MOST_ROWS.bit_length()) if rows % 2**i == 0]
    filling = [n for n in counts if n % mesh.pipeline == 0] or counts[:1]
    asked = constraints.numbers("train.accumulation")
    for numbers in (lambda: filling, lambda: counts, lambda: divisors(rows)):
        exact = sorted({*numbers(), *(n for n in asked if rows % n == 0)}, reverse=True)
        if allowed := [n for n in exact if constraints.allow("train.accumulation", n)]:
            return allowed
    return asked[:1]  # refused with the reason


@functools.lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*low, *(n // d for d in reversed(low) if d * d != n))


def by_schedule(laid: RunConfig, constraints: Constraints) -> list[list[RunConfig]]:
    """Variants by their schedule and product, those of the most microbatches first."""
    found: dict[tuple, list[RunConfig]] = {}
    for variant in variants_of(laid, constraints):
        found.setdefault((variant.pipeline, variant.matmul), []).append(variant)
    return list(found.values())
