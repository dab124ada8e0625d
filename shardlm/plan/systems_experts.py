"""How other systems bring tokens to experts: what they send, the passes over memory that our experts do not need, and
how long a device waits for a host that starts every operation by itself. Each as their sources say."""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from statistics import NormalDist

from shardlm.plan.constants import GAP, MODULE, NVLINK
from shardlm.plan.cost import StepCost
from shardlm.plan.op import Op
from shardlm.plan.published import Experts, Model, Point
from shardlm.plan.sketch import Sketch
from shardlm.plan.systems import MEGATRON
from shardlm.plan.traffic import GATHER, RAGGED, Sent

EIGHT_BITS = ("fp8", "mxfp8")
# Words in Point.note.
ALL_TO_ALL = "all-to-all dispatcher"  # Megatron's moe_token_dispatcher_type=alltoall
# What recipes capture of a layer (cuda_graph_scope): its operations cost the host one.
ATTENTION_CAPTURED = ("attention and router in CUDA graphs",)
ROUTER_CAPTURED = (*ATTENTION_CAPTURED, "router in CUDA graphs", "CUDA graphs of the router")
# The whole step in one graph (cuda_graph_impl=full_iteration): the device counts rows itself, with room for more than
# an even load (moe_paged_stash), and waits for no host.
WHOLE = "whole step in a CUDA graph"
# NVTE_CUTEDSL_FUSED_GROUPED_MLP with use_transformer_engine_op_fuser: products of all experts with the gated
# activation, and its gradient, in the same kernels, which write what the next product takes in MXFP8, in both layouts
# (Transformer Engine, pytorch/ops/fused, GroupedMLP_CuTeGEMMSwiGLU_MXFP8 as Megatron-LM's pull request 4318 names it).
FUSED = "experts in one kernel"
# A token goes once to each device that has experts for it, and not once to each of them; over a network once to each
# host, whose NVLink hands it on meanwhile (https://github.com/deepseek-ai/DeepEP, README of 2025-02: 153 to 158 GB/s of
# 160 inside a host, 43 to 58 of 50 between hosts).
ONCE = ("DeepEP", "HybridEP")
# Inside an NVLink domain HybridEP's kernels alone reach 543 to 764 GB/s of what arrives on 8 to 36 B200 and GB200, some
# of it from the device itself: about 0.67 of the link's rate where constants.NVLINK has 0.78 for NCCL. As PyTorch calls
# them they take 0.12 to 0.24 ms longer, of which a copy of the rows is about two thirds (the permutation stands for it
# in training), and what prepares each call the rest (BF16, 16 and 32 multiprocessors: shifangx/DeepEP@1242eb4f
# Hybrid-EP_Intra-node_Implementation.md). DeepEP's calls are taken to need as long.
HYBRID, HYBRID_SHARE, CALL = "HybridEP", 0.67, 60e-6
# Megatron's overlap_moe_expert_parallel_comm: the forward pass of one microbatch beside the backward pass of another.
BEHIND = "expert exchange behind another microbatch"
# NeMo AutoModel's FakeBalancedGate: experts in turn, tokens of a device taking `top_k` each
# (https://github.com/NVIDIA-NeMo/Automodel, nemo_automodel/components/moe/layers.py), so that a token's experts are
# neighbours. Megatron's moe_router_force_load_balancing draws them.
IN_TURN = "balanced gate"
SPLIT = "experts are split over tensor too"
# GPT-OSS in Megatron (fused_bias_geglu.py, TEGroupedMLP._apply_bias): clamps and their concatenation before the gated
# activation, biases of the second product added in float32, and a constant that each layer copies from the host and
# waits for. In NeMo AutoModel (layers.py, GroupedExpertsDeepEP._apply_bias) clamps are compiled into the activation;
# biases of both products are added expert by expert and concatenated: of an expert's two widths 4 bytes and 4, of what
# it gives 6 in float32, 8 and 6.
BIASED = "gpt-oss"
ADDED, BIASES = 16, 20  # bytes of each number, forward: of an expert's width, and of what it gives
# Operations that PyTorch starts for a layer, forward and backward, and for each of a device's experts: a product by
# itself, and in 8 bits its operands' casts and scales, which C++ starts in a loop, each counted half. Together with 16
# experts the 790 that constants.MODULE was measured with. Estimates.
LAYER, EXPERT, EXPERT_8BIT = 550, 3, 15
FORWARD = 1 / 2  # of them: half as many kernels, and twice as much Python. An estimate
# Of LAYER, what comes before the device has counted the rows of each expert: attention, norms and the router with what
# it prepares; and of these the router's part. Estimates.
BEFORE, ROUTER = 1 / 2, 1 / 5
# Kernels that hardly move anything, forward and backward, and what each takes with its gap. Megatron's router draws
# logits where it forces a balance, takes the best and makes a loss (transformer/moe/router.py, with moe_router_fusion);
# counts, splits and maps of rows follow (token_dispatcher.py, TransformerEngine's permutation.py). AutoModel's balanced
# gate and the maps of DeepEP's rows are fewer (token_dispatcher.py@0231c64e). Estimates.
SMALL, SMALL_SECONDS = 32, 4e-6
SMALL_BALANCED = 16


def experts_sent(sent: list[Sent], point: Point, experts: Experts, inside: int) -> Iterator[Sent]:
    """What layers exchange, as their system does, in bytes as NCCL would send them at its rate; `inside` devices of the
    expert axis are joined by NVLink."""
    for one in sent:
        if one.axes == ("expert",) and one.kind == RAGGED and any(words in point.note for words in ONCE):
            ranks = point.mesh.expert
            places = ranks // inside if inside < ranks else ranks
            copies = _in_turn(places, experts) if IN_TURN in point.note else _drawn(places, experts.top_k)
            slower = NVLINK.bandwidth / HYBRID_SHARE if HYBRID in point.note and inside >= ranks else 1.0
            one = dataclasses.replace(one, nbytes=one.nbytes * copies / experts.top_k * slower, host=CALL)
        if one.axes == ("expert",) and one.kind == RAGGED and BEHIND in point.note:
            share = beside_another(point)
            yield dataclasses.replace(one, nbytes=one.nbytes * share, count=one.count * share, beside=True)
            one = dataclasses.replace(one, nbytes=one.nbytes * (1 - share), count=one.count * (1 - share))
        if one.axes == ("tensor",) and SPLIT in point.note:
            # Attention's half, which its matmuls hide, and the experts', of each token as often as it has experts.
            yield dataclasses.replace(one, nbytes=one.nbytes / 2, count=one.count / 2)
            one = dataclasses.replace(one, nbytes=one.nbytes / 2 * experts.top_k, count=one.count / 2, beside=False)
        yield one


def beside_another(point: Point) -> float:
    """Share of a step's passes that run beside one of another microbatch (megatron/core/pipeline_parallel,
    combined_1f1b.py): forward passes that fill the pipeline, one more than without, have none to run beside, nor have
    the backward ones that empty it."""
    stages, parts = point.mesh.pipeline, point.virtual_stages or 1
    alone = (stages - 1) + (parts - 1) * stages + 1  # the mean of all stages
    return max(0.0, 1 - alone / (point.microbatches * parts))


def counts_sent(point: Point, sketch: Sketch) -> Iterator[Sent]:
    """What the all-to-all dispatcher sends besides rows, before and with them: how many go to each expert, and how much
    each counts, there and back. Hardly any bytes; each takes a collective's latency."""
    if ALL_TO_ALL in point.note:
        layers = sketch.passes * sketch.shape.cached_layers / sketch.mesh.pipeline
        yield Sent(("expert",), "rows of each expert", 8.0 * layers, GATHER, layers)
        yield Sent(("expert",), "weights of rows", 8.0 * layers, RAGGED, 2 * layers)


def _drawn(places: int, top_k: int) -> float:
    """Places, devices or hosts, that `top_k` even choices lie in."""
    return places * (1 - (1 - 1 / places) ** top_k)


def _in_turn(places: int, experts: Experts) -> float:
    """The same where tokens take experts in turn."""
    num, k = experts.num_experts, experts.top_k
    tokens = range(num // math.gcd(num, k))
    return statistics.mean(len({(t * k + i) % num * places // num for i in range(k)}) for t in tokens)


def as_fused(ops: list[Op], point: Point) -> Iterator[Op]:
    """Experts' products and the activation between them in kernels of their own: no pass for it is left, and no cast of
    the rows that it gives the second product or of the gradients that it gives the first one."""
    down = next((op for op in ops if op.grouped and op.what == "down"), None)
    if down is None or FUSED not in point.note:
        yield from ops
        return
    _, n, k = down.dims
    activated = 2 * 3 * k * down.flops / (2.0 * n * k)  # bytes: in 16 bits, of all rows; compute._experts
    for op in ops:
        if op.grouped:
            op = dataclasses.replace(op, cast_rows=float(op.what != "down"), cast_gradients=float(op.what != "up"))
        elif op.what == "activation and moving":
            op = dataclasses.replace(op, hbm_bytes=op.hbm_bytes - activated)
        yield op


def as_drawn(ops: list[Op], point: Point) -> Iterator[Op]:
    """Products of experts that Megatron's forced balance draws: chance gives each its rows, and all wait in every
    exchange for the device with most."""
    for op in ops:
        if op.grouped and point.framework in MEGATRON:
            experts = op.flops / (2.0 * math.prod(op.dims))
            ranks = point.mesh.expert
            # The largest of so many normal numbers, on average (https://doi.org/10.2307/2347982 on Blom's formula).
            largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
            most = 1 + largest / math.sqrt(op.dims[0] * experts)
            dims = (op.dims[0] * most, *op.dims[1:])
            op = dataclasses.replace(op, flops=op.flops * most, dims=dims, drawn=True)
        yield op


def experts_ops(point: Point, experts: Experts, sketch: Sketch, again: float) -> Iterator[Op]:
    """What experts do besides; `again` as the share of memory-bound work that the backward pass repeats."""
    rows = sketch.tokens * experts.top_k
    passes = sketch.passes * sketch.shape.cached_layers / sketch.mesh.pipeline

    def moving(what: str, nbytes: float, again: float) -> Op:
        count = passes * (3 + again)
        staged = sketch.mesh.pipeline > 1
        return Op("moe", what, "memory", 0, nbytes, count, passes, passes * again, in_stages=staged)

    D = sketch.shape.embed_dim
    small = SMALL_SECONDS * (SMALL_BALANCED if IN_TURN in point.note else SMALL)
    staged = sketch.mesh.pipeline > 1
    yield Op("moe", "routing", "memory", 0, 0, passes, passes, in_stages=staged, host=small)
    if point.framework in MEGATRON and point.precision in EIGHT_BITS and HYBRID not in point.note:
        # Rows of each expert are copied to where there is room for whole blocks of 16 or 32, and back (experts.py,
        # Fp8Padding); HybridEP places them so itself.
        padding = 4 * sketch.itemsize * rows * D
        count = passes * (2 + (point.remat == "full"))
        yield Op(
            *("moe", "rows padded", "memory", 0, padding, count, passes, count - 2 * passes),
            in_stages=staged,
            gradient_bytes=padding,
        )
    if point.framework in MEGATRON and point.precision in EIGHT_BITS and FUSED not in point.note:
        # Inputs and gradients of both products are cast expert by expert (TransformerEngine, split_quantize).
        gaps = 4 * (experts.num_experts / sketch.mesh.expert - 1) * GAP
        yield Op("moe", "casts of each expert", "memory", 0, 0, passes, passes, in_stages=staged, host=gaps)
    if ALL_TO_ALL in point.note:
        # Sorted by device and again by expert, and back; ours are sorted once.
        sorting = sketch.itemsize * rows * D * (2 + 2 / experts.top_k)
        yield moving("rows sorted twice", sorting, float(point.remat == "full"))
    if BIASED in point.model:
        yield moving("biases", BIASES * rows * D, 0)
        if FUSED not in point.note:
            yield moving("before the activation", ADDED * rows * experts.expert_dim, again)


def waiting(point: Point, model: Model, sketch: Sketch, cost: StepCost) -> Op | None:
    """A device waits for its host where layers take the host longer than the device. The backward pass asks the device
    for nothing: the longer of both counts, as it does for passes of two microbatches beside each other. In the forward
    pass the host asks in each layer how many rows there are, and starts neither experts nor the next layer's attention
    before it knows; by then the device has nothing left to do. What graphs capture costs the host nothing. Where each
    layer waits for a constant too, its forward pass begins again in the midst of the experts, beside another microbatch
    or not: the device is taken to work only when all is started."""
    if not model.experts or point.framework not in MEGATRON or WHOLE in point.note:
        return None
    if not any(words in point.note for words in (ALL_TO_ALL, *ONCE)):
        return None  # the source does not say what the host does
    passes = sketch.passes * sketch.shape.cached_layers / sketch.mesh.pipeline
    before, after = _host_seconds(point, model.experts.num_experts / sketch.mesh.expert)
    attention = sum(cost.compute.get(kind, 0.0) for kind in ("attention", "mlp", "norm")) / passes
    exchange = sum(one.exposed_seconds for one in cost.comms if one.sent.axes == ("expert",)) / passes
    experts = cost.compute.get("moe", 0.0) / passes + exchange
    host, device = before + after, attention + experts
    if BIASED in point.model:
        seconds = FORWARD * host + max(0.0, (1 - FORWARD) * host - device * 2 / 3)
    elif BEHIND in point.note:
        seconds = max(0.0, host - device)
    else:
        started = max(FORWARD * after, experts / 3) + attention / 3
        forward = max(FORWARD * host, started) - device / 3
        seconds = forward + max(0.0, (1 - FORWARD) * host - device * 2 / 3)
    staged = sketch.mesh.pipeline > 1
    return Op("other", "waits for the host", "memory", 0, 0, passes, passes, in_stages=staged, host=seconds)


def _host_seconds(point: Point, experts: float) -> tuple[float, float]:
    """(up to where a device has counted the rows of its `experts`, from there on) that a layer takes its host."""
    captured = any(words in point.note for words in ROUTER_CAPTURED)
    router = 0.0 if captured else ROUTER
    attention = 0.0 if any(words in point.note for words in ATTENTION_CAPTURED) else 1 - ROUTER
    each = EXPERT_8BIT if point.precision in EIGHT_BITS else EXPERT
    before, after = LAYER * BEFORE * (attention + router), LAYER * (1 - BEFORE) + each * experts
    return before * MODULE, after * MODULE
