"""A law: the training forward pass equals prefill in chunks and then decode, for each architecture on each mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LLAMA, TIED, init, mesh_of
from small_hybrid import HYBRID
from small_mamba import MAMBA
from small_moe import DEEPSEEK, MOE
from small_short_conv import CONV

from shardlm.errors import ShardlmError
from shardlm.generate import PAGE_SIZE, Sampling, generate, make_pages
from shardlm.layers import stack
from shardlm.layers.packed import Packed
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules
from shardlm.serve.layers import apart
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef

MESHES = (MeshSpec(), MeshSpec(data=2, fsdp=2, tensor=2), MeshSpec(tensor=8))
CONFIGS = {"untied": LLAMA, "tied": TIED, "moe": MOE, "deepseek": DEEPSEEK, "hybrid": HYBRID}
LENGTH, ROWS = 40, 2
# The two paths add the same float32 products in another order (measured: up to 1.7e-6 on logits of size 1). A norm of
# what is read of a memory makes much of it where there is little (up to 3.2e-5, of another mesh alone).
TOLERANCES = dict.fromkeys((LLAMA, TIED, MOE, DEEPSEEK, MAMBA, CONV), 2e-5) | {HYBRID: 1e-4}


def decoder_on(spec, config):
    return ModelDef.make(config.transformer(), Execution(Rules.make("zero3", spec).for_decoding()))


@jax.jit(static_argnums=0)
def packed_logits(model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    lm = model.model(params)
    hidden, _, _ = lm(tokens, positions, Packed(jnp.ones_like(tokens), model.execution.rules))
    return lm.logits(hidden)


@jax.jit(static_argnums=(0, 6))
def paged_logits(model, params, pages, table, tokens, start, layout):
    positions = start + jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    lm = model.model(params)
    slot = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    ctx = Paged.make(table, jnp.ones(tokens.shape, bool), layout, model.execution, slot=slot)
    hidden, pages, _ = lm(tokens, positions, ctx, pages)
    return lm.logits(hidden), pages


def test_layers_that_are_alike_are_traced_once(monkeypatch):
    """Where each is a segment of its own, as in serving."""
    traced, plain = [], stack.run_repeat
    monkeypatch.setattr(stack, "run_repeat", lambda *args: traced.append(args) or plain(*args))
    layout = PageLayout.whole(LLAMA.num_layers, 4)
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = ModelDef.make(apart(LLAMA.transformer()), Execution(Rules.make("zero3", MeshSpec()).for_decoding()))
        params, pages = init(model), jax.eval_shape(lambda: make_pages(model, layout))
        table, tokens = jnp.ones((1, 1), jnp.int32), jnp.zeros((1, 5), jnp.int32)
        jax.eval_shape(lambda pages: paged_logits(model, params, pages, table, tokens, 0, layout), pages)
    assert len(model.config.segments) == LLAMA.num_layers > 1 and len(traced) == 1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_training_forward_is_prefill_then_decode(spec, config):
    follow(spec, config)


@pytest.mark.parametrize("config", [MAMBA, CONV], ids=lambda small: type(small).__name__)
def test_layers_of_which_each_device_has_a_head(config):
    """Of Mamba 2, four devices have the same queries and keys. Other meshes are served in
    tests/serve/test_families_served.py."""
    follow(MeshSpec(tensor=8), config)


def follow(spec, config):
    tokens, rng = tokens_of(config), np.random.default_rng(1)
    pages_per_row = -(-LENGTH // PAGE_SIZE)
    num_pages = 1 + ROWS * pages_per_row
    table = jnp.asarray(rng.permutation(np.arange(1, num_pages)).reshape(ROWS, pages_per_row), jnp.int32)
    with jax.set_mesh(mesh_of(spec)):
        model = decoder_on(spec, config)
        layers, memories = model.config.cached_layers, model.config.memories
        params, layout = init(model), PageLayout.whole(layers, num_pages, memories, slots=ROWS)
        expected = np.asarray(packed_logits(model, params, tokens))
        pages = jax.jit(lambda: make_pages(model, layout))()
        parts = []
        for start, stop in [(0, 13), (13, 26), *[(i, i + 1) for i in range(26, LENGTH)]]:  # of two sizes: two programs
            chunk = tokens[:, start:stop]
            logits, pages = paged_logits(model, params, pages, table, chunk, jnp.int32(start), layout)
            parts.append(np.asarray(logits))
    assert np.abs(np.concatenate(parts, axis=1) - expected).max() < TOLERANCES[config]
    assert np.abs(expected - on_one_device(config)).max() < TOLERANCES[config]


@functools.cache
def on_one_device(config):
    """What every mesh computes: both passes could be wrong in the same way."""
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = decoder_on(MeshSpec(), config)
        return np.asarray(packed_logits(model, init(model), tokens_of(config)))


def tokens_of(config):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, config.vocab_size, (ROWS, LENGTH)), jnp.int32)


def test_greedy_generation_follows_the_training_forward():
    with jax.set_mesh(mesh_of(MeshSpec(tensor=2))):
        model = decoder_on(MeshSpec(tensor=2), LLAMA)
        params = init(model)
        prompt = [3, 1, 4, 1, 5]
        text = list(generate(model, params, prompt, max_new_tokens=20, sampling=Sampling(temperature=0)))
        row = jnp.asarray([prompt + text], jnp.int32)
        best = np.asarray(packed_logits(model, params, row))[0].argmax(-1)
    assert text == best[len(prompt) - 1 : -1].tolist()


def test_generation_where_the_embedding_does_not_divide_over_stages():
    """It rests whole over pipeline, as in training, and the text is that of one device."""
    prompt, said = [3, 1, 4], []
    for spec in (MeshSpec(), MeshSpec(pipeline=3)):
        with jax.set_mesh(mesh_of(spec)):
            shape = LLAMA.transformer()
            model = ModelDef.make(shape, Execution(serving_rules(shape, spec)))
            params = init(model)
            said.append(list(generate(model, params, prompt, max_new_tokens=6, sampling=Sampling(temperature=0))))
    assert LLAMA.embed_dim % 3 and said[0] == said[1]


def test_generation_stops_repeats_by_seed_and_refuses():
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = decoder_on(MeshSpec(), LLAMA)
        params = init(model)

        def run(seed, **kwargs):
            return list(generate(model, params, [1, 2], max_new_tokens=12, sampling=Sampling(seed=seed), **kwargs))

        text = run(seed=1)
        assert text == run(seed=1) != run(seed=2)
        assert run(seed=1, stop_ids=(text[5],)) == text[: text.index(text[5])]
        with pytest.raises(ShardlmError, match="token 64 of the prompt is outside the vocabulary of 64"):
            next(generate(model, params, [64], max_new_tokens=1, sampling=Sampling()))
        with pytest.raises(ShardlmError, match="no tokens"):
            next(generate(model, params, [], max_new_tokens=1, sampling=Sampling()))
    with pytest.raises(ShardlmError, match=r"top_p=0\.0 above 0"):
        Sampling(top_p=0.0)
