"""The program that decodes on a CPU: what it copies, and what a cache of 16 bits holds."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.ops import paged_rows
from shardlm.serve import programs
from shardlm.serve.layers import apart
from shardlm.serve.state import empty_state
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest

SLOTS, ROWS = 2**16, 2
LLAMA = LlamaConfig(
    vocab_size=64,
    embed_dim=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=80,
    tie_embeddings=False,
)


@pytest.mark.parametrize("tensor, made_first, page", [(1, True, 16), (2, False, 16), (1, True, 64), (2, False, 64)])
def test_decoding_on_a_cpu_copies_neither_weights_nor_pages(tensor, made_first, page, monkeypatch):
    monkeypatch.setattr(paged_rows, "cores", lambda: 2)  # which reads pages of 64 where they lie
    spec = MeshSpec(tensor=tensor)
    mesh = spec.build(jax.devices()[:tensor])
    with jax.set_mesh(mesh):
        shape = apart(LLAMA.transformer())
        rules = serving_rules(shape, spec, "dtype")
        model = ModelDef.make(shape, Execution(rules, jnp.float32, kv_cache="bfloat16", made_first=made_first))
        layout = PageLayout.whole(2, SLOTS // page)
        state = jax.eval_shape(lambda: empty_state(model, layout, page, ROWS))
        state = jax.tree.map(lambda s: at_rest(s, mesh), state)
        rows = programs.DecodeRows(jax.ShapeDtypeStruct((ROWS, 3 + 8 + 1), jnp.int32))
        decode = functools.partial(programs.decode, model, layout, 8)
        arguments = (model.held_at_rest(mesh), state, rows, jax.ShapeDtypeStruct((), jnp.int32))
        compiled = jax.jit(decode, donate_argnums=1).lower(*arguments).compile()
    assert {pool.dtype for pool in state.pages.values()} == {jnp.dtype("uint16")}
    pool = LLAMA.num_layers * SLOTS * LLAMA.num_kv_heads * LLAMA.head_dim * 2 // tensor
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool > 4 * memory.temp_size_in_bytes
    gathered = re.findall(r" = u16\[[\d,]+\]\S* gather\(", compiled.as_text())
    assert bool(gathered) == (page == 16)
    program, heads = compiled.as_text(), LLAMA.num_heads * LLAMA.head_dim // tensor
    sines = set(re.findall(r" = (\S+?)\{\S* sine\(", program))  # of two layers' queries and keys
    if made_first:
        assert sines == {f"f32[1,{ROWS},1,1,{LLAMA.head_dim // 4}]"} and program.count(" sine(") == 1
        # The weights of queries, the output and the head's as they lie: the first operands of products.
        for made, summed in ((heads, LLAMA.embed_dim), (LLAMA.embed_dim, heads), (LLAMA.vocab_size, LLAMA.embed_dim)):
            how = re.findall(rf" = f32\[{made},{summed}\]\S* ([\w-]+)\(", program)
            assert how and set(how) <= {"bitcast", "parameter", "get-tuple-element"}
            assert re.search(rf" = f32\[{made},{ROWS}\]\S* (dot|fusion)\(", program)
    else:
        how = re.findall(rf" = f32\[{heads},{LLAMA.embed_dim}\]\S* ([\w-]+)\(", program)
        assert how and set(how) <= {"bitcast", "parameter"}  # the weight "wo"
