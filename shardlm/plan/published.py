"""Throughput that others published, as data: models, hardware, meshes and what was measured, each with its source.

Owns the form of benchmarks/published.json and the refusal of points that contradict themselves. Predicting a point is
others' work; what a model is made of is published_models.py's.
"""

import dataclasses
import difflib
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import msgspec

from shardlm.clusters import ClusterKind
from shardlm.config_json import from_json
from shardlm.errors import ShardlmError
from shardlm.hardware import Gpu
from shardlm.hardware_file import Hardware, hardware_from
from shardlm.mesh import MeshSpec
from shardlm.rules import BATCH_AXES, Preset

Precision = Literal["bf16", "fp16", "fp8", "mxfp8"]
Remat = Literal["none", "selective", "full", "offload"]
Schedule = Literal["1f1b", "interleaved"]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Experts:
    """num_experts, each of expert_dim and gated, top_k of them for a token, shared_dim for every token; the first
    dense_layers have an MLP instead."""

    num_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int = 0
    dense_layers: int = 0


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention (layers/mla.py)."""

    q_dim: int
    kv_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class Window:
    """In one of `every` layers a token sees `size` tokens, itself included; in the others all before it."""

    size: int
    every: int


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a published model.

    mlp_dim     of dense layers; None where all have experts
    gated       three matrices in the MLP, as SwiGLU has, or two
    normed      queries and keys are
    parameters  in all, as the source counts them; None: it does not
    """

    name: str
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int | None
    vocab_size: int
    gated: bool
    tied: bool
    positions: Literal["rope", "learned"]
    source: str
    parameters: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    window: Window | None = None
    mtp_modules: int = 0
    normed: bool = False


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the source gives; at least one of them. tflops in units of 1e12, counted as Point.counted says."""

    step_seconds: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_s_per_gpu: float | None = None


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a source's FLOPs are of: the unmasked half of attention or the full square; with the recomputed forward pass
    or without it."""

    causal: Literal["half", "full"]
    recomputation: bool


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement.

    gpu, cluster    names of Published.hardware
    mesh, rules     in this project's terms
    global_batch    rows in one update
    microbatch      rows that one data-parallel group takes at once, `microbatches` of them in one update
    virtual_stages  parts of each pipeline stage
    rounds          times that the pipeline fills and drains in one update
    released        version of the framework, by year and month; "": not stated, or of no importance
    last            which lot, added when all constants and rules of the prediction were there; 0: before
    adapters        rank of adapters, which alone are trained; 0: all weights are
    source, at      where, and which table or line there
    None            the source does not say
    """

    name: str
    model: str
    gpu: str
    num_gpus: int
    cluster: str | None
    mesh: MeshSpec
    rules: Preset
    precision: Precision
    global_batch: int
    seq_len: int
    microbatch: int | None
    microbatches: int | None
    remat: Remat | None
    schedule: Schedule | None
    virtual_stages: int | None
    attention: Literal["flash", "unfused"] | None
    framework: str
    measured: Measured
    counted: Counted | None
    memory_gib: float | None
    source: str
    at: str
    note: str = ""
    rounds: int = 1
    released: str = ""
    last: int = 0
    adapters: int = 0

    @property
    def tokens(self) -> int:
        """In one update."""
        return self.global_batch * self.seq_len

    @property
    def batch_groups(self) -> int:
        """Groups of devices that take different rows."""
        return self.mesh.size(*BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Published:
    """All points, and what their names stand for."""

    hardware: Hardware
    models: Mapping[str, Model]
    points: Mapping[str, Point]

    def model_of(self, point: Point) -> Model:
        return self.models[point.model]

    def gpu_of(self, point: Point) -> Gpu:
        return self.hardware.gpu(point.gpu)

    def cluster_of(self, point: Point) -> ClusterKind | None:
        return self.hardware.cluster(point.cluster) if point.cluster else None


def load(path: str | pathlib.Path) -> Published:
    """The points in a file of the form of benchmarks/published.json.

    Raises: ShardlmError for a file that is not JSON, an unknown field (naming the nearest), a wrong type, a name that
    stands for nothing, or a point that contradicts itself.
    """
    return parsed(path, _published)


def parsed(path: str | pathlib.Path, form: Callable[[Any], T]) -> T:
    """What `form` makes of a JSON file; the ShardlmErrors that it raises name the file."""
    try:
        return form(msgspec.json.decode(pathlib.Path(path).read_bytes()))
    except FileNotFoundError as error:
        raise ShardlmError(f"{path} does not exist") from error
    except msgspec.DecodeError as error:
        raise ShardlmError(f"{path} is not JSON: {error}") from error
    except ShardlmError as error:
        raise ShardlmError(f"{path}: {error}") from error


def _published(data: Any) -> Published:
    parts = {"notes", "hardware", "models", "points"}
    if not isinstance(data, dict) or set(data) - parts or not {"models", "points"} <= set(data):
        given = ", ".join(data) if isinstance(data, dict) else type(data).__name__
        raise ShardlmError(f"expected an object with models and points, and perhaps hardware and notes, got {given}")
    hardware = hardware_from(data.get("hardware", {}))
    models = _by_name(Model, data["models"], "models")
    points = _by_name(Point, data["points"], "points")
    seen: dict[Any, str] = {}
    for point in points.values():
        check(point, hardware, models)
        same = dataclasses.replace(point, name="", at="", note="", source="", memory_gib=None, counted=None, last=0)
        if first := seen.get(same):
            raise ShardlmError(f"points {first} and {point.name} are the same measurement; keep one")
        seen[same] = point.name
    return Published(hardware, MappingProxyType(models), MappingProxyType(points))


def _by_name(cls: type, entries: Any, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for index, entry in enumerate(entries):
        label = entry.get("name", index) if isinstance(entry, dict) else index
        try:
            item = from_json(cls, entry)
        except ShardlmError as error:
            raise ShardlmError(f"{where} {label}: {error}") from error
        if item.name in found:
            raise ShardlmError(f"{where}: the name {item.name} is there twice")
        found[item.name] = item
    return found


def check(point: Point, hardware: Hardware, models: Mapping[str, Model]) -> None:
    """Raises: ShardlmError for a point that contradicts itself or names what is not there."""

    def refuse(what: str) -> None:
        raise ShardlmError(f"point {point.name}: {what}")

    if point.model not in models:
        near = difflib.get_close_matches(point.model, models, 1)
        refuse(f"there is no model {point.model!r}" + (f"; did you mean {near[0]}?" if near else ""))
    gpu = hardware.gpu(point.gpu)
    if point.cluster and hardware.cluster(point.cluster).gpu != gpu.name:
        refuse(f"gpu={point.gpu} is not that of cluster={point.cluster}, {hardware.cluster(point.cluster).gpu}")
    numbers = (point.num_gpus, point.global_batch, point.seq_len, point.microbatch, point.microbatches, point.rounds)
    amounts = (*numbers, point.virtual_stages, point.memory_gib, *dataclasses.astuple(point.measured))
    if any(amount is not None and not 0 < amount < float("inf") for amount in amounts):
        refuse("numbers, rates and seconds must be positive")
    if point.mesh.size(*point.mesh.sizes()) != point.num_gpus:
        refuse(f"mesh {point.mesh} is not num_gpus={point.num_gpus} devices; their product must be")
    if (point.microbatch is None) != (point.microbatches is None):
        refuse("give both microbatch and microbatches, or neither")
    if point.global_batch % point.batch_groups:
        refuse(f"global_batch={point.global_batch} does not divide over {point.batch_groups} groups of {point.mesh}")
    if point.microbatch and point.microbatch * point.microbatches * point.batch_groups != point.global_batch:
        product = f"{point.microbatch} x {point.microbatches} x {point.batch_groups} groups"
        refuse(f"microbatch x microbatches x groups = {product} is not global_batch={point.global_batch}")
    if (point.mesh.pipeline > 1) != (point.schedule is not None):
        refuse(f"mesh.pipeline={point.mesh.pipeline} with schedule={point.schedule}: a schedule belongs to a pipeline")
    if point.microbatches and point.microbatches % point.rounds:
        refuse(f"microbatches={point.microbatches} do not divide into rounds={point.rounds}")
    if point.mesh.expert > 1 and not models[point.model].experts:
        refuse(f"mesh.expert={point.mesh.expert}, but {point.model} has no experts")
    if not any(dataclasses.astuple(point.measured)):
        refuse("nothing was measured; give step_seconds, tokens_per_s_per_gpu or tflops_per_s_per_gpu")
    if not point.source.strip() or not point.at.strip():
        refuse("source and at must say where the figure stands")
