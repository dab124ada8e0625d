"""Folders as models were published before safetensors and tokenizer.json, opened by each command: weights that
torch.save wrote, OPT's vocab.json and merges.txt, Llama 2's tokenizer.model. Texts are transformers'
(make_tokenizer_files.py)."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request

import jax
import numpy as np
import pytest
from commands import run
from tokenizer_cases import FILES, PROMPT, folder_of

import shardlm
from shardlm.hf_files import Folder
from shardlm.serve.sampling_params import SamplingParams

TEXT = "def f(x):\n    return x + 1\n\n" * 40
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["opt", "llama"])
def model(request, tmp_path_factory):
    """A folder, and what transformers makes of the prompt."""
    home = folder_of(request.param, tmp_path_factory.mktemp("published") / request.param)
    shutil.copytree(FILES / f"{request.param}_model", home, dirs_exist_ok=True)
    expected = json.loads((home / "expected.json").read_text())
    (home / "expected.json").unlink()
    assert not list(home.glob("*.safetensors")) and not (home / "tokenizer.json").exists()
    return home, expected


def generated(checkpoint):
    done = run(
        "launch.generate", f"--checkpoint={checkpoint}", f"--prompt={PROMPT}", "--max_new_tokens=24", "--temperature=0"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("model", ["opt", pytest.param("llama", marks=pytest.mark.wide)], indirect=True)
def test_generate_convert_and_eval(model, tmp_path):
    home, expected = model
    text = generated(home)
    assert text == f"{PROMPT}{expected['text']}\n"
    for source, output, *dtype in ((home, "run"), (tmp_path / "run", "hf", "--dtype=float16")):
        done = run("launch.convert", f"--checkpoint={source}", f"--output={tmp_path / output}", *dtype)
        assert done.returncode == 0, done.stderr
    assert generated(tmp_path / "run") == generated(tmp_path / "hf") == text
    there, back = (Folder.open(folder).tensors for folder in (home, tmp_path / "hf"))
    assert set(there) - set(back) <= {"lm_head.weight"} and set(back) <= set(there)
    assert all(np.array_equal(stored.read(...), there[name].read(...)) for name, stored in back.items())
    (tmp_path / "text.txt").write_text(TEXT)
    found = []
    for folder in (home, tmp_path / "hf"):
        words = (f"--checkpoint={folder}", f"--text={tmp_path / 'text.txt'}", "--seq_len=64", f"--cache_dir={tmp_path}")
        done = run("launch.eval", *words, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")})
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] and found[0]["tokens"] > 500
    done = run("launch.convert", f"--checkpoint={home}", f"--output={tmp_path / 'other'}", "--dtype=float16")
    assert done.returncode == 1 and "--dtype is of a model's folder; runs are written in float32" in done.stderr


def test_replies_are_those_of_transformers(model):
    home, expected = model
    with jax.default_matmul_precision("highest"):
        llm = shardlm.LLM(home, max_num_seqs=2, max_num_batched_tokens=32, block_size=4)
    reply = llm.generate([PROMPT], SamplingParams(**GREEDY))[0]
    assert list(reply.prompt_token_ids) == expected["prompt"]
    assert list(reply.outputs[0].token_ids) == expected["ids"] and reply.outputs[0].text == expected["text"]


@pytest.mark.wide
def test_a_server_opens_it(model):
    home, expected = model
    words = [
        f"--model={home}",
        "--model_names=m",
        "--port=0",
        "--max_num_seqs=2",
        "--max_num_batched_tokens=32",
        "--block_size=4",
    ]
    process = subprocess.Popen([sys.executable, "-m", "launch.serve", *words], stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        body = json.dumps({"model": "m", "prompt": PROMPT, **GREEDY}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["choices"][0]["text"] == expected["text"]
    finally:
        process.terminate()
        process.communicate()
