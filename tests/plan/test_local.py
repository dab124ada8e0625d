"""The planner on a measured machine: seconds from a planted profile are exact, what it has not measured is said or
refused, and the ranking beside what was measured is computed right. Nothing here is timed."""

import dataclasses
import json
import math
import re
import types

import jax
import pytest
from commands import run
from planted_profile import EVERY, between, planted

from shardlm.config import load, resolve
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.network import collectives, machine
from shardlm.network.profile import load_profile, save_profile
from shardlm.network.rates import MatmulRate, MemoryRate
from shardlm.plan import local, ranking
from shardlm.plan import sweep_output as sweeps
from shardlm.plan.answer import answer
from shardlm.plan.apart import impossible
from shardlm.plan.asked import cluster_of
from shardlm.plan.auto import auto_mesh, cluster_of_devices
from shardlm.plan.cluster import Group
from shardlm.plan.constants import achieved_by
from shardlm.plan.constraints import Constraints
from shardlm.plan.links import Route
from shardlm.plan.local import cluster_of_profile, provenance, spread
from shardlm.plan.measured import kernels_of, route_of
from shardlm.plan.op import Op
from shardlm.plan.plan import Plan
from shardlm.plan.report.data import to_json
from shardlm.plan.report.text import to_text
from shardlm.plan.search import search
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.sweep import Over, around, base_cluster, sweep
from shardlm.serve.engine_config import EngineConfig
from shardlm.train.config import OffloadConfig

BENCH = "configs/bench_strategies.py"


def product(rows: int, n: int, k: int, dtype: str = "fp32", copies: int = 1) -> Op:
    return Op("mlp", "up", "matmul", 2.0 * rows * n * k * copies, 4.0, 1, dims=(rows, n, k), dtype=dtype)


def test_kernels_of_cpu_devices_take_what_was_measured_and_share_the_host():
    cluster = cluster_of_profile(planted())
    kernels = kernels_of(cluster, "xla")
    assert kernels.forward_seconds(product(1024, 1024, 1024)) == pytest.approx(2 * 1024**3 / 1e11)
    assert kernels.gradient_seconds(product(1024, 1024, 1024)) == pytest.approx(4 * 1024**3 / 1e11)
    assert kernels.forward_seconds(product(2048, 1024, 1024)) == pytest.approx(4 * 1024**3 / 1e11)  # as the largest
    assert kernels.forward_seconds(product(8, 8, 8)) == pytest.approx(1e-6)
    assert kernels.forward_seconds(product(4, 8, 2, copies=3)) < 3e-6  # smaller than any: never longer than the least
    halfway = (1.024e9 * 1e11) ** 0.5  # in logarithms of the volume: 64 * 64 * 181 is about (8 * 1024) ** 1.5
    assert kernels.forward_seconds(product(64, 64, 181)) == pytest.approx(2 * 64 * 64 * 181 / halfway, rel=0.01)
    moved = Op("norm", "norms", "memory", 0, 3e6, 1)
    assert kernels.forward_seconds(moved) == pytest.approx(5 * 3e-4 + 16e-6)  # as XLA:CPU cuts it up
    assert kernels.gradient_seconds(moved) == pytest.approx(2 * kernels.forward_seconds(moved))
    assert kernels.one_seconds(moved) == pytest.approx(3e-4 + 1e-6)  # of a compiled program's: one kernel is one
    scores = Op(
        "attention", "scores", "attention", 2.0 * 1024 * 512 * 1024 * 2, 0, 1, dims=(1024, 512, 1024), dtype="fp32"
    )
    assert kernels.forward_seconds(scores) == pytest.approx(4 * 1024**3 / 1e11 + 12 * 1024**2 / 1e10 + 4e-6)
    # Two devices instead of eight have four times as much of the host each; its memory too.
    pair = cluster_of_profile(planted(), 2)
    assert kernels_of(pair, "xla").forward_seconds(product(1024, 1024, 1024)) == pytest.approx(2 * 1024**3 / 4e11)
    assert pair.gpu.hbm_bytes == 4 * 2**30 and pair.gpu.peak.fp32 == 4e11 and pair.gpu.peak.bf16 == 16e11
    # Types that were not measured are multiplied as bf16; 8-bit operands are made of 16-bit ones besides.
    assert kernels.forward_seconds(product(1024, 1024, 1024, "fp16")) == pytest.approx(2 * 1024**3 / 4e11)
    made = 4 * 2 * 1024**2 / 1e10 + 1e-6
    assert kernels.forward_seconds(product(1024, 1024, 1024, "fp8")) == pytest.approx(2 * 1024**3 / 4e11 + made)


def test_experts_on_a_cpu_go_in_blocks_of_their_rows():
    kernels = kernels_of(cluster_of_profile(planted()), "xla")
    one = dataclasses.replace(product(64, 1024, 1024, copies=4), layer="moe")
    # 64 rows a group are two blocks of 32, and half a block is empty: 2.5 turns of 4 groups, 9 kernels in each.
    block = kernels.forward_seconds(product(32, 1024, 1024))
    assert kernels.forward_seconds(one) == pytest.approx(4 * 2.5 * (block + 9e-6))
    assert kernels.gradient_seconds(one) == pytest.approx(2 * kernels.forward_seconds(one))


def test_collectives_take_latency_and_bytes_by_the_nearest_group():
    cluster = cluster_of_profile(planted())
    pair, four, all_of_it = (route_of(Group(size, size), cluster) for size in (2, 4, 8))
    # Twice as long as back to back: devices come to it apart.
    assert pair.seconds("all-reduce", 1e6, 3) == pytest.approx(2 * (3e-5 + 1e-3)) and pair.name == "memory"
    assert all_of_it.seconds("all-reduce", 1e6, 1) == pytest.approx(2 * (7e-5 + 5e-4)) and pair.cores == 0
    assert four.seconds("all-reduce", 1e6, 1) == pytest.approx(2 * (3e-5 + 5e-4))  # 3 / 7 of the latency among 8
    assert all_of_it.seconds("reduce-scatter", 1e6, 1) == pytest.approx(2 * (7e-5 + 1e-3))  # XLA:CPU sums all of it
    assert route_of(Group(1, 1), cluster).seconds("all-gather", 1e6, 1) == 0 == pair.seconds("all-gather", 0, 0)
    with pytest.raises(ShardlmError, match="no all-gather between CPU devices, and the mesh joins 2; measure again"):
        pair.seconds("all-gather", 1e6, 1)


def test_a_measured_gpu_keeps_its_memory_and_what_a_step_holds_of_its_rates():
    name = "NVIDIA H100 80GB HBM3"
    rates = (
        MatmulRate(4096, 4096, 4096, "bfloat16", 7e14),
        MatmulRate(64, 4096, 14336, "bfloat16", 1.2e14),  # bounded by memory: it says nothing of the matrix units
    )
    profile = planted(
        name,
        matmuls=rates,
        memory=(MemoryRate("triad", 2**30, 3e12),),
        collectives=(between("all-gather", 8, 2e-5, 4e11),),
    )
    cluster = cluster_of_profile(profile, 64)
    assert (cluster.gpu.name, cluster.gpus_per_host, cluster.num_gpus, cluster.is_cpu) == ("h100", 8, 64, False)
    sustained = achieved_by(cluster.gpu).sustained
    kernels = kernels_of(cluster)
    assert kernels.forward_seconds(product(4096, 4096, 4096, "bf16")) == pytest.approx(2 * 4096**3 / (7e14 * sustained))
    assert kernels.forward_seconds(product(1555, 1555, 1555, "bf16")) == pytest.approx(2 * 1555**3 / (7e14 * sustained))
    assert kernels.matmul_rate("fp8") == pytest.approx(7e14 * sustained)  # not measured: as bf16
    inside, wide = route_of(Group(8, 8), cluster), route_of(Group(16, 8), cluster)
    assert inside.seconds("all-gather", 4e8, 2) == pytest.approx(4e-5 + 1e-3) and inside.name == "NVLink"
    formulas = Route.of(Group(8, 8), cluster)
    assert inside.seconds("all-reduce", 4e8, 1) == formulas.seconds("all-reduce", 4e8, 1)
    assert wide.seconds("all-gather", 4e8, 1) == Route.of(Group(16, 8), cluster).seconds("all-gather", 4e8, 1)
    assert inside.cores == formulas.cores and wide.name == "network"
    said = provenance(cluster)
    assert said[0].startswith("rates as measured on 8 x NVIDIA H100 80GB HBM3 of 1 host on 2026-11-21 (jax 0.10.2)")
    assert "estimated" in said[0] and "for 64 devices and collectives were measured among 8" in said[1]
    assert said[2:] == [
        "not measured inside a host, and by formulas in the plan: reduce-scatter, all-reduce, all-to-all, "
        "collective-permute",
        "not measured between hosts, and by formulas in the plan: collectives",
    ]
    every = (between(kind, 8, 1e-5, 4e11) for kind in collectives.KINDS)
    whole = dataclasses.replace(profile, collectives=tuple(every))
    assert len(provenance(cluster_of_profile(whole))) == 1 and provenance(cluster_of("h100", None, 8)) == []
    most = dataclasses.replace(whole, collectives=(*whole.collectives[1:], between("all-gather", 16, 1e-5, 4e10, 2)))
    assert [one.split(", and by formulas in the plan: ") for one in provenance(cluster_of_profile(most, 16))[1:]] == [
        ["not measured inside a host", "all-gather"],
        ["not measured between hosts", "reduce-scatter, all-reduce, all-to-all, collective-permute"],
    ]
    alone = cluster_of_profile(dataclasses.replace(profile, devices=1, collectives=()), 8)
    assert provenance(alone)[1] == "not measured, and by formulas in the plan: collectives"
    assert alone.gpus_per_host == 8


def test_a_step_is_the_sum_of_what_the_profile_says():
    config = load(BENCH)
    profile = planted(collectives=EVERY)
    cost = Plan.of(dataclasses.replace(config, rules="zero3", mesh=MeshSpec(fsdp=8)), cluster_of_profile(profile)).cost
    # Nothing runs beside a collective of CPU devices, and float32 weights travel as such.
    assert cost.hidden_seconds == 0 and cost.exposed_seconds > 0 and cost.contention_seconds == 0
    expected, latencies = 0.0, set()
    for one in cost.comms:
        scattered = one.sent.kind == "reduce-scatter"
        expected += (1 + scattered) * one.sent.nbytes / 1e9 + (0 if scattered else one.sent.count * 1e-4)
        latencies |= {(one.sent.axes, one.sent.count)} if scattered else set()
    # All that a layer scatters is one collective, and in a step each takes twice as long as by itself.
    assert latencies == {(("fsdp",), 8.0), (("fsdp",), 1.0)}
    assert cost.exposed_seconds == pytest.approx(2 * (expected + 9 * 1e-4))
    weights = 2048 * 128 * 2 + 8 * (4 * 128 * 128 + 3 * 128 * 384)
    gathered = sum(one.sent.nbytes for one in cost.comms if one.sent.kind == "all-gather")
    assert gathered == pytest.approx(4 * 7 / 8 * (2 * weights - 2048 * 128 * 2))  # but for the table and the head twice
    assert cost.step_seconds == pytest.approx(cost.compute_seconds + cost.exposed_seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmuls": ()}, "no matmuls, memory or memory_bytes of its CPU devices; measure again"),
        ({"memory_bytes": None}, "no matmuls, memory or memory_bytes of its CPU devices; measure again"),
        ({"device_kind": "NVIDIA H100 NVL"}, "is of 'NVIDIA H100 NVL', of which neither memory nor links are known"),
    ],
)
def test_a_profile_that_says_too_little_is_refused(change, message):
    with pytest.raises(ShardlmError, match=message):
        cluster_of_profile(planted(**change))


def test_rates_that_are_missing_are_refused_where_they_are_asked_for():
    h100 = planted("NVIDIA H100 80GB HBM3")
    with pytest.raises(ShardlmError, match="rates of collectives alone, and none of a device; measure again"):
        kernels_of(cluster_of_profile(dataclasses.replace(h100, matmuls=())))
    with pytest.raises(ShardlmError, match="no products of bfloat16, only of float32; measure again"):
        kernels_of(cluster_of_profile(dataclasses.replace(h100, matmuls=h100.matmuls[:2])))


def test_auto_plans_with_the_profile_of_these_devices_alone(tmp_path):
    cpus = [types.SimpleNamespace(device_kind="cpu", process_index=0) for _ in range(4)]
    profile = planted(collectives=EVERY)
    cluster = cluster_of_devices(cpus, profile)
    assert (cluster.num_gpus, cluster.gpus_per_host, cluster.measured) == (4, 4, profile)
    chosen, plan = auto_mesh(load(BENCH), cluster, [("mesh.pipeline", "1")])
    assert chosen.mesh.size(*chosen.mesh.sizes()) == 4 and chosen.mesh.pipeline == 1 and plan.fits
    with pytest.raises(ShardlmError, match=r"no mesh over 4 CPUs.*which divides the 4 CPUs"):
        search(load(BENCH), cluster, Constraints.parse(["mesh.tensor=3"]))
    with pytest.raises(ShardlmError, match="the profile is of 'cpu' and the devices here are 'NVIDIA H200'"):
        cluster_of_devices([types.SimpleNamespace(device_kind="NVIDIA H200", process_index=0)], profile)
    with pytest.raises(ShardlmError, match=r"or measure them .* and give --hardware_profile=FILE"):
        cluster_of_devices(cpus)


def test_what_rests_in_a_hosts_memory_is_in_that_of_its_cpu_devices():
    cluster, config = cluster_of_profile(planted(collectives=EVERY)), load(BENCH)
    config = dataclasses.replace(config, rules="zero3", mesh=MeshSpec(fsdp=8))
    for away in (OffloadConfig(optimizer=True), OffloadConfig(optimizer=True, params=True)):
        memory = Plan.of(dataclasses.replace(config, offload=away), cluster).memory
        assert memory.kinds["on the host"] == memory.host > 0
        assert memory.total >= Plan.of(config, cluster).memory.total
    full, offload = (dataclasses.replace(config, remat=remat) for remat in ("full", "offload"))
    assert Plan.of(offload, cluster).memory.total == Plan.of(full, cluster).memory.total  # compiled, they are equal


def test_a_serving_plan_takes_no_profile():
    with pytest.raises(ShardlmError, match="takes no measured profile: give --gpu=NAME instead of --profile"):
        ServingCase(ServedModel("any", None, "bfloat16", 8), cluster_of_profile(planted()), EngineConfig(), 4, 4)


def test_groups_to_measure_grow_to_the_whole_machine():
    for count, sizes in ((1, []), (8, [2, 4, 8]), (6, [2, 6]), (7, [7]), (128, [2, 4, 8, 16, 32, 128])):
        spec, over = spread(count)
        assert math.prod(spec.sizes().values()) == count and [spec.size(*axes) for axes in over] == sizes


def test_the_machine_is_measured_saved_and_planned_with(monkeypatch, tmp_path):
    for name, value in {"CPU_SHAPES": ((8,) * 3, (32,) * 3), "CPU_WORK": 1e5, "CPU_BYTES": 2**16}.items():
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setattr(local, "KINDS", ("all-reduce",))
    monkeypatch.setitem(collectives.SIZES, "cpu", (512, 2**16))
    said, file = [], tmp_path / "machine.json"
    cluster = cluster_of("local", None, None, profile=file, say=said.append)
    profile = load_profile(file)
    assert cluster.measured == profile and (profile.devices, profile.device_kind) == (8, "cpu")
    assert [(rate.m, rate.dtype) for rate in profile.matmuls][:2] == [(8, "float32"), (32, "float32")]
    assert profile.memory_bytes > 0 and len(profile.memory) == 2
    assert said[0].startswith("measuring 8 x cpu on 1 host(s)") and said[-1].startswith(f"saved to {file}")
    assert sum("all-reduce" in line for line in said) >= 6 and any("matmul 8 x 8 x 8 float32" in line for line in said)
    assert cluster_of(None, None, None, profile=file) == cluster
    assert cluster_of(None, None, 4, profile=file).num_gpus == 4
    with pytest.raises(ShardlmError, match="a profile stands for --gpu and --cluster: leave out --gpu=h100"):
        cluster_of("h100", None, 8, profile=file)
    with pytest.raises(ShardlmError, match=r"none\.json: No such file or directory; measure again"):
        cluster_of(None, None, 8, profile=tmp_path / "none.json")
    assert jax.device_count() == 8


def test_rank_correlation_is_spearmans():
    assert ranking.ranks([3.0, 1.0, 2.0, 2.0]).tolist() == [4, 1, 2.5, 2.5]
    assert ranking.spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert ranking.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Without ties 1 - 6 sum(d^2) / (n (n^2 - 1)): here d = 1, 1, 1, 1, 2, 0.
    assert ranking.spearman([1, 2, 3, 4, 5, 6], [2, 1, 5, 6, 3, 6.5]) == pytest.approx(1 - 6 * 8 / 210)
    assert ranking.spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    for a, b in (([1], [1]), ([1, 2], [1]), ([1, 1], [1, 2])):
        with pytest.raises(ShardlmError, match="have no rank correlation"):
            ranking.spearman(a, b)


def test_the_table_has_the_order_of_all_and_of_each_model():
    seconds = {"a": (1.0, 30.0), "b": (2.0, 10.0), "c": (3.0, 40.0), "d": (4.0, 50.0)}
    config, setting = load(BENCH), dict.fromkeys(ranking.SETTING, "x") | {"versions": {"jax": "1"}}
    rows = [
        ranking.row(ranking.Variant(name, ""), config, {"predicted_seconds": p}, [{"step_seconds": {"p50": m}}])
        for name, (p, m) in reversed(seconds.items())
    ]
    rows[0] |= {"model": "Mixtral"}
    rows.append(ranking.row(ranking.Variant("e", ""), config, {}, ["out of memory"]))
    table = ranking.report(rows, setting, planted())
    assert [row["strategy"] for row in table["rows"]] == ["a", "b", "c", "d", "e"]
    assert table["rank_correlation"] == pytest.approx(0.8) and table["median_ratio"] == pytest.approx(0.0775)
    assert table["rank_correlation_by_model"] == {"Mixtral": None, "Llama": pytest.approx(0.5)}
    lines = ranking.markdown(table).splitlines()
    assert lines[2].startswith("| 1 | 2 | a | Llama | 1 | replicated | 1.000 | 30.000 | 0.03 |")
    assert "| e | Llama | out of memory |" in lines[6] and "all meshes 0.800, Llama 0.500." in lines[-1]
    rounds = [{"step_seconds": {"p50": m}} for m in (3.0, 9.0, 2.0)]
    one = ranking.row(ranking.Variant("f", ""), config, {"predicted_seconds": 1.5}, rounds)
    assert (one["measured_seconds"], one["ratio"], one["measured_rounds"]) == (3.0, 0.5, [3.0, 9.0, 2.0])
    assert "each mesh in a process of its own." in lines[-1] and table["rounds"] == 1
    turns = ranking.markdown(ranking.report(rows, setting, planted(), 3)).splitlines()[-1]
    assert "each mesh in 3 processes in turn with the others', of which the median." in turns


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """Two meshes of a smaller model yet, and one that cannot split its heads."""
    home = tmp_path_factory.mktemp("ranking")
    profile = planted(collectives=EVERY)
    save_profile(profile, home / "machine.json")
    words = ["--config.model.num_layers=1", "--config.train.seq_len=16", "--config.model.num_heads=4"]
    words += ["--config.model.num_kv_heads=4", "--strategies=one device,ZeRO-3 (FSDP),tensor"]
    words += ["--steps=1", "--warmup=1", f"--profile={home / 'machine.json'}", f"--output={home / 'table.json'}"]
    done = run("launch.bench", "plan", f"--config={BENCH}", *words)
    return done, json.loads((home / "table.json").read_text()), (home / "table.md").read_text(), profile


@pytest.mark.wide
def test_meshes_are_ranked_as_predicted_and_as_measured(ranked):
    done, table, text, profile = ranked
    assert done.returncode == 1 and text in done.stdout, done.stderr  # one of them failed
    *ran, failed = table["rows"]
    assert failed["strategy"] == "tensor" and "tensor=8" in failed["error"] and len(ran) == 2
    names = ("predicted_seconds", "measured_seconds")
    predicted, measured = ([row[name] for row in ran] for name in names)
    assert predicted == sorted(predicted) and all(m > 0 for m in measured)
    assert table["rank_correlation"] is table["rank_correlation_by_model"]["Llama"] is None  # two say nothing
    assert [row["ratio"] for row in ran] == pytest.approx([p / m for p, m in zip(predicted, measured, strict=True)])
    fsdp = next(row for row in ran if row["strategy"] == "ZeRO-3 (FSDP)")
    parts = ("compute_seconds", "communication_seconds", "bubble_seconds")
    assert fsdp["mesh"] == {"fsdp": 8} and sum(fsdp[part] for part in parts) == pytest.approx(fsdp["predicted_seconds"])
    head, _, first, *_ = text.splitlines()
    assert head.startswith("| predicted | measured | strategy |") and first.startswith("| 1 | ")
    assert "Spearman's rank correlation: none of so few" in text and "on 2026-11-21" in text and "estimated" in text
    assert "tensor=8" in text and table["profile"] == provenance(cluster_of_profile(profile))


@pytest.mark.parametrize("variant", ranking.MESHES, ids=lambda variant: variant.name)
def test_every_mesh_has_a_prediction(variant):
    profile = planted(collectives=EVERY)
    changes = [tuple(change.split("=", 1)) for change in variant.changes.split()]
    config = resolve(variant.config or BENCH, changes).config
    found = ranking.predict(config, profile)
    assert math.prod(config.mesh.sizes().values()) == config.cpu_devices and found["predicted_seconds"] > 0


def test_a_sweep_goes_by_the_profile_too(tmp_path):
    file = tmp_path / "machine.json"
    save_profile(planted(collectives=EVERY), file)
    over = Over.parse("num_gpus=2,4,8")
    held = Constraints.parse(["mesh.tensor=1", "mesh.pipeline=1", "mesh.context=1", "rules=zero3,replicated"])
    swept = sweep(load(BENCH), base_cluster(over, None, None, None, profile=file), over, held)
    for row in swept.rows:
        cluster = cluster_of_profile(load_profile(file), int(row.case.value))
        assert row.case.cluster == cluster and row.plan == search(load(BENCH), cluster, held, every=False).plans[0]
    told, text = sweeps.to_json(swept), " ".join(sweeps.to_text(swept).split())
    assert told["measured"] == provenance(cluster) and "Rates as measured on 8 x cpu of 1 host on 2026-11-21" in text
    assert " a CPU " in text and "GPU" not in text
    assert around(load(BENCH), cluster, held)[0] == (8, told["rows"][-1]["tokens_per_second"], True)
    with pytest.raises(ShardlmError, match="is of one machine, and the sweep varies the gpu"):
        base_cluster(Over.parse("gpu=h100,a100"), None, None, 8, profile=file)


def test_the_profile_is_for_those_who_plan(tmp_path):
    done = run("launch.train", f"--config={BENCH}", "--hardware_profile=machine.json")
    assert done.returncode == 1 and done.stderr.startswith("error: --hardware_profile is read by --config.mesh=auto")
    save_profile(planted(collectives=EVERY), tmp_path / "machine.json")
    words = ("--config.mesh=auto", f"--hardware_profile={tmp_path / 'machine.json'}", "--print_shardings")
    done = run("launch.train", f"--config={BENCH}", *words, "--config.cpu_devices=2")
    assert done.returncode == 0, done.stderr
    assert "mesh=auto: rates as measured on 8 x cpu of 1 host on 2026-11-21" in done.stdout
    said = r"mesh=auto, estimated: [\d.]+ s a step, [\d.]+ GiB a CPU device. It stands for"
    assert re.search(said, done.stdout) and "--config.mesh." in done.stdout


def test_a_plan_names_the_machine_and_the_date_of_its_rates():
    free, cluster = (
        Constraints.parse(["mesh.pipeline=1", "rules=zero3"]),
        cluster_of_profile(planted(collectives=EVERY)),
    )
    told = to_text(to_json(answer(load(BENCH), cluster, free)))
    assert "rates as measured on 8 x cpu of 1 host on 2026-11-21 (jax 0.10.2)" in " ".join(told.split())
    assert impossible(cluster).startswith("these are CPU devices: run the plan's configuration")
    assert "8 x cpu in 1 host of 8; memory 1.00 GB/s" in told and "verified" not in told
    assert "Memory of a CPU, the first plan" in told and "GPU" not in told
    one = to_json(answer(load(BENCH), cluster_of_profile(planted(collectives=EVERY), 1), free))
    one["cluster"]["inside_bytes_per_second"] = 0.0  # of one device no collective was measured
    assert "1 x cpu in 1 host of 1\n" in to_text(one)
