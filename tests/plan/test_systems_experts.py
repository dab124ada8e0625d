"""How other systems bring tokens to experts, against counting by hand and by chance."""

import collections
import dataclasses
import math
import random
import statistics
import types

import pytest

from shardlm.hardware import GPUS
from shardlm.plan import validate as validation
from shardlm.plan.compute import operations
from shardlm.plan.constants import GAP, MODULE, NVLINK
from shardlm.plan.kernels import Kernels
from shardlm.plan.sketch import Sketch
from shardlm.plan.systems_experts import (
    CALL,
    HYBRID_SHARE,
    SMALL,
    SMALL_BALANCED,
    SMALL_SECONDS,
    as_drawn,
    as_fused,
    beside_another,
    counts_sent,
    experts_ops,
    experts_sent,
    waiting,
)
from shardlm.plan.traffic import GATHER, RAGGED, Sent, training_traffic
from shardlm.plan.validate import configuration, predict


def of(published, name):
    """(point, its model, a sketch of it)"""
    point = published.points[name]
    model = published.model_of(point)
    ends = validation.systems.ends_are_layers(point)
    shape = validation.systems.with_ends(model) if ends else model
    return point, model, Sketch.of(configuration(point, shape), published.gpu_of(point))


def places_of(tokens, experts, places):
    """Places that tokens go to on average: each token's experts in order, counted by hand."""
    return statistics.mean(len({expert * places // experts for expert in chosen}) for chosen in tokens)


@pytest.mark.parametrize(
    ("name", "inside", "places"),
    [
        ("automodel-deepseek-v3-h100x256", 8, 8),  # hosts of 8 GPUs
        ("automodel-deepseek-v3-h100x256", 64, 64),  # all under one switch
        ("automodel-kimi-k2-h100x256", 32, 32),  # 12 experts a device: every second token is cut
        ("automodel-gpt-oss-20b-h100x8", 8, 8),
    ],
)
def test_a_balanced_gate_takes_experts_in_turn(published, name, inside, places):
    """NeMo AutoModel's torch.arange(tokens * top_k).view(-1, top_k) % experts."""
    point, model, _ = of(published, name)
    experts, k = model.experts.num_experts, model.experts.top_k
    flat = [i % experts for i in range(4096 * k)]
    wanted = places_of([flat[i : i + k] for i in range(0, len(flat), k)], experts, places) / k
    sent = Sent(("expert",), "tokens sent", 8.0, RAGGED, 3)
    (found,) = experts_sent([sent], point, model.experts, inside)
    assert found.nbytes == pytest.approx(8 * wanted, rel=1e-3)
    assert list(experts_sent([weights := dataclasses.replace(sent, kind=GATHER)], point, model.experts, 8)) == [weights]


def test_other_balanced_tokens_draw_their_experts(published):
    """HybridEP over two hosts, against tokens that choose eight of 128 experts at random; behind another microbatch."""
    sent = Sent(("expert",), "tokens sent", 8.0, RAGGED, 3)
    point, model, _ = of(published, "bridge-qwen3-30b-a3b-h100x16-bf16-26.07")
    found, alone = experts_sent([sent], point, model.experts, 8)
    draw = random.Random(0)
    hosts = places_of([[draw.randrange(128) for _ in range(8)] for _ in range(4000)], 128, 2)
    assert found.nbytes + alone.nbytes == pytest.approx(hosts, rel=0.02) and found.beside and not alone.beside
    assert (found.count, alone.count) == (3 * 63 / 64, 3 / 64)  # of 64 microbatches the first pass and the last
    before = published.points["bridge-qwen3-30b-a3b-h100x16-bf16-26.06"]
    assert not next(experts_sent([sent], before, model.experts, 8)).beside
    plain = published.points["bridge-qwen3-30b-a3b-gb200x8-mxfp8-25.11"]
    assert list(experts_sent([sent], plain, model.experts, 8)) == [sent]
    (inside,) = experts_sent([sent], published.points["bridge-qwen3-30b-a3b-gb200x8-mxfp8-26.02"], model.experts, 8)
    hosts = places_of([[draw.randrange(128) for _ in range(8)] for _ in range(4000)], 128, 8) / 8
    assert inside.nbytes == pytest.approx(8 * hosts * NVLINK.bandwidth / HYBRID_SHARE, rel=0.02)


@pytest.mark.parametrize(("ranks", "received"), [(8, 734), (16, 659), (24, 617), (32, 606), (36, 596)])
def test_hybrid_exchanges_reach_what_their_authors_measured_on_gb200(published, ranks, received):
    """GB/s that a device receives in dispatch and combine in BF16, with 16 and 32 multiprocessors: what comes from
    itself is counted too (Hybrid-EP_Intra-node_Implementation.md, kernels alone)."""
    assert HYBRID_SHARE * 900 * ranks / (ranks - 1) == pytest.approx(received, rel=0.07)
    sent = Sent(("expert",), "tokens sent", 8.0, RAGGED, 3)
    point, model, _ = of(published, "bridge-qwen3-30b-a3b-gb200x8-mxfp8-26.02")
    assert next(experts_sent([sent], point, model.experts, 8)).host == CALL


def test_other_systems_send_tokens_where_ours_would_gather_them(published):
    _, _, sketch = of(published, "automodel-qwen3-30b-a3b-h100x8")
    ours = [one for one in training_traffic(sketch) if one.why.startswith("tokens")]
    theirs = [one for one in training_traffic(sketch, "all_to_all") if one.why.startswith("tokens")]
    assert {one.kind for one in ours} == {GATHER} and {one.kind for one in theirs} == {RAGGED}
    rows, runs = 4 * 4096, 48 * 16  # of a microbatch; layers of all microbatches
    # There and back, there again, and the gradients of both.
    assert sum(one.nbytes for one in theirs) == 5 * runs * rows * 8 * 7 / 8 * 2048 * 2


def test_experts_split_over_tensor_exchange_each_token_as_often_as_it_has_experts(published):
    point, model, _ = of(published, "nemo-grok-1-h100x512-bf16")
    hidden = Sent(("tensor",), "the sequence: gathers", 8.0, count=4, beside=True)
    attention, experts = experts_sent([hidden], point, model.experts, 1)
    assert (attention.nbytes, attention.beside, experts.nbytes, experts.beside) == (4, True, 8, False)


@pytest.mark.parametrize(("stages", "parts", "microbatches"), [(1, 1, 5), (1, 1, 64), (8, 2, 128), (8, 4, 256)])
def test_passes_that_fill_a_pipeline_have_none_to_run_beside(published, stages, parts, microbatches):
    """Megatron's interleaved schedule: how many forward passes each stage makes before its first backward one."""
    point = published.points["bridge-qwen3-235b-a22b-b300x256-mxfp8-26.02"]
    mesh = dataclasses.replace(point.mesh, pipeline=stages)
    point = dataclasses.replace(point, mesh=mesh, virtual_stages=parts, microbatches=microbatches)
    first = [2 * (stages - rank - 1) + (parts - 1) * stages + 1 for rank in range(stages)]
    assert beside_another(point) == pytest.approx(1 - statistics.mean(first) / (microbatches * parts))


def test_the_all_to_all_dispatcher_sorts_twice_and_gpt_oss_adds_biases(published):
    point, model, sketch = of(published, "bridge-gpt-oss-120b-h100x64-bf16-26.02")
    rows, layers = 4096 * 4, 36 / 4 * 80  # of one microbatch; of one stage in a step
    routing, sorting, biases, clamps = experts_ops(point, model.experts, sketch, again=1.0)
    assert (routing.host, routing.hbm_bytes, routing.count) == (SMALL * SMALL_SECONDS, 0, layers)
    assert sorting.hbm_bytes == 2 * rows * 2880 * 2.5 and (sorting.forward, sorting.again) == (layers, 0)
    assert (biases.hbm_bytes, biases.count) == (20 * rows * 2880, 3 * layers)
    assert (clamps.hbm_bytes, clamps.again, clamps.count) == (16 * rows * 2880, layers, 4 * layers)
    assert all(op.in_stages for op in (sorting, biases, clamps))
    automodel, small, here = of(published, "automodel-gpt-oss-20b-h100x8")
    gate, *added = experts_ops(automodel, small.experts, here, 0)
    assert gate.host == SMALL_BALANCED * SMALL_SECONDS
    assert [op.what for op in added] == ["biases", "before the activation"]
    qwen, other, there = of(published, "bridge-qwen3-235b-a22b-b200x256-mxfp8-26.02")
    assert [op.what for op in experts_ops(qwen, other.experts, there, 0)] == [
        "routing",
        "rows padded",
        "casts of each expert",
        "rows sorted twice",
    ]


def test_eight_bits_pad_rows_where_the_exchange_does_not(published):
    point, model, sketch = of(published, "bridge-qwen3-30b-a3b-gb200x8-mxfp8-25.11")
    _, padded, casts = experts_ops(point, model.experts, sketch, 0)
    assert casts.host == 4 * (16 - 1) * GAP  # of two products, inputs and gradients, but for what is counted anyway
    rows = 4 * 4096 * 8
    # Copied to where there is room and back, forward and backward.
    assert padded.hbm_bytes == padded.gradient_bytes == 2 * 2 * 2 * rows * 2048
    assert (padded.count, padded.forward) == (2 * 48 * 16, 48 * 16)
    hybrid = dataclasses.replace(point, note="HybridEP")
    wide = dataclasses.replace(point, precision="bf16")
    assert [op.what for op in experts_ops(hybrid, model.experts, sketch, 0)] == ["routing", "casts of each expert"]
    assert [op.what for op in experts_ops(wide, model.experts, sketch, 0)] == ["routing"]


def test_rows_that_are_drawn_fill_more_tiles_and_all_wait_for_the_fullest_device(published):
    point, _, sketch = of(published, "bridge-deepseek-v3-mtp-b200x256-mxfp8-25.11")
    ops = operations(sketch, ours=False)
    grouped = [op for op in ops if op.grouped]
    drawn = [op for op in as_drawn(ops, point) if op.grouped]
    draw = random.Random(0)
    devices = 8
    counts = [collections.Counter(draw.randrange(devices) for _ in range(32768)) for _ in range(100)]
    fullest = statistics.mean(max(one.values()) for one in counts) / (32768 / devices)
    # 32 experts of 1,024 rows each: eight times the rows of this simulation, and spread by the root of eight less.
    for before, after in zip(grouped, drawn, strict=True):
        assert after.drawn and after.flops / before.flops == after.dims[0] / before.dims[0]
        assert after.flops / before.flops - 1 == pytest.approx((fullest - 1) / math.sqrt(8), rel=0.1)
    turn, _, there = of(published, "automodel-qwen3-30b-a3b-h100x8")
    even = operations(there, ours=False)
    assert list(as_drawn(even, turn)) == even


def test_fused_experts_leave_no_pass_for_the_activation_and_half_of_the_casts(published):
    point, model, sketch = of(published, "bridge-gpt-oss-120b-gb200x64-mxfp8-26.06")
    kernels, rows = Kernels.of(GPUS["gb200"]), sketch.tokens * 4
    apart = dataclasses.replace(point, note=point.note.replace("experts in one kernel", ""))
    before = operations(sketch, ours=False)
    assert list(as_fused(before, apart)) == before
    (dense,) = before[:1]
    assert list(as_fused([dense], point)) == [dense]
    saved = {}
    for old, new in zip(before, as_fused(before, point), strict=True):
        forward, back = (lambda op: kernels.forward_seconds(op)), (lambda op: kernels.gradient_seconds(op))
        if old.what == "activation and moving":  # of 2F numbers one half's read twice: 3F, in 16 bits
            assert old.hbm_bytes - new.hbm_bytes == pytest.approx(2 * rows * 3 * 2880)
        elif old != new:
            saved[old.what] = (forward(old) - forward(new), back(old) - back(new))
    # 4 bytes of each number: read in 16 bits, written twice in 8. Weights are cast once a step.
    one = 4 * rows * 2880 / kernels.memory
    assert saved == {
        "up": (pytest.approx(0, abs=1e-9), pytest.approx(2 * one + GAP)),
        "down": (pytest.approx(one), pytest.approx(0, abs=1e-9)),
    }
    assert [op.what for op in experts_ops(point, model.experts, sketch, 0)] == ["routing", "biases"]
    beside = ["routing", "casts of each expert", "biases", "before the activation"]
    assert [op.what for op in experts_ops(apart, model.experts, sketch, 0)] == beside


def test_the_all_to_all_dispatcher_sends_counts_before_rows_and_weights_with_them(published):
    point, _, sketch = of(published, "bridge-qwen3-235b-a22b-b200x256-mxfp8-26.02")
    counts, weights = counts_sent(point, sketch)
    layers = 256 * 96 / 8
    assert (counts.kind, counts.count, weights.kind, weights.count) == (GATHER, layers, RAGGED, 2 * layers)
    plain, _, there = of(published, "bridge-qwen3-30b-a3b-gb200x8-mxfp8-25.11")
    assert not list(counts_sent(plain, there))


def waits(published, name, attention, experts, note=None, precision=None):
    """(seconds that a layer waits, of which parts the host has so many operations before and after it knows the rows),
    where a device takes so long for a layer's attention and its experts, forward and backward."""
    point, model, sketch = of(published, name)
    said = {"note": point.note if note is None else note, "precision": precision or point.precision}
    point = dataclasses.replace(point, **said)
    layers = sketch.passes * sketch.shape.cached_layers / sketch.mesh.pipeline
    cost = types.SimpleNamespace(compute={"attention": attention * layers, "moe": experts * layers}, comms=())
    found = waiting(point, model, sketch, cost)
    return None if found is None else found.host


def forward_of(host, device):
    """Seconds of a layer forward, simulated: (before, after) it is known how many rows each expert has. A host starts
    small kernels one by one, a device runs them in order, and the host knows when all before are done."""
    pieces, clock, done = 100, 0.0, 0.0
    for _ in range(3):
        known = clock = done  # experts of this layer, and what comes before the next one's
        for part in (1, 0):
            for _ in range(pieces):
                clock += host[part] / pieces
                done = max(done, clock) + device[part] / pieces
    return done - known


@pytest.mark.parametrize(
    ("attention", "experts"), [(2e-3, 4e-3), (2e-3, 12e-3), (9e-3, 3e-3), (12e-3, 9e-3), (9e-3, 12e-3), (30e-3, 40e-3)]
)
def test_forward_the_device_idles_until_the_host_has_started_what_it_asked_the_rows_for(published, attention, experts):
    name = "bridge-qwen3-30b-a3b-h100x32-bf16-26.07"  # HybridEP, 16 experts a device, nothing captured
    host = (275 * MODULE, (275 + 3 * 16) * MODULE)
    forward = forward_of([h / 2 for h in host], (attention / 3, experts / 3))
    backward = max(sum(host) / 2, (attention + experts) * 2 / 3)
    found = waits(published, name, attention, experts)
    assert found == pytest.approx(forward + backward - attention - experts, rel=0.02, abs=5e-5)


def test_what_is_captured_costs_the_host_nothing_and_casts_cost_it_more(published):
    name = "bridge-qwen3-30b-a3b-h100x32-fp8-26.07"  # attention and router captured
    eight = (275 + 15 * 16) * MODULE
    assert waits(published, name, 1e-3, 1e-3) == pytest.approx(eight / 2 + 1e-3 / 3 + eight / 2 - 2e-3)
    assert waits(published, name, 1e-3, 1e-3, precision="bf16") == pytest.approx(
        (275 + 3 * 16) * MODULE / 2 * 2 + 1e-3 / 3 - 2e-3
    )
    router = waits(published, name, 0.0, 1e-3, note="HybridEP, router in CUDA graphs")
    assert router == pytest.approx(0.8 * 275 * MODULE + eight - 1e-3)
    assert waits(published, name, 0.0, 1e-3, note="DeepEP") == pytest.approx(275 * MODULE + eight - 1e-3)
    assert waits(published, name, 1e-3, 1e-3, note="") is None  # not said how rows are sent
    assert waits(published, "automodel-qwen3-30b-a3b-h100x8", 1e-3, 1e-3) is None  # layers are compiled


def test_a_step_in_one_graph_waits_for_no_host(published):
    name = "megatron-qwen3-30b-a3b-gb200x16-mxfp8-whole"
    point = published.points[name]
    assert waits(published, name, 1e-6, 1e-6) is None
    assert waits(published, name, 1e-6, 1e-6, note=point.note.replace("whole step in a CUDA graph", "")) > 4e-3


def test_a_layer_takes_what_its_host_takes_at_least(published):
    point, _, _ = of(published, "bridge-qwen3-235b-a22b-b200x256-mxfp8-26.02")
    with_host = predict(point, published).cost
    calm = dataclasses.replace(point, note=point.note.replace("all-to-all dispatcher, no CUDA graphs", ""))
    without = predict(calm, published).cost
    layers = 256 * 12  # 96 over 8 stages, 256 microbatches
    host = (550 + 15 * 16) * MODULE  # 16 experts a device: as many as MODULE was measured with
    assert host == pytest.approx(790 * MODULE)
    assert without.step_seconds < layers * host < with_host.step_seconds < 1.25 * layers * host


def test_two_microbatches_beside_each_other_wait_for_the_longer_and_constants_for_all_of_a_forward_pass(published):
    name = "bridge-qwen3-235b-a22b-b200x256-mxfp8-26.02"
    behind = "all-to-all dispatcher, no CUDA graphs; expert exchange behind another microbatch"
    host = 790 * MODULE
    assert waits(published, name, 1e-3, 2e-3, note=behind) == pytest.approx(host - 3e-3)
    assert waits(published, name, 10e-3, 20e-3, note=behind) == 0
    oss = "bridge-gpt-oss-120b-gb200x64-bf16-26.02"
    assert waits(published, oss, 50e-3, 60e-3) == pytest.approx((550 + 3 * 2) * MODULE / 2)
    assert waits(published, oss, 50e-3, 60e-3, note=behind) == pytest.approx((550 + 3 * 2) * MODULE / 2)
    graphs = waits(published, "bridge-gpt-oss-120b-gb300x64-bf16-26.02", 50e-3, 60e-3)
    assert graphs == pytest.approx((275 + 3 * 2) * MODULE / 2)
    assert waits(published, "bridge-gpt-oss-120b-b300x64-bf16-26.02", 50e-3, 60e-3) == pytest.approx(graphs)
