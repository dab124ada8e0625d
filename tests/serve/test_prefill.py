"""Chunks that begin at position 0 attend to the keys and values at hand: what they say and write is what attention over
pages does, on any mesh, beside rows that have a cached beginning, and before decoding. On a CPU by the reference of
cuDNN's branch; test_gpu_prompts.py compiles that."""

import collections
import dataclasses
import logging
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, END, TOKENIZER, finished, of_model
from lazy_programs import all_compiled
from oracle import opened_of
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.layers.stack import Segment
from shardlm.mesh import MeshSpec
from shardlm.ops import chunk_attention
from shardlm.serve import build, runner_config
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import taken_apart
from shardlm.serve.prefill import Prefill, choose
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.speculation.config import SpeculativeConfig

TEXT = TOKENIZER.encode('{"name": "ab", "age": 12}né日🙂 true' * 2)
NGRAM = SpeculativeConfig(2, "ngram", None, 3, 2)
PROMPTS = [TEXT[:11], TEXT[3:30], TEXT[5:9], [*TEXT[3:23], *TEXT[:5]], TEXT[7:37]]  # the fourth begins as the second


def opened_on(spec: MeshSpec, window: int):
    """Two layers, the first with the window, and sinks where there is one, and one kv head."""
    shape = dataclasses.replace(CONFIG, num_layers=2, num_kv_heads=1).transformer()
    [block] = shape.segments[0].pattern
    attention = dataclasses.replace(block.attention, window=window, sinks=bool(window))
    windowed = dataclasses.replace(block, attention=attention)
    return opened_of(dataclasses.replace(shape, segments=(Segment((windowed, block), 1),)), spec)


def engine_of(spec: MeshSpec, window: int, **options):
    opened = opened_on(spec, window)
    with jax.set_mesh(opened.mesh):
        model, params = taken_apart(opened.model, opened.params)
    return of_model(model, params, mesh_of(spec), tokens=32, length=48, pages=60, least=3, **options)


def over_stages(window: int):
    """As it is built for users, where cuDNN's branch is chosen."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 4, "decode_steps": 4}
    config = EngineConfig(mesh=MeshSpec(pipeline=2), kv_cache_bytes=2**18, **sizes)
    with all_compiled(), mock.patch.object(build, "choose", lambda *_: Prefill("xla", True)):
        return build.assemble(opened_on(config.mesh, window), TOKENIZER, [END], 48, config)


def said(engine) -> dict:
    done = {}
    for turn in range(2):  # the second time with cached beginnings
        for n, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=7, prompt_logprobs=0 if n < 2 else None, ignore_eos=True)
            engine.add(f"{turn}.{n}", prompt, params)
        done |= finished(engine)
    return {
        id: (one.outputs[0].token_ids, [entry.chosen.logprob for entry in (one.prompt_logprobs or [])[1:]])
        for id, one in done.items()
    }


@pytest.mark.parametrize(
    ("spec", "window", "drafts", "in_parts"),
    [
        (MeshSpec(), 6, None, False),
        (MeshSpec(), 6, None, True),
        pytest.param(MeshSpec(tensor=2), 0, NGRAM, True, marks=pytest.mark.wide),
    ],
)
def test_chunks_attend_to_what_is_at_hand(monkeypatch, spec, window, drafts, in_parts):
    """And, in parts, to what pages hold before them: of the prompts' beginnings, and of the prefix cache's."""
    monkeypatch.setattr(runner_config, "WHOLE_LEAST", 16 if not in_parts else 1)
    monkeypatch.setattr(chunk_attention, "BLOCK_KEYS", 8)
    whole = engine_of(spec, window, prefill="xla", in_parts=in_parts, speculative=drafts)
    assert_same(monkeypatch, whole, engine_of(spec, window, speculative=drafts))


@pytest.mark.wide  # parts by ops/test_chunk_attention.py, stages by test_meshes.py
def test_chunks_attend_in_parts_over_stages(monkeypatch):
    monkeypatch.setattr(runner_config, "WHOLE_LEAST", 1)
    monkeypatch.setattr(chunk_attention, "BLOCK_KEYS", 8)
    assert_same(monkeypatch, over_stages(6), engine_of(MeshSpec(), 6))


def assert_same(monkeypatch, whole, over_pages):
    """Tokens, and log-probabilities to sums in another order."""
    ran, run = collections.Counter(), whole.runner._run
    monkeypatch.setattr(whole.runner, "_run", lambda key, *rest: (ran.update([key[0]]), run(key, *rest))[1])
    found, wanted = said(whole), said(over_pages)
    assert ran["whole"] >= 3 and ran["chunk"] >= 2
    for id, (tokens, logprobs) in wanted.items():
        assert found[id][0] == tokens, id
        np.testing.assert_allclose(found[id][1], logprobs, atol=2e-5)


def test_the_choice_is_said_with_its_reason(caplog):
    model = opened_of(dataclasses.replace(CONFIG, num_layers=1).transformer(), MeshSpec()).model

    def chosen(wanted="auto", deterministic=False, **execution) -> tuple[str, str]:
        own = dataclasses.replace(model, execution=dataclasses.replace(model.execution, **execution))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = choose(wanted, own, deterministic)
            return (found.whole, found.in_parts), caplog.text

    gpu = {"attention": "cudnn", "dtype": jnp.bfloat16}
    assert chosen(**gpu)[0] == ("cudnn", True) and "chunks of many tokens attend by cuDNN" in chosen(**gpu)[1]
    first = chosen("whole", **gpu)
    assert first[0] == ("cudnn", False) and "that begin at position 0 attend by cuDNN" in first[1]
    for options, reason in (
        (gpu | {"wanted": "pages"}, "prefill_attention=pages"),
        (gpu | {"deterministic": True}, "one program for all tokens"),
        (gpu | {"kv_cache": "int8"}, "pages hold int8"),
        ({}, "attention is xla"),
    ):
        how, why = chosen(**options)
        assert how == ("pages", False) and reason in why
    with pytest.raises(ShardlmError, match="prefill_attention='cudnn'; choose from auto, whole, pages"):
        EngineConfig(prefill_attention="cudnn")
