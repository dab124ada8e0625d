"""Plans that are compiled: what is said where compiling is not possible, fails, or shows that a plan does not fit."""

import concurrent.futures
import dataclasses
import operator
import os
import pathlib

import jaxlib
import pytest
from gpu_programs import MARKS

from shardlm.config import load
from shardlm.errors import ShardlmError
from shardlm.plan import answer as answers
from shardlm.plan import without_loop
from shardlm.plan.answer import answer
from shardlm.plan.apart import Failed, _result, each_apart
from shardlm.plan.asked import cluster_of
from shardlm.plan.bill import CompiledStep
from shardlm.plan.config_source import source
from shardlm.plan.constraints import Constraints
from shardlm.plan.report.data import to_json
from shardlm.plan.report.text import to_text
from shardlm.plan.verify import Verified

CONFIG = load(str(pathlib.Path(__file__).parent.parent.parent / "configs" / "llama3_8b.py"))
H100 = cluster_of("h100", None, 8)
GIB = 2**30


def test_what_cannot_be_compiled_here_is_said_and_leaves_the_estimates(monkeypatch):
    monkeypatch.setattr(answers, "impossible", lambda cluster: "pip install 'shardlm[cuda13]'")
    monkeypatch.setattr(answers, "verify", lambda plans: pytest.fail("nothing can be compiled"))
    told = answer(CONFIG, H100, Constraints.parse(["remat=full", "mesh.pipeline=1"]), compiled=2)
    assert told.unverified == "pip install 'shardlm[cuda13]'"
    assert told.best.plan is told.found.plans[0] and all(one.verified is None for one in told.ranked)


def test_a_plan_whose_program_fails_or_does_not_fit_goes_behind_those_that_fit(monkeypatch):
    shown = iter(
        [
            Verified(80 * GIB, 10 * GIB),
            Verified(failure="the compiler ended its process"),
            Verified(10 * GIB, 10 * GIB, CompiledStep(2.0, (), None, {})),
            Verified(10 * GIB, 20 * GIB, CompiledStep(1.0, (), None, {})),
        ]
    )
    monkeypatch.setattr(answers, "impossible", lambda cluster: "")
    monkeypatch.setattr(answers, "verify", lambda plans: [next(shown) for _ in plans])
    monkeypatch.setattr(answers, "_kind", lambda plan: (plan.config.mesh, plan.config.rules))
    heard = []
    held = Constraints.parse(["remat=full", "mesh.pipeline=1"])
    told = answer(CONFIG, H100, held, compiled=2, say=heard.append)
    first, second, *rest = told.ranked
    assert [said[:19] for said in heard] == ["compiling for h100:"] * 2 and str(first.plan.config.mesh) in heard[1]
    assert [one.plan for one in (second, first)] == list(told.found.plans[2:4]) and told.best is first
    assert all(one.verified is None for one in rest[:-2])
    assert [one.plan for one in rest[-2:]] == list(told.found.plans[:2])
    assert not rest[-2].fits and rest[-1].verified.failure


def test_what_a_program_needs_more_than_estimated_is_expected_of_its_kind(monkeypatch):
    asked = []

    def needs(plans):
        asked.extend(plans)
        return [needed(plan) for plan in plans]

    def needed(plan):
        estimated = int(plan.memory.total - plan.memory.reserve)
        over_context = plan.config.mesh.context > 1
        return Verified(4 * estimated if over_context else estimated, 0, CompiledStep(1.0, (), None, {}))

    monkeypatch.setattr(answers, "impossible", lambda cluster: "")
    monkeypatch.setattr(answers, "verify", needs)
    held = ["remat=full", "mesh.pipeline=1", "mesh.tensor=1", "rules=zero3,hybrid"]
    told = answer(CONFIG, H100, Constraints.parse(held), compiled=4)
    over_context = [one.plan.config.mesh.context > 1 for one in told.ranked]
    assert over_context == sorted(over_context)  # those that would not fit come last
    assert 1 <= sum(plan.config.mesh.context > 1 for plan in asked) < sum(over_context)  # and not all are asked for


def test_of_what_would_make_it_fit_the_first_whose_program_does_is_verified(monkeypatch):
    few = cluster_of("h100", None, 1)
    held = Constraints.parse(["mesh.tensor=1", "remat=full", "offload.params=false"])
    shorter = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, seq_len=6144))
    asked = []

    def needs(plans):
        asked.extend(plans)
        return [Verified(90 * GIB if len(asked) == 1 else 9 * GIB, GIB, CompiledStep(1.0, (), None, {})) for _ in plans]

    monkeypatch.setattr(answers, "impossible", lambda cluster: "")
    monkeypatch.setattr(answers, "verify", needs)
    estimated = answer(shorter, few, held).changes
    assert len(estimated) > 2 and not any(one.verified for one in estimated)
    told = answer(shorter, few, held, compiled=1)
    assert told.best is None and [p.config for p in asked] == [one.plan.config for one in estimated[:2]]
    verified, *left, refused = told.changes
    assert [one.what for one in (refused, verified, *left)] == [one.what for one in estimated]
    assert verified.ranked.fits and not refused.ranked.fits and not any(one.verified for one in left)


def test_what_formulas_say_does_not_fit_by_less_than_they_may_be_wrong_is_compiled(monkeypatch):
    words = ["mesh.fsdp=8", "rules=zero3", "remat=full", "train.accumulation=1", "offload.optimizer=false"]
    held = Constraints.parse(words)
    least = min(answer(CONFIG, H100, held).found.plans, key=lambda plan: plan.memory.total).memory
    used = least.total - least.reserve
    tight = dataclasses.replace(H100, gpu=dataclasses.replace(H100.gpu, hbm_bytes=int(used / 0.92 * 0.99)))
    monkeypatch.setattr(answers, "impossible", lambda cluster: "")
    shown = Verified(int(used * 0.97), 0, CompiledStep(1.0, (), None, {}))
    monkeypatch.setattr(answers, "verify", lambda plans: [shown for _ in plans])
    assert answer(CONFIG, tight, held).best is None
    told = answer(CONFIG, tight, held, compiled=1)
    assert told.best.plan is told.found.smallest and not told.changes


def test_the_best_is_compiled_without_its_loop_and_the_quicker_program_taken(monkeypatch):
    """After the others; what makes layers again or does not fit is left with its loop."""
    held = ["mesh.fsdp=8", "rules=zero3", "train.accumulation=1"]
    few = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, num_layers=8))
    looped, heard = Verified(10 * GIB, 10 * GIB, CompiledStep(1.0, (), None, {})), []

    def told(shown, *words, config=few):
        monkeypatch.setattr(answers, "impossible", lambda cluster: "")
        monkeypatch.setattr(answers, "verify", lambda plans: [looped for _ in plans])
        monkeypatch.setattr(without_loop, "verify", lambda plans: [shown] if shown else pytest.fail("compiled"))
        heard.clear()
        return answer(config, H100, Constraints.parse([*held, *words]), compiled=1, say=heard.append)

    quicker = dataclasses.replace(looped, step=CompiledStep(0.9, (), None, {}))
    found = told(quicker, "remat=dots")
    assert [one.plan.config.unroll for one in found.ranked] == [0, 1] and found.best is found.ranked[0]
    first, second = (one.plan.config for one in found.ranked)
    assert dataclasses.replace(first, unroll=1) == second and "without a loop over its layers" in heard[-1]
    shown = to_json(found)
    assert [plan["unroll"] for plan in shown["plans"]] == [0, 1] and "unroll" in to_text(shown).splitlines()[5]
    assert "unroll=0" in source(first, "")
    slower = dataclasses.replace(looped, step=CompiledStep(1.1, (), None, {}))
    for other, word in ((slower, "which stays"), (Verified(90 * GIB), "does not fit"), (Verified(failure="no"), "fit")):
        assert [one.plan.config.unroll for one in told(other, "remat=dots").ranked] == [1] and word in heard[-1]
    for words in (["remat=full"], ["remat=dots", "unroll=1"]):
        assert [one.plan.config.unroll for one in told(None, *words).ranked] == [1]
    many = dataclasses.replace(few.model, num_layers=without_loop.MOST + 4, mlp_dim=1024)
    many = dataclasses.replace(few, model=many)
    assert told(None, "remat=dots", config=many).best.plan.config.unroll == 1
    assert told(None, "remat=dots", "unroll=0").best.plan.config.unroll == 0  # asked for: all are


def test_whatever_ends_a_compilation_is_a_failure_of_that_job_alone():
    def ended(error):
        future = concurrent.futures.Future()
        future.set_exception(error)
        return _result(future)

    assert ended(RuntimeError("INTERNAL: no\nmore")) == Failed("RuntimeError: INTERNAL: no")
    assert ended(AssertionError()) == Failed("AssertionError")
    assert ended(ShardlmError("layers=3 cannot be split")) == Failed("layers=3 cannot be split")
    found = each_apart(operator.call, [(os._exit, 1), (max, 1, 2)], workers=1)
    assert "ended its process" in found[0].why and found[1] == 2


class TestCompiled:
    pytestmark = MARKS

    def test_the_best_is_compiled_for_its_gpus(self):
        few = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, seq_len=2048))
        told = answer(few, H100, Constraints.parse(["mesh.fsdp=8", "rules=zero3", "remat=names"]), compiled=1)
        best = told.best
        assert not told.unverified and not best.verified.failure
        # Within 5% with jaxlib 0.10.2; 0.11.2 needs 5.3% less than is foreseen.
        assert best.verified.hbm_bytes == pytest.approx(sum(best.plan.memory.kinds.values()), rel=0.06)
        step = best.verified.step
        assert {row.link for row in step.rows} == {"NVLink"} and {row.axes for row in step.rows} == {("fsdp",)}
        # Of jaxlib 0.10.2's program 0.289 s are estimated (kernels 0.250), where 0.272 are foreseen; of 0.11.2's 0.374
        # (0.308): what is taken of the MLPs' gradients to their devices is not behind kernels there. Not yet mended.
        rel = 0.25 if jaxlib.__version__.startswith("0.10.") else 0.4
        assert step.step_seconds == pytest.approx(best.plan.step_seconds, rel=rel)
