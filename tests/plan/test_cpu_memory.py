"""What virtual CPU devices move, send and wait for besides what layers compute goes by the mesh. Nothing is timed."""

import math

import pytest
from planted_profile import EVERY, planted

from shardlm.config import resolve
from shardlm.network.rates import MemoryRate
from shardlm.plan.compute import of_layers
from shardlm.plan.local import cluster_of_profile
from shardlm.plan.measured import kernels_of
from shardlm.plan.op import Op
from shardlm.plan.plan import Plan
from shardlm.plan.sketch import Sketch

BENCH, EXPERTS = "configs/bench_strategies.py", "configs/bench_experts.py"


def test_memory_of_cpu_devices_is_what_a_triad_finds():
    """A scale in place reads from its core's cache what the pass before wrote there."""
    memory = (MemoryRate("scale", 2**20, 2e10), MemoryRate("triad", 2**20, 1e10))
    cluster = cluster_of_profile(planted(memory=memory))
    moved = Op("norm", "norms", "memory", 0, 3e6, 1)
    assert kernels_of(cluster).one_seconds(moved) == pytest.approx(3e-4 + 1e-6)
    assert cluster.gpu.hbm_bytes_per_second == 1e10
    alone = cluster_of_profile(planted(memory=memory[:1]))
    assert alone.gpu.hbm_bytes_per_second == 2e10  # of an older profile what there is
    gpu = planted("NVIDIA H100 80GB HBM3", memory=memory)
    assert kernels_of(cluster_of_profile(gpu)).memory == 2e10


def of_cpu(changes: str, config: str = BENCH) -> dict[tuple[str, str], float]:
    """(layer, what) -> bytes that a step of 8 CPU devices moves for it, as formulas have them."""
    cluster = cluster_of_profile(planted(collectives=EVERY))
    asked = resolve(config, [tuple(change.split("=", 1)) for change in changes.split()]).config
    found = {}
    for op in of_layers(Sketch.of(asked, cluster.gpu)):
        gradients = 2 * op.hbm_bytes if op.gradient_bytes is None else op.gradient_bytes
        moved = (op.forward + op.again) * op.hbm_bytes + op.forward * gradients
        found[op.layer, op.what] = found.get((op.layer, op.what), 0.0) + moved
    return found


def test_what_cpus_move_besides_goes_by_the_mesh():
    ring = ("attention", "ring")
    assert ring in of_cpu("rules=zero3 mesh.context=8 context_attention=ring")
    assert ring not in of_cpu("rules=zero3 mesh.context=8 context_attention=ulysses")
    # Two gathers and two scatters of a layer, each read and written, forward, again and for gradients, of 8 layers.
    stream = 4 * 16 * 128 * 128  # float32, all rows of the batch
    turned = ("other", "sequence turned")
    assert of_cpu("rules=replicated mesh.tensor=8")[turned] == 8 * 3 * 8 * stream
    assert of_cpu("rules=zero1 mesh.data=4 mesh.tensor=2")[turned] == 8 * 3 * 8 * stream / 4
    assert turned not in of_cpu("rules=zero3 mesh.fsdp=8")
    # Where a stage runs one layer in a tick its kernels choose the tick's mask and positions number by number.
    chosen, staged = ("attention", "chosen anew"), "rules=zero1 train.accumulation=8 mesh.data=2"
    assert chosen in of_cpu(f"{staged} mesh.pipeline=4")
    assert chosen not in of_cpu(f"{staged} mesh.pipeline=4 pipeline.schedule=gpipe")
    assert chosen not in of_cpu(f"{staged} mesh.pipeline=2 mesh.tensor=2")


def test_what_cpus_move_for_experts_is_counted_pass_by_pass():
    rows = ("moe", "rows of experts")
    own, gathered, sent = (
        of_cpu(f"rules=zero3 {mesh}", EXPERTS)[rows]
        for mesh in ("mesh.fsdp=8", "mesh.fsdp=4 mesh.expert=2", "mesh.expert=8")
    )
    R = p = 2 * 256  # 2 of 8 experts for each of 256 tokens of a device
    D, F, n = 128, 192, 256
    forward = 4 * (7 * R * D + 11 * R * F + (3 * p + n) * D) + 2 * 40 * 1.5 * p * math.log2(p)
    gradients = 4 * (17 * R * D + 20 * R * F + (6 * p + n) * D)
    assert own == pytest.approx(8 * (2 * forward + gradients))
    # Gathered from two devices there are twice as many pairs, for buffers as for the worst case; sent, whole buffers.
    assert 2 * own < gathered < 2.2 * own and sent > gathered
    cluster = cluster_of_profile(planted(collectives=EVERY))
    comms = Plan.of(resolve(EXPERTS, [("rules", "zero3"), ("mesh.expert", "8")]).config, cluster).cost.comms
    moved = next(one for one in comms if one.sent.kind == "ragged-all-to-all")
    assert moved.sent.shown == 4  # a token's two pairs, but every expert has room for all tokens of a device
    assert moved.seconds == pytest.approx(2 * (moved.sent.count * 1e-4 + 4 * moved.sent.nbytes / 1e9))


def test_of_1f1b_only_one_stage_has_the_head_and_no_core_waits_for_it():
    base = "rules=zero1 train.accumulation=8 mesh.data=2 mesh.pipeline=4 pipeline.schedule="
    heads = [of_cpu(base + schedule)["head", "logits and loss"] for schedule in ("gpipe", "1f1b")]
    assert heads[0] == heads[1]
