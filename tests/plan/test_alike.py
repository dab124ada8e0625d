"""What a search remembers, and what it leaves out, changes none of its plans: each is what it is by itself. By formulas
alone."""

import dataclasses
import pathlib
import random

import pytest
from more_families import PICKED, SERVED

from shardlm.config import load
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.plan.alike import Alike, Shared
from shardlm.plan.asked import cluster_of
from shardlm.plan.constraints import Constraints
from shardlm.plan.parts import Parts
from shardlm.plan.plan import Plan
from shardlm.plan.program_traffic import program_traffic
from shardlm.plan.search import _all, _search, fastest, search
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import state
from shardlm.plan.ways import laid_out
from shardlm.train.config import OffloadConfig, RunConfig

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
CASES = {  # model -> GPU, GPUs, rows, constraints
    "llama3_8b": ("h100", 16, 64, ("matmul=dtype,fp8",)),
    "mixtral_8x7b": ("h200", 32, 128, ("mesh.context<=2",)),
    "diloco_two_sites": ("h100", 16, 64, ()),
    "convolved experts": ("h100", 16, 128, ()),
    "llama3_8b in stages": ("rtx4090", 32, 32, ("mesh.pipeline=2,4", "rules=zero1,zero3")),
}


def run(name: str, rows: int) -> RunConfig:
    file = CONFIGS / f"{name.partition(' in ')[0]}.py"
    if file.exists():
        one = load(str(file))
    else:
        sizes = dict(next(found["sizes"] for found in PICKED.values() if found["model"] == name))
        sizes |= {"kinds": "CC" + "CCCF" * 4}  # two dense layers, and a pattern of which three are alike
        one = dataclasses.replace(load(str(CONFIGS / "llama3_8b.py")), model=SERVED[name](**sizes))
    return dataclasses.replace(one, train=dataclasses.replace(one.train, global_batch=rows, seq_len=4096))


@pytest.mark.parametrize("name", CASES)
def test_what_is_remembered_of_a_search_is_what_each_plan_is_by_itself(name):
    """Costs, bounds and the choice on each of a few meshes, which are looked at one after another."""
    gpu, gpus, rows, words = CASES[name]
    cluster, constraints = cluster_of(gpu, None, gpus), Constraints.parse(words)
    known, dice, compared = Alike(cluster), random.Random(name), 0
    meshes = list(laid_out(run(name, rows), cluster, constraints))
    for laid in dice.sample(meshes, min(12, len(meshes))):
        plans = [p for p in _all(laid, known, constraints, [OffloadConfig()]) if isinstance(p, Plan) and p.fits]
        alone = [Plan.of(plan.config, cluster) for plan in plans]
        for plan, own in zip(plans, alone, strict=True):
            assert plan.least_seconds <= own.step_seconds and plan.cost == own.cost and plan.memory == own.memory
            compared += 1
        if plans:
            seconds = [own.step_seconds for own in alone]
            assert fastest(plans) is plans[seconds.index(min(seconds))]
    assert compared > 4


def test_a_search_finds_the_best_of_each_mesh_whatever_it_leaves_out():
    cluster, constraints = cluster_of("h100", None, 8), Constraints.parse(["mesh.context=1"])
    one = run("convolved experts", 32)
    best: dict[tuple, Plan] = {}
    considered = 0
    for laid in laid_out(one, cluster, constraints):
        for plan in _all(laid, Alike(cluster), constraints, [OffloadConfig()]):
            considered += 1
            if isinstance(plan, Plan) and plan.fits:
                own, key = Plan.of(plan.config, cluster), (laid.mesh, laid.rules)
                if key not in best or own.step_seconds < best[key].step_seconds:
                    best[key] = own
    found = _search(one, constraints, [OffloadConfig()], Alike(cluster), beam=10**9)
    ranked = sorted(best.values(), key=lambda plan: (plan.step_seconds, plan.memory.total))
    assert [plan.config for plan in found.plans] == [plan.config for plan in ranked] and found.considered == considered


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("zero3", {"fsdp": 8}),
        ("zero3", {"fsdp": 2, "pipeline": 2, "tensor": 2}),
        ("zero1", {"data": 2, "expert": 4}),
        ("hybrid", {"data": 2, "fsdp": 2, "context": 2}),
    ],
)
def test_layers_that_are_alike_hold_and_send_as_if_each_were_asked(rules, mesh):
    """Of weights in a plain tuple nothing is known to be alike."""
    one = run("convolved experts", 64)
    train = dataclasses.replace(one.train, accumulation=2)
    sketch = Sketch.of(dataclasses.replace(one, mesh=MeshSpec(**mesh), rules=rules, train=train), GPUS["h100"])
    plain = dataclasses.replace(sketch, weights=tuple(sketch.weights))
    firsts = sketch.weights.firsts
    assert len(set(firsts)) < 0.8 * len(firsts) and list(plain.spread.firsts) == list(range(len(firsts)))
    assert program_traffic(sketch) == program_traffic(plain)
    assert Parts.of(sketch) == Parts.of(plain) and state(sketch) == state(plain)


def test_searches_on_several_clusters_find_what_each_finds_by_itself():
    """GPUs of one generation and of others, hosts of one and of several; of fp8 some have no units."""
    config, shared = run("llama3_8b", 64), Shared()
    held = Constraints.parse(["mesh.pipeline<=2", "rules=zero1,zero3"])
    for gpu, gpus in (("h100", 16), ("h200", 16), ("b200", 16), ("gb200", 16), ("a100", 16), ("h200", 8)):
        cluster = cluster_of(gpu, None, gpus)
        both, alone = (search(config, cluster, held, every=False, shared=own) for own in (shared, None))
        assert [plan.config for plan in both.plans] == [plan.config for plan in alone.plans] and both.plans
        assert (both.considered, both.refused, both.too_large) == (alone.considered, alone.refused, alone.too_large)
        for plan, own in zip(both.plans, alone.plans, strict=True):
            assert (plan.gpu, plan.cost, plan.memory) == (own.gpu, own.cost, own.memory)


def test_where_tokens_are_gathered_hosts_are_told_apart():
    """Of one generation, hosts of 8 and of 4: the 8 devices of the expert axis lie in one, or not."""
    shared, config = Shared(), dataclasses.replace(run("mixtral_8x7b", 32), mesh=MeshSpec(fsdp=4, expert=8))
    sent = {}
    for gpu in ("b200", "gb200"):
        known = Alike(cluster_of(gpu, None, 32), shared)
        sketch = known.sketch(config)
        sent[gpu] = {one.kind for one in known.layers(sketch).sent if one.axes == ("expert",)}
    assert sent == {"b200": {"all-gather", "reduce-scatter"}, "gb200": {"ragged-all-to-all"}}


def test_a_sketch_with_other_weights_remembers_nothing():
    sketch = Sketch.of(dataclasses.replace(run("llama3_8b", 64), mesh=MeshSpec(fsdp=8)), GPUS["h100"])
    whole = sketch.once(state)
    assert sketch.once(state) is whole and sketch.on(GPUS["h200"], 8).once(state) is whole
    assert dataclasses.replace(sketch, weights=tuple(sketch.weights)[:-1]).once(state).weights < whole.weights
