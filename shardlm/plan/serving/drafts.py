"""What drafts for a served model, as its engine holds and runs it (serve/speculation/): a smaller model, the model's
own modules for further tokens, or a head that reads its streams. Looking tokens up in the text has neither weights nor
pages."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator

from shardlm.layers.block import BlockConfig
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.ops import Pass, Work, ends_work, layer_work, products
from shardlm.plan.serving.weights import Held, InUse, cache_bytes, held_bytes, one_layer, rules_for, weights_of
from shardlm.rules import Rules
from shardlm.serve.submeshes import of_stage
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """In the last stage of a replica.

    model     of a layer, whose cache entries are those of all
    layers    with their weights, first to last; of modules each is one
    beside    weights that are its own and of no layer
    head      weights that make logits, its own or the model's
    again     passes through all layers for the drafts of one step, a token of each row in each
    sampled   of these, those that end in logits and a sampled token
    observed  tokens of each row that go through the layers besides, once they are verified
    entry     weights that tokens go through before the layers, but for those that are drafted
    """

    model: ModelDef
    layers: tuple[tuple[BlockConfig, tuple[Held, ...]], ...]
    beside: tuple[Held, ...]
    head: Held
    rules: Rules
    vocab: int
    embed_dim: int
    again: float
    sampled: int
    observed: int
    entry: tuple[Held, ...] = ()

    @property
    def windows(self) -> list[int | None]:
        return [block.attention.window for block, _ in self.layers]

    @property
    def weight_bytes(self) -> int:
        """On one device."""
        return held_bytes([*self.beside, *(held for _, own in self.layers for held in own)], self.rules)

    def drafting(self, rows: float, context: float, itemsize: int) -> Iterator[tuple[Work, float]]:
        """(work, how often) of one decode step."""
        one = Pass(rows, rows, context, itemsize)
        for work, count in self._passing(one):
            yield work, self.again * count
        yield ends_work(InUse.of(self.head, self.rules), self.rules, one, self.vocab, self.embed_dim), self.sampled
        if self.observed:
            yield from self.reading(dataclasses.replace(one, tokens=rows * self.observed))

    def reading(self, one: Pass) -> Iterator[tuple[Work, float]]:
        """The same of tokens that only pass through the layers, as those of prompts do."""
        if self.entry:
            yield products([InUse.of(held, self.rules) for held in self.entry], one), 1
        yield from self._passing(one)

    def _passing(self, one: Pass) -> Iterator[tuple[Work, float]]:
        for block, own, count in self._kinds:
            yield layer_work(block, own, self.rules, self._cache, one, self.embed_dim), count

    @functools.cached_property
    def _cache(self) -> float:
        return cache_bytes(self.model)

    @functools.cached_property
    def _kinds(self) -> list[tuple[BlockConfig, list[InUse], int]]:
        """Layers that differ, and how many there are of each."""
        found = Counter(self.layers).items()
        return [(block, [InUse.of(held, self.rules) for held in own], count) for (block, own), count in found]


def drafter_of(case: ServingCase) -> Drafter | None:
    """None where no layers draft. Raises ShardlmError for what does not divide."""
    asked = case.engine.speculative_config
    if asked is None or asked.method == "ngram":
        return None
    count, mesh = asked.num_speculative_tokens, of_stage(case.engine.mesh)
    if asked.method == "mtp":
        return _modules(case, count)
    draft = case.draft
    if draft.head:
        return _head(case, count)
    dtype = case.engine.dtype or draft.dtype
    weights = weights_of(draft.shape, mesh, dtype, case.draft_weights)
    head = weights.beside["embedding" if weights.tied else "head"][0]
    return Drafter(
        model=one_layer(draft.shape, mesh, dtype, case.engine.kv_cache_dtype),
        layers=tuple(zip(draft.shape.blocks(), weights.layers, strict=True)),
        beside=tuple(held for own in weights.beside.values() for held in own),
        head=head,
        rules=serving_rules(draft.shape, mesh, case.draft_weights),
        vocab=draft.shape.vocab_size,
        embed_dim=draft.shape.embed_dim,
        again=count + 1,  # one more for the keys and values of the last draft (speculation/draft_model.py)
        sampled=count + 1,
        observed=0,
    )


def _head(case: ServingCase, count: int) -> Drafter:
    """In the model's dtype. Its embedding, where it is the model's, is there already, but in the last of several stages
    (multi_token.py, eagle.py)."""
    shape, head, mesh = case.draft.shape, case.draft.head, of_stage(case.engine.mesh)
    weights = weights_of(shape, mesh, case.dtype, "dtype")
    there = case.engine.mesh.pipeline == 1 or case.model.shape.tie_embeddings
    shared = {name for name in head.shared if there or name == "head"}
    return Drafter(
        model=one_layer(shape, mesh, case.dtype, case.engine.kv_cache_dtype),
        layers=tuple(zip(shape.blocks(), weights.layers, strict=True)),
        beside=tuple(held for name, own in weights.beside.items() if name not in shared for held in own),
        head=weights.beside["embedding" if weights.tied else "head"][0],
        rules=serving_rules(shape, mesh),
        vocab=shape.vocab_size,
        embed_dim=shape.embed_dim,
        again=count,
        sampled=count,
        observed=count,
        entry=tuple(held for held in weights.beside["eagle"] if held.into),
    )


def _modules(case: ServingCase, count: int) -> Drafter:
    """Module k has its input k passes later; beyond the last module, that one drafts on (multi_token.py)."""
    shape, mesh = dataclasses.replace(case.model.shape, mtp=case.model.mtp), of_stage(case.engine.mesh)
    weights, depth = weights_of(shape, mesh, case.dtype, case.weights), case.model.mtp.depth
    # The last stage has the first one's embedding once more (serve/stages.py).
    again = ("positions",) if weights.tied else ("embedding", "positions")
    copied = [held for name in again for held in weights.beside.get(name, ())]
    how = case.engine.kv_cache_dtype, case.engine.decode_context_parallel_size
    return Drafter(
        model=one_layer(case.model.shape, mesh, case.dtype, *how),
        layers=((case.model.mtp.block, weights.beside["mtp"]),) * depth,
        beside=tuple(copied) if case.engine.mesh.pipeline > 1 else (),
        head=weights.beside["embedding" if weights.tied else "head"][0],
        rules=rules_for(case.engine, shape, case.weights),
        vocab=shape.vocab_size,
        embed_dim=shape.embed_dim,
        again=sum(max(1, depth - i) for i in range(count)) / depth,
        sampled=count,
        observed=count,
    )
