"""What XLA makes of the serving programs for NVIDIA GPUs, compiled without one: nothing large is copied, the pool of
pages stays where it is, and a layer has the collectives it needs. Every figure is read from the program (compiled)."""

import collections
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

from shardlm.generate import make_pages
from shardlm.hlo.kernels import kernel
from shardlm.hlo.text import parse
from shardlm.layers.context import MEMORIES
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.lora import LoraConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.layers.page_layout import PageLayout, layout_of, layout_of_rows
from shardlm.layers.param import Execution
from shardlm.layers.stack import Segment
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.llama import LlamaConfig
from shardlm.models.mixtral import MixtralConfig
from shardlm.models.qwen_hybrid import QwenHybridConfig
from shardlm.ops import grouped_weights
from shardlm.ops.kv_format import KvFormat
from shardlm.ops.paged_attention import choose
from shardlm.ops.weight_format import WeightFormat
from shardlm.serve import programs
from shardlm.serve.carry import lowered, of_both
from shardlm.serve.host_copies import PageCopies
from shardlm.serve.host_pages import BUNDLE
from shardlm.serve.layers import apart
from shardlm.serve.memory_copies import COPIES, copy_memories
from shardlm.serve.speculation import programs as speculation
from shardlm.serve.speculation.draft_model import DraftModelProposer
from shardlm.serve.speculation.multi_token import MultiTokenProposer
from shardlm.serve.speculation.ngram import NgramProposer
from shardlm.serve.state import empty_state
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest
from shardlm.topology import topology

pytestmark = MARKS

LAYERS, ROWS, PAGES = 3, 64, 4097
LLAMA = dataclasses.replace(LlamaConfig(), num_layers=LAYERS, vocab_size=32_768)
NARROW = {"embed_dim": 512, "vocab_size": 2048, "num_layers": 2}
SMALL = dataclasses.replace(LLAMA, mlp_dim=512, **NARROW)
LATENT = dataclasses.replace(DeepseekConfig(), num_heads=16, dense_layers=2, mlp_dim=512, **NARROW)
SPARSE = {"num_experts": 8, "top_k": 2, "expert_dim": 256}
LATENT_EXPERTS = dataclasses.replace(LATENT, dense_layers=1, groups=1, top_groups=1, **SPARSE)
EXPERTS = MixtralConfig(num_heads=16, num_kv_heads=8, head_dim=64, **NARROW, **SPARSE)
HYBRID = dataclasses.replace(QwenHybridConfig(), mlp_dim=512, **NARROW | {"num_layers": 4})
DRAFT = dataclasses.replace(LLAMA, num_layers=1, embed_dim=1024, num_heads=16, head_dim=64, mlp_dim=4096)


def decoding(
    tensor: int,
    config=LLAMA,
    gpu: str = "h100",
    kv_cache: KvFormat = "auto",
    drafts: str = "",
    expert: int = 1,
    weights: WeightFormat = "dtype",
    rows: int = ROWS,
    adapters: int = 0,
    fused_rows: int = 0,
):
    """(the compiled decode program of Llama 3 8B's layers or others, with four drafts of a smaller model, by n-gram or
    by a module of the model's, or with adapters of rank 16; its state's shapes)."""
    spec = MeshSpec(tensor=tensor, expert=expert)
    mesh = spec.build(topology(gpu, 1, tensor * expert))
    with jax.set_mesh(mesh):
        shape = apart(config.transformer())
        execution = Execution(
            serving_rules(shape, spec, weights),
            jnp.bfloat16,
            paged_attention=choose("gpu"),
            kv_cache=kv_cache,
            weights=weights,
            few_bits=grouped_weights.choose("gpu"),
            lora=LoraConfig(16 * adapters),
            adapters=adapters,
            fused_rows=fused_rows,
        )
        if drafts == "mtp":
            shape = dataclasses.replace(shape, mtp=MtpConfig(shape.segments[-1].pattern[0]))
        model = ModelDef.make(shape, execution)
        layout = PageLayout.whole(model.config.num_layers, PAGES, model.config.memories, rows + 1)
        if len(shape.kept_heads) > 1:
            windows = [block.attention.window for block in shape.blocks()]
            layout = layout_of(windows, PAGES, 4096, 16, 8, shape.sharing(tensor), shape.sources)
        if shape.compressed:
            layout = layout_of_rows(shape.rows, PAGES, 4096, 16, 8)
        layout = dataclasses.replace(layout, unsure=5 if drafts and shape.memories else 0)
        one = PageLayout.whole(1, PAGES)
        draft = ModelDef.make(apart(DRAFT.transformer()), execution)
        proposer = {
            "draft_model": DraftModelProposer(4, draft, one, 16),
            "mtp": MultiTokenProposer(4, model, model.model, one, 16, rows),
            "ngram": NgramProposer(4, 4, 2, rows, 4096),
        }.get(drafts)
        state = jax.eval_shape(lambda: empty_state(model, layout, 16, rows, proposer.empty if drafts else tuple))
        state = jax.tree.map(lambda s: at_rest(s, mesh), state)
        whole = NamedSharding(mesh, jax.P())
        where = programs.DecodeRows(
            jax.ShapeDtypeStruct((rows, 3 + 256 * len(layout.windows) + 1), jnp.int32, sharding=whole)
        )
        function, params = functools.partial(programs.decode, model, layout, 8), model.held_at_rest(mesh)
        if drafts:
            function = functools.partial(speculation.decode, model, layout, 8, proposer)
            params = (params, {"draft_model": draft.held_at_rest(mesh), "mtp": None, "ngram": ()}[drafts])
        steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        return jax.jit(function, donate_argnums=1).lower(params, state, where, steps).compile(), state


@pytest.mark.parametrize(
    ("tensor", "drafts", "adapters", "fused"),
    [
        *((1, "", 0, 0), (4, "", 0, 0), (1, "draft_model", 0, 0), (1, "mtp", 0, 0), (1, "ngram", 0, 0)),
        *((1, "", 4, 0), (4, "", 4, 0), (1, "", 0, ROWS), (4, "", 0, ROWS)),
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
    [(2, 0, 15, "auto"), (ROWS, 0, 15, "auto"), (2, ROWS, 7, "auto"), (ROWS, ROWS, 9, "auto"), (2, ROWS, 7, "int8")],
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


def collectives(text: str) -> list[str]:
    """Kinds, in order of the alphabet."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return sorted(re.findall(rf" = .*? (\w*-?(?:{kinds}))(?:-start)?\(", text))


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
    """A kernel of attention a layer and two for what mixes its streams, and those that score entries and choose some;
    pools are only written into, and sums cross devices as in other layers."""
    compiled, state = decoding(4, Entries())
    text = compiled.as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3 * Entries.num_layers + 2
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
