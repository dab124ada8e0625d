"""Attention to the last tokens and, beyond them, to entries that stand for several tokens each (ops/compression.py):
DeepSeek V4. All heads share one key of each token and entry, which is its value too; so the rotation of what is read is
undone by the query's position. What heads make is brought together group by group, in two steps."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.context import INDEX, ROWS, Context, Pages
from shardlm.layers.lora import LoraConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, gathered, in_use, normal, project
from shardlm.ops.compressed_pages import rows_of_widths
from shardlm.ops.compression import Chooser, Compressed, Series
from shardlm.ops.norm import rms_norm
from shardlm.ops.rope import Rope, rope_of_tail


@dataclasses.dataclass(frozen=True)
class ChooserConfig:
    """num_heads, head_dim  of an indexer that chooses `top_k` entries for a query. Its own entries overlap as the
    layer's do."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class CompressedConfig:
    """num_heads, head_dim  of queries; keys have one head
    q_latent_dim  width of the queries' latent
    window      tokens that a query sees, itself included
    rope        of the last rope.dim dimensions
    out_groups, out_latent_dim  heads are brought together in so many groups, each to so many numbers
    rate        tokens of an entry; 0: there are none
    overlap     an entry is made of its window and the one before
    chooser     chooses the entries that a query attends to; None: all
    index_dim   numbers that pages have room for of a chooser's entry, whether the layer has one or not
    """

    num_heads: int
    head_dim: int
    q_latent_dim: int
    window: int
    rope: Rope
    out_groups: int
    out_latent_dim: int
    rate: int = 0
    overlap: bool = False
    chooser: ChooserConfig | None = None
    index_dim: int = 0
    norm: NormConfig = NormConfig(eps=1e-6)

    def __post_init__(self):
        if self.num_heads % self.out_groups:
            raise ShardlmError(
                f"num_heads={self.num_heads} cannot be split into out_groups={self.out_groups}; choose a divisor"
            )
        least = min(self.head_dim, self.chooser.head_dim if self.chooser else self.head_dim)
        if not 0 < self.rope.dim <= least:
            raise ShardlmError(
                f"rotary embedding of {self.rope.dim} dimensions; heads have {least} at least: choose from 2 to {least}"
            )
        self.rope.check(self.head_dim)

    num_kv_heads, softcap, indexer = 1, 0.0, None

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def series(self) -> int:
        """That each token is projected to."""
        return 1 + self.overlap

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """What the layer keeps of a text, each in rows of head_dim numbers: (the tokens that see a row, 0: all; the
        tokens that it stands for)."""
        if not self.rate:
            return ((self.window, 1),)
        widths = [2 * self.series * self.head_dim] + [2 * self.series * c.head_dim for c in [self.chooser] if c]
        read = self.series * self.rate  # by the last token of a window
        return ((self.window, 1), *[(read, 1)] * rows_of_widths(widths, self.head_dim), (0, self.rate))

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        N, H, D, Q = self.num_heads, self.head_dim, embed_dim, self.q_latent_dim
        found = D * Q + Q * N * H + D * H + N * H * self.out_latent_dim + self.out_groups * self.out_latent_dim * D
        if self.rate:
            found += 2 * self.series * D * H
        if self.chooser:
            own = self.chooser
            found += 2 * self.series * D * own.head_dim + Q * own.num_heads * own.head_dim + D * own.num_heads
        return found

    def macs(self, pairs: float, tokens: float) -> float:
        """Multiply-adds of attention for so many tokens, and the (query, key) pairs among them: at most `window` tokens
        each, and of entries those that a query attends to; and what scores them."""
        near = min(pairs, tokens * self.window)
        width = self.num_heads * 2 * self.head_dim
        if not self.rate:
            return near * width
        far = pairs / self.rate
        if not self.chooser:
            return (near + far) * width
        scored = far * self.chooser.num_heads * (self.chooser.head_dim + 1)
        return (near + min(far, tokens * self.chooser.top_k)) * width + scored


class Compressor(nnx.Module):
    """x [B, T, D] -> Series of entries of H numbers; weights "wkv" and "wgate" (D, W, H), "bias" (rate, W, H) and
    "norm"."""

    def __init__(self, rate: int, series: int, head_dim: int, rope: Rope, embed_dim: int, norm: NormConfig, params):
        W, H, D = series, head_dim, embed_dim
        self.rope, self.eps = rope, norm.eps
        for name in ("wkv", "wgate"):
            params.projection(self, name, (D, W, H), ("embed", "groups", "head_dim"), normal(D**-0.5))
        self.bias = params((rate, W, H), ("groups", "groups", "head_dim"), constant(0.0))
        self.norm = Norm(norm, H, params)

    def __call__(self, x: jax.Array, execution: Execution) -> Series:
        """x [B, T, D], the sequence split as between blocks."""
        raw = [project("btd,dwh->btwh", x, self, name, execution) for name in ("wkv", "wgate")]
        raw = jax.reshard(jnp.stack(raw, axis=2), execution.rules.act.spec("batch", "whole_seq", None, None, None))
        bias = gathered(self, "bias", execution).astype(jnp.float32)
        return Series(raw, bias, in_use(self.norm.scale, execution), self.eps, self.rope)


class EntryIndexer(nnx.Module):
    """Chooses entries (layers/indexer.py): queries' latents and the stream -> Chooser; weights "wq" (Q, N, H), "heads"
    (D, N) and "compressor". It takes no part in the loss."""

    def __init__(self, config: CompressedConfig, embed_dim: int, params: Params):
        own, D, Q = config.chooser, embed_dim, config.q_latent_dim
        self.config = config
        params = dataclasses.replace(params, place=f"{params.place}indexer.", lora=LoraConfig())
        heads = ("latent", "index_heads", "head_dim")
        params.projection(self, "wq", (Q, own.num_heads, own.head_dim), heads, normal(Q**-0.5))
        self.heads = params((D, own.num_heads), ("embed", "index_heads"), normal(D**-0.5))
        self.compressor = Compressor(config.rate, config.series, own.head_dim, config.rope, D, config.norm, params)

    def __call__(self, latent: jax.Array, x: jax.Array, positions: jax.Array, execution: Execution) -> Chooser:
        """latent [B, T, Q] with the whole sequence, x [B, T, D] with the sequence split as between blocks."""
        own, whole = self.config.chooser, execution.rules.act.spec("batch", "whole_seq", None)
        latent, x = (jax.lax.stop_gradient(a) for a in (latent, x))
        plain = execution.plain
        q = rope_of_tail(project("btr,rnh->btnh", latent, self, "wq", plain), positions, self.config.rope)
        weights = jnp.einsum("btd,dn->btn", x, in_use(self.heads, execution), preferred_element_type=jnp.float32)
        weights = jax.reshard(weights * (own.num_heads * own.head_dim) ** -0.5, whole)
        series = self.compressor(x, plain)
        series, q, weights = jax.tree.map(jax.lax.stop_gradient, (series, q, weights))
        return Chooser(series, q, weights, own.top_k)


class CompressedAttention(nnx.Module):
    """x [B, T, D] -> [B, T, D]; weights "wq_down" (D, Q), "wq_up" (Q, N, H), "wkv" (D, H), "wo_down" (G, N / G, H, R),
    "wo_up" (G, R, D), "sinks" (N,) and the norms of latents and keys; "compressor" where there are entries, and
    "indexer" where they are chosen."""

    def __init__(self, config: CompressedConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, H, Q = embed_dim, config.num_heads, config.head_dim, config.q_latent_dim
        G, R = config.out_groups, config.out_latent_dim
        self.config = config
        params.projection(self, "wq_down", (D, Q), ("embed", "latent_whole"), normal(D**-0.5))
        self.q_norm = Norm(config.norm, Q, params)
        params.projection(self, "wq_up", (Q, N, H), ("latent", "heads", "head_dim"), normal(Q**-0.5))
        params.projection(self, "wkv", (D, H), ("embed", "head_dim"), normal(D**-0.5))
        self.kv_norm = Norm(config.norm, H, params)
        of_group = ("heads", "groups", "head_dim", "latent")
        self.wo_down = params((G, N // G, H, R), of_group, normal((N // G * H) ** -0.5))
        params.projection(
            self, "wo_up", (G, R, D), ("heads", "latent_whole", "embed"), normal(out_scale * (G * R) ** -0.5), into=2
        )
        self.sinks = params((N,), ("heads",), constant(0.0))
        if config.rate:
            self.compressor = Compressor(config.rate, config.series, H, config.rope, D, config.norm, params)
        if config.chooser:
            self.indexer = EntryIndexer(config, D, params)

    def cache_entries(self) -> dict[str, tuple[tuple[int, int], str]]:
        """The rows of all kinds, and a chooser's entries."""
        found = {ROWS: ((1, self.config.head_dim), "kv_heads_whole")}
        return found | ({INDEX: ((1, self.config.index_dim), "kv_heads_whole")} if self.config.index_dim else {})

    def __call__(self, x, positions, ctx: Context, pages: Pages | None, layer, execution: Execution):
        """x [B, T, D] with the sequence split as between blocks, positions int32 [B, T]; returns (x's shape, pages,
        nothing that later layers read)."""
        config, act = self.config, execution.rules.act
        whole = act.spec("batch", "whole_seq", None)
        latent = self.q_norm(project("btd,dr->btr", x, self, "wq_down", execution), execution)
        latent = jax.reshard(latent, whole)
        q = project("btr,rnh->btnh", latent, self, "wq_up", execution)
        q = rms_norm(q, jnp.ones(q.shape[-1:], q.dtype), config.norm.eps)
        q = rope_of_tail(q, positions, config.rope)
        kv = jax.reshard(self.kv_norm(project("btd,dh->bth", x, self, "wkv", execution), execution), whole)
        kv = rope_of_tail(kv[:, :, None], positions, config.rope)[:, :, 0]
        compressed = None
        if config.rate:
            chooser = self.indexer(latent, x, positions, execution) if config.chooser else None
            compressed = Compressed(self.compressor(x, execution), chooser)
        sinks = gathered(self, "sinks", execution)
        how = {"scale": config.head_dim**-0.5, "window": config.window, "rows": len(config.rows)}
        out, pages = ctx.attend_compressed(q, kv, compressed, positions, pages, layer, sinks, **how)
        out = rope_of_tail(out, positions, config.rope, back=True)
        out = out.reshape(*out.shape[:2], config.out_groups, -1, config.head_dim)
        out = jnp.einsum("btgmh,gmhr->btgr", out, in_use(self.wo_down, execution))
        stream = act.spec("batch", "seq", "embed")
        return project("btgr,grd->btd", out, self, "wo_up", execution, stream), pages, {}
