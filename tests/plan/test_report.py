"""What the planner says of an answer: sums that agree, the same figures in text, JSON and page, and words that are kept
apart. Answers are made of plans by formulas; what a compiler would add is written by hand."""

import dataclasses
import functools
import json
import math

import chromium
import markupsafe
import numpy as np
import page_checker
import pytest

from shardlm.config import load
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.plan.answer import Answer
from shardlm.plan.bill import Charge, CompiledStep
from shardlm.plan.budget import Budget
from shardlm.plan.change import Change
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.ranked import Ranked
from shardlm.plan.report import figures, pictures, sentences, tables
from shardlm.plan.report.data import to_json
from shardlm.plan.report.html import to_html
from shardlm.plan.report.laid_out import WIDTH
from shardlm.plan.report.text import to_text
from shardlm.plan.search import Found
from shardlm.plan.verify import Verified
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig

BROWSER = chromium.find()
H100 = Cluster.of(GPUS["h100"], 16)
MODEL = LlamaConfig(vocab_size=32_768, embed_dim=2048, num_layers=16, num_heads=16, num_kv_heads=8, mlp_dim=8192)
HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}</style>"
SWEEP = [(8, 0.0, False), (16, 1e5, True), (32, 1.9e5, True), (64, 3.5e5, True)]


def plan(mesh: MeshSpec, cluster: Cluster = H100, rules: str = "zero3", schedule=("circular", 2), **train) -> Plan:
    steps = TrainConfig(**{"steps": 1000, "global_batch": 64, "seq_len": 4096, "accumulation": 8} | train)
    config = RunConfig(
        model=MODEL,
        mesh=mesh,
        rules=rules,
        precision="bf16",
        remat="full",
        train=steps,
        pipeline=PipelineConfig(*schedule),
    )
    return Plan.of(config, cluster)


FSDP = plan(MeshSpec(fsdp=8, tensor=2), accumulation=1)
HYBRID = plan(MeshSpec(data=2, fsdp=8), rules="hybrid", accumulation=1)
PIPELINED = {
    name: plan(MeshSpec(data=2, pipeline=4, tensor=2), rules="zero1", schedule=(name, rounds))
    for name, rounds in (("circular", 2), ("gpipe", 1), ("1f1b", 1))
}


def answer(*ranked: Ranked, smallest: Plan | None = None, changes=(), cluster: Cluster = H100, **kwargs) -> Answer:
    refused = {"mesh.tensor=3 does not divide 16 heads": 5, "another reason": 2, "a third": 1, "a fourth": 1}
    found = Found(tuple(one.plan for one in ranked), 123, 17, refused, smallest)
    budget = Budget(1e12, 2.5, "as given")
    return Answer(cluster, Constraints.parse(["mesh.tensor<=8"]), found, ranked, tuple(changes), budget, **kwargs)


def compiled(gib: float) -> Verified:
    where = "a.py:1 < b.py:2 [jit(x)]"
    gather = ("all-gather", ("fsdp",), "bf16", "forward", "network", "state.params.head", where, 32, 3e9, 0.09, 0.03)
    reduce = ("all-reduce", ("tensor",), "f32", "backward", "NVLink", "f < g", "c.py:3", 7, 1e9, 0.004, 0.004, "a loop")
    charges = (Charge(*gather), Charge(*reduce))
    step = CompiledStep(1.2, charges, 1.5, {"mystery_kernel": 3}, 0.05)
    return Verified(int(gib * 2**30 / 4), int(gib * 2**30 * 3 / 4), step, 4.0)


ESTIMATED = to_json(answer(Ranked(FSDP), Ranked(HYBRID)), "configs/small.py", SWEEP)
CHECKED = to_json(answer(Ranked(FSDP, compiled(40)), Ranked(HYBRID)), "configs/small.py")


@pytest.mark.parametrize("best", [FSDP, HYBRID, *PIPELINED.values()], ids=str)
def test_rows_sum_to_the_totals(best):
    told = json.loads(json.dumps(to_json(answer(Ranked(best))), allow_nan=False))
    first, row = told["first"], told["plans"][0]
    close = {"rel_tol": 1e-9, "abs_tol": 1e-12}

    def total(rows, key="seconds"):
        return math.fsum(one[key] for one in rows)

    held = row["memory"]
    assert math.isclose(total(held["kinds"], "bytes") + held["reserve_bytes"], best.memory.total, **close)
    sums = held["estimated"]
    parts = sums["at_rest_bytes"] + sums["during_the_step_bytes"] + held["reserve_bytes"]
    assert math.isclose(parts, sums["total_bytes"]) and math.isclose(parts, row["estimated"]["memory_bytes"], **close)
    assert math.isclose(total(part for phase in row["timeline"] for part in phase["parts"]), best.step_seconds, **close)
    for rows in (first["communication"], first["bill"]["rows"]):
        assert math.isclose(total(rows, "exposed_seconds"), best.cost.exposed_seconds, **close)
        assert math.isclose(total(rows, "hidden_seconds"), best.cost.hidden_seconds, **close)
        assert math.isclose(total(rows, "bytes"), sum(one.sent.nbytes for one in best.cost.comms), **close)
    for rows in first["compute"].values():
        assert math.isclose(total(rows), best.cost.compute_seconds, **close)
    speed = row["estimated"]
    assert speed["tokens_per_second"] * speed["days"] * 86_400 == pytest.approx(1e12)
    assert speed["dollars"] == pytest.approx(speed["days"] * 24 * 16 * 2.5) and row["basis"] == "estimated"
    assert_bills_sum_up(told, best)
    assert (first["stages"] is None) == (best.config.mesh.pipeline == 1)
    for stage in first["stages"]["rows"] if first["stages"] else []:
        assert math.isclose(total(stage["spans"]), best.step_seconds, rel_tol=1e-9)


def assert_bills_sum_up(told: dict, best: Plan) -> None:
    """What is exposed and what is hidden of each collective is all its time, its axes' as in the cost, and what the
    timeline waits for; the page's bar shows the same."""
    first, phases = told["first"], told["plans"][0]["timeline"]
    close = {"rel_tol": 1e-9, "abs_tol": 1e-12}
    for one in [*first["communication"], *first["bill"]["rows"]]:
        assert one["exposed_seconds"] >= 0 and one["hidden_seconds"] >= 0
        assert math.isclose(one["exposed_seconds"] + one["hidden_seconds"], one["seconds"], **close)
    assert {"+".join(one.axes) for one in best.cost.by_axes} == {
        "+".join(one["axes"]) for one in first["communication"]
    }
    for axes in best.cost.by_axes:
        sent = [one for one in first["communication"] if one["axes"] == list(axes.axes)]
        for key in ("seconds", "exposed_seconds"):
            assert math.isclose(math.fsum(one[key] for one in sent), getattr(axes, key), **close)
    waits = math.fsum(part["seconds"] for phase in phases for part in phase["parts"] if part["part"] == "exposed")
    assert math.isclose(waits, best.cost.exposed_seconds, **close)
    bar = pictures.steps(told)["bars"][0]  # in percent of the widest, which it is
    assert sum(part["width"] for part in bar["parts"]) == pytest.approx(100 / 1.02)
    hidden = best.cost.hidden_seconds / best.step_seconds
    assert sum(part["width"] for part in bar["hidden"]) == pytest.approx(hidden * 100 / 1.02)
    if first["stages"]:
        share = best.cost.bubble_seconds / best.step_seconds
        assert f"{100 * share:.1f}% of the step (estimated)" in sentences.pipeline(first)


@pytest.mark.parametrize("name", ["llama3_8b_128k", "mixtral_8x7b", "deepseek_v3", "diloco_two_sites"])
def test_bills_of_shipped_configurations_sum_up(name):
    config = load(f"configs/{name}.py")
    best = Plan.of(config, Cluster.of(GPUS["h100"], math.prod(config.mesh.sizes().values())))
    assert_bills_sum_up(json.loads(json.dumps(to_json(answer(Ranked(best), cluster=best.cluster)))), best)


@pytest.mark.parametrize("name", PIPELINED)
def test_stages_are_idle_when_the_schedule_says_so(name):
    best = PIPELINED[name]
    found, schedule = to_json(answer(Ranked(best)))["first"]["stages"], best.sketch.schedule
    jobs = schedule.microbatches * schedule.rounds
    for row in found["rows"]:
        counted = dict.fromkeys(("forward", "backward", "forward and backward"), 0)
        for span in row["spans"]:
            counted[span["what"]] = counted.get(span["what"], 0) + span["jobs"]
        both = counted["forward and backward"]
        assert counted["forward"] + both == counted["backward"] + both == jobs
    # Tick by tick, by the formulas of layers/pipeline.py and train/one_f_one_b.py.
    S = schedule.stages
    for stage in range(S if name == "1f1b" else 0):
        ticks = np.arange(schedule.ticks)
        going, coming = (ticks - stage >= 0) & (ticks - stage < jobs), (ticks - (2 * S - 2 - stage) >= 0)
        coming &= ticks - (2 * S - 2 - stage) < jobs
        tick = sum(s["seconds"] for s in found["rows"][stage]["spans"][:-2]) / schedule.ticks
        idle = sum(s["seconds"] for s in found["rows"][stage]["spans"] if s["what"] == "idle")
        assert idle == pytest.approx(tick * np.sum(~going & ~coming), abs=1e-9)
    if name != "1f1b":
        idle = [sum(s["seconds"] for s in row["spans"] if s["what"] == "idle") for row in found["rows"]]
        assert idle == pytest.approx([best.cost.bubble_seconds] * S)


def test_places_are_those_of_the_mesh():
    told = ESTIMATED["first"]["placement"]
    grid = np.arange(16).reshape(8, 2)
    for host in told["hosts"]:
        for gpu in host["gpus"]:
            assert grid[gpu["place"]["fsdp"], gpu["place"]["tensor"]] == gpu["gpu"]
            assert gpu["gpu"] // 8 == host["host"] == host["island"]
    assert [one["axis"] for one in told["axes"]] == ["fsdp", "tensor"] and told["axes"][0]["islands"] == 2
    rack = Cluster.of(GPUS["gb200"], 144, 4)
    best = plan(MeshSpec(data=9, fsdp=16), rack, "hybrid", accumulation=1, global_batch=144)
    told = to_json(answer(Ranked(best), cluster=rack))["first"]["placement"]
    assert [host["island"] for host in told["hosts"]] == [0] * 18 + [1] * 14 and told["hosts_left_out"] == 4


def test_the_text_has_the_figures_and_fits():
    for told in (ESTIMATED, CHECKED, to_json(answer(Ranked(PIPELINED["circular"])), "x" * 200)):
        text = to_text(told)
        assert max(map(len, text.splitlines())) <= WIDTH
        words = " ".join(text.split())
        row, first = told["plans"][0], told["first"]
        shown = [tables.plans(told), tables.memory(row), tables.step(row), tables.communication(first)]
        shown += [tables.compute(first, row["estimated"]["step_seconds"]), tables.search(told, 3)]
        for table in shown:
            assert table.title in words
            for cells in table.rows:
                assert all(word in words for cell in cells for word in cell.split()), (table.title, cells)
        for fact in sentences.facts(row, told["run"]):
            assert f"{fact.said} {fact.basis}" in words and fact.beside in words
        assert "Limited by " in words and "2 other reasons" not in words and "a fourth" not in words
        assert "Asked for: mesh.tensor<=8" in words
    assert "32" in to_text(ESTIMATED) and "190,000" in to_text(ESTIMATED)
    few = to_text(ESTIMATED | {"run": ESTIMATED["run"] | {"global_batch": 4}})
    assert "4 rows are fewer than the GPUs" in few and "rows are fewer" not in to_text(ESTIMATED)
    own = {point["num_gpus"]: point["tokens_per_second"] for point in ESTIMATED["sweep"]}
    assert own[16] == ESTIMATED["plans"][0]["estimated"]["tokens_per_second"] != SWEEP[1][1] and own[32] == SWEEP[2][1]
    assert "Of 16 GPUs the first plan, of others the fastest as estimated" in " ".join(to_text(ESTIMATED).split())


def test_what_was_not_compiled_never_says_so():
    for told in (ESTIMATED, to_json(answer(Ranked(FSDP), unverified="no CUDA plugin"))):
        for said in (to_text(told), to_html(told)):
            assert "compiled" not in said and "verified: the program" not in said and 'chip verified"' not in said
            assert "estimated" in said
    for said in (to_text(told), to_html(told)):
        assert "Nothing was verified: no CUDA plugin" in said


def test_what_was_compiled_stands_beside_what_was_estimated():
    row = CHECKED["plans"][0]
    assert row["status"] == "verified" and CHECKED["plans"][1]["status"] == "estimated"
    assert CHECKED["plans"][1]["compiled"] is CHECKED["plans"][1]["compiled_step"] is None
    assert (row["basis"], CHECKED["plans"][1]["basis"]) == ("compiled", "estimated")
    made, guessed = row["compiled"], row["estimated"]
    assert made["memory_bytes"] == pytest.approx(40 * 2**30 + FSDP.memory.reserve)
    assert made["step_seconds"] == row["compiled_step"]["step_seconds"] == pytest.approx(1.25 + 0.034)
    longer = made["step_seconds"] / guessed["step_seconds"]
    assert made["mfu"] * longer == pytest.approx(guessed["mfu"])
    for key in ("days", "dollars"):
        assert made[key] == pytest.approx(guessed[key] * longer)
    assert row["limited_by"].endswith("which a lighter remat saves") and "of 1.28 s" in row["limited_by"]
    for fact in sentences.facts(row, CHECKED["run"]):
        assert fact.basis == "compiled" and fact.beside.endswith(" estimated") and fact.said not in fact.beside
    table = tables.plans(CHECKED)
    other = dict(zip([(c.title, c.basis) for c in table.columns], table.rows[1], strict=True))
    assert other["GiB", "compiled"] == other["s/step", "compiled"] == "-" and other["GiB", "estimated"] != "-"
    charged = CHECKED["first"]["bill"]
    assert charged["basis"] == "compiled" and [r["count"] for r in charged["rows"]] == [32, 7]
    bill = tables.bill(CHECKED["first"])
    assert {column.basis for column in bill.columns} == {"", "compiled"}
    text = " ".join(to_text(CHECKED).split())
    known = "state.params.head at a.py:1 < b.py:2", "count not certain: a loop", "mystery_kernel (3 times)"
    for said in (*known, "kernels by XLA's own estimate - 1,500", "tiles that were chosen without a GPU"):
        assert said in text
    assert "compiled: read from the program" in text and "verified: the program" in text
    folded = tables.bill(CHECKED["first"], most=1)
    assert folded.sums == 2 and folded.rows[1][0] == "1 more" and folded.rows[2][3] == "39"


def test_a_plan_whose_program_does_not_fit_or_exist_says_why():
    failed = Verified(failure="the compiler ended its process")
    told = to_json(answer(Ranked(HYBRID), Ranked(FSDP, compiled(100)), Ranked(PIPELINED["gpipe"], failed)))
    assert [one["status"] for one in told["plans"]] == ["estimated", "refused", "refused"]
    text = to_text(told)
    assert "#2 fsdp=8 x tensor=2 was refused: its program needs more memory than a GPU has" in text
    assert "was refused: the compiler ended its process" in text and "verified" not in text
    none = to_json(answer(Ranked(FSDP, compiled(100))))
    assert none["first"] is None and none["shortfall"]["over_bytes"] > 20 * 2**30
    assert "(compiled)" in to_text(none) and "Nothing fits" in to_html(none)


def test_where_nothing_fits_it_says_by_how_much_and_what_helps():
    small = Cluster.of(GPUS["rtx4090"], 2)
    least = plan(MeshSpec(fsdp=2), small, accumulation=1)
    least = dataclasses.replace(
        least, cluster=dataclasses.replace(small, gpu=dataclasses.replace(small.gpu, hbm_bytes=10**9))
    )
    told = to_json(answer(smallest=least, changes=[Change("num_gpus=16", FSDP)], cluster=least.cluster), HOSTILE)
    over = least.memory.total - 10**9
    assert told["first"] is None and told["shortfall"]["over_bytes"] == pytest.approx(over)
    text = " ".join(to_text(told).split())
    assert "Nothing fits. What needs least is fsdp=2" in text and f"{over / 2**30:.1f} GiB more than the" in text
    assert "num_gpus=16 fsdp=8 x tensor=2 zero3" in text
    assert "It fits with num_gpus=16 (estimated): fsdp=8 x tensor=2 on 16 x h100" in text and "compiled" not in text
    tried = [Change("num_gpus=16", FSDP, compiled(40)), Change("later", HYBRID), Change("too much", FSDP, compiled(99))]
    told = to_json(answer(smallest=least, changes=tried, cluster=least.cluster), HOSTILE)
    assert [one["status"] for one in told["changes"]] == ["verified", "estimated", "refused"]
    for said in (to_text(told), to_html(told)):
        said = " ".join(said.split())
        needs, has = 40 + FSDP.memory.reserve / 2**30, FSDP.gpu.hbm_bytes / 2**30
        change = (
            f"num_gpus=16 (verified): fsdp=8 x tensor=2 on 16 x h100, {needs:.1f} of {has:.1f} GiB a GPU (compiled)"
        )
        assert f"It fits with {change}." in said
        assert "too much with fsdp=8 x tensor=2 was refused: its program needs more memory than a GPU has" in said
        assert "verified: the program was compiled, and fits." in said
    freed = told | {"changes": [told["changes"][0] | {"change": "without mesh.tensor=2"}]}
    assert "It fits without mesh.tensor=2 (" in sentences.change(freed)
    bare = to_json(answer(smallest=least))
    assert bare["changes"] == [] and "No single change that was tried makes it fit." in to_text(bare)


def test_every_kind_of_memory_has_a_look_and_a_name_of_its_own():
    averaged = dataclasses.replace(FSDP.config.optim, ema_decay=0.99)
    dots = Plan.of(dataclasses.replace(FSDP.config, remat="dots", optim=averaged), H100)
    found = to_json(answer(Ranked(FSDP), Ranked(dots)))
    drawn = pictures.memory(found)
    kinds = {row["kind"] for one in found["plans"] for row in one["memory"]["kinds"]}
    names = [one["name"] for one in drawn["legend"]]
    looks = {one["look"]: one["name"] for one in drawn["legend"]}
    assert len(kinds) > pictures.COLOURS and {*names} == {*kinds, "reserve of the runtime"}
    assert len(looks) == len(names) == len({*names})
    for bar in drawn["bars"]:
        assert all(part["tip"].startswith(f"{looks[part['look']]}: ") for part in bar["parts"])
    assert looks["c0"] == "weights" and looks["c0 part1"].startswith("weights ")
    four = ("weights", "weights turned", "weights in use", "weights gathered")  # of several plans
    assert len({*pictures.kind_looks(four).values()}) == len(four)


def test_short_steps_have_three_digits_too():
    assert [figures.duration(x) for x in (0.0018, 0.0995, 0.824, 15.24, 0, None)] == [
        *("0.00180", "0.100", "0.824", "15.2", "0", "-")
    ]


def test_short_runs_are_told_in_minutes_and_cents():
    assert [figures.days(x) for x in (3.81, 0.5, 0.01, 1e-4)] == [
        "3.81 days",
        "12.0 hours",
        "14.4 minutes",
        "8.64 seconds",
    ]
    assert [figures.dollars(x) for x in (0, 0.004, 3.2, 731, 2e6)] == ["$0", "<$0.01", "$3.20", "$731", "$2.00 M"]


@pytest.mark.parametrize("told", [ESTIMATED, CHECKED], ids=["estimated", "compiled"])
def test_the_page_is_whole_loads_nothing_and_escapes(told):
    page = to_html(told | {"config": HOSTILE})
    page_checker.check(page)
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "{{ 7 * 7 }}" in page
    for table in (tables.plans(told), tables.memory(told["plans"][0]), tables.bill(told["first"])):
        assert f'id="table-{table.key}"' in page
        assert all(str(markupsafe.escape(cell.split("\n")[0])) in page for row in table.rows for cell in row)


def test_bars_of_steps_are_as_wide_as_their_seconds():
    """Those of a program too, in which communication slows kernels down."""
    bars = pictures.steps(CHECKED)["bars"]
    shown = [one[basis] for one in CHECKED["plans"] for basis in ("estimated", "compiled") if one[basis]]
    seconds = [one["step_seconds"] for one in shown]
    widths = [math.fsum(part["width"] for part in bar["parts"]) for bar in bars]
    assert [bar["basis"] for bar in bars] == ["estimated", "compiled", "estimated"]
    assert widths == pytest.approx([100 * one / max(seconds) / 1.02 for one in seconds])


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: SHARDLM_CHROMIUM=PATH names one")
def test_a_person_looks_at_the_pictures(tmp_path):
    best = PIPELINED["1f1b"]
    told = to_json(answer(Ranked(best, compiled(30)), Ranked(FSDP), Ranked(HYBRID)), HOSTILE, SWEEP)
    with page_checker.shown(BROWSER, tmp_path, to_html(told), HOSTILE) as page:
        number = functools.partial(page_checker.number, page)
        assert number("#memory .bar:not(.head)") == 4 and number("#memory .over") == 0  # the first one twice
        assert number("#steps .bar") == 4 and number("#stages .bar") == 4
        assert number("#mesh .gpu") == 16 and number("#mesh .host") == 2 and number("#mesh input") == 3
        assert number("#sweep .point") == 4 and number("#sweep .point.none") == 1
        width = "b => b.getBoundingClientRect().width"
        drawn = "(w => [...document.querySelectorAll('{} .track:not(.thin)')].map(t => " + (
            f"[...t.querySelectorAll('.part')].reduce((sum, part) => sum + w(part), 0) / w(t)))({width})"
        )
        shown = [one[basis] for one in told["plans"] for basis in ("estimated", "compiled") if one[basis]]
        seconds = [one["step_seconds"] for one in shown]
        widths = page.value(drawn.format("#steps"))
        assert widths == pytest.approx([one / max(seconds) / 1.02 for one in seconds], abs=0.01)
        assert page.value(drawn.format("#stages")) == pytest.approx([1] * 4, abs=0.01)
        shown = (  # innerText would need a font
            "[...document.querySelectorAll('#mesh .gpu .at')].filter(a => getComputedStyle(a).display != 'none')"
            ".map(a => a.textContent).join('')"
        )
        assert page.value(shown) == "01" * 8  # tensor
        page.value("document.getElementById('by-pipeline').click()")
        assert page.value(shown) == "0011223300112233"
        page.value("document.querySelector('#stages .part').scrollIntoView()")
        box = "document.querySelector('#stages .part').getBoundingClientRect()"
        x, y = page.value(f"{box}.x") + 2, page.value(f"{box}.y") + 2
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert page.until("!tip.hidden && tip.textContent").startswith("stage 0, forward: ")
        page_checker.look(page)
