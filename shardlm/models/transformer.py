"""The decoder that every architecture configures: embedding, segments of blocks, final norm and output head."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.flops import attention_width
from shardlm.layers.altup import AltUpConfig, AltUpEnds
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.context import KEPT, SELECTION, Context, Pages
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.gated_streams import GatedStreamsConfig, GatedStreamsHead
from shardlm.layers.hyper_connections import StreamsConfig, StreamsHead, mean_of
from shardlm.layers.indexer import IndexerConfig
from shardlm.layers.layer_inputs import LayerInputs, LayerInputsConfig
from shardlm.layers.lora import shares
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mtp import Mtp, MtpConfig
from shardlm.layers.ngrams import TOKENS, NgramsConfig, rows_of, tables
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import MADE_FIRST, Execution, Params, constant, gathered, in_use, normal
from shardlm.layers.shortcut import ShortcutConfig, parted
from shardlm.layers.stack import Segment, Stack, traced_once
from shardlm.ops.cpu_einsum import cpu_einsum
from shardlm.ops.cross_entropy import LogitsConfig, shaped


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder. Architectures (models/llama.py, ...) build it from their own, familiar fields.

    embed_scale    factor on the embedding (Gemma, Granite)
    embed_norm     the embedding has a norm without a scale before the first layer (nanochat)
    logits         what becomes of the output head's products
    max_positions  learned positions that are added to the embedding (GPT-2); 0: none
    mtp            modules that predict further tokens (layers/mtp.py)
    inputs         what each layer takes of each token besides the stream (layers/layer_inputs.py)
    streams        there are several streams, mixed around every layer (layers/hyper_connections.py, gated_streams.py)
                   or predicted and corrected (layers/altup.py), or what is added later (layers/shortcut.py)
    frequencies    so many of the rotations of all layers have a learned logarithm of a factor on each; 0: they are not
                   learned (Mistral Large 4)
    final_norm     there is a norm behind the last layer; else streams have their own
    last_norm      that norm, where it is another than of layers
    """

    vocab_size: int
    embed_dim: int
    segments: tuple[Segment, ...]
    norm: NormConfig = NormConfig()
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    embed_norm: NormConfig | None = None
    logits: LogitsConfig = LogitsConfig()
    max_positions: int = 0
    mtp: MtpConfig | None = None
    inputs: LayerInputsConfig | None = None
    streams: StreamsConfig | GatedStreamsConfig | AltUpConfig | ShortcutConfig | None = None
    final_norm: bool = True
    frequencies: int = 0
    last_norm: NormConfig | None = None

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("vocab_size", "embed_dim", "num_layers")}
        if min(sizes.values()) < 1 or any(segment.repeats < 0 for segment in self.segments):
            raise ShardlmError(f"{', '.join(f'{name}={n}' for name, n in sizes.items())}: each must be at least 1")
        if self.both and not all(block.memory for block in self.kinds):
            raise ShardlmError("some layers have Mamba 2 beside attention and others have not: give it to all, or none")

    @property
    def num_layers(self) -> int:
        return sum(segment.num_layers for segment in self.segments)

    @property
    def cached_layers(self) -> int:
        """Layers that keep something of a text: those of the modules behind the decoder are the last."""
        return self.num_layers + (self.mtp.depth if self.mtp else 0)

    def blocks(self):
        """The configuration of each layer, first to last."""
        for segment in self.segments:
            yield from segment.pattern * segment.repeats

    @functools.cached_property
    def kinds(self) -> tuple[BlockConfig, ...]:
        """Those that differ, of layers and modules that predict further tokens: of a hundred layers one or a few."""
        blocks = [block for segment in self.segments for block in segment.pattern]
        return tuple(dict.fromkeys([*blocks, self.mtp.block] if self.mtp and self.mtp.depth else blocks))

    def attentions(self):
        """Of each layer and module that attends to tokens, whose keys and values are kept."""
        return (b.attention for b in self.all_blocks() if not isinstance(b.attention, DeltaNetConfig))

    @functools.cached_property
    def attention_kinds(self) -> tuple[AttentionConfig | MlaConfig, ...]:
        """Those of them that differ."""
        return tuple(dict.fromkeys(k.attention for k in self.kinds if not isinstance(k.attention, DeltaNetConfig)))

    @functools.cached_property
    def memories(self) -> tuple[int, ...]:
        """The layers that keep none: they remember a text by arrays of one size."""
        return tuple(i for i, b in enumerate(self.blocks()) if isinstance(b.attention, DeltaNetConfig))

    @functools.cached_property
    def remembers(self) -> bool:
        """Whether any layer remembers a text so, those with pages too among them."""
        return bool(self.memories) or self.both

    @functools.cached_property
    def both(self) -> bool:
        """Whether layers, which are all of them then, keep something of tokens and remember texts so."""
        return any(block.memory for block in self.kinds)

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """Of each layer, whose keys and values it attends to: its own, or those of one before it. Of modules that
        predict further tokens too."""
        keepers, found = {}, []
        for layer, block in enumerate(self.all_blocks()):
            own = block.attention
            found.append(keepers[own.reads] if getattr(own, "reads", "") else layer)
            keepers |= {own.keeps: layer} if getattr(own, "keeps", "") else {}
        return tuple(found)

    @property
    def reads(self) -> bool:
        """Whether any layer attends to another's."""
        return self.sources != tuple(range(len(self.sources)))

    @functools.cached_property
    def sparse(self) -> bool:
        """Whether indexers choose the tokens that queries attend to."""
        return any(_indexer(block) for block in self.kinds)

    @functools.cached_property
    def shared_choice(self) -> int:
        """How many tokens are chosen at a time, where layers share what an indexer before them chose; 0: none do."""
        return max((own.top_k for block in self.kinds if (own := _indexer(block)) and own.shared), default=0)

    @functools.cached_property
    def compressed(self) -> bool:
        """Whether queries attend to entries that stand for several tokens (layers/compressed_attention.py)."""
        return any(isinstance(block.attention, CompressedConfig) for block in self.kinds)

    @functools.cached_property
    def rows(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each layer of such a model, the rows that it keeps in pages (layers/page_layout.py, layout_of_rows)."""
        return tuple(block.attention.rows for block in self.blocks()) if self.compressed else ()

    @functools.cached_property
    def hashed(self) -> bool:
        """Whether experts of some layers go by the token."""
        return any(getattr(block.mlp, "hashed", 0) for block in self.kinds)

    @functools.cached_property
    def ngrams(self) -> tuple[NgramsConfig, ...]:
        """Of the layers that have rows of n-grams (layers/ngrams.py), in order."""
        return tuple(block.ngrams for block in self.blocks() if block.ngrams)

    @functools.cached_property
    def kept_heads(self) -> frozenset[tuple[int, int]]:
        """(kv heads, numbers of one) of the layers that keep keys and values of heads."""
        kinds = (block.attention for block in self.kinds)
        return frozenset((a.num_kv_heads, a.head_dim) for a in kinds if isinstance(a, AttentionConfig))

    def kept_numbers(self, ways: int) -> dict[tuple[int, int], int]:
        """By those, numbers of a token's keys over `ways` devices that split heads: where some layers have too few to
        split and others not, each device keeps the one that its queries read."""
        split = any(heads % ways == 0 for heads, _ in self.kept_heads)
        return {(heads, width): (ways if split and heads % ways else heads) * width for heads, width in self.kept_heads}

    def sharing(self, ways: int) -> tuple[int, ...]:
        """Of each layer, how many like it have room in one place of a page (layers/page_layout.py); (): one."""
        if len(self.kept_heads) < 2:
            return ()
        numbers, attentions = self.kept_numbers(ways), [block.attention for block in self.all_blocks()]
        most = math.lcm(*numbers.values())
        own = (numbers[a.num_kv_heads, a.head_dim] if isinstance(a, AttentionConfig) else most for a in attentions)
        return tuple(most // each for each in own)

    def all_blocks(self):
        """The same, and then of the modules that predict further tokens."""
        yield from self.blocks()
        yield from (self.mtp.block,) * self.mtp.depth if self.mtp else ()

    def apart(self) -> "TransformerConfig":
        """The same, each layer a segment of its own."""
        return dataclasses.replace(self, segments=tuple(Segment((block,), 1) for block in self.blocks()))

    def check_stages(self, count: int) -> None:
        """Refuses pipelines of models whose layers need more than the stream of the one before."""
        needs = {
            "read the keys and values of others": self.reads,
            "have inputs of their own, made of the embedding": self.inputs,
            "attend to what others chose": self.shared_choice,
            "turn by frequencies that are learned": self.frequencies,
            "look at the tokens themselves": self.hashed or self.ngrams,
            "keep rows of several kinds in pages": self.compressed,
            "have several streams, or what is added later, between them": self.streams is not None,
        }
        what = next((what for what, needed in needs.items() if needed), "")
        if count > 1 and what:
            raise ShardlmError(
                f"pipeline={count}: layers of the model {what}, which stages do not send on; set pipeline to 1 and "
                "give its devices to tensor, fsdp or data"
            )

    def without_mtp(self) -> "TransformerConfig":
        """The decoder alone."""
        return dataclasses.replace(self, mtp=None)

    def pipelined_segment(self) -> int:
        """Index of the segment with the most repeats: the one that runs in pipeline stages."""
        if len(self.segments) == 1:  # a planner asks half a million times
            return 0
        return max(range(len(self.segments)), key=lambda i: self.segments[i].repeats)

    def widths(self) -> dict[str, set[int]]:
        """Sizes of the dimensions by which weights are spread over devices that see other tokens (rules.py)."""
        attentions = {block.attention for block in self.kinds}
        latents = {n for a in attentions if isinstance(a, MlaConfig) for n in (a.q_latent_dim, a.kv_latent_dim) if n}
        compressed = [a for a in attentions if isinstance(a, CompressedConfig)]
        latents |= {n for a in compressed for n in (a.q_latent_dim, a.out_latent_dim)}
        latents |= {a.head_dim for a in attentions if isinstance(a, DeltaNetConfig) and a.latents}
        beside = {self.inputs.dim} if self.inputs else set()
        beside |= {n for own in self.ngrams for n in (own.width, own.dim)}
        expert = {getattr(block.mlp, "latent_dim", 0) or self.embed_dim for block in self.kinds}
        return {"embed": {self.embed_dim} | beside, "expert_embed": expert, "latent": latents}

    def parameters_per_token(self) -> int:
        """Weights that take part in a matmul for each token: all layers and the output head, not the embedding; and
        the same of modules that predict further tokens."""
        layers = sum(block.parameters_per_token(self.embed_dim) for block in self.blocks())
        head = self.vocab_size * self.embed_dim
        if self.inputs:  # made of the embedding, and each layer's gate and projection back
            layers += 3 * self.num_layers * self.embed_dim * self.inputs.dim
        layers += sum(own.parameters_per_token(self.embed_dim) for own in self.ngrams)
        if isinstance(self.streams, GatedStreamsConfig):
            of_layer = self.streams.parameters_per_token(self.embed_dim)
            layers += 2 * self.num_layers * of_layer + self.streams.parameters_per_token(self.embed_dim, adds=False)
        if isinstance(self.streams, AltUpConfig):
            layers += 2 * (self.streams.count - 1) * self.embed_dim**2
        further = self.mtp.depth * (self.mtp.parameters_per_token(self.embed_dim) + head) if self.mtp else 0
        return layers + head + further

    def attention_width(self) -> int:
        """Multiply-adds of one (query, key) pair in all layers together that see all of them (flops.py)."""
        every = (a for a in self.attentions() if not isinstance(a, CompressedConfig))
        return sum(attention_width(a.num_heads, a.head_dim, a.value_dim) for a in every)

    def attention_macs(self, pairs: float, tokens: float) -> float:
        """Multiply-adds of all layers for so many tokens and the (query, key) pairs among them (flops.py)."""
        linear = [a for b in self.all_blocks() for a in b.mixers if isinstance(a, DeltaNetConfig)]
        compressed = (a.macs(pairs, tokens) for a in self.attentions() if isinstance(a, CompressedConfig))
        return pairs * self.attention_width() + sum(compressed) + tokens * sum(a.macs_per_token() for a in linear)


def _indexer(block: BlockConfig) -> IndexerConfig | None:
    return getattr(block.attention, "indexer", None)


class Transformer(nnx.Module):
    """tokens [B, T] -> hidden [B, T, D] -> logits [B, T, V]; weights "embedding" (V, D) and, untied, "head" (D, V);
    with learned positions "positions" (P, D); norms "final_norm" and, where there is one, "embed_norm"; "mtp" where
    there are modules that predict further tokens, "layer_inputs" where layers have any, "head_streams", "head_gates"
    or "altup_ends" where there are several streams, "ngram_tables" of the layers that have n-grams, and
    "faster" where frequencies are learned."""

    def __init__(self, config: TransformerConfig, execution: Execution, rngs: nnx.Rngs | None):
        V, D = config.vocab_size, config.embed_dim
        lora = execution.lora.of_model(any(block.mlp.num_experts for block in config.all_blocks()))
        params = Params(rngs, execution.rules, lora, execution.weights, execution.made_first)
        self.config, self.execution = config, execution
        # Unit-variance logits at the start need D**-0.5 in the head; a tied embedding is that head.
        self.embedding = params((V, D), ("vocab", "embed"), normal(D**-0.5))
        if config.max_positions:
            self.positions = params((config.max_positions, D), ("layers", "embed"), normal(D**-0.5))
        # Each residual branch is scaled so that the stream's variance does not grow with depth (GPT-2, section 2.3).
        out_scale = (2 * config.num_layers) ** -0.5
        longest = config.pipelined_segment()
        ends = list(itertools.accumulate((s.num_layers for s in config.segments), initial=0))
        of_segment = [dataclasses.replace(params, layers=range(*ends[i : i + 2])) for i in range(len(ends) - 1)]
        self.segments = nnx.List(
            [
                Stack(s, D, out_scale, config.norm, i == longest, own)
                for i, (s, own) in enumerate(zip(config.segments, of_segment, strict=True))
            ]
        )
        if config.final_norm:
            self.final_norm = Norm(config.last_norm or config.norm, D, params)
        if isinstance(config.streams, GatedStreamsConfig):
            self.head_gates = GatedStreamsHead(config.streams, D, params)
        elif isinstance(config.streams, AltUpConfig):
            self.altup_ends = AltUpEnds(config.streams, D, params)
        elif isinstance(config.streams, StreamsConfig) and not config.streams.plain_head:
            self.head_streams = StreamsHead(config.streams, D, params)
        if config.ngrams:
            self.ngram_tables = tables(config.ngrams, params)
        if config.frequencies:
            self.faster = params((config.frequencies,), ("norm",), constant(0.0))
        if config.embed_norm:
            self.embed_norm = Norm(config.embed_norm, D, params)
        if not config.tie_embeddings:
            params.weight(self, "head", (D, V), ("embed", "vocab"), normal(D**-0.5), into=1)
        if config.mtp:
            self.mtp = Mtp(config.mtp, D, out_scale, config.norm, params)
        if config.inputs:
            self.layer_inputs = LayerInputs(config.inputs, config.num_layers, D, config.norm, params)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, ctx: Context, pages: Pages | None = None
    ) -> tuple[jax.Array, Pages | None, dict[str, jax.Array]]:
        """tokens and positions int32 [B, T]; returns (hidden [B, T, D] after the last norm, pages, auxiliary
        values [layers that have them, ...])."""
        x = self.embed(tokens, positions)
        if self.config.hashed:
            ctx = dataclasses.replace(ctx, tokens=tokens)
        if self.config.ngrams:
            ctx, pages = self._with_ngrams(tokens, positions, ctx, pages)
        if self.config.frequencies:
            ctx = dataclasses.replace(ctx, faster=jnp.exp(gathered(self, "faster", self.execution)))
        if self.config.inputs:
            ctx = dataclasses.replace(
                ctx, inputs=self.layer_inputs(tokens, x[..., : self.config.embed_dim], self.execution)
            )
        x, pages, aux = self.run(x, positions, ctx, pages)
        return self.finish(x), pages, aux

    def _with_ngrams(self, tokens, positions, ctx: Context, pages: Pages | None) -> tuple[Context, Pages | None]:
        """The context with what is looked up of n-grams, and the pages with the last tokens."""
        every = self.config.ngrams
        own = every[0].hash
        tokens, before, text, pages = ctx.preceded(TOKENS, tokens, own.before, own.eos, positions, pages)
        rows = [rows_of(own, tokens, before, text, self.execution.rules) for own in every]
        found = (table(of, self.execution) for table, of in zip(self.ngram_tables, rows, strict=True))
        return dataclasses.replace(ctx, ngrams=tuple(found)), pages

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens and positions int32 [B, T] -> the stream that enters the first block, [B, T, D]."""
        act = self.execution.rules.act
        table = in_use(self.embedding, self.execution)
        looked_up = act.spec("batch", "whole_seq", "embed")
        if jax.sharding.get_abstract_mesh().manual_axes:
            # Inside a replica or a stage jaxlib 0.11.2 aborts on a lookup split over both rows and vocabulary.
            vocab = act.spec("vocab")[0]
            table, looked_up = jax.reshard(table, PartitionSpec(None, vocab)), PartitionSpec(*looked_up[:2], vocab)
        x = table.at[tokens].get(out_sharding=looked_up)
        if self.config.embed_scale != 1:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)  # rounded as Gemma's own code does
        if self.config.max_positions:
            x = x + in_use(self.positions, self.execution).at[positions].get(out_sharding=looked_up)
        x = jax.reshard(x, act.spec("batch", "seq", "embed"))
        x = self.embed_norm(x, self.execution) if self.config.embed_norm else x
        if isinstance(self.config.streams, AltUpConfig):
            return self.altup_ends.begin(x, self.execution)
        return jnp.tile(x, self.config.streams.count) if self.config.streams else x

    def run(self, x: jax.Array, positions: jax.Array, ctx: Context, pages: Pages | None, which: slice = slice(None)):
        """x [B, T, D] through the blocks of all segments, or of a slice of them."""
        found: dict[str, list[jax.Array]] = {}
        execution = self.execution
        if execution.adapters:
            own = shares(ctx.adapter, execution.adapters, execution.lora.rank)
            execution = dataclasses.replace(execution, shares=own)
        if count := self.config.shared_choice:
            ctx = dataclasses.replace(ctx, selection=ctx.unselected(positions, pages, count))
        scan = None if pages is None else traced_once()
        first_layers = itertools.accumulate((s.num_layers for s in self.config.segments), initial=0)
        for stack, first_layer in list(zip(self.segments, first_layers, strict=False))[which]:
            x, pages, aux = stack(x, positions, ctx, pages, first_layer, execution, scan)
            if SELECTION in aux:
                ctx = dataclasses.replace(ctx, selection=aux.pop(SELECTION))
            if kept := {name: aux.pop(name) for name in list(aux) if name.startswith(KEPT)}:
                last = {name.removeprefix(KEPT): jax.tree.map(lambda a: a[-1], kv) for name, kv in kept.items()}
                ctx = dataclasses.replace(ctx, kept={**(ctx.kept or {}), **last})
            for name, value in aux.items():
                found.setdefault(name, []).append(value)
        return x, pages, {name: jnp.concatenate(values) for name, values in found.items()}

    def finish(self, x: jax.Array) -> jax.Array:
        """The norm after the last block: x [B, T, D], or streams side by side -> hidden [B, T, D]."""
        if isinstance(self.config.streams, GatedStreamsConfig):
            x = self.head_gates(x, self.execution)
        elif isinstance(self.config.streams, AltUpConfig):
            x = self.altup_ends.end(x, self.execution)
        elif isinstance(self.config.streams, ShortcutConfig):
            x, _ = parted(x)
        elif self.config.streams and self.config.streams.plain_head:
            x = mean_of(x, self.config.streams)
        elif self.config.streams:
            x = self.head_streams(x, self.execution)
        return self.final_norm(x, self.execution) if self.config.final_norm else x

    def predict_next(
        self,
        hidden: jax.Array,
        next_tokens: jax.Array,
        positions: jax.Array,
        ctx: Context,
        pages: Pages | None = None,
        depth: int = 0,
        layer: int | None = None,
    ) -> tuple[jax.Array, Pages | None]:
        """What module `depth`, from 0, makes of each token and the one that follows the last it knows of: hidden [B, T,
        D] of module 0 is what the model returned, of the next ones and of module 0 run again what this returned;
        next_tokens int32 [B, T] are the tokens depth + 1 places after each; positions int32 [B, T] are hidden's. The
        module's keys and values are `layer` of the pages, by default num_layers + depth. Returns (hidden for
        `logits_of_next` and for what predicts the token after that, pages)."""
        hidden, pages, _ = self.run_mtp(hidden, next_tokens, positions, ctx, pages, depth, layer)
        return hidden, pages

    def run_mtp(
        self, hidden, next_tokens, positions, ctx: Context, pages: Pages | None, depth: int, layer: int | None = None
    ):
        """As `predict_next`, with the block's auxiliary values."""
        embedded = self.embed(next_tokens, positions)
        layer = self.config.num_layers + depth if layer is None else layer
        return self.mtp(depth, hidden, embedded, positions, ctx, pages, layer, self.execution)

    def logits_of_next(self, hidden: jax.Array, depth: int = 0) -> jax.Array:
        """hidden [B, T, D] from `predict_next` -> float32 [B, T, V]: of the token depth + 2 places after each."""
        return self.logits(self.mtp.head_norm(depth, hidden, self.execution))

    def head_param(self) -> nnx.Param:
        """The output head at rest: (D, V), or (V, D) when it is the embedding or lies so."""
        if self.config.tie_embeddings:
            return self.embedding
        return getattr(self, "head" + MADE_FIRST) if self.execution.made_first else self.head

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [B, T, D] -> float32 [B, T, V]. For few tokens: training uses ops/cross_entropy.py instead."""
        act, made_first = self.execution.rules.act, self.execution.made_first
        letters = "btd,vd->btv" if self.config.tie_embeddings or made_first else "btd,dv->btv"
        hidden = jax.reshard(hidden, act.spec("batch", "whole_seq", "embed"))
        weight = in_use(self.head_param(), self.execution)
        einsum = cpu_einsum if made_first else jnp.einsum
        logits = einsum(letters, hidden, weight, preferred_element_type=jnp.float32)
        return shaped(logits, self.config.logits)
