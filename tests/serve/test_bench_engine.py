"""What `launch.bench serve` builds to be measured: any mesh and precision that launch.serve takes."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import time
import types

import pytest
from engines import CONFIG

from shardlm.mesh import MeshSpec
from shardlm.serve.bench.engine import bench_serving, offline
from shardlm.serve.bench.random_engine import random_engine, words
from shardlm.serve.bench.turns import SAID, in_turns, longest
from shardlm.serve.engine_config import EngineConfig

ROOT = pathlib.Path(__file__).parents[2]


def test_replicas_of_quantised_weights():
    shape = dataclasses.replace(CONFIG, num_layers=1).transformer()
    sizes = {"max_model_len": 16, "max_num_seqs": 1, "max_num_batched_tokens": 8, "block_size": 4}
    mesh = MeshSpec(data=2, tensor=2)
    engine = random_engine(shape, EngineConfig(mesh=mesh, quantization="int8", kv_cache_dtype="int8", **sizes))
    found = bench_serving(engine, prompt_len=9, output_len=4, shared=0, tell=(said := []).append)
    assert len(said) == 1 and re.fullmatch(r"offline, 1 at once: [\d,]+ tokens/s while decoding", said[0])
    assert found["mesh"] == {"data": 2, "tensor": 2} and found["quantization"] == found["kv_cache_dtype"] == "int8"
    assert found["weight_bytes"] < 4 * found["parameters"] and [one["batch"] for one in found["offline"]] == [1]
    assert engine.stats().generation_tokens == 4 + 1 + 4  # of three rounds


class Counting:
    """An engine that takes 20 ms for each token of a request."""

    runner = types.SimpleNamespace(model=types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=9)))
    left = 0

    def add(self, name, prompt, params, pictures):
        self.left += params.max_tokens

    def stats(self):
        return types.SimpleNamespace(speculation=None)

    @property
    def has_unfinished(self) -> bool:
        return self.left > 0

    def step(self):
        time.sleep(0.02)
        self.left -= 1
        return []


def test_decoding_is_what_more_tokens_take_more():
    found = offline(Counting(), 2, prompt_len=4, output_len=8)
    assert found["prefill_seconds"] >= 0.04 and found["seconds"] >= 0.32
    taken = found["seconds"] - found["prefill_seconds"]
    assert found["decode_tokens_per_second"] * taken == pytest.approx(14)
    assert found["output_tokens_per_second"] * found["seconds"] == pytest.approx(16)


def test_conversations_go_on_from_what_was_said():
    """Of more of them than pages hold, by pages in the host's memory."""
    shape = dataclasses.replace(CONFIG, num_layers=1).transformer()
    length = longest(3, prompt_len=40, output_len=4)
    page = 4 * CONFIG.num_kv_heads * CONFIG.head_dim * 2 * 4
    sizes = {"max_model_len": length, "max_num_seqs": 1, "max_num_batched_tokens": 32, "block_size": 4}
    sizes |= {"kv_cache_bytes": page * (2 + -(-length // 4)), "kv_offloading_size": 0.001}
    engine = random_engine(shape, EngineConfig(**sizes))
    rows = list(in_turns(engine, 3, 3, 40, 4))
    assert [row["prompt_tokens"] for row in rows] == [120, 120 + 3 * (SAID + 4), 120 + 6 * (SAID + 4)]
    assert rows[0]["cached_tokens"] == rows[0]["pages_loaded"] == 0 < rows[0]["pages_saved"]
    for row, before in zip(rows[1:], rows, strict=False):
        assert row["pages_loaded"] > 0 and row["cached_tokens"] >= before["prompt_tokens"] - 3 * 4


def test_clients_see_every_token_when_it_comes():
    stream = words(300).stream(skip_special=True)
    assert [stream.step(token) for token in (7, 299, 0, 7)] == ["w7", " w299", " w0", " w7"]


def test_the_command_takes_what_launch_serve_takes():
    flags = ["--pipeline=4", "--data=2", "--kv_cache_dtype=fp8", "--config.cpu_devices=8"]
    command = [sys.executable, "-m", "launch.bench", "serve", "--config=configs/tiny.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "pipeline=4 stages of 3 layers" in done.stderr
