"""A step's cost: its parts add up, what can hide hides, more hardware never slows it down, and the limit says so."""

import dataclasses
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm.hardware import GPUS
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.llama import LlamaConfig
from shardlm.models.mixtral import MixtralConfig
from shardlm.models.pretrained import Pretrained
from shardlm.plan.cluster import Cluster
from shardlm.plan.compute import executed_flops, operations
from shardlm.plan.cost import Layers, StepCost, step_cost, without_weights
from shardlm.plan.overlap import IN_STAGES, SUMS_IN_STAGES, keeping, overlapped, timed
from shardlm.plan.program_traffic import layers_traffic, weights_traffic
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import GATHER, PERMUTE, REDUCE, SCATTER, Sent
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig

H100 = GPUS["h100"]
LLAMA = RunConfig(LlamaConfig(), mesh=MeshSpec(fsdp=64), train=TrainConfig(global_batch=64, seq_len=8192))


def cost(config: RunConfig = LLAMA, gpu=H100, nic: float = 0) -> StepCost:
    size = config.mesh.size(*config.mesh.sizes())
    return step_cost(Sketch.of(config, gpu), Cluster.of(gpu, size, 0, nic))


def meshed(batch: int = 64, seq_len: int = 8192, accumulation: int = 1, rules: str = "zero3", **axes: int) -> RunConfig:
    train = TrainConfig(global_batch=batch, seq_len=seq_len, accumulation=accumulation)
    return dataclasses.replace(LLAMA, mesh=MeshSpec(**axes), train=train, rules=rules)


def test_the_parts_of_a_step_add_up():
    found = cost(meshed(accumulation=8, pipeline=2, fsdp=4, tensor=8))
    assert found.step_seconds == pytest.approx(
        found.compute_seconds + found.contention_seconds + found.exposed_seconds + found.bubble_seconds
    )
    assert sum(found.units.values()) == pytest.approx(found.compute_seconds)
    assert [phase.name for phase in found.timeline] == ["forward", "backward", "optimizer"]
    assert sum(phase.compute for phase in found.timeline) == pytest.approx(found.compute_seconds)
    assert sum(phase.exposed for phase in found.timeline) == pytest.approx(found.exposed_seconds)
    assert set(found.compute) == {"attention", "mlp", "norm", "head", "embedding", "optimizer", "other"}
    by_axes = {one.axes: one for one in found.by_axes}
    assert set(by_axes) == {("tensor",), ("fsdp",), ("pipeline",), ("pipeline", "fsdp")}  # together: the embedding's
    assert by_axes[("tensor",)].link == "NVLink" and by_axes[("fsdp",)].link == "network"
    assert by_axes[("tensor",)].exposed_seconds == by_axes[("tensor",)].seconds > 0
    assert found.tokens_per_second == 64 * 8192 / found.step_seconds


def test_stages_hide_few_of_their_gathers_and_no_moves_of_weights_to_them():
    found = cost(meshed(256, accumulation=8, pipeline=2, fsdp=32))
    hidden = dict.fromkeys((("fsdp",), ("pipeline", "fsdp")), 0.0)
    whole = dict.fromkeys(hidden, 0.0)
    for one in found.comms:
        if one.sent.beside and one.sent.axes in hidden and one.sent.why.startswith("segments"):
            hidden[one.sent.axes] += one.hidden_seconds
            whole[one.sent.axes] += one.seconds
    assert 0 < hidden["fsdp",] <= IN_STAGES["circular"] * whole["fsdp",]
    assert hidden["pipeline", "fsdp"] == 0 < whole["pipeline", "fsdp"]


@pytest.mark.parametrize("schedule,rounds", [("gpipe", 1), ("circular", 2), ("1f1b", 1)])
def test_what_a_tick_does_to_the_weights_of_its_stage_and_to_what_it_keeps_by_hand(schedule, rounds):
    config = meshed(accumulation=4, pipeline=2, data=4, batch=16, rules="replicated")
    config = dataclasses.replace(config, pipeline=PipelineConfig(schedule, rounds), remat="full")
    sketch = Sketch.of(config, H100)
    op, kept = (op for op in operations(sketch) if op.what.endswith("of a stage"))
    assert (op.what, kept.what) == ("weights of a stage", "stacks of a stage")
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096  # attention, MLP and norms of Llama 3 8B
    one = 16 * layer / rounds
    assert op.hbm_bytes == pytest.approx(4 * one)  # bfloat16 read and written
    # Of the float32 sum, copied out and then added to.
    assert op.gradient_bytes == pytest.approx(4 * one + (8 + 2 + 8) * one)
    stream = 2 * sketch.tokens * 4096  # each layer's input, in bfloat16
    assert kept.hbm_bytes == kept.gradient_bytes == pytest.approx(4 * stream * 16 / rounds)
    for found in (op, kept):
        assert (found.forward, found.count, found.in_stages) == (4 * rounds, 8 * rounds, True)
    assert not [op for op in operations(sketch, ours=False) if op.what.endswith("of a stage")]


def test_stages_of_one_f_one_b_hide_more_and_sums_in_every_tick_are_hidden_by_the_tick():
    circular = meshed(256, accumulation=8, pipeline=2, fsdp=32)
    shares = []
    for schedule in ("circular", "1f1b"):
        config = dataclasses.replace(circular, pipeline=PipelineConfig(schedule, 1))
        gathers = [one for one in cost(config).comms if one.sent.kind == GATHER and one.sent.count > 1]
        staged = [one for one in gathers if one.sent.axes == ("fsdp",) and one.sent.why.startswith("segments")]
        shares.append(sum(one.hidden_seconds for one in staged) / sum(one.seconds for one in staged))
    assert 0 < shares[0] <= IN_STAGES["circular"] < shares[1] <= IN_STAGES["1f1b"]
    whole = meshed(64, accumulation=8, pipeline=2, context=32, rules="zero1")
    once, sums = (
        [one for one in cost(config).comms if one.sent.axes == ("context",) and one.sent.why.endswith("of gradients")]
        for config in (whole, dataclasses.replace(whole, matmul="fp8"))
    )
    assert sums and all(one.hidden_seconds == pytest.approx(SUMS_IN_STAGES * one.seconds) for one in sums)
    # Products of 16 bits leave each device its own sum through the ticks, in float32 (layers/own_sums.py).
    ticks, slots = 8 * 2 + 1, 8  # two rounds
    assert {one.sent.count for one in once} == {1} and {one.sent.count for one in sums} == {slots * 16}
    nbytes = [sum(one.sent.shown_bytes for one in found) for found in (once, sums)]
    assert nbytes[1] * 2 * 2 == pytest.approx(nbytes[0] * ticks)


def test_remat_repeats_the_forward_pass_but_its_last_product():
    repeated = {remat: cost(dataclasses.replace(LLAMA, remat=remat)) for remat in ("none", "dots", "names", "full")}
    assert repeated["none"].repeated_seconds == 0
    seconds = {remat: found.step_seconds for remat, found in repeated.items()}
    assert max(seconds["none"], seconds["dots"]) < seconds["names"] < seconds["full"]
    assert seconds["dots"] == pytest.approx(seconds["none"], rel=0.01)  # attention is kept; norms are soon made
    full = repeated["full"]
    assert repeated["dots"].repeated_seconds < 0.1 * full.repeated_seconds
    assert 0.15 < full.repeated_seconds / full.compute_seconds < 0.25
    forward = {remat: one.timeline[0].compute for remat, one in repeated.items()}
    assert forward["full"] < forward["names"] < forward["none"], "what is kept is written into all layers'"
    assert forward["full"] == pytest.approx(forward["none"], rel=0.1)


def test_weights_that_are_not_trained_have_no_gradient():
    """Compiled programs of adapters run what is foreseen within 0.1% (4 layers of Llama 3 8B on one H100 and on
    fsdp=2 x tensor=2, 2026-11-22)."""
    model = Pretrained("unread", 0, json.dumps(LlamaConfig().to_hf()))
    full = dataclasses.replace(LLAMA, model=model, mesh=MeshSpec(fsdp=8), remat="none")
    adapted = dataclasses.replace(full, lora=LoraConfig(rank=16))
    ops, trained = (operations(Sketch.of(one, H100)) for one in (adapted, full))
    beside = [op for op in ops if op.what.startswith("adapter of ")]
    assert len(beside) == 2 * 7
    assert sum(op.flops for op in beside) == 2 * 8192 * 8 * 16 * (9 * 4096 + 2 * 1024 + 3 * 14336)
    products = [executed_flops([op for op in of if op.unit == "matmul"]) for of in (ops, trained)]
    assert products[0] - executed_flops(beside) == pytest.approx(2 / 3 * products[1])
    assert 0.8 < cost(adapted).step_seconds / cost(full).step_seconds < 0.9


def test_as_if_no_weights_were_moved_is_less_than_any_split_of_them_takes():
    """Of whichever mesh it is asked: the search asks it of one for all with the same inner axes."""
    cluster = Cluster.of(H100, 64)
    meshes = (meshed(rules="replicated", data=64), meshed(rules="zero1", data=64), meshed(fsdp=64), meshed(data=64))
    floors = [without_weights(Sketch.of(config, H100), cluster).step_seconds for config in meshes]
    assert floors == pytest.approx([floors[0]] * 4)
    assert all(floors[0] < cost(config).step_seconds for config in meshes)


def test_what_a_search_remembers_of_layers_and_weights_is_so_on_other_meshes_and_with_other_remat():
    cluster, inner = Cluster.of(H100, 64), {"tensor": 2, "pipeline": 2}
    meshes = [("zero3", {"fsdp": 16}), ("hybrid", {"data": 4, "fsdp": 4}), ("hybrid", {"data": 8, "fsdp": 2})]
    sketches = [Sketch.of(meshed(rules=rules, accumulation=2, **sizes, **inner), H100) for rules, sizes in meshes]
    layers, links = Layers.of(sketches[0], cluster), []
    for one in sketches:
        assert layers.timed(one, cluster) == timed(layers_traffic(one), one, cluster)
        links.append({sent.link for sent in layers.timed(one, cluster)})
    assert links == [{"NVLink", "network"}, {"NVLink", "network"}, {"NVLink"}]  # stages are apart by fsdp's devices
    for one in sketches:
        plain = Sketch.of(dataclasses.replace(one.config, remat="none"), H100)
        sent = [timed(weights_traffic(sketch), sketch, cluster) for sketch in (one, plain)]
        assert sent[0] != sent[1] == keeping(sent[0], "none")
        assert step_cost(plain, cluster, weights=keeping(sent[0], "none")) == step_cost(plain, cluster)


def test_weights_hide_behind_layers_but_the_first_and_the_last():
    found = cost()
    moved = sum(one.seconds for one in found.comms)
    assert found.exposed_seconds == pytest.approx(moved / 32)  # one layer's of 32
    # A row of 256 tokens computes for less time than its weights take over a slow network.
    slow = cost(meshed(seq_len=256, fsdp=64), nic=1e9)
    assert slow.exposed_seconds > 0.5 * sum(one.seconds for one in slow.comms)
    assert "communication over fsdp (network)" in slow.limit and "microbatch" in slow.limit


def test_what_is_hidden_by_hand():
    """One second of each, in layers of which there are 32, beside windows that are too short, and long enough."""
    sketch, cluster = Sketch.of(LLAMA, H100), Cluster.of(H100, 64)

    def beside(forward: float, backward: float, *sent: Sent):
        return overlapped(timed(sent, sketch, cluster), sketch, cluster, forward, backward)

    (one,) = beside(0, 0, Sent(("fsdp",), "", 1e12, GATHER, 1, True))
    assert one.exposed_seconds == one.seconds
    rate = 1e12 / one.seconds
    gather, scatter, total = (Sent(("fsdp",), "", rate, kind, 1, True) for kind in (GATHER, SCATTER, REDUCE))
    (found,) = beside(0.25, 10, gather)  # half of it belongs to the forward pass
    assert found.exposed_seconds == pytest.approx(1 - 31 / 64 - 0.25, rel=0.01)
    (found,) = beside(10, 10, scatter)
    assert found.exposed_seconds == pytest.approx(1 / 32, rel=0.01)
    found = beside(10, 1.5, scatter, total)  # sums have what scatters leave
    assert found[1].hidden_seconds == pytest.approx(1.5 - found[0].hidden_seconds, rel=0.01)
    assert found[0].slowing_seconds > 0
    (found,) = beside(10, 10, Sent(("fsdp",), "", rate, PERMUTE, 1))
    assert found.exposed_seconds == found.seconds


def test_sums_of_gradients_hide_behind_the_last_microbatch_only():
    once = cost(meshed(batch=512, seq_len=1024, data=64, rules="replicated"), nic=5e9)
    often = cost(meshed(batch=512, seq_len=1024, data=64, accumulation=8, rules="replicated"), nic=5e9)
    assert often.exposed_seconds > once.exposed_seconds


def test_the_bubble_is_idle_time_of_the_stages():
    def piped(rounds: int, accumulation: int) -> StepCost:
        config = meshed(accumulation=accumulation, pipeline=4, fsdp=2, tensor=8)
        return cost(dataclasses.replace(config, pipeline=PipelineConfig(rounds=rounds)))

    assert piped(1, 4).bubble_seconds > piped(2, 4).bubble_seconds > piped(2, 16).bubble_seconds > 0
    found = piped(1, 4)  # three of seven ticks are idle in the layers
    layers = found.step_seconds - found.bubble_seconds
    assert found.bubble_seconds / layers == pytest.approx(3 / 4, rel=0.15)
    assert "pipeline's idle time" in found.limit or "matmuls" in found.limit


@settings(max_examples=25, deadline=None)
@given(
    axes=st.sampled_from(
        [{"fsdp": 64}, {"fsdp": 8, "tensor": 8}, {"data": 8, "fsdp": 8}, {"fsdp": 4, "context": 8, "tensor": 2}]
    ),
    seq_len=st.sampled_from([1024, 8192, 32_768]),
    nic=st.sampled_from([2e9, 12.5e9, 50e9]),
)
def test_faster_hardware_is_never_slower(axes, seq_len, nic):
    config = meshed(seq_len=seq_len, **axes)
    base = cost(config, nic=nic).step_seconds
    assert cost(config, nic=2 * nic).step_seconds <= base
    for field in ("hbm_bytes_per_second", "nvlink_bytes_per_second"):
        faster = dataclasses.replace(H100, **{field: 2 * getattr(H100, field)})
        assert cost(config, faster, nic).step_seconds <= base * (1 + 1e-9)
    assert cost(meshed(batch=128, seq_len=seq_len, **axes), nic=nic).step_seconds > base


def test_the_limit_names_what_takes_most_and_what_helps():
    assert cost().limit.startswith("matmuls: ") and "matmul=fp8" in cost().limit and "lighter remat" in cost().limit
    long = cost(meshed(batch=8, seq_len=131_072, fsdp=8, context=8))
    assert long.limit.startswith("attention: ")
    wide = cost(meshed(fsdp=2, tensor=32))  # over four hosts
    assert wide.limit.startswith("communication over tensor (network)") and "mesh.tensor" in wide.limit
    one = cost()
    exposed = [(axis, "network", one.step_seconds / 4) for axis in ("context", "fsdp")]
    assert one.limited_by(one.step_seconds - one.exposed_seconds, exposed).startswith("matmuls: ")
    exposed += [("pipeline+context", "network", one.step_seconds / 3), ("tensor", "NVLink", one.step_seconds / 4)]
    said = one.limited_by(one.step_seconds - one.exposed_seconds, exposed)  # no axis takes as long as matmuls
    assert said.startswith("communication that nothing hides, ") and "s of it over pipeline+context (network): " in said
    assert said.endswith("fewer pipeline.rounds or stages make it less")


def test_a_cost_takes_no_time():
    """Thousands are ranked. The limit has room for a slow machine: half a millisecond of CPU is usual."""
    sketch, cluster = Sketch.of(LLAMA, H100), Cluster.of(H100, 64)
    took = []
    for _ in range(5):
        start = time.thread_time()
        step_cost(sketch, cluster)
        took.append(time.thread_time() - start)
    assert min(took) < 5e-3


@pytest.mark.parametrize(
    ("ranks", "top_k", "capacity", "room", "forward", "backward"),
    [
        (8, 2, 0.0, 8, 9 * 8 + 2 * 2, 12 * 8 + 4 * 2),  # a device has room for all tokens of all, one expert each
        (8, 2, 2.0, 4, 9 * 4 + 2 * 2, 12 * 4 + 4 * 2),
        (2, 2, 0.0, 4, 2 * (4 + 2), 6 * 4 + 2 * 2),  # tokens of both gathered, two experts each
        (1, 2, 0.0, 2, 2 * (2 + 1), 6 * 2 + 2 * 1),
    ],
)
def test_buffers_of_experts_are_moved_whole(ranks, top_k, capacity, room, forward, backward):
    model = MixtralConfig(num_layers=2, top_k=top_k, capacity_factor=capacity)
    config = RunConfig(model, mesh=MeshSpec(expert=ranks), train=TrainConfig(global_batch=ranks, seq_len=1024))
    found = {}
    for ours in (True, False):
        ops = operations(Sketch.of(config, GPUS["h100"]), ours)
        (found[ours],) = [op for op in ops if op.what == "activation and moving"]
    hidden = 14336 * room
    assert found[True].hbm_bytes == pytest.approx(1024 * 2 * (3 * hidden + 4096 * forward))
    assert found[True].gradient_bytes == pytest.approx(1024 * 2 * (4 * hidden + 4096 * backward))
    assert found[False].hbm_bytes == 1024 * 2 * (3 * 14336 * top_k + 4096 * 4 * top_k)


@pytest.mark.parametrize(
    ("axes", "turned"),
    [
        ({"expert": 2}, 0),  # nothing is gathered
        ({"expert": 2, "fsdp": 4}, 1),
        ({"expert": 8, "fsdp": 4}, 0),  # one expert a device: what is gathered of it follows each other
    ],
)
def test_gathered_experts_are_turned_for_their_kernels(axes, turned):
    mesh = MeshSpec(**axes)
    batch = mesh.size(*axes)
    config = RunConfig(MixtralConfig(num_layers=2), mesh=mesh, train=TrainConfig(global_batch=batch, seq_len=1024))
    (op,) = [op for op in operations(Sketch.of(config, GPUS["h100"])) if op.what == "weights turned"]
    once = 2 * 2 * 3 * 8 / mesh.expert * 4096 * 14336  # read and written, in 16 bits
    assert (op.hbm_bytes, op.gradient_bytes) == (turned * once, (2 + turned) * once)


def test_heads_are_turned_for_latent_attention_and_ulysses_exchange():
    def turned(model, **axes) -> list[float]:
        config = RunConfig(model, mesh=MeshSpec(**axes), train=TrainConfig(global_batch=1, seq_len=1024))
        return [op.hbm_bytes for op in operations(Sketch.of(config, GPUS["h100"])) if op.what == "heads turned"]

    dense, latent = LlamaConfig(num_layers=1), DeepseekConfig(num_layers=4)
    heads = 2 * 2 * 512 * (2 * 32 + 2 * 8) * 128  # queries, output, keys and values of half a row
    assert turned(dense) == [] and turned(dense, context=2) == [heads]
    assert turned(latent) == [2 * 2 * 1024 * 128 * (192 + 192 + 128)] * 2


def test_a_router_multiplies_in_full_precision():
    config = RunConfig(MixtralConfig(num_layers=2), mesh=MeshSpec(), train=TrainConfig(global_batch=1, seq_len=1024))
    ops = operations(Sketch.of(config, GPUS["h100"]))
    assert [op.dtype for op in ops if op.what == "router"] == ["fp32"]
