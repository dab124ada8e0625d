"""The decoder that every architecture configures: embedding, segments of blocks, final norm and output head."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from shardlm.layers.altup import AltUpConfig, AltUpEnds
from shardlm.layers.context import HANDED, KEPT, SELECTION, Context, Pages
from shardlm.layers.eagle import Eagle
from shardlm.layers.gated_streams import GatedStreamsConfig, GatedStreamsHead
from shardlm.layers.hyper_connections import StreamsConfig, StreamsHead, mean_of
from shardlm.layers.layer_inputs import LayerInputs
from shardlm.layers.lora import shares
from shardlm.layers.mtp import Mtp
from shardlm.layers.ngrams import TOKENS, rows_of, tables
from shardlm.layers.norm import Norm
from shardlm.layers.param import MADE_FIRST, Execution, Params, constant, gathered, in_use, normal
from shardlm.layers.shortcut import ShortcutConfig, parted
from shardlm.layers.stack import Stack, traced_once
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cpu_einsum import cpu_einsum
from shardlm.ops.cross_entropy import shaped
from shardlm.ops.rope import Sines


class Transformer(nnx.Module):
    """tokens [B, T] -> hidden [B, T, D] -> logits [B, T, V]; weights "embedding" (V, D) and, untied, "head" (D, V),
    with a bias "head_bias" (V,); with learned positions "positions" (P, D), of which the first are not used where texts
    begin later; norms "final_norm" and, where there is one, "embed_norm"; "mtp" where there are modules that predict
    further tokens, "eagle" in a head that drafts, "layer_inputs" where layers have any, "head_streams", "head_gates" or
    "altup_ends" where there are several streams, "ngram_tables" of the layers that have n-grams, and "faster" where
    frequencies are learned."""

    def __init__(self, config: TransformerConfig, execution: Execution, rngs: nnx.Rngs | None):
        V, D = config.vocab_size, config.embed_dim
        lora = execution.lora.of_model(any(block.mlp.num_experts for block in config.all_blocks()))
        params = Params(rngs, execution.rules, lora, execution.weights, execution.made_first)
        self.config, self.execution = config, execution
        # Unit-variance logits at the start need D**-0.5 in the head; a tied embedding is that head.
        self.embedding = params((V, D), ("vocab", "embed"), normal(D**-0.5))
        if config.max_positions:
            rows = config.first_position + config.max_positions
            self.positions = params((rows, D), ("layers", "embed"), normal(D**-0.5))
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
            params.weight(self, "head", (D, config.head_size), ("embed", "vocab"), normal(D**-0.5), into=1)
        if config.head_bias:
            self.head_bias = params((V,), ("vocab",), constant(0.0))
        if config.mtp:
            self.mtp = Mtp(config.mtp, D, out_scale, config.norm, params)
        if config.eagle:
            self.eagle = Eagle(config.eagle, D, V, config.norm, params)
        if config.inputs:
            self.layer_inputs = LayerInputs(config.inputs, config.num_layers, D, config.norm, params)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, ctx: Context, pages: Pages | None = None
    ) -> tuple[jax.Array, Pages | None, dict[str, jax.Array]]:
        """tokens and positions int32 [B, T]; returns (hidden [B, T, D] after the last norm, pages, auxiliary
        values [layers that have them, ...])."""
        x = self.enter(tokens, positions, ctx)
        if self.config.hashed:
            ctx = dataclasses.replace(ctx, tokens=tokens)
        if self.config.ngrams:
            ctx, pages = self._with_ngrams(tokens, positions, ctx, pages)
        if self.config.frequencies:
            ctx = dataclasses.replace(ctx, faster=jnp.exp(gathered(self, "faster", self.execution)))
        if self.config.inputs:
            named, own = tokens if ctx.seen is None else ctx.seen.named(tokens), x[..., : self.config.embed_dim]
            ctx = dataclasses.replace(ctx, inputs=self.layer_inputs(named, own, self.execution))
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

    def enter(self, tokens: jax.Array, positions: jax.Array, ctx: Context) -> jax.Array:
        """tokens and positions int32 [B, T] -> the stream that enters the first block, [B, T, D], with images in it."""
        x = self.embed(tokens, positions)
        return x if ctx.seen is None else ctx.seen.embedded(x, self.config.embed_dim)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens and positions int32 [B, T] -> what the embedding says of them, [B, T, D]."""
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
            rows = positions + self.config.first_position
            x = x + in_use(self.positions, self.execution).at[rows].get(out_sharding=looked_up)
        x = jax.reshard(x, act.spec("batch", "seq", "embed"))
        x = self.embed_norm(x, self.execution) if self.config.embed_norm else x
        if isinstance(self.config.streams, AltUpConfig):
            return self.altup_ends.begin(x, self.execution)
        return jnp.tile(x, self.config.streams.count) if self.config.streams else x

    def run(self, x: jax.Array, positions: jax.Array, ctx: Context, pages: Pages | None, which: slice = slice(None)):
        """x [B, T, D] through the blocks of all segments, or of a slice of them."""
        found: dict[str, list[jax.Array]] = {}
        handed: dict[int, jax.Array] = {}
        execution = self.execution
        if execution.adapters:
            own = shares(ctx.adapter, execution.adapters, execution.lora.rank)
            execution = dataclasses.replace(execution, shares=own)
        if execution.made_first:
            turns = positions if ctx.turns is None else ctx.turns
            ctx = dataclasses.replace(ctx, sines=Sines.of(self.config.rotations, turns))
        if count := self.config.shared_choice:
            ctx = dataclasses.replace(ctx, selection=ctx.unselected(positions, pages, count))
        scan = None if pages is None else traced_once()
        first_layers = itertools.accumulate((s.num_layers for s in self.config.segments), initial=0)
        for stack, first_layer in list(zip(self.segments, first_layers, strict=False))[which]:
            handed[first_layer] = x
            x, pages, aux = stack(x, positions, ctx, pages, first_layer, execution, scan)
            if SELECTION in aux:
                ctx = dataclasses.replace(ctx, selection=aux.pop(SELECTION))
            if kept := {name: aux.pop(name) for name in list(aux) if name.startswith(KEPT)}:
                last = {name.removeprefix(KEPT): jax.tree.map(lambda a: a[-1], kv) for name, kv in kept.items()}
                ctx = dataclasses.replace(ctx, kept={**(ctx.kept or {}), **last})
            for name, value in aux.items():
                found.setdefault(name, []).append(value)
        whole = {name: jnp.concatenate(values) for name, values in found.items()}
        if places := execution.handed_out:
            handed[self.config.num_layers] = x
            whole[HANDED] = jnp.concatenate([handed[place] for place in places], axis=-1)
        return x, pages, whole

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
        if self.config.head_bias:
            logits = logits + self.bias_of_head()
        return shaped(logits, self.config.logits)

    def bias_of_head(self) -> jax.Array | None:
        """float32 [V], split as logits are; None where it has none."""
        rules = self.execution.rules
        return rules.gather(self.head_bias[...].astype(jnp.float32), "vocab") if self.config.head_bias else None
