"""What XLA makes of a step of decoding for NVIDIA GPUs, compiled without one: nothing large is copied, a layer has the
collectives it needs, and weights are read as they are held. Every figure is read from the program (compiled)."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import MARKS
from serving_programs import EXPERTS, LATENT_EXPERTS, LAYERS, LLAMA, ROWS, SMALL, collectives, decoding

from shardlm.hlo.kernels import kernel
from shardlm.hlo.text import parse
from shardlm.serve.carry import lowered, of_both
from shardlm.topology import topology

pytestmark = MARKS


@pytest.mark.parametrize(
    ("tensor", "drafts", "adapters", "fused"),
    [
        *((1, "", 0, 0), (4, "", 0, 0), (1, "draft_model", 0, 0), (1, "mtp", 0, 0), (1, "ngram", 0, 0)),
        *((1, "eagle3", 0, 0), (1, "", 4, 0), (4, "", 4, 0), (1, "", 0, ROWS), (4, "", 0, ROWS)),
    ],
)
def test_decoding_copies_neither_weights_nor_pages(tensor, drafts, adapters, fused):
    compiled, state = decoding(tensor, drafts=drafts, adapters=adapters, fused_rows=fused)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pools = jax.tree.leaves((state.pages, state.drafts))
    pool = sum(math.prod(a.shape) * a.dtype.itemsize for a in pools) // tensor
    assert memory.alias_size_in_bytes >= pool > 0.7 * 2**30 / tensor
    assert memory.temp_size_in_bytes < 0.25 * 2**30  # the sampler's arrays of [rows, vocabulary]
    smallest = LLAMA.embed_dim * LLAMA.num_kv_heads * LLAMA.head_dim // tensor  # of the projections
    moved = re.findall(r" = \(?bf16\[([\d,]+)\]\S* (?:copy|copy-start|dynamic-slice)\(", text)
    assert max((math.prod(map(int, shape.split(","))) for shape in moved), default=0) < smallest
    # After attention, after the MLP, and of the embedding; the logits.
    assert collectives(text) == (["all-gather"] + ["all-reduce"] * (2 * LAYERS + 1) if tensor > 1 else [])


@pytest.mark.parametrize(
    ("rows", "fused", "each", "held"),
    [(2, 0, 15, "auto"), (ROWS, 0, 15, "auto"), (2, ROWS, 9, "auto"), (ROWS, ROWS, 9, "auto"), (2, ROWS, 9, "int8")],
)
def test_a_step_is_few_kernels_and_few_waits(rows, fused, each, held):
    """Of one row XLA makes 20 kernels a layer, so that engines run two at least (serve/pool_size.py). At a conditional
    a GPU waits until the host has read which branch runs. No pool is copied."""
    compiled, _ = decoding(1, rows=rows, fused_rows=fused, kv_cache=held)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * 2**30  # half of a pool of 8 bits
    module = parse(compiled.as_text())
    (loop,) = (at for at in module.computations[module.entry].instructions if at.opcode == "while")
    step = module.computations[loop.called("body")[0]]
    assert [at.opcode for at in step.instructions].count("conditional") == 3
    kernels = [at.opcode for at in step.instructions if kernel(module, step, at)]
    own = [i for i, opcode in enumerate(kernels) if opcode == "custom-call"]  # two of attention, four of products
    of_layer = 7 if fused else 2  # and one of what is between them
    assert len(own) == of_layer * LAYERS
    assert np.diff(own[::of_layer]).min() == each  # XLA puts some of the step's beside the first layer's
    assert len(kernels) - each * LAYERS <= 32  # the beginning, the head and sampling


@pytest.mark.parametrize(
    ("config", "tensor", "weights"), [(LATENT_EXPERTS, 1, "dtype"), (EXPERTS, 2, "int8")], ids=["latent", "int8"]
)
def test_experts_are_split_and_no_weight_is_gathered(config, tensor, weights):
    """Over expert=4, heads, hidden layers and vocabulary are split as over tensor: sums of embedding, after attention
    and after the MLP or the experts, with those that all tokens share, and the logits are all that crosses devices."""
    compiled, _ = decoding(tensor, config, expert=4, weights=weights)
    text = compiled.as_text()
    assert collectives(text) == ["all-gather"] + ["all-reduce"] * (2 * config.num_layers + 1)
    [logits] = re.findall(r" = \(*(\w+\[[\d,]+\]).*? all-gather(?:-start)?\(", text)
    assert logits.startswith("f32["), logits
    if weights != "dtype":  # attention's four and the experts' three are read as they are held
        assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == (2 + 7) * config.num_layers
        assert not re.findall(r" = \(?(?:bf16|s8)\[2,(?:512,128|128,512)\]\S* (?:fusion|copy|transpose)\(", text)


def test_weights_in_few_bits_are_read_as_they_are_held():
    """By the kernel, seven times a layer: no weight is written in 16 bits, and no byte of one is copied."""
    compiled, _ = decoding(4, SMALL, weights="int4")
    text, layers = compiled.as_text(), SMALL.num_layers
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == (2 + 7) * layers
    smallest = SMALL.embed_dim * SMALL.num_kv_heads * SMALL.head_dim // 4  # in numbers, of those made of the stream
    made = re.findall(r" = \(?bf16\[([\d,]+)\]\S* (?!parameter|bitcast|get-tuple-element)([\w-]+)\(", text)
    page = f",16,{SMALL.num_kv_heads // 4},{SMALL.head_dim}"
    large = [(s, op) for s, op in made if math.prod(map(int, s.split(","))) >= smallest and not s.endswith(page)]
    assert made and not large
    assert not re.findall(r" = \(?(?:s8|f8e4m3fn)\[[\d,]+\]\S* (copy|transpose|fusion)\(", text)
    assert collectives(text) == ["all-gather"] + ["all-reduce"] * (2 * layers + 1)


def test_what_leaves_a_stage_for_another_host_is_sent_at_once():
    """By one collective and nothing else, whose start and end are one from jax 0.11 on: there is nothing between."""
    hosts = np.array(topology("h100", 2, 8)).reshape(2, 8)
    shapes = [jax.ShapeDtypeStruct((64, 1, 8192), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)]
    text = lowered(of_both(*hosts), shapes).compile().as_text()
    module = parse(text)
    kinds = collections.Counter(op.opcode for op in module.computations[module.entry].instructions)
    sent = {"collective-permute": 1}, {"collective-permute-start": 1, "collective-permute-done": 1}
    assert kinds in [{"parameter": 2} | how for how in sent]
    assert "source_target_pairs={{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}" in text
