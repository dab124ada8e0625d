"""While thoughts are free, tokens are sampled several at a time, ahead of the host; replies are those of lockstep."""

import functools

import pytest
from engines import TOKENIZER, another, finished, random_engine

from shardlm.mesh import MeshSpec
from shardlm.serve.deterministic import DeterministicRunner
from shardlm.serve.replies import Reply
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.scheduler import Scheduler
from shardlm.serve.speculation.config import SpeculativeConfig

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
CHOICES = ["true", "ags", "12,"]
BIAS = {TOKENIZER.encode(one)[0]: 3.0 for one in "na"}
WISHES = {
    "plain": {"after": "x y"},  # which hardly comes: thoughts to the end
    "soon": {"after": "a"},
    "in parts": {"after": "na"},  # what is forbidden changes with every n
    "twice": {"after": ("na", '"')},
    "opened": {"after": "g", "opening": '{"'},
}


def params_of(name: str, seed: int, **more) -> SamplingParams:
    wish = StructuredOutputs(choice=CHOICES, **WISHES[name])
    sampled = {"temperature": 1.3, "top_p": 0.95, "seed": seed, "logit_bias": BIAS, "logprobs": 2}
    return SamplingParams(max_tokens=40, ignore_eos=True, structured_outputs=wish, **(sampled | more))


def served(engine, together: bool) -> dict:
    """All replies. One after the other they run in programs of the same sizes, however many steps those take."""
    found = {}
    for seed, name in enumerate(WISHES):
        more = {"frequency_penalty": 0.7, "repetition_penalty": 1.1} if seed % 2 else {}
        engine.add(name, [5, 6, 7, seed], params_of(name, seed, **more, n=2 if together else 1))
        found |= {} if together else finished(engine)
    found |= finished(engine)
    return {
        name: [
            (one.text, one.token_ids, one.logprobs, one.cumulative_logprob, one.finish_reason) for one in told.outputs
        ]
        for name, told in found.items()
    }


@functools.cache
def engine_of(kind: str):
    """Of the same programs as the engines of test_thinking_budget.py and test_reply_form.py."""
    options = {"deterministic": {"runner_of": DeterministicRunner}, "drafts": {"speculative": NGRAM}}.get(kind, {})
    return random_engine(MeshSpec(), rows=10, tokens=32, pages=300, least=10, **options)[0]


@pytest.mark.parametrize("kind", ("alone", "deterministic", pytest.param("drafts", marks=pytest.mark.wide)))
def test_the_replies_are_those_of_lockstep_to_the_bit(kind, monkeypatch):
    engine = engine_of(kind)
    taken, own = [], Scheduler._take_back
    monkeypatch.setattr(Scheduler, "_take_back", lambda *args: taken.append(args) or own(*args))
    begun, together = engine.scheduler._batches, kind == "deterministic"
    ahead = served(engine, together)
    batches = engine.scheduler._batches - begun
    assert len(taken) >= 3
    monkeypatch.setattr(Reply, "bound", property(lambda reply: 0))
    lockstep = served(engine, together)
    assert ahead == lockstep and len(taken) >= 3
    ends = [one[-1] for replies in ahead.values() for one in replies]
    assert ends.count("stop") >= 2 and ends.count("length") >= 2, "both kinds are to be seen"
    assert batches < 0.7 * (engine.scheduler._batches - begun - batches)


def test_free_thoughts_take_a_fraction_of_the_dispatches():
    """41 tokens at four a dispatch, of which the first comes with the prompt, and the mask is sent once: of tokens that
    would end the free part and go on, and of those that would end the reply."""
    engine = another(engine_of("alone"), tokens=32, pages=300)
    for after, ignore_eos, masks in (("x y z", True, 0), ("na", True, 1), ("x y z", False, 1)):
        engine.runner.reset()  # no mask is there
        ran, run = [], engine.runner._run
        engine.runner._run = lambda key, *rest, ran=ran, run=run: ran.append(key) or run(key, *rest)
        held = StructuredOutputs(regex="a", after=after)
        params = SamplingParams(max_tokens=41, temperature=0, ignore_eos=ignore_eos, structured_outputs=held)
        engine.add("alone", [5, 6, 7], params)
        before = engine.scheduler._batches
        [reply] = finished(engine)["alone"].outputs
        del engine.runner._run
        assert reply.finish_reason == "length" and after not in reply.text
        assert (engine.scheduler._batches - before, ran.count("allowed")) == (11, masks), ran
