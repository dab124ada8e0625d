"""What XLA makes of pages and memories of texts for NVIDIA GPUs, compiled without one: they are read and written where
they lie, whatever layers keep in them, and copied only where that is asked for. Every figure is read from the program
(compiled)."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import MARKS
from jax.sharding import NamedSharding
from serving_programs import HYBRID, LATENT, LLAMA, PAGES, ROWS, SMALL, collectives, decoding

from shardlm.generate import make_pages
from shardlm.hlo.kernels import kernel
from shardlm.hlo.text import parse
from shardlm.layers.context import MEMORIES
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.param import Execution
from shardlm.layers.stack import Segment
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.ops.paged_attention import choose
from shardlm.serve.host_copies import PageCopies
from shardlm.serve.host_pages import BUNDLE
from shardlm.serve.layers import apart
from shardlm.serve.memory_copies import COPIES, copy_memories
from shardlm.serve.state import empty_state
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest
from shardlm.topology import topology

pytestmark = MARKS


@dataclasses.dataclass(frozen=True)
class Gemma4:
    """Its smallest, with few layers: heads of 256 and 512 numbers, and layers that read others' keys and values."""

    layers: int = 5

    def transformer(self):
        kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
        return registry.transformer(
            {"model_type": "gemma4_text", "vocab_size": 32_768, "hidden_size": 1536, "intermediate_size": 6144}
            | {"num_hidden_layers": self.layers, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
            | {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "sliding_window": 512}
            | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 32_768, "layer_types": kinds}
            | {"num_kv_shared_layers": 2}
        )


def test_heads_of_two_sizes_are_written_and_read_where_they_lie():
    """Layers see one pool as pages of their own heads: no copy of it. Two of the five write nothing."""
    compiled, state = decoding(1, Gemma4())
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state.pages))
    assert memory.alias_size_in_bytes >= pool > 2**27
    assert memory.temp_size_in_bytes < pool
    moved = re.findall(r" = \(?bf16\[([\d,]+)\]\S* (?:copy|copy-start|dynamic-slice)\(", text)
    assert max((math.prod(map(int, shape.split(","))) for shape in moved), default=0) < pool // 8
    written = re.findall(r"\(bf16\[\d+,16,1,(?:256|512)\]\S* |bf16\[\d+,16,1,(?:256|512)\]\S* scatter\(", text)
    assert len(written) == 6


@pytest.mark.parametrize(("tensor", "drafts"), [(1, ""), (2, ""), (2, "ngram")])
def test_memories_stay_where_they_are(tensor, drafts):
    """Of layers of linear attention: states are read from their slots and written there, and no pool is copied."""
    compiled, state = decoding(tensor, HYBRID, drafts=drafts)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    own = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state.pages)) // tensor
    assert memory.alias_size_in_bytes >= own > 2**28 / tensor
    states = state.pages["state"].shape
    of_rows = ROWS * math.prod(states[1:]) * 4 // tensor
    assert memory.temp_size_in_bytes < 2.5 * of_rows + 2**27  # what a layer reads, and what becomes of it
    made = re.findall(rf" = f32\[{states[0]},{states[1] // tensor},{states[2]},{states[3]}\]\S* ([\w-]+)\(", text)
    assert set(made) <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}, set(made)
    assert collectives(text) == (["all-gather"] + ["all-reduce"] * (2 * HYBRID.num_layers + 1) if tensor > 1 else [])


def test_memories_are_copied_from_slot_to_slot_and_nothing_else():
    """By which prefixes are cached (serve/snapshots.py): of one text at a time, in all layers at once."""
    spec = MeshSpec(tensor=2)
    mesh = spec.build(topology("h100", 1, 2))
    with jax.set_mesh(mesh):
        shape = apart(HYBRID.transformer())
        model = ModelDef.make(shape, Execution(serving_rules(shape, spec, "dtype"), jnp.bfloat16))
        layout = PageLayout.whole(shape.num_layers, PAGES, shape.memories, 2 * ROWS + 1)
        pages = jax.eval_shape(lambda: make_pages(model, layout, 16))
        pages = jax.tree.map(lambda s: at_rest(s, mesh), pages)
        pairs = jax.ShapeDtypeStruct((COPIES, 2), jnp.int32, sharding=NamedSharding(mesh, jax.P()))
        run = jax.jit(functools.partial(copy_memories, layout, model.execution.rules), donate_argnums=0)
        compiled = run.lower(pages, pairs).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    own = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(pages)) // 2
    held = {name: a for name, a in pages.items() if name in MEMORIES}
    of_text = sum(math.prod(a.shape) * a.dtype.itemsize for a in held.values()) // (2 * layout.slots)
    assert memory.alias_size_in_bytes >= own
    assert memory.temp_size_in_bytes < 1.5 * of_text
    assert not collectives(text)
    module = parse(text)
    (loop,) = (at for at in module.computations[module.entry].instructions if at.opcode == "while")
    step = module.computations[loop.called("body")[0]]
    assert sum(bool(kernel(module, step, at)) for at in step.instructions) <= 3 * len(held)


@pytest.mark.parametrize("tensor", [1, 2])
def test_pages_go_to_the_host_and_back_and_nothing_else_moves(tensor):
    """A bundle of them (serve/host_pages.py): one gather or a scatter for each pool, and a copy to or from the host's
    memory, which other streams do."""
    spec = MeshSpec(tensor=tensor)
    mesh = spec.build(topology("h100", 1, tensor))
    with jax.set_mesh(mesh):
        shape = apart(LLAMA.transformer())
        execution = Execution(serving_rules(shape, spec, "dtype"), jnp.bfloat16, paged_attention=choose("gpu"))
        model = ModelDef.make(shape, execution)
        layout = PageLayout.whole(shape.num_layers, PAGES)
        state = jax.tree.map(lambda s: at_rest(s, mesh), jax.eval_shape(lambda: empty_state(model, layout, 16, ROWS)))
        pages = jax.ShapeDtypeStruct((BUNDLE,), jnp.int32, sharding=NamedSharding(mesh, jax.P()))
        work = PageCopies(PAGES, None, host=True).shapes(state, mesh)
        found = {
            name: jax.jit(run, donate_argnums=1).lower(*arguments[:-1], pages).compile()
            for name, (run, arguments) in work.items()
        }
    pool = sum(math.prod(a.shape) * a.dtype.itemsize for a in state.pages.values()) // tensor
    bundle = pool * BUNDLE // PAGES
    for name, compiled in found.items():
        memory, text = compiled.memory_analysis(), compiled.as_text()
        on_host = memory.host_output_size_in_bytes if name == "save" else memory.host_argument_size_in_bytes
        assert on_host == bundle
        assert memory.alias_size_in_bytes >= pool and memory.temp_size_in_bytes < 1.1 * bundle
        assert not collectives(text)
        module = parse(text)
        entry = module.computations[module.entry]
        opcodes = collections.Counter(at.opcode for at in entry.instructions if kernel(module, entry, at))
        assert opcodes["fusion"] <= 2 and not opcodes["copy"], opcodes
        assert text.count(" copy-start(") == 2


@pytest.mark.parametrize("drafts", ["", "ngram"])
def test_pages_split_over_devices_are_written_and_read_where_they_lie(drafts):
    """Of latents, of which four devices had copies: a quarter on each, no copy of it, and in a layer one exchange of
    queries and one of results."""
    compiled, state = decoding(4, LATENT, split=4, drafts=drafts)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state.pages))
    assert pool / 4 > 2**25 and pool / 4 <= memory.alias_size_in_bytes < pool / 4 + 2**21  # and texts, for n-grams
    assert memory.temp_size_in_bytes < pool / (2 if drafts else 4)
    moved = re.findall(r" = \(?bf16\[([\d,]+)\]\S* (?:copy|copy-start|dynamic-slice)\(", text)
    assert max((math.prod(map(int, shape.split(","))) for shape in moved), default=0) < pool // 64
    layers = LATENT.num_layers
    sums = ["all-reduce"] * (2 * layers + 1)
    assert collectives(text) == ["all-gather"] * (1 + layers) + sums + ["all-to-all"] * layers


@dataclasses.dataclass(frozen=True)
class Choosing:
    """DeepSeek V3.2's attention, of texts longer than what a query attends to."""

    num_layers: int = 2

    def transformer(self):
        return registry.transformer(
            {"model_type": "deepseek_v32", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 512}
            | {"num_hidden_layers": self.num_layers, "first_k_dense_replace": self.num_layers, "hidden_act": "silu"}
            | {"num_attention_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
            | {"qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6, "n_routed_experts": 8}
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
        )


@dataclasses.dataclass(frozen=True)
class Gated(Choosing):
    """The same with gates and sinks, around streams that are not mixed, as Hy4 has it."""

    def transformer(self):
        plain = super().transformer().segments[0].pattern[0]
        attention = dataclasses.replace(plain.attention, gate="number", sinks=True)
        streams = StreamsConfig(4, 0, 1e-6, 1e-6)
        block = dataclasses.replace(plain, attention=attention, streams=streams)
        segments = (Segment((block,), self.num_layers),)
        return dataclasses.replace(super().transformer(), segments=segments, streams=streams)


@dataclasses.dataclass(frozen=True)
class Growing(Choosing):
    """As Mistral Large 4 has it: queries that grow, learned frequencies, and a layer without a rotation."""

    def transformer(self):
        return registry.transformer(
            {"model_type": "mistral_large4_text", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 512}
            | {"num_hidden_layers": self.num_layers, "first_k_dense_replace": self.num_layers, "hidden_act": "silu"}
            | {"num_attention_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "no_rope_layers": [1, 0]}
            | {"qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5, "n_routed_experts": 8}
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
        )


@dataclasses.dataclass(frozen=True)
class Entries:
    """DeepSeek V4's layers, one of each kind, with entries of 4 and of 64 tokens."""

    num_layers: int = 3

    def transformer(self):
        kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        return registry.transformer(
            {"model_type": "deepseek_v4", "vocab_size": 2048, "hidden_size": 1024, "hidden_act": "silu"}
            | {"num_hidden_layers": self.num_layers, "layer_types": kinds, "num_attention_heads": 64, "head_dim": 512}
            | {"compress_rates": dict(zip(kinds[1:], (4, 64), strict=True)), "q_lora_rank": 512, "o_lora_rank": 256}
            | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_hash_layers": 1}
            | {"rms_norm_eps": 1e-6, "num_key_value_heads": 1, "index_topk": 256}
        )


@pytest.mark.parametrize(
    ("config", "gpu", "tensor", "kv_cache"),
    [
        (SMALL, "a100", 4, "int8"),
        (LATENT, "h100", 1, "auto"),
        (LATENT, "a100", 4, "fp8"),
        (Choosing(), "h100", 4, "int8"),
        (Gated(), "h100", 4, "fp8"),
        (Growing(), "h100", 4, "auto"),
    ],
)
def test_pages_are_read_where_they_lie(config, gpu, tensor, kv_cache):
    """By the kernel, twice a layer: parts of the rows, and their merge; before them those that score tokens and choose
    some. Of arrays made of pages, the program has the pools alone, and writes into them; `blocked` has gathers too."""
    compiled, state = decoding(tensor, config, gpu, kv_cache)
    text, choosing = compiled.as_text(), isinstance(config, Choosing)
    kernels = 4 if choosing else 2
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == kernels * config.num_layers
    assert text.count("index_scores") > 0 or not choosing
    assert collectives(text) == (["all-gather"] + ["all-reduce"] * (2 * config.num_layers + 1) if tensor > 1 else [])
    split = 1 if config is LATENT or choosing else tensor
    pools = [(a.dtype.name, a.shape[1], a.shape[2] // split, a.shape[3]) for a in state.pages.values()]
    own = sum(math.prod(a.shape) * a.dtype.itemsize for a in state.pages.values()) // split
    assert compiled.memory_analysis().alias_size_in_bytes >= own
    for dtype, *page in set(pools):
        kind = {"int16": "s16", "bfloat16": "bf16", "float32": "f32"}[dtype]
        made = re.findall(rf" = {kind}\[[\d,]+,{','.join(map(str, page))}\]\S* ([\w-]+)\(", text)
        made = collections.Counter(made)
        assert set(made) <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}, made
        assert made["scatter"] == pools.count((dtype, *page)) * config.num_layers


def test_entries_are_made_and_read_where_they_lie():
    """A kernel of attention a layer, of those with entries a merge of its parts, two for what mixes its streams, and
    those that score entries and choose some; pools are only written into, and sums cross devices as in other layers."""
    compiled, state = decoding(4, Entries())
    text = compiled.as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3 * Entries.num_layers + 2 + 2
    assert collectives(text) == ["all-gather"] + ["all-reduce"] * (2 * Entries.num_layers + 1)
    own = sum(math.prod(a.shape) * a.dtype.itemsize for a in state.pages.values())  # whole on each device
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= own > 5 * memory.temp_size_in_bytes
    for pool in state.pages.values():
        page = ",".join(map(str, pool.shape[1:]))
        made = set(re.findall(rf" = bf16\[[\d,]+,{page}\]\S* ([\w-]+)\(", text))
        assert made <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}, made


@dataclasses.dataclass(frozen=True)
class Ngrams:
    """Qwen4-Exp's layers: linear attention, one of three with a table of 3.2 million n-grams, and one that attends to
    16 blocks of 64 tokens."""

    num_layers: int = 4

    def transformer(self):
        rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
        return registry.transformer(
            {"model_type": "qwen4_exp_text", "vocab_size": 2048, "hidden_size": 1024, "hidden_act": "silu"}
            | {"num_hidden_layers": self.num_layers, "num_attention_heads": 16, "num_key_value_heads": 4}
            | {"head_dim": 256, "rms_norm_eps": 1e-6, "eos_token_id": 5, "rope_parameters": rope}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
            | {"linear_value_head_dim": 128, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
            | {"num_experts": 8, "num_experts_per_tok": 2, "ple_layer_ids": [2], "ngram_vocab_size_base": 200_000}
            | {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 1024}
            | {"indexer_compress_ratio": 64}
        )


def test_blocks_and_ngrams_are_read_where_they_lie():
    """Attention to blocks takes the kernel of any attention; of the table and of pages nothing is copied, and what is
    found in the table's parts is summed over devices together with what layers make."""
    config = Ngrams()
    compiled, state = decoding(4, config)
    text = compiled.as_text()
    [own] = config.transformer().ngrams
    assert collectives(text) == ["all-gather"] + ["all-reduce"] * (2 * config.num_layers + 1)
    made = re.findall(rf" = bf16\[{own.rows // 4},{own.width}\]\S* ([\w-]+)\(", text)
    assert set(made) <= {"parameter", "get-tuple-element", "bitcast"}, made
    for name in ("k", "v", "i"):
        page = ",".join(map(str, (*state.pages[name].shape[:2], 1, state.pages[name].shape[3])))
        made = set(re.findall(rf" = bf16\[{page}\]\S* ([\w-]+)\(", text))
        assert {"scatter"} < made <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}, made
