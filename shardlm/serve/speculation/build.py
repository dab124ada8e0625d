"""From a configuration to what proposes drafts, with its weights on the model's mesh."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.page_layout import PageLayout, layout_of, layout_of_rows
from shardlm.layers.param import MADE_FIRST
from shardlm.mesh import MeshSpec
from shardlm.models.transformer import Transformer
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import describe, load
from shardlm.ops.kv_format import KvFormat
from shardlm.serve.layers import taken_apart
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.serve.speculation.draft_model import DraftModelProposer
from shardlm.serve.speculation.eagle import EagleProposer
from shardlm.serve.speculation.eagle_files import HEAD, holds_head, open_head
from shardlm.serve.speculation.multi_token import MultiTokenProposer
from shardlm.serve.speculation.ngram import NgramProposer
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.stages import Place, Stage
from shardlm.state import ModelDef, kv_ways


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A draft model or head, its layers apart, and its parameters at rest; None: the model itself or its last pipeline
    stage, whose modules draft, and how it is put together with its parameters (`lm`). A head reads the `streams` of
    the model behind so many layers, and some parameters are `shared` with it."""

    model: ModelDef
    params: Any
    lm: Callable[[Any], Transformer] | None = None
    streams: tuple[int, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def windows(self) -> list[int | None]:
        """Of the layers that draft."""
        blocks = [*self.model.config.all_blocks()]
        number = self.model.config.num_layers
        return _windows(blocks[number:] if self.params is None else blocks[:number])

    def listening(self, model: ModelDef, params: Any) -> tuple[ModelDef, "DraftModel"]:
        """(the model that it drafts for, which hands out the streams that it reads, it with the parameters of that);
        call under its mesh."""
        if not self.streams:
            return model, self
        execution = dataclasses.replace(model.execution, handed_out=self.streams)
        held = self.model.held_at_rest(jax.tree.leaves(self.params)[0].sharding.mesh)
        shared = {name: jax.device_put(params[name], held[name].sharding) for name in self.shared}
        own = dataclasses.replace(self, params={**self.params, **shared})
        return ModelDef.make(model.config, execution), own

    def beside(self, place: Place) -> Place:
        """With what is shared once on each device, where the last stage has it."""
        models = place.params[-1]
        names = [n for n in self.shared if n in models and models[n].sharding == place.draft[n].sharding]
        return (
            dataclasses.replace(place, draft={**place.draft, **{name: models[name] for name in names}})
            if names
            else place
        )

    def within(self, stage: Stage) -> "DraftModel":
        """As it is in the last stage of the model that it drafts for."""
        return self if self.params is not None else DraftModel(stage.model, None, stage.lm)


def wants_modules(config: SpeculativeConfig | None, shape: TransformerConfig, path: str | os.PathLike) -> bool:
    """Whether modules that predict further tokens shall draft. Raises ShardlmError where the model has none."""
    wanted = config is not None and config.method == "mtp"
    if wanted and not shape.mtp:
        raise ShardlmError(
            f"speculative_config: method 'mtp' drafts by modules that predict further tokens, and {path} has none. "
            "Published checkpoints of DeepSeek V3, GLM-4.5, Qwen3-Next and Qwen 3.5 have them, and runs that trained "
            "them; what transformers wrote has not. Choose method 'ngram', or 'draft_model' with a smaller model"
        )
    return wanted


def by_modules(config: SpeculativeConfig | None, model: ModelDef) -> DraftModel | None:
    """The model, its layers apart, as what drafts for itself, where that is asked for."""
    return DraftModel(model, None, model.model) if config and config.method == "mtp" else None


def open_draft_model(
    config: SpeculativeConfig | None,
    shape: TransformerConfig,
    length: int,
    mesh: MeshSpec,
    dtype: str | None = None,
    kv_cache: KvFormat = "auto",
    devices: Sequence[jax.Device] | None = None,
) -> DraftModel | None:
    """The draft model that is asked for, if one is, on the devices of the model that it drafts for, which has this
    shape. Raises ShardlmError, before its weights are read, where it cannot."""
    if config is None or config.model is None:
        return None
    if config.method == "eagle3":
        return _open_head(config.model, shape, length, mesh, dtype, kv_cache, devices)
    if holds_head(config.model):
        raise ShardlmError(
            f"speculative_config: {config.model} holds a head of EAGLE-3, which drafts by the model's streams: add "
            '\'"method": "eagle3"\''
        )
    found = describe(config.model, length)
    drafting, longest = found.source.transformer(), found.longest
    own, vocab = drafting.vocab_size, shape.vocab_size
    if own != vocab:
        raise ShardlmError(
            f"the draft model {config.model} has a vocabulary of {own} tokens, and the model one of {vocab}: they must "
            "be the same. Choose a draft model of the same family, or method 'ngram'"
        )
    if longest and length > longest:
        raise ShardlmError(
            f"the draft model {config.model} was made for {longest} positions, and max_model_len={length}: lower that "
            f"to {longest}, or choose another draft model"
        )
    if drafting.memories and not shape.remembers:
        raise ShardlmError(
            f"the draft model {config.model} has {len(drafting.memories)} layers of linear attention, whose memory is "
            "kept where that of the model's is, which has none; choose another, or method 'ngram'"
        )
    draft = load(config.model, mesh=mesh, dtype=dtype, decoding=True, length=length, devices=devices)
    of_draft = draft.model.config
    lacking = {
        "have Mamba 2 beside attention": of_draft.both,
        "read others' keys and values": of_draft.reads,
        "keep entries of several tokens": of_draft.compressed,
        "look up n-grams": of_draft.ngrams,
    }
    if what := next((what for what, holds in lacking.items() if holds), ""):
        raise ShardlmError(
            f"the draft model {config.model} has layers that {what}, which no draft model may; choose another, or "
            "method 'ngram'"
        )
    with jax.set_mesh(draft.mesh):
        return DraftModel(*taken_apart(draft.model, draft.params, kv_cache))


def _open_head(
    path: str, shape: TransformerConfig, length: int, mesh: MeshSpec, dtype: str | None, *rest
) -> DraftModel:
    head, model, params = open_head(path, shape, length, mesh, dtype, *rest)
    end = MADE_FIRST if model.execution.made_first else ""
    shared = tuple(name + end if name == HEAD else name for name in head.shared)
    return DraftModel(model, params, None, head.streams.of(shape.num_layers), shared)


def layouts_of(
    model: ModelDef, draft: DraftModel | None, length: int, page_size: int, steps: int, drafts: int = 0
) -> tuple[PageLayout, ...]:
    """How pages serve the layers of a model and, under the same numbers, those that draft, `drafts` tokens a step. As
    `layout_of`, the number of pages left to be set."""
    return layouts_for(model.config, draft and draft.windows, length, page_size, steps, drafts, kv_ways(model))


def layouts_for(
    shape: TransformerConfig,
    drafting: Sequence[int | None] | None,
    length: int,
    page_size: int,
    steps: int,
    drafts: int = 0,
    ways: int = 1,
) -> tuple[PageLayout, ...]:
    """The same from the shape of the model, the windows of the layers that draft, where there are any, and the devices
    that kv heads are split over."""
    if shape.compressed:
        if drafting is not None:
            raise ShardlmError(
                "layers that keep entries of several tokens share no pages with a draft model; choose method 'ngram'"
            )
        return (layout_of_rows(shape.rows, 0, length, page_size, steps),)
    windows, sources = _windows(shape.blocks()), shape.sources[: shape.num_layers]
    layout = layout_of(windows, 0, length, page_size, steps, shape.sharing(ways)[: shape.num_layers], sources)
    beside = layout.beside(drafting or ())
    if beside is None:  # layers that draft see farther than any of the model's
        layout = PageLayout.whole(len(set(sources)), 0, shape.memories).reading(sources)
        beside = layout.beside(drafting)
    layout = dataclasses.replace(layout, both=shape.both)
    layouts = (layout,) if drafting is None else (layout, beside)
    return tuple(dataclasses.replace(one, unsure=1 + drafts if drafts and one.memories else 0) for one in layouts)


def _windows(blocks: Iterable[BlockConfig]) -> list[int | None]:
    every = (block.attention for block in blocks)
    return [own.reach if isinstance(own, AttentionConfig) else own.window for own in every]


def make_proposer(
    config: SpeculativeConfig, draft: DraftModel | None, sizes: RunnerConfig, layout: PageLayout | None = None
) -> tuple[Proposer, Any]:
    """(what proposes drafts, its parameters or None for the model's); `layout` is that of the layers that draft."""
    count = config.num_speculative_tokens
    if config.method == "mtp":
        return MultiTokenProposer(count, draft.model, draft.lm, layout, sizes.page_size, sizes.max_rows), None
    if config.method == "eagle3":
        own = (count, draft.model, draft.model.model, layout, sizes.page_size, sizes.max_rows)
        return EagleProposer(*own, draft.shared), draft.params
    if draft is not None:
        return DraftModelProposer(count, draft.model, layout, sizes.page_size), draft.params
    least, most = config.prompt_lookup_min, config.prompt_lookup_max
    return NgramProposer(count, most, least, sizes.max_rows, sizes.max_model_len), ()
