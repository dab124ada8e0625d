"""Serving on a GPU: one forward pass for training, prefill and decoding, and the replies that a CPU gives."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LLAMA, init, logits_of
from small_hybrid import HYBRID
from small_moe import DEEPSEEK
from test_one_forward import packed_logits, paged_logits

from shardlm.execution import execution_of
from shardlm.generate import PAGE_SIZE, make_pages
from shardlm.layers.lora import LoraConfig
from shardlm.layers.page_layout import PageLayout
from shardlm.mesh import MeshSpec
from shardlm.opened import Opened
from shardlm.rules import Rules
from shardlm.serve.build import assemble
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import ModelDef
from shardlm.tokenizer import train_bpe

LENGTH, ROWS = 40, 2
TOKENIZER = train_bpe(['{"name": "ab", "age": 12}'] * 8, 300)
SERVED = EngineConfig(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32, kv_cache_bytes=2**20, decode_steps=4)
PROMPTS = ([3, 1, 4, 1, 5], [250, 100, 7], [9] * 40)


def model_for(config, device: jax.Device) -> ModelDef:
    """In float32, with what serving runs on such a device; under a mesh that is set."""
    shape, rules = config.transformer(), Rules.make("zero3", MeshSpec()).for_decoding()
    return ModelDef.make(shape, execution_of(shape, rules, "float32", device, "dtype", LoraConfig()))


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK, HYBRID], ids=["llama", "latents and experts", "linear attention"])
def test_training_forward_is_prefill_then_decode(config, gpu, cpu):
    """By the kernel over pages, and both as the CPU has it."""
    if gpu.platform == "gpu" and config is DEEPSEEK:
        pytest.importorskip("tokamax", reason="the experts' kernels are tokamax's: pip install 'shardlm[experts]'")
    rng, width = np.random.default_rng(1), -(-LENGTH // PAGE_SIZE)
    tokens = rng.integers(0, config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    table = rng.permutation(np.arange(1, 1 + ROWS * width)).reshape(ROWS, width).astype(np.int32)
    found = {}
    for device in (gpu, cpu):
        mesh = MeshSpec().build([device])
        with jax.set_mesh(mesh), jax.default_device(device), jax.default_matmul_precision("float32"):
            model = model_for(config, device)
            shape = model.config
            params, layout = init(model), PageLayout.whole(shape.cached_layers, 1 + ROWS * width, shape.memories, ROWS)
            found[device] = np.asarray(packed_logits(model, params, tokens))
            if device == gpu:
                pages, parts = jax.jit(lambda m=model, x=layout: make_pages(m, x))(), []
                for start, stop in [(0, 7), (7, 32), *[(i, i + 1) for i in range(32, LENGTH)]]:
                    chunk = (jnp.asarray(tokens[:, start:stop]), jnp.int32(start))
                    logits, pages = paged_logits(model, params, pages, jnp.asarray(table), *chunk, layout)
                    parts.append(np.asarray(logits))
    assert np.abs(np.concatenate(parts, axis=1) - found[gpu]).max() < 1e-4  # between CPU paths: 1.7e-6
    assert np.abs(found[gpu] - found[cpu]).max() < 1e-3


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_greedy_replies_are_those_of_a_cpu(gpu, cpu, kv_cache):
    """No token is further from the best, as the CPU computes the same text, than the cache's format rounds."""
    config = dataclasses.replace(LLAMA, vocab_size=320, head_dim=16)
    mesh = MeshSpec().build([gpu])
    with jax.set_mesh(mesh):
        model = model_for(config, gpu)
        opened = Opened(model, init(model), mesh, None, pathlib.Path())
    served = dataclasses.replace(SERVED, dtype="float32", kv_cache_dtype=kv_cache)
    engine = assemble(opened, TOKENIZER, (), served.max_model_len, served)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    replies = {}
    while engine.has_unfinished:
        replies |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    with jax.set_mesh(MeshSpec().build([cpu])), jax.default_device(cpu):
        model = model_for(config, cpu)
        params = init(model)
        for i, prompt in enumerate(PROMPTS):
            text = jnp.asarray([[*prompt, *replies[str(i)]]], jnp.int32)
            logits = np.asarray(jax.jit(lambda t, m=model, p=params: logits_of(m, p, t))(text))[0]
            of_next = logits[len(prompt) - 1 : -1]
            behind = of_next.max(axis=1) - of_next[np.arange(12), replies[str(i)]]
            assert behind.max() < (1e-3 if kv_cache == "auto" else 0.5)
