"""What the planner says of an answer: sums that agree, the same figures in text, JSON and page, and words that are kept
apart. Answers are made of plans by formulas; what a compiler would add is written by hand."""

import dataclasses
import html.parser
import json
import math

import chromium
import markupsafe
import numpy as np
import pytest

from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.plan.answer import Answer, Budget, Ranked
from shardlm.plan.bill import Charge, CompiledStep
from shardlm.plan.change import Change
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.report import tables
from shardlm.plan.report.data import to_json
from shardlm.plan.report.html import to_html
from shardlm.plan.report.text import WIDTH, to_text
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
    step = CompiledStep(1.25, charges, 1.5, {"mystery_kernel": 3})
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
    assert math.isclose(parts, sums["total_bytes"]) and math.isclose(parts, row["estimated_memory_bytes"], **close)
    assert math.isclose(total(part for phase in row["timeline"] for part in phase["parts"]), best.step_seconds, **close)
    for rows in (first["communication"], first["bill"]["rows"]):
        assert math.isclose(total(rows, "exposed_seconds"), best.cost.exposed_seconds, **close)
        assert math.isclose(total(rows, "hidden_seconds"), best.cost.hidden_seconds, **close)
        assert math.isclose(total(rows, "bytes"), sum(one.sent.nbytes for one in best.cost.comms), **close)
    for rows in first["compute"].values():
        assert math.isclose(total(rows), best.cost.compute_seconds, **close)
    assert row["tokens_per_second"] * row["days"] * 86_400 == pytest.approx(1e12)
    assert row["dollars"] == pytest.approx(row["days"] * 24 * 16 * 2.5)
    assert (first["stages"] is None) == (best.config.mesh.pipeline == 1)
    for stage in first["stages"]["rows"] if first["stages"] else []:
        assert math.isclose(total(stage["spans"]), best.step_seconds, rel_tol=1e-9)


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
        shown += [tables.compute(first, row["step_seconds"]), tables.search(told, 3)]
        for table in shown:
            assert table.title in words
            for cells in table.rows:
                assert all(word in words for cell in cells for word in cell.split()), (table.title, cells)
        for _, figure, basis in tables.facts(row, told["run"]):
            assert f"{figure} {basis}" in words
        assert "Limited by " in words and "2 other reasons" not in words and "a fourth" not in words
        assert "Asked for: mesh.tensor<=8" in words
    assert "32" in to_text(ESTIMATED) and "190,000" in to_text(ESTIMATED)


def test_what_was_not_compiled_never_says_so():
    for told in (ESTIMATED, to_json(answer(Ranked(FSDP), unverified="no CUDA plugin"))):
        for said in (to_text(told), to_html(told)):
            assert "compiled" not in said and "verified: the plan" not in said and 'chip verified"' not in said
            assert "estimated" in said
    for said in (to_text(told), to_html(told)):
        assert "Nothing was verified: no CUDA plugin" in said


def test_what_was_compiled_stands_beside_what_was_estimated():
    row = CHECKED["plans"][0]
    assert row["status"] == "verified" and CHECKED["plans"][1]["status"] == "estimated"
    assert CHECKED["plans"][1]["compiled_memory_bytes"] is CHECKED["plans"][1]["compiled_step"] is None
    assert row["compiled_memory_bytes"] == pytest.approx(40 * 2**30 + FSDP.memory.reserve)
    assert row["compiled_step"]["step_seconds"] == pytest.approx(1.25 + 0.034)
    table = tables.plans(CHECKED)
    other = dict(zip([(c.title, c.basis) for c in table.columns], table.rows[1], strict=True))
    assert other["GiB", "compiled"] == other["s/step", "compiled"] == "-" and other["GiB", "estimated"] != "-"
    charged = CHECKED["first"]["bill"]
    assert charged["basis"] == "compiled" and [r["count"] for r in charged["rows"]] == [32, 7]
    bill = tables.bill(CHECKED["first"])
    assert {column.basis for column in bill.columns} == {"", "compiled"}
    text = " ".join(to_text(CHECKED).split())
    for said in ("state.params.head at a.py:1 < b.py:2", "count not certain: a loop", "mystery_kernel (3 times)"):
        assert said in text
    assert "compiled: read from the program" in text and "verified: the plan's program" in text
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
    assert to_json(answer(smallest=least))["changes"] == []


class Checker(html.parser.HTMLParser):
    """Every tag is closed in order; what a page would load or run is noted."""

    VOID = ("meta", "link", "input", "line", "polyline", "br")

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.scripts, self.ids = [], [], 0, []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] if tag not in self.VOID else []
        self.scripts += tag == "script"
        for name, value in attributes:
            self.loads += [value] if name in ("src", "href", "action", "data", "srcset", "poster") else []
            self.ids += [value] if name == "id" else []
            assert not name.startswith("on")

    def handle_startendtag(self, tag, attributes):
        assert tag in self.VOID
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("told", [ESTIMATED, CHECKED], ids=["estimated", "compiled"])
def test_the_page_is_whole_loads_nothing_and_escapes(told):
    page = to_html(told | {"config": HOSTILE})
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == [] and checker.scripts == 1 and checker.loads == ["data:,"]
    assert len(set(checker.ids)) == len(checker.ids)
    assert "http://" not in page and "https://" not in page and "url(" not in page and "@import" not in page
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "{{ 7 * 7 }}" in page
    for table in (tables.plans(told), tables.memory(told["plans"][0]), tables.bill(told["first"])):
        assert f'id="table-{table.key}"' in page
        assert all(str(markupsafe.escape(cell.split("\n")[0])) in page for row in table.rows for cell in row)


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: SHARDLM_CHROMIUM=PATH names one")
def test_a_person_looks_at_the_pictures(tmp_path):
    best = PIPELINED["1f1b"]
    told = to_json(answer(Ranked(best, compiled(30)), Ranked(FSDP), Ranked(HYBRID)), HOSTILE, SWEEP)
    path = tmp_path / "plan.html"
    path.write_text(to_html(told), encoding="utf-8")
    with chromium.browser(BROWSER, tmp_path / "profile") as page:
        page.call("Page.navigate", url=path.as_uri())
        page.until("document.querySelector('footer') && document.readyState == 'complete'")
        assert page.value("document.querySelector('h1').textContent") == HOSTILE

        def number(selector):
            return page.value(f"document.querySelectorAll({selector!r}).length")

        assert number("#memory .bar:not(.head)") == 4 and number("#memory .over") == 0  # the first one twice
        assert number("#steps .bar") == 3 and number("#stages .bar") == 4
        assert number("#mesh .gpu") == 16 and number("#mesh .host") == 2 and number("#mesh input") == 3
        assert number("#sweep .point") == 4 and number("#sweep .point.none") == 1
        width = "b => b.getBoundingClientRect().width"
        drawn = "(w => [...document.querySelectorAll('{} .track:not(.thin)')].map(t => " + (
            f"[...t.querySelectorAll('.part')].reduce((sum, part) => sum + w(part), 0) / w(t)))({width})"
        )
        slowest = max(one["step_seconds"] for one in told["plans"]) * 1.02
        widths = page.value(drawn.format("#steps"))
        assert widths == pytest.approx([one["step_seconds"] / slowest for one in told["plans"]], abs=0.01)
        assert page.value(drawn.format("#stages")) == pytest.approx([1] * 4, abs=0.01)
        shown = "[...document.querySelectorAll('#mesh .gpu')].map(g => g.innerText.trim()).join('')"
        assert page.value(shown) == "01" * 8  # tensor
        page.value("document.getElementById('by-pipeline').click()")
        assert page.value(shown) == "0011223300112233"
        page.value("document.querySelector('#stages .part').scrollIntoView()")
        box = "document.querySelector('#stages .part').getBoundingClientRect()"
        x, y = page.value(f"{box}.x") + 2, page.value(f"{box}.y") + 2
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert page.until("!tip.hidden && tip.textContent").startswith("stage 0, forward: ")
        for width in (1280, 400):
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        ground = "getComputedStyle(document.body).backgroundColor"
        colours = []
        for scheme in ("light", "dark"):
            scheme = {"name": "prefers-color-scheme", "value": scheme}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            colours.append(page.value(ground))
        assert colours[0] != colours[1]
        assert page.errors == [] and set(page.asked) <= {path.as_uri(), "data:,"}
