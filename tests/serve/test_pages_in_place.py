"""Engines with pages of the size that servers have, which a CPU of few cores reads where they lie: what is decoded has
the log-probabilities that the same text has as a prompt, which gathers them, on one device and on two."""

import dataclasses
import json

import numpy as np
import pytest
from engines import CONFIG, folder_of

import shardlm
from shardlm import SamplingParams
from shardlm.mesh import MeshSpec
from shardlm.ops import paged_rows

SHAPE = dataclasses.replace(CONFIG, num_layers=2, head_dim=16)
LENGTHS = (60, 5, 130, 61)  # the first and the last go on to another page


@pytest.mark.parametrize("cores", [2, 64])
@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(tensor=2)], ids=str)
def test_a_reply_has_the_log_probabilities_of_a_prompt(cores, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(paged_rows, "cores", lambda: cores)
    read, summed = [], paged_rows._summed
    monkeypatch.setattr(paged_rows, "_summed", lambda *given: read.append(given) or summed(*given))
    folder = folder_of(tmp_path / "model", shape=SHAPE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    sizes = {"block_size": 64, "max_model_len": 256, "max_num_seqs": 4}
    llm = shardlm.LLM(folder, mesh=spec, dtype="float32", **sizes)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 256, n).tolist()} for n in LENGTHS]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, seed=1)
    replies = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    texts = [
        {"prompt_token_ids": prompt["prompt_token_ids"] + list(reply.token_ids)}
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for reply, text in zip(replies, llm.generate(texts, asked, use_tqdm=False), strict=True):
        found = [place[token].logprob for place, token in zip(reply.logprobs, reply.token_ids, strict=True)]
        again = [place.chosen.logprob for place in text.prompt_logprobs[-12:]]
        np.testing.assert_allclose(found, again, atol=1e-5)
    assert bool(read) == (cores == 2)
