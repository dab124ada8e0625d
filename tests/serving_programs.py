"""Programs of serving for NVIDIA GPUs, compiled without one: the step of decoding, and what is read of it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardlm.layers.eagle import EagleConfig
from shardlm.layers.lora import LoraConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.layers.page_layout import PageLayout, layout_of, layout_of_rows
from shardlm.layers.param import Execution
from shardlm.layers.stack import Segment
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.llama import LlamaConfig
from shardlm.models.mixtral import MixtralConfig
from shardlm.models.qwen_hybrid import QwenHybridConfig
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops import grouped_weights
from shardlm.ops.kv_format import KvFormat
from shardlm.ops.paged_attention import choose
from shardlm.ops.weight_format import WeightFormat
from shardlm.serve import programs
from shardlm.serve.layers import apart
from shardlm.serve.speculation import programs as speculation
from shardlm.serve.speculation.draft_model import DraftModelProposer
from shardlm.serve.speculation.eagle import EagleProposer
from shardlm.serve.speculation.multi_token import MultiTokenProposer
from shardlm.serve.speculation.ngram import NgramProposer
from shardlm.serve.state import empty_state
from shardlm.serving_rules import serving_rules, split_pages
from shardlm.state import ModelDef, at_rest
from shardlm.topology import topology

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
    split: int = 1,
):
    """(the compiled decode program of Llama 3 8B's layers or others, with four drafts of a smaller model, by n-gram,
    by a module of the model's or by a head of EAGLE-3, or with adapters of rank 16, or positions of pages split over so
    many devices; its state's shapes)."""
    spec = MeshSpec(tensor=tensor, expert=expert)
    mesh = spec.build(topology(gpu, 1, tensor * expert))
    with jax.set_mesh(mesh):
        shape = apart(config.transformer())
        execution = Execution(
            split_pages(serving_rules(shape, spec, weights), shape, split, 16),
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
        head = ModelDef.make(_head(shape), execution) if drafts == "eagle3" else None
        if head:
            execution = dataclasses.replace(execution, handed_out=(0, 1, LAYERS))
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
            "eagle3": head and EagleProposer(4, head, head.model, one, 16, rows, shared=("embedding",)),
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
            own = {"draft_model": draft.held_at_rest(mesh), "mtp": None, "ngram": ()}
            params = (params, head.held_at_rest(mesh) if head else own[drafts])
        steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        return jax.jit(function, donate_argnums=1).lower(params, state, where, steps).compile(), state


def _head(shape: TransformerConfig) -> TransformerConfig:
    """Of EAGLE-3, for a model of this shape, with a quarter of its tokens."""
    [*_, block] = shape.blocks()
    block = dataclasses.replace(block, attention=dataclasses.replace(block.attention, beside="stream"))
    eagle = EagleConfig(3 * shape.embed_dim, shape.vocab_size // 4)
    return dataclasses.replace(apart(shape), segments=(Segment((block,), 1),), eagle=eagle, mtp=None)


def collectives(text: str) -> list[str]:
    """Kinds, in order of the alphabet."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return sorted(re.findall(rf" = .*? (\w*-?(?:{kinds}))(?:-start)?\(", text))
