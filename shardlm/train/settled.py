"""What a run's configuration comes to on a mesh: rules, the model's shape and how it executes, every "auto" resolved
and every check made. Needs no devices, so it serves planning for GPUs that are not there; program.py traces and
compiles what is settled here."""

import dataclasses
import functools
from typing import Any, Protocol

from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops import expert_dispatch, grouped_matmul
from shardlm.ops.attention import choose, choose_context
from shardlm.ops.weight_format import PUBLISHED, WeightFormat
from shardlm.precision import COMPUTE_DTYPE
from shardlm.published_weights import frozen_as_published
from shardlm.rules import Preset, Rules
from shardlm.train.check import (
    check_batch,
    check_matmul,
    check_model,
    check_outside_stages,
    check_pipeline,
    check_positions,
    check_remat,
)
from shardlm.train.config import RunConfig
from shardlm.train.distill import check_distill, check_same_rows, of_teacher
from shardlm.train.learned_encoder import check_encoder
from shardlm.train.lora import check_lora
from shardlm.train.mtp import check_mtp
from shardlm.train.offload import check_offload
from shardlm.train.policy import check_policy
from shardlm.train.preference import check_preference
from shardlm.train.replicas import check_replicas, shares
from shardlm.train.rounded import check_rounded


class Device(Protocol):
    """What is asked of a device: a jax.Device is one."""

    platform: str
    device_kind: str  # and of a GPU its compute_capability

    def addressable_memories(self) -> list[Any]: ...


@dataclasses.dataclass(frozen=True)
class Settled:
    """A run on a mesh of known sizes, checked, with the teacher that it learns from as one that trains it would be."""

    config: RunConfig
    shape: TransformerConfig
    rules: Rules
    execution: Execution
    teacher: "Settled | None" = None

    @property
    def mesh(self) -> MeshSpec:
        return self.rules.mesh


def settle(
    config: RunConfig, spec: MeshSpec, device: Device, mtp: bool = True, *, traced: bool = True, joined: int = 1
) -> Settled:
    """`config` on a mesh of these sizes over devices like this one. Without `mtp` the model is held without the modules
    that predict further tokens, as it is under adapters, which leave those as they are. Unless it is to be `traced`,
    the packages of its kernels need not be there. NVLink joins so many devices of each host.

    Raises ShardlmError for whatever does not divide or does not exist.
    """
    shape, rules = check_sizes(config, spec, mtp)
    check_replicas(config, rules)
    check_pipeline(shape.segments[shape.pipelined_segment()].repeats, config.train, config.pipeline, spec)
    context = _context_attention(config, shape, spec)
    check_outside_stages(shape, config.pipeline, spec, context)
    check_remat(config.remat, config.pipeline, spec)
    check_matmul(config.matmul, config.precision, device)
    check_lora(config)
    check_rounded(config, shape)
    check_preference(config)
    check_policy(config)
    check_distill(config)
    check_encoder(config)
    check_offload(config.offload, spec, config.local_sgd, device)
    dtype = COMPUTE_DTYPE[config.precision]
    heads = {(a.head_dim, a.value_dim) for a in shape.attention_kinds}
    capped = any(a.softcap for a in shape.attention_kinds)
    execution = Execution(
        rules=rules,
        dtype=dtype,
        remat=config.remat,
        attention=choose(config.attention, device, dtype, heads, capped),
        context_attention=context,
        matmul=config.matmul,
        grouped_matmul=_grouped_matmul(shape, device.platform, traced),
        unroll=config.unroll,
        microbatches=max(shares(config.train, spec.data)),
        rounds=config.pipeline.laps,
        learns_images=config.train.encoder != "frozen",
        lora=config.lora,
        weights=_frozen(config, shape, rules),
        gathers_tokens=expert_dispatch.near(spec, joined),
    )
    teacher = _teacher(config, spec, device, traced, joined) if config.distill.teacher else None
    if teacher:
        check_same_rows(config, (shape, execution), (teacher.shape, teacher.execution))
    return Settled(config, shape, rules, execution, teacher)


def _teacher(config: RunConfig, spec: MeshSpec, device: Device, traced: bool, joined: int) -> Settled:
    try:
        return settle(of_teacher(config), spec, device, mtp=False, traced=traced, joined=joined)
    except ShardlmError as error:
        raise ShardlmError(f"distill.teacher={config.distill.teacher}: {error}") from error


def _frozen(config: RunConfig, shape: TransformerConfig, rules: Rules) -> WeightFormat:
    """What adapters stand on is held in."""
    base = config.lora.base
    return frozen_as_published(config.model, shape, rules) if base == PUBLISHED else base


def check_sizes(config: RunConfig, spec: MeshSpec, mtp: bool = True) -> tuple[TransformerConfig, Rules]:
    """The model, and the rules on a mesh of these sizes. Refuses, before all else, what is refused with every schedule,
    remat policy and kind of product: most of a search's meshes."""
    check_batch(config.train, spec)
    shape = _shape(config.model)
    check_positions(config.train.seq_len, shape)
    modules = mtp and not config.lora.rank
    check_mtp(config, shape if modules else shape.without_mtp())
    found = _rules(config.rules, spec, config.model, modules, config.context_attention)
    if isinstance(found, ShardlmError):
        raise found.with_traceback(None)
    return found


# A search settles tens of thousands of configurations of one model on a few hundred meshes.
@functools.lru_cache(maxsize=64)
def _shape(model: Any) -> TransformerConfig:
    return model.transformer()


@functools.lru_cache(maxsize=64)
def _widths(model: Any) -> dict[str, set[int]]:
    return _shape(model).widths()


@functools.lru_cache(maxsize=8192)
def _rules(
    preset: Preset, spec: MeshSpec, model: Any, mtp: bool, context_attention: str
) -> tuple[TransformerConfig, Rules] | ShardlmError:
    """Or why there are none, which is found once as they are."""
    shape = _shape(model) if mtp else _shape(model).without_mtp()
    try:
        rules = Rules.make(preset, spec).fitting(_widths(model))
        check_model(shape, rules, context_attention)
    except ShardlmError as error:
        return error
    return shape, rules


def _grouped_matmul(shape: TransformerConfig, platform: str, traced: bool) -> grouped_matmul.GroupedMatmul:
    """Chosen only where there are experts: a GPU needs an extra package for them."""
    if not any(block.mlp.num_experts for block in shape.kinds):
        return "blocked"
    return grouped_matmul.choose(platform) if traced or platform == "cpu" else "tokamax"


def _context_attention(config: RunConfig, shape: TransformerConfig, mesh: MeshSpec) -> str:
    """One way for all layers, since it decides the order of tokens: a ring, if any layer needs it."""
    if (
        shape.remembers or shape.sparse or shape.compressed
    ):  # which go through whole rows from token to token, or choose among all tokens
        return "ulysses"
    heads = {(block.attention.num_heads, block.attention.num_kv_heads) for block in shape.kinds}
    ways = {choose_context(config.context_attention, *pair, config.train.seq_len, mesh) for pair in heads}
    return "ring" if "ring" in ways else "ulysses"
