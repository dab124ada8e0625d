"""What XLA makes of prompts' programs for NVIDIA GPUs, compiled without one: long chunks attend by cuDNN, the pool of
pages stays where it is, and no weights are put together. Every figure is read from the program (compiled)."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import MARKS
from jax.sharding import NamedSharding
from serving_programs import LAYERS, LLAMA, PAGES, ROWS

from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.ops.batch_sampling import RowSettings
from shardlm.ops.paged_attention import choose
from shardlm.rules import Rules
from shardlm.serve import programs
from shardlm.serve.compiling import options_of
from shardlm.serve.layers import apart
from shardlm.serve.prefill import choose as choose_prefill
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.state import empty_state, no_edits
from shardlm.state import ModelDef, at_rest
from shardlm.topology import topology

pytestmark = MARKS


def chunk_of_llama(gpu: str, tokens: int, length: int, kind: str, window: int = 0, sinks: bool = False):
    """(the compiled program of one chunk, the bytes of the pool) of texts of at most `length` tokens, which begins at
    position 0 ("whole") or may not ("chunk")."""
    mesh = MeshSpec().build(topology(gpu, 1, 1))
    with jax.set_mesh(mesh):
        rules = Rules.make("zero3", MeshSpec()).for_decoding()
        execution = Execution(rules, jnp.bfloat16, attention="cudnn", paged_attention=choose("gpu"))
        shape = apart(LLAMA.transformer())
        [block] = shape.segments[0].pattern
        attention = dataclasses.replace(block.attention, window=window, sinks=sinks)
        block = dataclasses.replace(block, attention=attention)
        segments = tuple(dataclasses.replace(segment, pattern=(block,)) for segment in shape.segments)
        model = ModelDef.make(dataclasses.replace(shape, segments=segments), execution)
        how = choose_prefill("auto", model, False)
        sizes = {"prefill": how.whole, "in_parts": how.in_parts}
        config = RunnerConfig(PageLayout.whole(LAYERS, PAGES), 16, 1, tokens, length, 1, **sizes)
        whole = NamedSharding(mesh, jax.P())
        held = lambda tree: jax.tree.map(lambda s: at_rest(s, mesh), tree)  # noqa: E731
        state = held(jax.eval_shape(lambda: empty_state(model, config.layout, 16, ROWS)))
        here = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)  # noqa: E731
        read = np.zeros((1, tokens), np.int32)
        rest = (RowSettings.defaults(1), no_edits(1), np.zeros(1, np.int8))
        rows = programs.ChunkRows(np.zeros((1, config.columns(6)), np.int32), read, read, *rest)
        key = kind, (1, tokens)
        function = functools.partial(programs.chunk, model, config.layout, **config.chunk_programs[key])
        jitted = jax.jit(function, donate_argnums=1, compiler_options=options_of("gpu", key))
        compiled = jitted.lower(model.held_at_rest(mesh), state, jax.tree.map(here, rows)).compile()
    return compiled, sum(math.prod(a.shape) * a.dtype.itemsize for a in state.pages.values())


def assert_pool_stays(compiled, pool: int):
    """Pages are written where they lie, and no weights are put together."""
    assert compiled.memory_analysis().alias_size_in_bytes >= pool > 0.7 * 2**30
    text, page = compiled.as_text(), (LLAMA.num_kv_heads, LLAMA.head_dim)
    made = set(re.findall(rf" = bf16\[{LAYERS * PAGES},16,{page[0]},{page[1]}\]\S* ([\w-]+)\(", text))
    assert "scatter" in made and made <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}, made
    together = LLAMA.num_heads + 2 * LLAMA.num_kv_heads
    assert f"bf16[{LLAMA.embed_dim},{together * LLAMA.head_dim}]" not in text  # weights that are copied into one


@pytest.mark.parametrize("window,sinks", [(0, False), (1024, True)])
def test_a_whole_prompt_attends_by_cudnn(window, sinks):
    """8,192 tokens in one chunk: a kernel of cuDNN's a layer and none of ours."""
    compiled, pool = chunk_of_llama("h100", 8192, 8192, "whole", window, sinks)
    text = compiled.as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == LAYERS
    assert 'custom_call_target="__gpu$xla.gpu.triton"' not in text
    assert_pool_stays(compiled, pool)


@pytest.mark.parametrize("gpu,length,most", [("h100", 131_072, 177), ("a100", 8192, 209)])
def test_a_chunk_attends_in_parts_by_cudnn(gpu, length, most):
    """2,048 tokens with others before: cuDNN's kernel to each other, to the first block of pages, and in a loop to the
    further ones that texts may have; none of ours. A block is there when what the MLP makes is not: the program needs
    `most` MiB, to a tenth what a chunk over pages does (compiled)."""
    compiled, pool = chunk_of_llama(gpu, 2048, length, "chunk")
    text, loops = compiled.as_text(), length > 8192
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == (2 + loops) * LAYERS
    merged = f"f32[1,2048,{LLAMA.num_heads},{LLAMA.head_dim}]"
    assert len([line for line in text.splitlines() if " while(" in line and merged in line]) == loops * LAYERS
    assert not re.findall(rf" = {re.escape(merged)}\S* copy\(", text)
    assert 'custom_call_target="__gpu$xla.gpu.triton"' not in text
    assert_pool_stays(compiled, pool)
    assert compiled.memory_analysis().temp_size_in_bytes < most * 2**20
