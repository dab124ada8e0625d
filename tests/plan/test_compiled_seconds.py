"""Estimated steps against those of programs compiled for H100s (bill.py, jax 0.10.2, read 2026-11-22), and by hand what
moves memory besides what layers compute, and what goes to the host and back."""

import dataclasses

import pytest
from record_memory import Run

from shardlm.hardware import GPUS
from shardlm.plan.cluster import Cluster
from shardlm.plan.compute import operations
from shardlm.plan.cost import StepCost, step_cost
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import state

H100 = GPUS["h100"]
HALF = "llama3_8b model.num_layers=16 mesh.fsdp=1 mesh.data=8 rules="
COMPILED = {  # seconds
    "llama3_8b": 1.053,
    "llama3_8b remat=names": 1.042,
    "llama3_8b remat=dots": 0.940,
    "llama3_8b remat=dots model.num_layers=8": 0.2733,
    "llama3_8b remat=dots model.num_layers=8 unroll=0": 0.2596,
    "llama3_8b remat=dots model.num_layers=8 mesh.fsdp=4 mesh.tensor=2 unroll=0": 0.2702,
    "llama3_8b remat=dots model.num_layers=8 mesh.fsdp=4 mesh.context=2 train.global_batch=4 unroll=0": 0.1485,
    "llama3_8b remat=offload": 1.078,
    "llama3_8b train.accumulation=4 train.global_batch=32": 4.191,
    "llama3_8b precision=fp32 train.seq_len=4096": 6.262,
    "llama3_8b matmul=fp8": 0.790,
    "llama3_8b matmul=int8": 0.878,
    "llama3_8b offload.optimizer=True": 1.383,
    "llama3_8b offload.optimizer=True offload.params=True": 1.630,
    "llama3_8b optim.name=muon": 1.354,
    HALF + "replicated": 0.649,  # XLA makes some of it twice, to need less memory
    HALF + "zero1": 0.621,
    "llama3_8b rules=zero1 mesh.fsdp=16 train.accumulation=4 train.global_batch=64 model.num_layers=16": 2.412,
    "llama3_8b mesh.fsdp=2 mesh.pipeline=4 train.accumulation=16 train.global_batch=32": 4.676,
    "llama3_8b mesh.fsdp=2 mesh.context=4 context_attention=ring train.seq_len=32768": 6.703,
    "llama3_8b_128k": 64.11,
    "diloco_two_sites": 1.063,
    "llama3_70b": 2.722,
    "mixtral_8x7b": 2.225,
    "mixtral_8x7b optim.name=muon model.num_layers=8 mesh.fsdp=4 mesh.expert=2": 2.363,
    "mixtral_8x7b mesh.fsdp=8 mesh.expert=1 model.num_layers=8 train.global_batch=8": 0.612,
    "deepseek_v3": 87.15,
}

SMALLER = "llama3_8b model.num_layers=16 model.embed_dim=3072 model.num_heads=24 model.mlp_dim=8192 "
EIGHT = "llama3_8b model.num_layers=8 "
OVER_PCIE = {  # the same over a host's PCIe, read 2026-11-27; the last six were estimated before they were compiled
    ("l40s", "llama3_8b"): 3.283,
    ("l40s", "llama3_8b mesh.data=2 mesh.fsdp=4 rules=hybrid"): 3.725,
    ("l40s", "llama3_8b mesh.fsdp=4 mesh.tensor=2"): 4.104,
    ("l40s", "llama3_8b mesh.fsdp=2 mesh.pipeline=4 train.accumulation=8 train.global_batch=16 train.seq_len=4096"): (
        4.587
    ),
    ("l40s", EIGHT + "train.seq_len=2048"): 0.679,
    ("l40s", EIGHT + "remat=dots"): 1.018,
    ("l40s", EIGHT + "remat=dots unroll=0"): 0.983,
    ("l40s", EIGHT + "mesh.fsdp=4 mesh.context=2 train.global_batch=4"): 0.873,
    ("l40s", EIGHT + "mesh.fsdp=1 mesh.data=8 rules=replicated"): 1.460,
    ("a40", EIGHT.strip()): 1.965,
    ("rtxpro6000", EIGHT.strip()): 0.838,
    (
        "l40s",
        "mixtral_8x7b model.num_layers=4 mesh.fsdp=8 mesh.expert=1 train.global_batch=8 train.seq_len=4096",
    ): 1.485,
    (
        "l40s",
        "mixtral_8x7b model.num_layers=4 mesh.fsdp=4 mesh.expert=2 train.global_batch=8 train.seq_len=4096",
    ): 0.912,
    (
        "rtxpro6000",
        "llama3_8b model.num_layers=28 model.embed_dim=3072 model.num_heads=24 model.mlp_dim=8192 mesh.fsdp=4 "
        "remat=names train.seq_len=4096",
    ): 1.221,
    (
        "a40",
        "llama3_8b model.num_layers=16 model.embed_dim=2048 model.num_heads=16 model.mlp_dim=8192 mesh.data=2 "
        "model.tie_embeddings=True mesh.fsdp=2 mesh.tensor=2 rules=hybrid remat=dots train.global_batch=16 "
        "train.seq_len=4096",
    ): 1.232,
    ("rtx4090", SMALLER + "train.global_batch=32 train.accumulation=4 train.seq_len=2048"): 2.746,
    (
        "a40",
        "mixtral_8x7b model.num_layers=4 model.embed_dim=2048 model.num_heads=16 model.expert_dim=7168 mesh.data=2 "
        "mesh.fsdp=4 mesh.expert=1 rules=hybrid train.global_batch=16 train.seq_len=4096",
    ): 0.662,
    (  # estimated as 0.523, and since then without what waits for the same link as a cover
        "l40s",
        "llama3_8b model.num_layers=12 mesh.fsdp=2 mesh.context=2 mesh.tensor=2 remat=none train.global_batch=4 "
        "train.seq_len=4096",
    ): 0.600,
    (
        "rtx5090",
        "llama3_8b model.num_layers=16 model.embed_dim=2048 model.num_heads=32 model.head_dim=64 model.mlp_dim=8192 "
        "model.tie_embeddings=True remat=names",
    ): 1.200,
}


def sketch(words: str) -> Sketch:
    return Sketch.of(Run.parse(words).config(), H100)


def cost(words: str) -> StepCost:
    one = sketch(words)
    return step_cost(one, Cluster.of(H100, one.num_gpus))


@pytest.mark.parametrize("words", COMPILED)
def test_a_step_takes_about_what_its_program_does(words):
    # Over tensor gathers of the sequence wait for gradients that were scattered before them, which is not foreseen.
    within = 0.06 if "replicated" in words or words in ("mixtral_8x7b", "llama3_70b") else 0.03
    assert cost(words).step_seconds == pytest.approx(COMPILED[words], rel=within)


@pytest.mark.parametrize(("gpu", "words"), OVER_PCIE)
def test_over_pcie_too(gpu, words):
    one = Sketch.of(Run.parse(words).config(), GPUS[gpu])
    found = step_cost(one, Cluster.of(GPUS[gpu], one.num_gpus))
    assert found.step_seconds == pytest.approx(OVER_PCIE[gpu, words], rel=0.10)


def test_over_pcie_nothing_hides_embedding_and_head():
    found = step_cost(sketch("llama3_8b"), Cluster.of(GPUS["l40s"], 8))
    ends = [one for one in found.comms if not one.sent.why.startswith("segments.")]
    assert {one.sent.why.partition(":")[0] for one in ends} == {"embedding", "head"}
    assert all(one.exposed_seconds == one.seconds for one in ends)
    layers = [one for one in found.comms if one not in ends]
    assert all(0.1 < one.exposed_seconds / one.seconds < 0.2 for one in layers)


def named(words: str, what: str) -> Op:
    (found,) = (op for op in operations(sketch(words)) if op.what == what)
    return found


ATTENTION, MLP, TABLE = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336, 128256 * 4096  # numbers of a layer's matrices


def test_what_weights_and_their_gradients_move_by_hand():
    layers = 16 * (ATTENTION + MLP)
    whole = named(HALF + "replicated", "weights and gradients")
    assert whole.hbm_bytes == (4 + 2) * (layers + 2 * TABLE)  # cast where they are used
    # Cast again, turned, written into zeros; zeros for the head's, and for the embedding's, which rows are added to.
    backward = layers * (6 + 4 + (4 + 2 + 4)) + (4 + 6) * TABLE
    assert (whole.gradient_bytes, whole.forward, whole.count) == (backward, 1, 2)
    split = named("llama3_8b model.num_layers=16", "weights and gradients")
    # Whole are only gradients as they leave products, which are turned where the embedding is summed over.
    turned = 4 * 16 * (ATTENTION - 4096 * 4096 + 2 * 4096 * 14336)
    assert split.hbm_bytes == whole.hbm_bytes / 8
    assert split.gradient_bytes == layers * 16 / 8 + turned + (4 + 6) * TABLE
    several = named("llama3_8b model.num_layers=16 train.accumulation=4 train.global_batch=32", "weights and gradients")
    assert several.gradient_bytes == split.gradient_bytes + 12 * (layers + 2 * TABLE) / 8  # microbatches' sum
    assert (several.forward, several.count) == (4, 8)


def test_what_a_ring_does_between_its_moves_by_hand():
    ring = named("llama3_8b mesh.fsdp=2 mesh.context=4 context_attention=ring train.seq_len=32768", "ring")
    tokens = 4 * 8192  # four rows, a quarter of each
    output, visitors = 4 * tokens * 4096, 4 * tokens * 2 * 1024  # float32 of heads, and of KV heads
    assert ring.hbm_bytes == (6.5 * 3 + 3) * output
    assert ring.gradient_bytes == (5 * 3 + 3) * output + 9 * 3 * visitors
    assert not [op for op in operations(sketch("llama3_8b")) if op.what == "ring"]


def test_updated_weights_are_gathered_by_their_first_dimension_and_turned():
    turned = 16 * (ATTENTION + MLP) + TABLE  # the head's first dimension is the one that is split
    found = named(HALF + "zero1", "updated weights turned")
    norms = 2 * 16 * 4096 + 4096
    assert found.hbm_bytes == 8 * turned * (1 + 2 / 8)
    assert named(HALF + "zero1", "norm").hbm_bytes == pytest.approx(4 * (turned + TABLE + norms) / 8, rel=1e-3)
    assert named(HALF + "replicated", "updated weights turned").hbm_bytes == 0
    gathers = [one for one in cost(HALF + "zero1").comms if one.sent.kind == "all-gather"]
    seconds = sum(one.seconds for one in gathers)
    assert all(one.sent.update for one in gathers)
    # Nothing but the optimizer's own kernels runs beside them.
    update = cost(HALF + "zero1").units["optimizer"]
    assert sum(one.exposed_seconds for one in gathers) == pytest.approx(seconds - update)


def test_on_a_cpu_kernels_are_as_its_profile_counts_them():
    one = Sketch.of(Run.parse("llama3_8b").config(), H100)
    cpu = Sketch.of(one.config, dataclasses.replace(H100, generation="cpu"))
    ours = {op.what for op in operations(one)} - {op.what for op in operations(cpu)}
    layers = {"positions", "small kernels", "softmax", "weights and gradients", "stacks"}
    assert ours == layers | {"norm", "updated weights turned"}


def test_state_on_the_host_comes_and_goes_and_nothing_hides_it():
    rate = Cluster.of(H100, 8).host_bytes_per_second
    for words, times in (("offload.optimizer=True", 2), ("offload.params=True", 3)):
        one = cost(f"llama3_8b {words}")
        copies = [comm for comm in one.comms if comm.sent.axes == ("host",)]
        nbytes = state(sketch(f"llama3_8b {words}")).host
        assert sum(comm.sent.nbytes for comm in copies) == times * nbytes
        assert sum(comm.exposed_seconds for comm in copies) == pytest.approx(times * nbytes / rate)
        assert {comm.link for comm in copies} == {"PCIe"} and {comm.sent.kind for comm in copies} == {"copy"}
        assert one.step_seconds == pytest.approx(cost("llama3_8b").step_seconds + times * nbytes / rate)
    slow = cost("llama3_8b offload.optimizer=True train.seq_len=512")
    assert slow.limit.startswith("communication over host (PCIe) that nothing hides") and "offload" in slow.limit


def test_layers_inputs_leave_behind_kernels_and_every_other_comes_back_behind_one():
    copies = [comm for comm in cost("llama3_8b remat=offload").comms if comm.sent.axes == ("host",)]
    assert [comm.sent.nbytes for comm in copies] == [32 * 8192 * 4096 * 2] * 2
    there, back = copies
    assert there.exposed_seconds == 0 and back.exposed_seconds == back.seconds / 2
