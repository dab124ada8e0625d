"""Predicts throughput that others published and says how far off each prediction is.

A point's model, mesh, batch, precision and remat are taken over as a configuration of this project and predicted as
any other; what its system is known to do otherwise is systems.py's, systems_experts.py's and systems_stages.py's. What
the planner has no word for is left out by name and with the reason.

The constants were chosen with the points of some frameworks; the others are held out. Since then, what far predictions
had in common was added from sources, and no constant changed to meet a point: networks, the kernels of MPT, the gathers
of ZeRO-3, the products of experts. Which waits of experts count, and their number of operations, was settled with
Megatron Bridge's points in view. Waits for the last stage were found with its DeepSeek V3 on 256 B200, tokens that take
experts in turn with NeMo AutoModel's DeepSeek V3 on H100, biases with its GPT-OSS 20B. Points `added last` came after
all of these, and of what follows: what systems_passes.py counts, drawn and padded rows, small kernels of routers and
HybridEP's rate were looked for because mixtures were predicted too fast; that a forward pass waits for the host layer
by layer was settled with Megatron Bridge's runs on B200 in view, and that it waits in the midst of a layer, with how
many of its operations lie on either side and in each expert, with its Qwen3 30B, also of those added last. A second lot
came after that, of newer releases; since then, only that GPT-OSS waits for its constant beside another microbatch too,
and that the first and the last pass of a step have none to run beside. The third lot came after all of this; what a
step in one CUDA graph and experts in one kernel leave out was looked for with it in view, and GB300's attention because
dense models on it were predicted too slow. The fourth lot came after those; since then, only that weights which are not
trained have no gradient, found with its runs of adapters, and, with fms-fsdp's, what programs move that are not
compiled.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.models.transformer_config import TransformerConfig
from shardlm.plan import systems, systems_experts, systems_passes, systems_stages
from shardlm.plan.cluster import Cluster
from shardlm.plan.compute import adapters, frozen, operations
from shardlm.plan.cost import StepCost, cost_of
from shardlm.plan.kernels import Kernels
from shardlm.plan.op import Op
from shardlm.plan.published import Model, Point, Published, load
from shardlm.plan.published_models import step_seconds, transformer
from shardlm.plan.sketch import Sketch
from shardlm.plan.superseded import superseded
from shardlm.plan.traffic import training_traffic
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig

POINTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "published.json"
CHOSEN = ("MaxText", "Megatron-LM", "Megatron Bridge")  # dense models of these: Achieved.sustained; experts: see above
FAR = 0.25


@dataclasses.dataclass(frozen=True)
class Row:
    """One point.

    measured  seconds of a step; None where the source does not settle it
    cost      what is predicted; None where it cannot be, for `reason`
    assumed   what the source does not say and was assumed
    experts   whether the model is a mixture
    later     the point that supersedes it (superseded.py); "": none does
    """

    point: Point
    measured: float | None
    cost: StepCost | None
    reason: str = ""
    assumed: str = ""
    experts: bool = False
    later: str = ""

    @property
    def chosen(self) -> bool:
        """Whether the constants were chosen with it."""
        return self.point.framework in CHOSEN and not self.point.last

    @property
    def error(self) -> float:
        """Of the predicted seconds, as a share of the measured ones: negative is too fast. Only of rows with a cost."""
        return self.cost.step_seconds / self.measured - 1


@dataclasses.dataclass(frozen=True)
class _Decoder:
    """A published model where RunConfig has an architecture's configuration."""

    model: Model
    seq_len: int

    def transformer(self) -> TransformerConfig:
        return transformer(self.model, self.seq_len)


def validate(path: str | pathlib.Path = POINTS) -> list[Row]:
    """All points of a file, in its order. Raises ShardlmError for a file that cannot be read."""
    published = load(path)
    later = superseded(published, FAR)
    rows = [predict(point, published) for point in published.points.values()]
    return [dataclasses.replace(row, later=later.get(row.point.name, "")) for row in rows]


def predict(point: Point, published: Published) -> Row:
    """One of them."""
    model = published.model_of(point)
    measured = step_seconds(point, model)
    policy = systems.recomputed(point)
    assumed = ""
    if measured is None:
        reason = "the source gives FLOP/s and not what it counts"
    elif point.microbatches is None:
        reason = "the number of microbatches is not stated"
    elif point.attention is None:
        reason = "the attention kernel is not stated"
    elif policy is None and point.framework not in systems.MEGATRON:
        reason = "what remat keeps is not stated"
    else:
        if policy is None:
            policy, assumed = systems.POLICIES["none"], "no recomputation"
        try:
            cost = _cost(point, published, policy)
            return Row(point, measured, cost, "", assumed, bool(model.experts))
        except ShardlmError as error:
            reason = str(error).partition(";")[0]
    return Row(point, measured, None, reason, assumed, bool(model.experts))


def _cost(point: Point, published: Published, policy: systems.Recomputed) -> StepCost:
    gpu, kind, model = published.gpu_of(point), published.cluster_of(point), published.model_of(point)
    host = min(kind.gpus_per_host, point.num_gpus) if kind else 0
    network = (kind.nic_bytes_per_second, kind.fabric) if kind else ()
    cluster = Cluster.of(gpu, point.num_gpus, host, *network)
    ends = systems.ends_are_layers(point)
    model = systems.with_ends(model) if ends else model
    sketch = Sketch.of(configuration(point, model), gpu)
    kernels = Kernels.of(gpu, systems.attention_kernel(point))
    ops = _layers(point, sketch, policy)
    last: list[Op] = []
    if point.mesh.pipeline > 1:
        bare = Sketch.of(configuration(point, dataclasses.replace(model, mtp_modules=0)), gpu)
        last = systems_stages.at_the_end(ops, _layers(point, bare, policy))
        ops = [op for op in ops if op not in last]
    ops += [*systems_passes.heads_ops(point, model, sketch, policy), *systems_passes.added_ops(point, sketch)]
    sent = list(systems.as_sent(training_traffic(sketch, "all_to_all"), point))
    if model.experts:
        ops += systems_experts.experts_ops(point, model.experts, sketch, policy.memory)
        inside = cluster.group(point.mesh, ("expert",)).inside
        sent = list(systems_experts.experts_sent(sent, point, model.experts, inside))
        sent += systems_experts.counts_sent(point, sketch)
    cost = cost_of(sketch, cluster, ops, sent, kernels)
    if waits := systems_experts.waiting(point, model, sketch, cost):
        ops = [*ops, waits]
        cost = cost_of(sketch, cluster, ops, sent, kernels)
    if last and (waits := systems_stages.waiting_for_stages(point, model.num_layers, last, cost, kernels, ends)):
        cost = cost_of(sketch, cluster, [*ops, waits], sent, kernels)
    return cost


def _layers(point: Point, sketch: Sketch, policy: systems.Recomputed) -> list[Op]:
    """Our products, attention and norms as their system runs them, and its loss."""
    ops = operations(sketch, ours=False)
    if point.adapters:  # what the optimizer does to them is next to nothing
        ops = list(frozen([op for op in ops if op.layer != "optimizer"]))
        ops += adapters(sketch, point.adapters) if systems.ADAPTED in point.note else []
    ops = list(systems.as_run(systems.as_apart(ops, point, sketch.shape.segments[0].pattern[0].attention), policy))
    ops = list(systems_experts.as_drawn(list(systems_experts.as_fused(ops, point)), point))
    return [*systems_passes.as_multiplied(ops, point), systems_passes.loss_op(point, sketch)]


def configuration(point: Point, model: Model) -> RunConfig:
    """The run in our words. One forward and one backward pass in turn idles as long as all forward passes first."""
    eight = point.precision in ("fp8", "mxfp8")
    interleaved = point.schedule == "interleaved"
    return RunConfig(
        model=_Decoder(model, point.seq_len),
        mesh=point.mesh,
        rules=point.rules,
        precision="bf16" if eight else point.precision,
        remat="full" if point.remat == "full" else "none",
        attention="xla" if point.attention == "unfused" else "cudnn",
        context_attention="ring",
        matmul="fp8" if eight else "dtype",
        pipeline=PipelineConfig("circular" if interleaved else "gpipe", point.virtual_stages or 1),
        train=TrainConfig(global_batch=point.global_batch, seq_len=point.seq_len, accumulation=point.microbatches),
    )


def format_validation(rows: list[Row]) -> str:
    """A table of points, what was left out and why, and medians of the sets."""
    predicted = [row for row in rows if row.cost]
    lines = [f"{'point':46} {'system':15} {'measured':>9} {'predicted':>9} {'error':>7}  set"]
    for row in predicted:
        of = ("chosen" if row.chosen else "held out") + (", experts" if row.experts else "")
        of += (", added last" if row.point.last else "") + (f", superseded by {row.later}" if row.later else "")
        seconds = f"{row.measured:8.3f}s {row.cost.step_seconds:8.3f}s {row.error:+7.1%}"
        assumed = f", assumed: {row.assumed}" if row.assumed else ""
        lines.append(f"{row.point.name:46} {row.point.framework[:15]:15} {seconds}  {of}{assumed}")
    out = [row for row in rows if not row.cost]
    lines += ["", f"left out ({len(out)}):", *(f"  {row.point.name}: {row.reason}" for row in out), ""]
    far = [row for row in predicted if abs(row.error) > FAR]
    lines.append(f"beyond {FAR:.0%} ({len(far)}):")
    lines += [f"  {row.point.name}, {row.error:+.1%}: {_why(row)}" for row in far]
    return "\n".join([*lines, "", *summary(rows)])


def _why(row: Row) -> str:
    return f"superseded by {row.later}, the same system's on as many of these GPUs" if row.later else "not known why"


def summary(rows: list[Row]) -> list[str]:
    """A line for each set: how many, the median and the largest error, and how many are within 10 and 25%."""
    sets: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        "not superseded": lambda row: not row.later,
        "superseded": lambda row: bool(row.later),
        "dense, constants chosen with": lambda row: row.chosen and not row.experts,
        "dense, held out": lambda row: not row.chosen and not row.experts,
        "experts, chosen with": lambda row: row.chosen and row.experts,
        "experts, held out": lambda row: not row.chosen and row.experts,
        "dense, added last": lambda row: bool(row.point.last) and not row.experts,
        "experts, added last": lambda row: bool(row.point.last) and row.experts,
        "dense, second lot of these": lambda row: row.point.last == 2 and not row.experts,
        "experts, second lot of these": lambda row: row.point.last == 2 and row.experts,
        "dense, third lot of these": lambda row: row.point.last == 3 and not row.experts,
        "experts, third lot of these": lambda row: row.point.last == 3 and row.experts,
        "dense, fourth lot of these": lambda row: row.point.last == 4 and not row.experts,
        "experts, fourth lot of these": lambda row: row.point.last == 4 and row.experts,
        "nothing assumed": lambda row: not row.assumed,
    }
    lines = []
    for name, belongs in sets.items():
        found = [row for row in rows if row.cost and belongs(row)]
        if not found:
            continue
        errors = [abs(row.error) for row in found]
        worst = max(found, key=lambda row: abs(row.error))
        within = f"{sum(e <= 0.10 for e in errors)} within 10%, {sum(e <= FAR for e in errors)} within {FAR:.0%}"
        lines.append(
            f"{name}: {len(found)} points, median error {statistics.median(errors):.1%}, {within}, worst "
            f"{worst.error:+.1%} ({worst.point.name})"
        )
    return lines


def validation_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Of each point; seconds and error are None where it is left out, for `reason`."""
    return [
        {
            "point": row.point.name,
            "measured_seconds": row.measured,
            "predicted_seconds": row.cost.step_seconds if row.cost else None,
            "error": row.error if row.cost else None,
            "reason": row.reason,
            "assumed": row.assumed,
            "superseded_by": row.later,
            "source": row.point.source,
        }
        for row in rows
    ]
