"""The names, defaults and limits of sampling parameters, and what a user reads who missed them."""

import dataclasses
import math
import re

import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.serve.request import Request, check_prompt
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs

WRONG = [
    ({"temperature": -0.5}, "temperature=-0.5 must be at least 0 (0: greedy)"),
    ({"temperature": math.nan}, "temperature=nan must be at least 0 (0: greedy)"),
    ({"temperature": math.inf}, "temperature=inf must be at least 0 (0: greedy)"),
    ({"temperature": "hot"}, "temperature='hot' must be a number, at least 0 (0: greedy)"),
    ({"temperature": True}, "temperature=True must be a number, at least 0 (0: greedy)"),
    ({"top_p": -0.1}, "top_p=-0.1 must be from 0 (the likeliest token) to 1 (every token)"),
    ({"top_p": 1.5}, "top_p=1.5 must be from 0 (the likeliest token) to 1 (every token)"),
    ({"top_k": -2}, "top_k=-2 must be at least 1, or 0 or -1 for every token"),
    ({"top_k": 2.5}, "top_k=2.5 must be an integer, at least 1, or 0 or -1 for every token"),
    ({"min_p": -0.1}, "min_p=-0.1 must be from 0 to 1 (0: every token)"),
    ({"repetition_penalty": 0}, "repetition_penalty=0.0 must be above 0 (1 for none)"),
    ({"presence_penalty": 3}, "presence_penalty=3 must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3 must be from -2 to 2"),
    ({"n": 0}, "n=0 must be at least 1"),
    ({"max_tokens": -1}, "max_tokens=-1 must be at least 0, or None"),
    ({"max_tokens": True}, "max_tokens=True must be an integer, at least 0, or None"),
    ({"min_tokens": -1}, "min_tokens=-1 must be at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8; lower the one or raise the other"),
    ({"logprobs": 21}, "logprobs=21 must be from 0 to 20, or None"),
    ({"prompt_logprobs": 21}, "prompt_logprobs=21 must be from 0 to 20, or None"),
    *(
        ({name: -1}, "text that is given, and the model that shardlm.load opens all logits")
        for name in ("logprobs", "prompt_logprobs")
    ),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 must be at least 1, or None"),
    ({"seed": 2**63}, "seed=9223372036854775808 must be an integer of 64 bits, or None"),
    ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
    ({"stop": [""]}, "stop=[''] has an empty text: it would end every reply at once; leave it out"),
    ({"stop": [3]}, "stop=[3] must be a list of texts"),
    ({"bad_words": "word"}, "bad_words='word' must be a list of texts"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids=[1, -1] must be a list of token ids, integers from 0"),
    ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list of token ids"),
    ({"logit_bias": [1]}, "logit_bias=[1] must be a mapping from token id to what is added to its logit"),
    ({"logit_bias": {"a": 1}}, "logit_bias has the key 'a'; its keys must be token ids, integers from 0"),
    ({"logit_bias": {"7": 200}}, "logit_bias[7]=200 must be from -100 to 100"),
    (
        {"stop": [f"a{i}" for i in range(65)]},
        "stop has 65 texts of 185 characters together; at most 64 texts and 16384 characters are possible",
    ),
    (
        {"stop": "a" * 20_000},
        "stop has 1 texts of 20000 characters together; at most 64 texts and 16384 characters are possible",
    ),
    (
        {"bad_words": [f"a{i}" for i in range(301)]},
        "bad_words has 301 texts of 1094 characters together; at most 300 texts and 16384 characters are possible",
    ),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids has 5000 token ids; at most 4096 are possible"),
    ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias has 301 tokens; at most 300 are possible"),
    ({"allowed_token_ids": []}, "allowed_token_ids=[] must be a list of at least one token id, or None"),
    (
        {"structured_outputs": {"yaml": 1}},
        "StructuredOutputs has no yaml (given: 1); there are json, regex, choice, grammar, "
        "structural_tag, after, opening, instead",
    ),
    ({"structured_outputs": {"json_object": True}}, 'has no json_object (given: True); it is json={"type": "object"}'),
    (
        {"structured_outputs": {1: 2}},
        "must be a mapping with one of json, regex, choice, grammar, structural_tag",
    ),
    # Names of vLLM's.
    ({"best_of": 2}, "best_of=2 must be n=1; ask for n replies and choose"),
    ({"detokenize": False, "stop": "a"}, "leaves no text in which to look for stop; give stop_token_ids"),
    ({"guided_decoding": {"json": {}}}, "it is called structured_outputs, a StructuredOutputs or a mapping"),
    (
        {"logits_processors": [len]},
        "bad_words and structured_outputs say what may be written",
    ),
    ({"tempreature": 1}, "SamplingParams has no tempreature (given: 1); did you mean temperature?"),
    ({"structured_outputs": "json"}, "structured_outputs='json' must be a StructuredOutputs or None"),
]
WRONG_STRUCTURES = [
    ({}, "exactly one of json, regex, choice, grammar, structural_tag; given: none"),
    (
        {"regex": "a", "choice": ["b"]},
        "one of json, regex, choice, grammar, structural_tag; given: regex, choice",
    ),
    ({"json": 3}, "json=3 must be a JSON schema, as text or as a mapping"),
    ({"regex": ""}, "regex='' must be a text that is not empty"),
    ({"choice": []}, "choice=[] must be a list of at least one text"),
    ({"choice": ["a", ""]}, "choice=['a', ''] has an empty text: give the texts to choose from"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(values)[:50] for values, _ in WRONG])
def test_a_wrong_value_is_named_with_what_it_must_be(values, message):
    with pytest.raises(ShardlmError, match=re.escape(message) + "$"):
        SamplingParams(**values)


@pytest.mark.parametrize(("values", "message"), WRONG_STRUCTURES, ids=[str(values) for values, _ in WRONG_STRUCTURES])
def test_a_wrong_structure_is_named(values, message):
    with pytest.raises(ShardlmError, match=re.escape(message) + "$"):
        StructuredOutputs(**values)


def test_defaults_are_those_of_vllm():
    # docs.vllm.ai/en/stable/api/vllm/sampling_params
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (False, True, False)


def test_values_come_out_in_one_form():
    params = SamplingParams(stop="end", temperature=1, logit_bias={"7": 1}, stop_token_ids=[np.int64(3)], max_tokens=0)
    assert params.stop == ("end",) and params.logit_bias == {7: 1.0} and params.stop_token_ids == (3,)
    assert type(params.temperature) is float and type(params.stop_token_ids[0]) is int
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None) == SamplingParams()
    of_vllm = {"best_of": 2, "seed": -1, "spaces_between_special_tokens": False, "logits_processors": None}
    assert SamplingParams(n=2, **of_vllm) == SamplingParams(n=2)
    assert SamplingParams(stop=["a"] * 999).stop == ("a",) and params.clone() == params
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputs(regex="a")
    assert dataclasses.replace(params, seed=1).stop == ("end",)  # what was checked passes again


def test_tokens_outside_the_vocabulary():
    for params in (SamplingParams(stop_token_ids=[9]), SamplingParams(logit_bias={9: 1})):
        params.check_vocabulary(10)
        with pytest.raises(ShardlmError, match="has token 9, outside the vocabulary of 9; use the model's tokenizer"):
            params.check_vocabulary(9)
    check_prompt([0, 9], 10)
    for bad in (-1, 10, 2**70, "a", 1.5):
        with pytest.raises(
            ShardlmError, match=re.escape(f"token {bad!r} of the prompt is outside the vocabulary of 10")
        ):
            check_prompt([1, bad], 10)


def test_a_request_takes_the_end_of_a_long_prompt_and_the_ends_that_count():
    request = Request("a", [1, 2, 3, 4], SamplingParams(truncate_prompt_tokens=3, stop_token_ids=[8]), eos_ids=[9])
    assert list(request.tokens) == [2, 3, 4] and request.truncated == 1 and request.prompt_len == 3
    assert request.stop_ids == {8, 9}
    request = Request("b", [1, 2], SamplingParams(truncate_prompt_tokens=3, ignore_eos=True), eos_ids=[9])
    assert list(request.tokens) == [1, 2] and request.truncated == 0 and request.stop_ids == set()
    with pytest.raises(ShardlmError, match="the prompt has no tokens; give at least one"):
        Request("c", [], SamplingParams())
