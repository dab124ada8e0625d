"""Prompts of a served model with linear attention, by the kernels for GPUs, interpreted."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, finished, of_model
from small import init, mesh_of
from small_hybrid import HYBRID

from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.ops import gated_delta_rows
from shardlm.rules import Rules
from shardlm.serve.layers import taken_apart
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import ModelDef

# Heads that the kernels fit, in bfloat16.
HEADS = {"linear_num_heads": 4, "linear_num_kv_heads": 2, "linear_head_dim": 16, "linear_value_dim": 32}
SHAPE = dataclasses.replace(HYBRID, vocab_size=CONFIG.vocab_size, num_layers=2, **HEADS)


def replies() -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities of prompts that are longer than chunks, begin alike, and go on from copies of
    what was remembered; in passes of several rows."""
    mesh, rng = mesh_of(MeshSpec()), random.Random(0)
    with jax.set_mesh(mesh):
        execution = Execution(Rules.make("zero3", MeshSpec()).for_decoding(), dtype=jnp.bfloat16)
        model = ModelDef.make(SHAPE.transformer(), execution)
        apart = taken_apart(model, init(model))
    engine = of_model(*apart, mesh, tokens=100, length=256, pages=200, snapshots=3)
    beginning, done = rng.choices(range(256), k=130), {}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    for turn, lengths in enumerate(((5, 90), (30, 7))):
        for length in lengths:
            engine.add(f"{turn}, {length}", beginning + rng.choices(range(256), k=length), params)
        done |= finished(engine)
    assert engine.stats().prefix_hits >= 100
    said = {name: one.outputs[0] for name, one in done.items()}
    return {
        name: (one.token_ids, [told[token].logprob for token, told in zip(one.token_ids, one.logprobs, strict=True)])
        for name, one in said.items()
    }


@pytest.mark.wide
def test_prompts_by_kernels_get_the_replies_of_xlas_products(monkeypatch):
    by_xla, run = replies(), []

    def by_kernels(rule, chunk, *given):
        run.append(given[0].shape)
        return gated_delta_rows.outputs_by_kernel(chunk, *given, interpret=True)

    monkeypatch.setattr(gated_delta_rows, "delta_rows", by_kernels)
    jax.clear_caches()  # layers that were traced by XLA's products
    found = replies()
    jax.clear_caches()
    assert (1, 100, 2, 16) in run
    for name, (tokens, logprobs) in by_xla.items():
        assert found[name][0] == tokens
        np.testing.assert_allclose(found[name][1], logprobs, atol=0.15)  # of bfloat16; measured: up to 0.058
