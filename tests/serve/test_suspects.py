"""Requests that break the batch they are in, whatever arrives, ends or leaves beside them: each is answered with the
error, and everybody else with the reply that it would get alone, each token once. No model: fake_device.py."""

import types

import hypothesis.strategies as st
import numpy as np
import pytest
from engines import TOKENIZER
from fake_device import EOS, VOCAB, FakeDevice, reply
from hypothesis import example, given, settings

from shardlm.layers.page_layout import PageLayout
from shardlm.ops.batch_sampling import Sampled
from shardlm.serve import probe
from shardlm.serve.engine import Engine
from shardlm.serve.outputs import EngineError
from shardlm.serve.page_table import PageTable
from shardlm.serve.recovery import FAILURES
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.suspects import Suspects

LENGTH = 20
P = [1, 2, 3, 4, 5, 6, 1, 2, 3]  # that prompts begin with


class FakeRunner:
    """As Runner, over a FakeDevice. `poison`: ids of requests, with the position from which on a batch with them fails,
    and whether it does so at its start. `lost`: numbers of batches that fail whoever is in them."""

    proposer = image_encoder = None
    model = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=VOCAB, embed_dim=8))
    config = types.SimpleNamespace(layout=types.SimpleNamespace(windows=(0,)))

    def __init__(self, rows: int, pages: int, poison: dict[str, tuple[int, bool]], lost=()):
        self.rows, self.poison, self.lost, self.count, self.failed = rows, poison, lost, 0, 0
        self.pages = PageTable(pages, 4, windows=(0,), longest_step=99, caching=True)
        self.reset()

    def reset(self):
        self.device = FakeDevice(self.pages, self.rows)

    def start(self, batch, settings, masks=()):
        self.count += 1
        place = {row.request.id: row.end for row in batch.rows}
        broken = [early for id, (at, early) in self.poison.items() if place.get(id, 0) > at]
        broken += [False] * (self.count in self.lost)
        if any(broken):
            self._fail()
        if probe.NAME not in place:
            self.device.dispatch(batch)
        return types.SimpleNamespace(batch=batch, sampled=lambda: self._read(batch, bool(broken)))

    def _read(self, batch, broken: bool) -> Sampled:
        if broken:
            self._fail()
        if batch.rows[0].request.id == probe.NAME:
            return None
        ran, tokens, _ = self.device.run()
        assert ran is batch
        zeros = np.zeros(tokens.shape, np.float32)
        return Sampled(tokens, zeros, zeros[..., None], zeros[..., None], zeros)

    def _fail(self):
        self.failed += 1
        raise RuntimeError("out of memory")


def engine_of(runner: FakeRunner) -> Engine:
    return Engine(runner, Scheduler(SchedulerConfig(runner.rows, 16, LENGTH, (1, 4)), runner.pages), TOKENIZER, [EOS])


@st.composite
def arrivals(draw):
    """(prompt, seed, at which step it comes, after how many more its client leaves or None, how it is poisonous or
    None)."""
    prefix = draw(st.sampled_from(([], P)))
    prompt = prefix + draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=5))
    leaves = draw(st.sampled_from((None, None, None, 1, 4)))
    poison = draw(st.sampled_from((None, None, None, (0, True), (0, False), (6, True), (11, False), (14, False))))
    return prompt, draw(st.integers(0, 3)), draw(st.sampled_from((0, 0, 0, 1, 3, 6))), leaves, poison


@example(  # the one that breaks its batch is gone before that has failed: the other one in it is not to blame
    requests=[
        ([1], 0, 3, 4, (0, True)),
        ([*P, 1], 0, 0, None, (11, False)),
        ([1], 0, 3, None, None),
        ([*P, 5], 0, 0, None, None),
    ],
    rows=3,
    spare=4,
    lost=set(),
)
@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(arrivals(), min_size=1, max_size=9),
    rows=st.integers(1, 5),
    spare=st.integers(0, 12),
    lost=st.sets(st.integers(1, 12)),
)
def test_only_who_breaks_batches_is_answered_with_the_error(requests, rows, spare, lost):
    poison = {str(n): one[4] for n, one in enumerate(requests) if one[4]}
    # Failures of nobody's doing, no two together: a suspect that one hits by chance would be taken for guilty.
    lost = () if poison else {min(lost, default=0)}
    runner = FakeRunner(rows, 1 + PageLayout(0, (0,), ()).pages_of(LENGTH, 4, 99) + spare, poison, lost)
    engine, said, done, step = engine_of(runner), {}, {}, 0
    while engine.has_unfinished or step <= 6:
        for n, (prompt, seed, comes, leaves, _) in enumerate(requests):
            if step == comes:
                engine.add(str(n), prompt, SamplingParams(temperature=0, max_tokens=12, seed=seed))
            if leaves is not None and step == comes + leaves:
                engine.abort(str(n))
        for output in engine.step():
            tokens, before = output.outputs[0].token_ids, said.get(output.request_id, [])
            assert tokens[: len(before)] == before and output.request_id not in done  # nothing is taken back
            said[output.request_id] = list(tokens)
            if output.finished:
                done[output.request_id] = output
        runner.pages.check_invariants()
        step += 1
        assert step < 400, "it does not end"
    assert engine.ended is None and runner.pages.num_used == 0
    for n, (prompt, seed, _, leaves, poisonous) in enumerate(requests):
        want, reason = reply(prompt, SamplingParams(max_tokens=12, seed=seed), "", LENGTH)
        want = want[:-1] if reason == "stop" else want
        output = done.get(str(n))
        assert output is not None or leaves is not None
        if output is None:
            continue
        got = output.outputs[0]
        if output.error:
            assert poisonous and "the batch of this request alone failed with RuntimeError: out of" in output.error
            assert got.token_ids == want[: len(got.token_ids)]
        else:
            assert (got.token_ids[: len(want)], got.finish_reason) == (want, reason)
            assert not poisonous or len(prompt) + len(want) <= poisonous[0] + 1, "it went by unnoticed"


def test_many_that_break_batches_do_not_end_the_engine():
    poison = {str(n): (0, n % 2 == 0) for n in range(24)}
    runner = FakeRunner(8, 60, poison)
    engine, done = engine_of(runner), {}
    for n in range(32):
        engine.add(str(n), [1, 2, 3], SamplingParams(temperature=0, max_tokens=6, seed=n))
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert {id for id, output in done.items() if output.error} == set(poison) and len(done) == 32
    assert runner.failed > 2 * FAILURES and engine.ended is None
    # Where nothing runs, the engine ends and has answered nobody with an error.
    runner.poison, runner.lost = {}, range(runner.count + 1, 999)
    for n in range(8):
        engine.add(str(n), [1, 2, 3], SamplingParams(temperature=0, max_tokens=6, seed=n))
    with pytest.raises(EngineError, match=r"4 batches failed one after another, .* the engine's own with out of"):
        while engine.has_unfinished:
            assert engine.step() == []
    assert len(engine.hand_over()) == 8


def test_suspects():
    a, b, c, d = (Request(str(n), [1, 2], SamplingParams(max_tokens=9)) for n in range(4))
    suspects = Suspects()
    assert suspects.trial is None and not suspects.passed()
    assert suspects.accuse(dict.fromkeys((a, b, c), 2)) is None and set(suspects.trial) == {a, b}
    assert suspects.accuse({b: 2}) is b and set(suspects.trial) == {a} and not suspects.passed()
    a.tokens.append(5)
    assert suspects.passed() and set(suspects.trial) == {c}
    assert suspects.accuse({d: 2}) is None and set(suspects.trial) == {d}  # alone, and for the first time
    assert suspects.accuse({d: 2}) is d and suspects.passed() and set(suspects.trial) == {c}
