"""Greedy tokens and log-probabilities of served models against those that transformers recorded (tests/hf/references),
from a folder through LLM: pages, chunks smaller than the prompt, several requests in a batch, and the prefix cache."""

import collections
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from engines import TOKENIZER, decoding_from
from served_families import LEFT_OUT

import shardlm
from shardlm import hf_files
from shardlm.mesh import MeshSpec
from shardlm.serve.sampling_params import SamplingParams

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"
ONE = MeshSpec()
TENSOR, EXPERT, DATA, PIPELINE = (MeshSpec(**{axis: 2}) for axis in ("tensor", "expert", "data", "pipeline"))
SAMPLE = [  # of what differs, linear attention among it; each on another mesh
    ("llama", TENSOR),
    ("gemma2", PIPELINE),
    ("deepseek_v32", ONE),
    ("deepseek_v4", TENSOR),
    ("hy_v4", TENSOR),
    ("mistral_large4", DATA),
    ("qwen3_moe", EXPERT),
    ("gpt_oss", DATA),
    ("gemma4", TENSOR),
    ("gemma3n", TENSOR),
    ("qwen4_exp", EXPERT),
    ("qwen3_5", PIPELINE),  # the second stage has linear attention alone
    ("lfm2_moe", TENSOR),  # short convolutions
    ("falcon_h1", PIPELINE),  # layers that have pages and remember
    ("granitemoehybrid", TENSOR),  # a group of Mamba 2's queries and keys that devices share
]
# These begin at the start of a text, so that no pages are shared.
MEMORIES = ["bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"]
MEMORIES += ["bamba", "granitemoehybrid", "granitemoehybrid_moe", "nemotron_h", "nemotron_h_moe"]
MEMORIES += ["falcon_h1", "falcon_h1_norm", "lfm2", "lfm2_moe", "lfm3", "glm5_next", "lara_mini", "minimax"]
ROUTED = ("nemotron_h", "lfm2_moe", "deepseek_v32", "deepseek_v4", "hy_v4", "mistral_large4")
NEWEST = ("flint", "glm5_next", "lara_mini", "longcat_flash", "minimax", "minimax_m3")
ROUTED += ("qwen3_moe", "qwen4_exp", "gpt_oss", *NEWEST)
NAMES = [path.name for path in sorted(REFERENCES.iterdir()) if path.name not in LEFT_OUT]
# Replicas are whole engines, in which a family is what it is in one: over data there are those of SAMPLE.
MESHED = [(name, spec) for name in (*dict(SAMPLE), "nemotron_h", *NEWEST) for spec in (TENSOR, EXPERT, PIPELINE)]
# A head of keys that all devices have, norms of each head, a bias of the head, rows before the first position, slopes.
MESHED += [(name, TENSOR) for name in ("falcon", "cohere", "phi", "opt", "stablelm_parallel", "bloom")]
MESHED += [("muse_glimmer", spec) for spec in (TENSOR, PIPELINE)]
MESHED += [("phi", PIPELINE), ("bloom", PIPELINE)]
MESHED.append(("gemma4_moe", TENSOR))  # kv heads of some layers are split, and others have too few
UNSTAGED = ("gemma3n", "gemma4", "deepseek_v4", "hy_v4", "mistral_large4", "qwen4_exp")  # which stages refuse
UNSTAGED += ("glm5_next", "longcat_flash")
REFUSED = {EXPERT: {*NAMES} - {*ROUTED}, PIPELINE: {*UNSTAGED}}
REST = [(name, spec) for name, spec in MESHED if (name, spec) not in SAMPLE and name not in REFUSED.get(spec, ())]
# What is right on two meshes is on one device; the others are served there.
MESHES = collections.Counter(name for name, _ in SAMPLE + REST)
REST += [(name, ONE) for name in NAMES if MESHES[name] < 2 and (name, ONE) not in SAMPLE]
COSTLY = ("deepseek_v32", *UNSTAGED)  # 6 to 18 s of a core
COSTLY += ("lfm2_moe", "falcon_h1", "gpt_oss")  # of a kind that others are
SIZES = {"max_model_len": 56, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "decode_steps": 4}
CLOSE = 1e-4  # float32 sums in another order, as in test_families.py


def check(name: str, spec: MeshSpec, folder: pathlib.Path, **options) -> None:
    """A reply begun anywhere goes on as the whole one does, so one recorded reply is several requests."""
    stored = hf_files.header(REFERENCES / name / "expected.safetensors.reference")
    tokens, logits, greedy = (stored[key].read(...) for key in ("tokens", "logits", "greedy"))
    prompt, greedy = tokens[0].tolist(), greedy.tolist()
    shutil.copytree(REFERENCES / name, folder)
    TOKENIZER.save(folder / "tokenizer.json")  # they have none; only what replies are spelt with
    with decoding_from(2):  # one decode program; test_matrix.py has others
        llm = shardlm.LLM(folder, mesh=spec, dtype="float32", kv_cache_bytes=2**18, **(SIZES | options))
    begun = [0, 5, 20]
    params = [SamplingParams(temperature=0, max_tokens=len(greedy) - n, ignore_eos=True) for n in begun]
    params.append(SamplingParams(max_tokens=0, prompt_logprobs=0))
    *replies, scored = llm.generate([*(prompt + greedy[:n] for n in begun), tokens[1].tolist()], params)
    assert [reply.outputs[0].token_ids for reply in replies] == [greedy[n:] for n in begun]
    expected = np.asarray(jax.nn.log_softmax(logits[1]))[np.arange(len(prompt) - 1), tokens[1][1:]]
    close = 3 * CLOSE if name in (*MEMORIES, "gemma3n", "gemma4") else CLOSE
    np.testing.assert_allclose([one.chosen.logprob for one in scored.prompt_logprobs[1:]], expected, atol=close)
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    [cached] = llm.generate([prompt], params[0])
    assert cached.outputs[0].token_ids == greedy and (cached.num_cached_tokens > 0) == (name not in MEMORIES)
    assert llm.engine.stats().kv_usage == 0
    if (beams := REFERENCES / name / "beams.json").exists():
        check_beams(llm, prompt, json.loads(beams.read_text()))


def check_beams(llm, prompt: list[int], expected: dict) -> None:
    """What transformers' beam search found without an end, by the number of beams; two prompts at once."""
    for width, found in expected.items():
        params = shardlm.BeamSearchParams(int(width), len(found["tokens"][0]), ignore_eos=True)
        for output in llm.beam_search([prompt, {"prompt_token_ids": prompt}], params):
            assert [beam.tokens for beam in output.sequences] == [prompt + reply for reply in found["tokens"]]
            np.testing.assert_allclose([beam.cum_logprob for beam in output.sequences], found["sums"], atol=10 * CLOSE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "spec"),
    [pytest.param(name, spec, marks=[pytest.mark.wide] * (name in COSTLY)) for name, spec in SAMPLE],
    ids=str,
)
def test_each_kind_of_family_on_another_mesh(name, spec, tmp_path):
    check(name, spec, tmp_path / name)


@pytest.mark.wide  # programs of its own each: 6 s of a core (measured, nothing cached), 4 minutes for all of them
@pytest.mark.parametrize(("name", "spec"), REST, ids=str)
def test_every_family_and_every_mesh(name, spec, tmp_path):
    check(name, spec, tmp_path / name)


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {"deterministic": True}],
    ids=["drafts", "deterministic"],
)
@pytest.mark.parametrize("name", ["qwen4_exp", "granitemoehybrid", "lfm2_moe", "falcon_h1"])
def test_memories_of_drafts_and_of_rows_in_turn(name, options, tmp_path):
    check(name, ONE, tmp_path / name, **options)
