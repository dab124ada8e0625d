"""The search over meshes: what it looks at and leaves out, and what it says where nothing fits. By formulas alone."""

import dataclasses
import math
import pathlib
import pickle
import re
import types

import pytest

from shardlm.config import load
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.hlo.rows import LAYERS
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.plan import search as planned
from shardlm.plan.alike import Alike
from shardlm.plan.answer import answer
from shardlm.plan.asked import budget_of, cluster_of
from shardlm.plan.auto import auto_mesh, cluster_of_devices
from shardlm.plan.change import changes
from shardlm.plan.config_source import source
from shardlm.plan.constraints import FREE, Constraint, Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.predicted import rows
from shardlm.plan.search import _search, first_fit, search, settings
from shardlm.plan.shares import described
from shardlm.plan.sketch import Sketch
from shardlm.plan.ways import divisors
from shardlm.train.config import OffloadConfig, PipelineConfig

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
H100 = cluster_of("h100", None, 8)


def config(name: str, **train):
    loaded = load(str(CONFIGS / f"{name}.py"))
    return dataclasses.replace(loaded, train=dataclasses.replace(loaded.train, **train))


@pytest.fixture(scope="module")
def found():
    return search(config("llama3_8b"), H100)


def test_every_plan_fills_the_gpus_fits_and_comes_in_order(found):
    assert found.smallest is None and len(found.plans) > 20 and found.considered > len(found.plans)
    seconds = [plan.step_seconds for plan in found.plans]
    assert seconds == sorted(seconds)
    keys = {(plan.config.mesh, plan.config.rules) for plan in found.plans}
    assert len(keys) == len(found.plans)
    for plan in found.plans:
        assert plan.sketch.num_gpus == 8 and plan.fits
        assert plan.config.train.global_batch == 8
        assert plan.config.mesh.expert == 1  # no experts to split
    axes = {axis for plan in found.plans for axis, size in plan.config.mesh.sizes().items() if size > 1}
    assert axes == {"data", "fsdp", "tensor", "context", "pipeline"}
    assert {plan.config.rules for plan in found.plans} > {"zero3", "hybrid", "zero1", "zero2"}


def test_the_best_beats_every_mesh_that_is_planned_by_hand(found):
    best = found.plans[0].step_seconds
    for mesh, rules in (
        (MeshSpec(fsdp=8), "zero3"),
        (MeshSpec(fsdp=4, tensor=2), "zero3"),
        (MeshSpec(tensor=8), "zero3"),
    ):
        by_hand = Plan.of(dataclasses.replace(config("llama3_8b"), mesh=mesh, rules=rules), H100)
        assert best <= by_hand.step_seconds


def test_constraints_leave_only_what_they_allow(found):
    words = ("mesh.tensor>=2", "mesh.tensor<=4", "rules=zero3,hybrid", "remat=full", "mesh.context=1")
    constraints = Constraints.parse(words)
    held = search(config("llama3_8b"), H100, constraints)
    assert held.plans and held.considered < found.considered
    for plan in held.plans:
        assert plan.config.mesh.tensor in (2, 4) and plan.config.mesh.context == 1
        assert plan.config.rules in ("zero3", "hybrid") and plan.config.remat == "full"
    assert {plan.config.mesh.tensor for plan in found.plans} - {2, 4}  # others were there
    fixed = search(config("llama3_8b"), H100, Constraints.parse(["mesh.fsdp=4", "mesh.data=2", "rules=zero3"]))
    assert {plan.config.mesh for plan in fixed.plans} == {MeshSpec(data=2, fsdp=4)}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mesh.tenser<=8", "mesh.tenser is not searched; did you mean mesh.tensor?"),
        ("tensor", "is no constraint; write for instance mesh.tensor<=8"),
        ("mesh.tensor=two", "mesh.tensor is a number of at least 1"),
        ("mesh.tensor=0", "mesh.tensor is a number of at least 1"),
        ("unroll=no", "unroll is a number of at least 0"),
        ("rules<=zero3", "<= compares with one number; for rules write rules=VALUE,VALUE"),
        ("mesh.tensor<=2,4", "<= compares with one number"),
        ("rules=zero3,zero4", "rules cannot be 'zero4'; did you mean zero3?"),
        ("remat=some", "remat cannot be 'some' (known: none, "),
        ("offload.optimizer=maybe", "offload.optimizer cannot be 'maybe'"),
        ("matmul=W4A17", "matmul cannot be 'W4A17'; did you mean W4A16?"),
    ],
)
def test_what_is_no_constraint_is_refused(word, message):
    with pytest.raises(ShardlmError, match=re.escape(message)):
        Constraint.parse(word)


def test_words_are_taken_however_they_are_written():
    """As a configuration has them, of which some are in capitals."""
    for word in ("matmul=W4A16,fp8", "matmul=w4a16,FP8"):
        assert Constraints.parse([word]).choices("matmul", ["dtype"]) == ["W4A16", "fp8"]
    assert Constraint.parse("offload.params=True").allows(True)


def test_divisors_are_those_of_large_numbers_too():
    assert [divisors(n) for n in (1, 36, 13)] == [(1,), (1, 2, 3, 4, 6, 9, 12, 18, 36), (1, 13)]
    assert len(divisors(10**12)) == 169


@pytest.mark.parametrize("size", ["num_layers", "num_heads", "head_dim", "mlp_dim", "vocab_size", "embed_dim"])
def test_a_model_has_sizes_of_at_least_one(size):
    with pytest.raises(ShardlmError, match=f"{size}=0.*at least 1"):
        dataclasses.replace(LlamaConfig(), **{size: 0}).transformer()


def test_what_cannot_run_at_all_says_which_constraint_and_why():
    with pytest.raises(
        ShardlmError, match=r"no mesh over 8 GPUs.*mesh\.tensor=3 cannot be; mesh\.tensor could be 1, 2, 4"
    ):
        search(config("llama3_8b"), H100, Constraints.parse(["rules=zero3", "mesh.tensor=3"]))
    with pytest.raises(ShardlmError, match=r"could be 1 here.* a dense model has none"):
        search(config("llama3_8b"), H100, Constraints.parse(["mesh.fsdp=2", "mesh.expert=2"]))
    for words, why in (
        ("mesh.tensor=4 mesh.fsdp=4", r"each of these can be, and all.*\(4 x 4 = 16\) cannot: that does not divide 8"),
        (
            "mesh.data=1 mesh.fsdp=1 mesh.context=1 mesh.pipeline=1 mesh.tensor=4",
            "the other 2 ways would be",
        ),
        (
            "mesh.tensor>=3 mesh.tensor<=3",
            "tensor<=3 cannot be; mesh.tensor could be .*8 GPUs and the 32 attention",
        ),
        ("mesh.pipeline=2 remat=none pipeline.schedule=1f1b", "do not go together: 1f1b keeps the inputs"),
    ):
        with pytest.raises(ShardlmError, match=why):
            search(config("llama3_8b"), H100, Constraints.parse(words.split()))
    with pytest.raises(ShardlmError, match=r"(?s)The reasons.*train\.global_batch=3 cannot be split over fsdp=8"):
        search(config("llama3_8b", global_batch=3), H100, Constraints.parse(["mesh.fsdp=8"]))
    away = Constraints.parse(["mesh.fsdp=2", "offload.optimizer=false"])
    alone = search(config("llama3_8b"), cluster_of("l40s", None, 2), away)
    assert not alone.plans and not alone.smallest.config.offload.optimizer


def test_what_does_not_fit_says_so_and_what_would():
    wanted = config("llama3_70b")
    told = answer(wanted, cluster_of("a100-40gb", None, 8))
    assert not told.ranked and told.best is None and not told.found.plans
    assert told.found.smallest.memory.total > GPUS["a100-40gb"].hbm_bytes
    assert told.found.smallest.config.offload == OffloadConfig(optimizer=True, params=True)  # that was tried too
    assert told.found.smallest.config.remat == "full"  # what keeps most needs more
    for change in told.changes:
        assert change.plan.fits, change.what
        again = first_fit(change.plan.config, change.plan.cluster)
        assert again is not None
    more = [change for change in told.changes if change.what.startswith("num_gpus=")]
    assert len(more) == 1 and more[0].plan.cluster.num_gpus > 8
    fewer = dataclasses.replace(more[0].plan.cluster, num_gpus=more[0].plan.cluster.num_gpus // 2)
    assert first_fit(wanted, fewer) is None  # it is the fewest


def test_weights_rest_on_the_host_where_nothing_fits_otherwise_and_where_a_constraint_says_so():
    """8B on one L40S, in rows of 4,096: 48 GB, of which float32 weights and gradients alone would take 60."""
    one, base = cluster_of("l40s", None, 1), config("llama3_8b", global_batch=1)
    base = dataclasses.replace(base, train=dataclasses.replace(base.train, seq_len=4096))
    found = search(base, one)
    assert {plan.config.offload for plan in found.plans} == {OffloadConfig(optimizer=True, params=True)}
    best = found.plans[0]
    assert settings(best.config)["offload.params"] is True and "params offloaded" in described(best)
    assert best.memory.host == pytest.approx(12 * 8.03e9, rel=0.01)
    alone = search(base, one, every=False)
    assert alone.plans[0].config == best.config
    assert not search(base, one, Constraints.parse(["offload.params=false"])).plans
    assert first_fit(base, one).config.offload.params
    held = Constraints.parse(["offload.params=true"])
    assert {p.config.offload for p in search(base, H100, held).plans} == {OffloadConfig(params=True)}
    assert not any(p.config.mesh.pipeline > 1 for p in search(config("llama3_8b"), H100, held).plans)  # refused there


def test_what_is_too_large_and_cannot_rest_on_the_host_either_does_not_fit():
    told = search(config("diloco_two_sites"), cluster_of("rtx5090", None, 16))
    assert not told.plans and told.smallest.config.local_sgd.inner_steps and not told.smallest.config.offload.optimizer


def test_a_constraint_that_stands_in_the_way_is_named():
    constraints = Constraints.parse(["rules=replicated", "mesh.tensor=1", "mesh.pipeline=1"])
    assert not search(config("llama3_70b"), cluster_of("h100", None, 64), constraints).plans
    told = [change.what for change in changes(config("llama3_70b"), cluster_of("h100", None, 64), constraints)]
    assert told[0] == "without rules=replicated"


def test_what_is_asked_of_microbatches_and_of_the_optimizers_place_is_kept_where_other_plans_are_faster(found):
    assert {plan.config.train.accumulation for plan in found.plans[:3]} == {1}
    held = search(config("llama3_8b"), H100, Constraints.parse(["train.accumulation=2"]))
    assert held.plans and {plan.config.train.accumulation for plan in held.plans} == {2}
    assert any("accumulation=2, 16 ways" in reason for reason in held.refused)  # one row a device: not there
    away = search(config("llama3_8b"), H100, Constraints.parse(["offload.optimizer=true"]))
    assert {plan.config.offload.optimizer for plan in away.plans} == {True}
    with pytest.raises(ShardlmError, match=r"(?s)train\.accumulation=16.*cannot be split over .*accumulation=16"):
        search(config("llama3_8b"), H100, Constraints.parse(["train.accumulation=16"]))
    odd = search(config("llama3_8b", global_batch=24), H100, Constraints.parse(["train.accumulation=3", "mesh.fsdp=8"]))
    assert {plan.sketch.rows for plan in odd.plans} == {1}


def test_constraints_that_no_value_can_agree_with_are_refused():
    with pytest.raises(ShardlmError, match=r"mesh\.tensor=2 and mesh\.tensor>=4 leave no value of mesh\.tensor"):
        Constraints.parse(["mesh.tensor=2", "mesh.tensor>=4"])
    with pytest.raises(ShardlmError, match="rules=zero1 and rules=zero3 leave no value"):
        Constraints.parse(["rules=zero1", "rules=zero3"])
    assert Constraints.parse(["mesh.tensor<=4", "mesh.tensor>=2", "offload.optimizer=true,false"]).items


@pytest.mark.parametrize(
    ("words", "unroll"),
    [([], 1), (["unroll=0"], 0), (["unroll<=0"], 0), (["unroll>=2"], 2), (["unroll=0,1"], 1)],
)
def test_how_layers_are_looped_over_is_as_constraints_have_it(words, unroll):
    """Of what they allow, what the configuration has where that is among it."""
    held = [*words, "mesh.fsdp=8", "remat=full", "train.accumulation=1", "rules=zero3"]
    plans = search(config("llama3_8b"), H100, Constraints.parse(held)).plans
    assert {plan.config.unroll for plan in plans} == {unroll}


def test_8_bit_matmuls_are_advised_where_the_gpu_has_them_and_the_run_does_not():
    for gpu, asked, advised in (("h100", "dtype", "fp8"), ("a100", "dtype", "int8"), ("h100", "fp8", "")):
        wanted = dataclasses.replace(config("llama3_8b"), mesh=MeshSpec(fsdp=8), rules="zero3", matmul=asked)
        said = Plan.of(wanted, cluster_of(gpu, None, 8)).cost.limit
        assert said.startswith("matmuls") and (f"8-bit matmuls (matmul={advised})" in said) == bool(advised)
        assert "8-bit" in said or not advised


def test_the_winner_is_written_as_a_configuration_that_says_the_same(found, tmp_path):
    for name in ("llama3_8b", "deepseek_v3", "sft", "tiny_hybrid"):
        wanted = found.plans[0].config if name == "llama3_8b" else load(str(CONFIGS / f"{name}.py"))
        (tmp_path / "plan.py").write_text(source(wanted, 'a "quoted"\n\\ """docstring"""'))
        assert load(str(tmp_path / "plan.py")) == wanted
        assert max(map(len, (tmp_path / "plan.py").read_text().splitlines())) <= 120


def test_auto_takes_the_best_mesh_for_the_devices_and_leaves_what_was_given(found):
    devices = [types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", process_index=i // 4) for i in range(8)]
    cluster = cluster_of_devices(devices)
    assert (cluster.gpus_per_host, cluster.num_gpus, cluster.gpu.name) == (4, 8, "h100")
    chosen, plan = auto_mesh(config("llama3_8b"), H100, [])
    assert chosen == plan.config == found.plans[0].config
    assert settings(chosen)["mesh.fsdp"] == chosen.mesh.fsdp
    held, _ = auto_mesh(config("llama3_8b"), H100, [("remat", "full"), ("train.seq_len", "8192"), ("rules", "zero1")])
    assert (held.remat, held.rules) == ("full", "zero1")
    held, _ = auto_mesh(config("llama3_8b"), H100, [("matmul", "W4A16"), ("rules", "zero3"), ("remat", "full")])
    assert held.matmul == "W4A16" == settings(held)["matmul"] and "matmul" not in settings(chosen)
    with pytest.raises(ShardlmError, match="nothing fits on 4 x h100; the least is"):
        auto_mesh(config("llama3_70b"), cluster_of("h100", None, 4), [])
    with pytest.raises(ShardlmError, match="none are known of 'cpu'"):
        cluster_of_devices([types.SimpleNamespace(device_kind="cpu", process_index=0)])


def test_budget_and_cluster_of_a_command_line():
    wanted = config("llama3_8b")
    told = budget_of(wanted, H100, 0, 0)
    assert told.tokens == 100_000 * 8 * 8192 and told.dollars_per_gpu_hour > 0 and "median" in told.price_source
    plan = Plan.of(wanted, H100)
    assert math.isclose(told.days(plan), 100_000 * plan.step_seconds / 86_400)
    assert math.isclose(told.dollars(plan), told.days(plan) * 24 * 8 * told.dollars_per_gpu_hour)
    assert budget_of(wanted, H100, 1e9, 2.5).dollars_per_gpu_hour == 2.5
    mega = cluster_of(None, "gcp-a3-mega", 16)
    assert (mega.nic_bytes_per_second, mega.fabric) == (25e9, "tcp")
    assert cluster_of(None, "gcp-a3-mega", 16, fabric="roce").fabric == "roce"
    assert [cluster_of("h100", None, 16, fabric=one).fabric for one in (None, "efa")] == ["infiniband", "efa"]
    with pytest.raises(ShardlmError, match="a profile's links were measured; leave out --fabric"):
        cluster_of(None, None, None, profile="any.json", fabric="tcp")
    for arguments, message in (
        ((None, None, 8), "either --gpu=NAME or --cluster=NAME"),
        (("h100", "aws-p5", 8), "those of aws-p5 are h100.; leave out one of them"),
        (("h1000", None, 8), "did you mean h100"),
        (("h100", None, 12), "num_gpus=12 does not fill hosts of 8; choose 8 or 16"),
    ):
        with pytest.raises(ShardlmError, match=message):
            cluster_of(*arguments)


def test_constraints_that_say_nothing_allow_everything(found):
    assert all(FREE.allow("rules", plan.config.rules) for plan in found.plans)
    assert FREE.choices("rules", ["zero3"]) == ["zero3"]


def test_a_plan_has_the_names_and_the_sums_of_a_profile(found):
    plan = next(p for p in found.plans if p.config.rules == "zero3" and p.config.mesh == MeshSpec(fsdp=4, tensor=2))
    told = rows(plan)
    assert told["step"] == plan.step_seconds == told["busy"] + told["idle"] and set(LAYERS) > plan.cost.compute.keys()
    assert sum(told[layer] for layer in plan.cost.compute) == pytest.approx(plan.cost.compute_seconds)
    assert {"all-gather fsdp", "reduce-scatter tensor exposed"} < told.keys()
    sent = [told[row] for row in told if row.endswith(" exposed")]
    assert sum(sent) == pytest.approx(plan.cost.exposed_seconds)


@pytest.mark.parametrize("pipeline", [PipelineConfig(rounds=2), PipelineConfig("1f1b")])
def test_without_stages_nothing_is_idle_whatever_the_schedule(pipeline):
    odd = config("llama3_8b")
    odd = dataclasses.replace(odd, mesh=MeshSpec(fsdp=4, tensor=2), model=dataclasses.replace(odd.model, num_layers=31))
    plain, asked = (
        Plan.of(dataclasses.replace(odd, pipeline=one), H100) for one in (PipelineConfig("gpipe"), pipeline)
    )
    assert asked.cost.bubble_seconds == 0 and rows(asked)["idle"] == 0
    assert (asked.step_seconds, asked.memory.total) == (plain.step_seconds, plain.memory.total)


def test_looking_at_everything_on_the_best_meshes_alone_finds_the_same_best():
    wanted, cluster = config("mixtral_8x7b"), cluster_of("h100", None, 32)
    held = Constraints.parse(["mesh.context=1"])
    everything, some = (_search(wanted, held, [OffloadConfig()], Alike(cluster), beam=beam) for beam in (10**9, 16))
    assert some.considered < everything.considered
    assert [plan.config for plan in some.plans[:3]] == [plan.config for plan in everything.plans[:3]]


def test_meshes_are_compared_by_the_fewest_microbatches_that_fit():
    """Of DeepSeek V3 on 1,024 the fewest do not fit on the fastest mesh, and the most gather its weights eight times as
    often: by these two it would not be among those that everything is looked at on."""
    cluster, held = cluster_of("h100", None, 1024), Constraints.parse(["mesh.pipeline=1", "rules=zero3", "remat=full"])
    wanted = config("deepseek_v3")
    everything, some = (_search(wanted, held, [OffloadConfig()], Alike(cluster), beam=beam) for beam in (10**9, 16))
    assert some.considered < everything.considered
    assert [plan.config for plan in some.plans[:3]] == [plan.config for plan in everything.plans[:3]]
    assert some.plans[0].config.train.accumulation == 4


def test_gpus_that_are_no_power_of_two_are_told_a_batch_that_they_can_share():
    with pytest.raises(ShardlmError, match=r"A mesh can with train\.global_batch=9, which 12 GPUs can share"):
        search(config("llama3_8b"), cluster_of("h100", None, 12, 4))


def test_words_on_why_nothing_runs_are_made_when_they_are_asked_for(monkeypatch):
    """Advice asks for few of them; and they cross processes, whole."""
    made = []
    monkeypatch.setattr(planned, "_batch_that_runs", lambda *args: made.append(args) or 9)
    with pytest.raises(ShardlmError) as caught:
        search(config("llama3_8b", global_batch=7), cluster_of("h100", None, 24))
    assert not made
    assert str(caught.value).endswith("which 24 GPUs can share.") and str(caught.value) and len(made) == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_remat_policies_are_tried_in_their_own_order_whatever_the_command_line_has():
    one, other = (
        search(config("llama3_8b"), H100, Constraints.parse([f"remat={words}"])) for words in ("full,none", "none,full")
    )
    assert one.plans[0].config == other.plans[0].config and one.plans[0].config.remat == "none"
    assert Constraints.parse(["remat=offload,full,dots"]).choices("remat", ("none", "dots", "full")) == [
        "dots",
        "full",
        "offload",
    ]


def test_a_mesh_that_divides_a_block_of_moments_has_no_plan():
    """As Program.make refuses it."""
    run = dataclasses.replace(config("llama3_8b", global_batch=32), mesh=MeshSpec(tensor=32))
    assert Sketch.of(run, GPUS["h100"])
    held = dataclasses.replace(run, optim=dataclasses.replace(run.optim, moments="int8"))
    with pytest.raises(ShardlmError, match=r"embedding has blocks of 16 along vocab=128256, and 32 devices would"):
        Sketch.of(held, GPUS["h100"])


def test_fewer_bits_of_moments_are_offered_and_chosen_only_where_they_are_allowed():
    """Llama 3 8B's first 18 layers on one GPU, whose state does not go to the host's memory."""
    one, kinds = cluster_of("h100", None, 1), "optim.moments=float32,bfloat16,int8"
    base = config("llama3_8b", global_batch=1)
    base = dataclasses.replace(base, model=LlamaConfig(num_layers=18))
    words = ["offload.optimizer=false", "rules=zero3"]
    constraints = Constraints.parse(words)
    assert not search(base, one, constraints).plans
    offered = {change.what: change.plan for change in changes(base, one, constraints)}
    bits = [what for what in offered if what.startswith("optim.")]
    assert bits == ["optim.moments=bfloat16", "optim.moments=int8"] and offered[bits[0]].fits
    assert next(iter(offered)) == "without offload.optimizer=false"
    allowed = search(base, one, Constraints.parse([*words, kinds])).plans
    assert {plan.config.optim.moments for plan in allowed} == {"bfloat16", "int8"}
    assert settings(allowed[0].config)["optim.moments"] == allowed[0].config.optim.moments
    small = dataclasses.replace(base, model=LlamaConfig(num_layers=2))
    assert {plan.config.optim.moments for plan in search(small, one, constraints).plans} == {"float32"}
    every = search(small, one, Constraints.parse([*words, kinds])).plans
    assert {plan.config.optim.moments for plan in every} == {"float32", "bfloat16", "int8"}
    assert every[0].step_seconds == min(plan.step_seconds for plan in every)
