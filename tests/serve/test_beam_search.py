"""Beam search over a model of three tokens whose probabilities are written down; test_families_served.py has what
transformers finds."""

import itertools
import math

import pytest

from shardlm.errors import ShardlmError
from shardlm.serve.beam_search import Beams, BeamSearchParams, search
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput, TokenLogprob
from shardlm.serve.request import PromptTooLong
from shardlm.serve.sampling_params import SamplingParams

A, B, END = 0, 1, 2
# After which token (the prompt's last one is END) what follows: greedily A A A, and B leads to the best of three.
FOLLOWS = {END: (0.5, 0.4, 0.1), A: (0.4, 0.3, 0.3), B: (0.05, 0.9, 0.05)}


def place_after(token):
    ranked = sorted(enumerate(FOLLOWS[token]), key=lambda one: -one[1])
    return Place.make(TokenLogprob(id, math.log(p), rank, str(id)) for rank, (id, p) in enumerate(ranked, 1))


def asked(beams):
    place = lambda tokens: CompletionOutput(0, "", [A], 0.0, [place_after(tokens[-1])], "length")  # noqa: E731
    return [RequestOutput("", None, beam.tokens, None, [place(beam.tokens)], True) for _, beam in beams]


def best(params, prompts=1, **options):
    every = [Beams([END], params, [END], 100, **options) for _ in range(prompts)]
    search(every, asked)
    found = [[(tuple(beam.tokens[1:]), beam) for beam in beams.found()] for beams in every]
    assert all([tokens for tokens, _ in one] == [tokens for tokens, _ in found[0]] for one in found)
    return dict(found[0])


def every_text(length, ends):
    """(tokens, log-probability) of all texts of so many tokens, or that end before."""
    for n in range(1, length + 1):
        for tokens in itertools.product((A, B, END), repeat=n):
            inside, last = tokens[:-1], tokens[-1]
            if (ends and (END in inside or (n < length and last != END))) or (not ends and n < length):
                continue
            yield tokens, sum(math.log(FOLLOWS[a][b]) for a, b in itertools.pairwise((END, *tokens)))


@pytest.mark.parametrize("ends", (False, True))
@pytest.mark.parametrize("penalty", (0.0, 1.0, 3.0))
def test_a_search_that_leaves_nothing_out_finds_the_best_of_all(ends, penalty):
    found = best(BeamSearchParams(9, 3, ignore_eos=not ends, length_penalty=penalty), prompts=2)
    score = lambda text, total: total / (1 + len(text) - (ends and text[-1] == END)) ** penalty  # noqa: E731
    expected = sorted(every_text(3, ends), key=lambda one: -score(*one))[:9]
    assert [beam.cum_logprob for beam in found.values()] == pytest.approx([total for _, total in expected])
    for text, beam in found.items():
        assert (beam.finish_reason, beam.stop_reason) == (
            ("stop", END) if ends and text[-1] == END else ("length", None)
        )
        assert [place.chosen.token_id for place in beam.logprobs] == list(text) and len(beam.logprobs[0]) == 3


def test_few_beams_leave_most_out_and_a_model_s_length_ends_them():
    assert [*best(BeamSearchParams(1, 3, ignore_eos=True))] == [(A, A, A)]
    assert next(iter(best(BeamSearchParams(2, 3, ignore_eos=True)))) == (B, B, B)
    beams = Beams([END] * 97, BeamSearchParams(2, None, ignore_eos=True), [END], 100)
    search([beams], asked)
    assert {len(beam.tokens) for beam in beams.found()} == {100} and beams.ask.logprobs == 4
    with pytest.raises(PromptTooLong, match="max_model_len=100 must hold it and at least one new token"):
        Beams([END] * 100, BeamSearchParams(2, 5), [END], 100)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beam_width": 11}, "beam_width=11 must be an integer from 1 to 10: each beam is followed by twice as many"),
        ({"beam_width": True}, "beam_width=True must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer of at least 1, or None"),
        ({"length_penalty": math.nan}, "length_penalty=nan must be a number"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"early_stopping": True}, "BeamSearchParams has no early_stopping .*; beams go on until max_tokens"),
    ],
)
def test_what_cannot_be_searched_is_refused(wrong, message):
    with pytest.raises(ShardlmError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3} | wrong)


def test_parameters_of_replies_say_who_searches():
    with pytest.raises(ShardlmError, match=r"has no use_beam_search .*; LLM.beam_search\(prompts, BeamSearchParams\("):
        SamplingParams(use_beam_search=True)
