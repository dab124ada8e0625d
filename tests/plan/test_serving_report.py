"""What the planner says of serving: the same figures in text, JSON and page, words that are kept apart, and what is
said where programs do not fit or cannot be made. What a compiler would add is written by hand."""

import dataclasses
import functools
import json
import math
import pickle
import shlex
import types

import chromium
import markupsafe
import page_checker
import pytest

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.plan.cluster import Cluster
from shardlm.plan.report.laid_out import WIDTH
from shardlm.plan.serving import answer as answers
from shardlm.plan.serving.answer import answer_serving
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.report import tables
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.html import to_html
from shardlm.plan.serving.report.start import ROUTER, shown, start
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.verify import Program, VerifiedServing
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.speculation.config import SpeculativeConfig

BROWSER = chromium.find()
HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}</style>"
GIB = 2**30
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def case(**asked) -> ServingCase:
    shape = LlamaConfig(embed_dim=8192, num_layers=80, num_heads=64, mlp_dim=28_672).transformer()
    model = ServedModel(HOSTILE, shape, "bfloat16", 8192)
    return ServingCase(model, Cluster.of(GPUS["h100"], 16), EngineConfig(), 1024, 256, **asked)


def programs(gib: int) -> VerifiedServing:
    sent = {"tensor": {"all-reduce": 3 * 2**20}}
    return VerifiedServing((Program("decode", 256, 1, 0, gib * GIB, GIB, 1.01 * (gib + 1) * GIB, sent),), 12.0)


@pytest.fixture
def checked(monkeypatch):
    """An answer whose best plan's program does not fit, whose second one's process ended, and whose third one fits."""
    asked = []
    shown = [programs(90), VerifiedServing(failure="the compiler ended its process"), programs(60)]
    monkeypatch.setattr(answers, "impossible", lambda cluster: "")
    monkeypatch.setattr(answers, "verify_apart", lambda plans: [shown[asked.extend(plans) or len(asked) - 1]])
    heard = []
    found = answer_serving(case(), compiled=1, say=heard.append)
    assert asked == list(found.found.plans[:3])
    assert heard == [f"compiling the engine's programs of a replica on {p.mesh} for h100 ..." for p in asked]
    return found


def test_programs_that_do_not_fit_or_exist_go_behind_those_that_do(checked):
    told = json.loads(json.dumps(to_json(checked, 2), allow_nan=False))
    first, *_, last = told["plans"]
    assert checked.first.plan is checked.found.plans[2] and checked.first.fits
    statuses = [one["status"] for one in told["plans"]]
    assert statuses[0] == "verified" and statuses[-2:] == ["refused"] * 2 and set(statuses[1:-2]) <= {"estimated"}
    assert (
        first["compiled"][0]["total_bytes"] == 61 * GIB and last["compiled"] == [] and last["compile_seconds"] is None
    )
    for said in (to_text(told), to_html(told)):
        said = " ".join(said.split())
        assert "was refused: its programs need more memory than jax may take of a GPU" in said
        assert "was refused: the compiler ended its process" in said
        assert "verified: the engine" in said and "compiled: read from the programs" in said
    assert "tensor all-reduce 3.00" in " ".join(to_text(told).split()) and "+1.0%" in to_text(told)


def test_what_cannot_be_compiled_is_said_and_nothing_is_called_compiled(monkeypatch):
    monkeypatch.setattr(answers, "impossible", lambda cluster: "no CUDA plugin")
    monkeypatch.setattr(answers, "verify_apart", lambda plans: pytest.fail("nothing can be compiled"))
    for told in (to_json(answer_serving(case())), to_json(answer_serving(case(), compiled=1))):
        for said in (to_text(told), to_html(told)):
            assert "compiled: read" not in said and "verified: the" not in said and 'chip verified"' not in said
            assert "estimated: by formulas" in said
    assert "Nothing was verified: no CUDA plugin" in to_text(told)


def test_a_change_that_makes_it_fit_is_compiled_and_the_next_one_where_its_programs_do_not(monkeypatch):
    one = dataclasses.replace(case(), cluster=Cluster.of(GPUS["h100"], 1))
    told, shown, asked = {}, [], []
    monkeypatch.setattr(answers, "impossible", lambda cluster: "")
    monkeypatch.setattr(answers, "verify_apart", lambda plans: [shown[asked.extend(plans) or len(asked) - 1]])
    for name, *gib in (("first", 60), ("second", 90, 60), ("none", 90, 90)):
        shown[:], asked[:] = map(programs, gib), []
        with pytest.raises(ShardlmError) as error:
            answer_serving(one, compiled=1)
        told[name] = str(error.value)
        assert len(asked) == len(gib) and asked[0].case.engine.quantization == "int4"
    assert (
        "fits with quantization=int4 (verified: the programs of one device were compiled in 12 s, and" in told["first"]
    )
    assert "need 61.0 of the 75.2 GiB a GPU that jax may take)" in told["first"] and "(estimated)" in told["first"]
    refused = "quantization=int4, which fits as estimated, was refused: its programs need more memory than jax may take"
    assert refused in told["second"] and "it fits with num_gpus=3 (verified" in told["second"]
    assert "it fits with" not in told["none"] and told["none"].count("was refused") == 2
    monkeypatch.setattr(answers, "impossible", lambda cluster: "no CUDA plugin")
    with pytest.raises(ShardlmError, match=r"int4 \(estimated; nothing was verified: no CUDA plugin\)"):
        answer_serving(one, compiled=1)


def test_the_figures_of_the_first_plan_are_in_text_and_page():
    answer = answer_serving(case(request_rate=20.0))
    told = json.loads(json.dumps(to_json(answer), allow_nan=False))
    plan, first = answer.first.plan, told["plans"][0]
    found = first["estimated"]
    assert found["max_concurrency"] == plan.at_once and found["num_pages"] == plan.memory.layout.num_pages
    held = found["memory"]
    kinds = ("weights", "pages", "slots", "temporaries")
    assert math.fsum(held[f"{kind}_bytes"] for kind in kinds) == pytest.approx(held["total_bytes"])
    assert set(found["at_rate"]) == {
        *("requests_per_second", "tokens_per_second", "requests_running", "itl_seconds", "ttft_seconds"),
        *("share_of_time_for_prompts", "limit"),
    }
    for step in found["decode"]:
        bound = step["tokens_per_second"] / step["bandwidth_bound_tokens_per_second"]
        assert bound == pytest.approx(step["share_of_bandwidth_bound"]) and bound < 1
    assert pickle.loads(pickle.dumps(plan)).usual == plan.usual  # it goes to another process to be compiled
    facts = {fact.what: fact.said for fact in tables.facts(told)}
    means = {name: f"{1000 * answer.times[f'{name}_seconds']['mean']:.3g} ms" for name in ("ttft", "tpot")}
    assert (facts["first token, mean"], facts["between tokens, mean"]) == (means["ttft"], means["tpot"])
    rate = plan.usual.rate * plan.replicas
    assert rate == pytest.approx(20) and ("requests/s of all", "20.0") in {(f.what, f.said) for f in tables.facts(told)}
    # The hosts that its replicas take, the last of them perhaps not whole.
    hosts = told["placement"]["hosts"]
    used = [gpu for host in hosts for gpu in host["gpus"] if gpu["place"]]
    assert len(used) == plan.num_gpus and len(hosts) == told["cluster"]["num_hosts"] == -(-plan.num_gpus // 8)
    text, page = to_text(told), to_html(told)
    assert max(map(len, text.replace(HOSTILE, "x" * 20).splitlines())) <= WIDTH
    page_checker.check(page)
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "{{ 7 * 7 }}" in page
    assert [line for line in text.splitlines() if line.startswith("Start it")] and "<h2>Start it</h2>" in page
    words = text.split()
    for table in (tables.plans(told), tables.times(told), tables.memory(told), tables.decode(told)):
        assert f'id="table-{table.key}"' in page and table.title in " ".join(words)
        for cell in (cell for row in table.rows for cell in row):
            assert str(markupsafe.escape(cell)) in page and all(word in words for word in cell.split())


def started(mesh: MeshSpec, replicas: int, name: str = "FOLDER", **options) -> list[tuple[str, str]]:
    """Of hosts of eight GPUs."""
    here = types.SimpleNamespace(
        cluster=types.SimpleNamespace(gpus_per_host=8),
        model=types.SimpleNamespace(name=name),
        engine=EngineConfig(mesh=mesh, **options),
    )
    own = mesh.size("pipeline", "expert", "tensor")
    plan = types.SimpleNamespace(case=here, mesh=mesh, replicas=replicas, gpus_per_replica=own)
    return [(one["where"], one["command"]) for one in start(plan)]


def test_how_a_plan_is_started():
    router = ("Before them:", ROUTER)
    one = started(MeshSpec(data=2, tensor=4), 2, "a folder", kv_cache_bytes=2**31, enable_prefix_caching=False)
    words = "--data=2 --tensor=4 --kv_cache_gib=2 --noenable_prefix_caching"
    assert one == [("On a host:", f"python -m launch.serve '--model=a folder' {words}")]
    [(_, blind)] = started(MeshSpec(), 1, limit_mm_per_prompt={"image": 0})
    assert shlex.split(blind)[-1] == '--limit_mm_per_prompt={"image":0}'
    # Five replicas of four GPUs: two on each host, one on the last.
    serve = "python -m launch.serve --model=FOLDER"
    assert started(MeshSpec(data=5, tensor=4), 5, "configs/llama3_8b.py") == [
        ("On each of 2 hosts:", f"{serve} --data=2 --tensor=4"),
        ("On a host:", f"{serve} --tensor=4"),
        router,
    ]
    (where, command), (_, last) = started(MeshSpec(data=2, pipeline=2, tensor=8), 2, speculative_config=NGRAM)
    assert where.startswith("On each of the 2 hosts of a replica, under srun") and last == ROUTER
    given = shlex.split(command)
    assert given[:6] == [*shlex.split(serve), "--pipeline=2", "--tensor=8"] and given[-1] == "--distributed"
    assert SpeculativeConfig.from_json(given[-2].partition("=")[2]) == SpeculativeConfig.parse(NGRAM)
    text = shown({"where": where, "command": command}, 60)
    assert shlex.split(text[text.index("python") :].replace("\\\n", "")) == given


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: SHARDLM_CHROMIUM=PATH names one")
def test_a_person_looks_at_the_pictures(checked, tmp_path):
    told = to_json(checked, 4)
    with page_checker.shown(BROWSER, tmp_path, to_html(told), HOSTILE) as page:
        number = functools.partial(page_checker.number, page)
        drawn = len(told["plans"])
        assert number("#memory .bar:not(.head)") == drawn + 2 and number("#memory .over") == 1
        steps = told["plans"][0]["estimated"]["decode"]
        assert number("#decode .point") == len(steps) > 3 and number("#mesh .gpu") == 16
        limit = told["plans"][0]["estimated"]["memory_limit_bytes"]
        totals = [one["estimated"]["memory"]["total_bytes"] for one in told["plans"]]
        width = "b => b.getBoundingClientRect().width"
        bars = "(w => [...document.querySelectorAll('#memory .bar:not(.head) .track')].map(t => " + (
            f"[...t.querySelectorAll('.part')].reduce((sum, part) => sum + w(part), 0) / w(t)))({width})"
        )
        widest = 1.02 * max(limit, 91 * GIB)
        assert page.value(bars)[0] == pytest.approx(totals[0] / widest, abs=0.01)
        assert page.value(bars)[1] == pytest.approx(61 * GIB / widest, abs=0.01)
        tops = page.value("[...document.querySelectorAll('#decode .point')].map(p => p.getBoundingClientRect().top)")
        assert tops == sorted(tops, reverse=True)  # more requests at once, more tokens
        page.value("document.querySelector('#decode .point').scrollIntoView()")
        box = "document.querySelector('#decode .point').getBoundingClientRect()"
        x, y = page.value(f"{box}.x") + 4, page.value(f"{box}.y") + 4
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert page.until("!tip.hidden && tip.textContent").startswith("1 requests: ")
        page_checker.look(page)


def test_one_mesh_that_does_not_do_is_told_of_as_one():
    refused = [{"mesh_text": "data=2", "why": "no room"}, {"mesh_text": "data=4", "why": "none"}]
    told = {"plans": [], "plans_left_out": 0, "asked": {"request_rate": 0}}
    assert tables.plans(told | {"refused": refused[:1]}).note.endswith(
        "1 more does not do, for instance data=2: no room."
    )
    assert "2 more do not do, for instance data=2" in tables.plans(told | {"refused": refused}).note
