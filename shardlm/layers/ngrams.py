"""What some layers take of each token and those before it besides the stream: rows of a large table, found by hashes of
n-grams (Qwen4-Exp's per-layer embeddings; ops/ngram_hash.py). The table, 45e9 numbers as published, stays where it
rests, of each device some columns of some rows: devices tell each other which rows they want and exchange what is
found there, and its gradient is made where it rests too. Nothing of it is gathered."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.context import NGRAMS, START, Context, Pages
from shardlm.layers.gated_streams import grouped_norm
from shardlm.layers.param import Execution, Params, constant, gathered, in_use, normal, project
from shardlm.mesh import shard_map
from shardlm.ops.ngram_hash import LARGEST, NgramHash, ngram_rows
from shardlm.rules import Rules

CONVOLVED, TOKENS = NGRAMS
LEAST = 1e-6  # of a score's size, before its root


@dataclasses.dataclass(frozen=True)
class NgramsConfig:
    """number    of the layer among those that have n-grams, from 0; layer, among all
    hash      which rows stand for a token
    rows      of the table
    dim       numbers of a token, those of all heads side by side
    streams   that a layer's part is added to (layers/gated_streams.py)
    conv_width  taps of the convolution of what is added, `spacing` tokens apart
    norm_eps  of its norms, whose scales are stored as their distance from 1
    parts     that checkpoints have the table in
    """

    number: int
    layer: int
    hash: NgramHash
    rows: int
    dim: int
    streams: int
    conv_width: int
    norm_eps: float
    parts: int = 1

    def __post_init__(self):
        heads = len(self.hash.sizes)
        if min(heads, self.dim, self.conv_width) < 1 or self.dim % heads:
            raise ShardlmError(f"{self.dim} numbers of n-grams cannot be split over {heads} heads; choose a multiple")
        if self.rows >= LARGEST:
            raise ShardlmError(f"a table of {self.rows:,} n-grams: rows are numbered in 31 bits; choose fewer")

    @property
    def width(self) -> int:
        """Numbers of a row of the table."""
        return self.dim // len(self.hash.sizes)

    @property
    def spacing(self) -> int:
        return len(self.hash.multipliers)

    @property
    def before(self) -> int:
        """Tokens before a token that its convolution sees."""
        return (self.conv_width - 1) * self.spacing

    def parameters_per_token(self, embed_dim: int) -> int:
        return self.dim * (self.streams + 1) * embed_dim


class NgramTable(nnx.Module):
    """rows int32 [B, T, heads] -> [B, T, E]; weight "table" (V, H)."""

    def __init__(self, config: NgramsConfig, params: Params):
        self.table = params((config.rows, config.width), ("vocab", "embed"), normal(config.width**-0.5))

    def __call__(self, rows: jax.Array, execution: Execution) -> jax.Array:
        """Returns what is found with the sequence split as between blocks."""
        rules = execution.rules
        act, rest = rules.act, rules.rest
        over_rows, over_columns = rest.axes("vocab"), rest.axes("embed")
        run = shard_map(
            lambda table, rows: _looked_up(table, rows, over_rows, over_columns, execution),
            in_specs=(rest.spec("vocab", "embed"), act.spec("batch", "whole_seq", None)),
            out_specs=act.spec("batch", "seq", None),
        )
        return run(self.table[...], rows)


def rows_of(config: NgramsConfig, tokens: jax.Array, before: jax.Array, text: jax.Array, rules: Rules) -> jax.Array:
    """Of whole rows of tokens int32 [B, T] (ops/ngram_hash.py): [B, T, heads], the sequence split as inside layers."""
    whole = rules.act.spec("batch", None)
    run = shard_map(
        lambda *given: ngram_rows(config.hash, *given),
        in_specs=(whole,) * 3,
        out_specs=rules.act.spec("batch", None, None),
    )
    return jax.reshard(run(tokens, before, text), rules.act.spec("batch", "whole_seq", None))


def _looked_up(table: jax.Array, rows: jax.Array, over_rows, over_columns, execution: Execution) -> jax.Array:
    """On one device: table [V / over_rows, H / over_columns] and its own tokens' rows [B, T, heads]. Devices whose
    columns differ and that see other tokens look up those of all, and exchange them for their own tokens' other
    columns; what is of the same tokens is gathered or summed."""
    act = execution.rules.act
    where = dict.fromkeys(act.axes("batch"), 0) | dict.fromkeys(act.axes("whole_seq"), 1)
    for axis in over_columns:
        if axis in where:
            rows = jax.lax.all_gather(rows, axis, axis=where[axis], tiled=True)
    first = jnp.int32(0)
    for axis in over_rows:
        first = first * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
    own = rows - first * table.shape[0]
    here = (own >= 0) & (own < table.shape[0])
    found = table[jnp.where(here, own, 0)].astype(execution.dtype)
    found = jnp.where(here[..., None], found, 0) if over_rows else found  # [B, T, heads, H / over_columns]
    for axis in reversed(over_columns):  # the axis whose columns are nearest to each other first
        if axis in where:
            found = jax.lax.all_to_all(found, axis, split_axis=where[axis], concat_axis=3, tiled=True)
        else:
            found = jax.lax.all_gather(found, axis, axis=3, tiled=True)
    found = found.reshape(*found.shape[:2], -1)
    parts = [axis for axis in act.axes("seq") if axis not in act.axes("whole_seq")]
    for axis in over_rows:
        if axis in parts:
            found = jax.lax.psum_scatter(found, axis, scatter_dimension=1, tiled=True)
        else:
            found = jax.lax.psum(found, axis)
    for axis in (axis for axis in parts if axis not in over_rows):
        size = found.shape[1] // jax.lax.axis_size(axis)
        found = jax.lax.dynamic_slice_in_dim(found, jax.lax.axis_index(axis) * size, size, axis=1)
    return found


class Ngrams(nnx.Module):
    """What a layer makes of its n-grams: a value, and for each stream a key whose product with the stream gates it, and
    a convolution of that over tokens; weights "key" (E, S, D), "value" (E, D), "taps" (S, D, W) and the scales of three
    norms, "key_norm", "query_norm" and "conv_norm" (S * D,)."""

    def __init__(self, config: NgramsConfig, embed_dim: int, params: Params):
        E, S, D, W = config.dim, config.streams, embed_dim, config.conv_width
        self.config = config
        params.weight(self, "key", (E, S, D), ("embed", "groups", "head_dim"), normal(E**-0.5))
        params.weight(self, "value", (E, D), ("embed", "head_dim"), normal(E**-0.5))
        for name in ("key", "query", "conv"):
            setattr(self, f"{name}_norm", params((S * D,), ("norm",), constant(0.0)))
        self.taps = params((S, D, W), ("groups", "head_dim", "norm"), constant(0.0))

    def __call__(self, x: jax.Array, positions: jax.Array, ctx: Context, pages: Pages | None, execution: Execution):
        """x [B, T, S * D], the sequence split as between blocks; returns (what is added to it, the pages)."""
        config, plain = self.config, execution.plain
        eps, own = config.norm_eps, ctx.ngrams[config.number]
        key = project("bte,esd->btsd", own, self, "key", plain)
        value = project("bte,ed->btd", own, self, "value", plain)
        key = grouped_norm(key, gathered(self, "key_norm", execution), eps)
        query = grouped_norm(x.reshape(*key.shape), gathered(self, "query_norm", execution), eps)
        score = jnp.sum(key.astype(jnp.float32) * query, axis=-1, keepdims=True) * key.shape[-1] ** -0.5
        score = jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), LEAST))
        made = jax.nn.sigmoid(score).astype(value.dtype) * value[:, :, None]  # [B, T, S, D]
        normed = grouped_norm(made, gathered(self, "conv_norm", execution), eps)
        taps = in_use(self.taps, execution)
        mixed, pages = ctx.convolve(CONVOLVED, normed, taps, config.spacing, positions, pages, config.number)
        return (made + jax.nn.silu(mixed)).reshape(x.shape), pages


def tables(configs: tuple[NgramsConfig, ...], params: Params) -> nnx.List:
    return nnx.List([NgramTable(config, params) for config in configs])


Kept = tuple[int, tuple[int, ...], jnp.dtype]
"""Of how many layers, shape and dtype."""


def text_entries(
    configs: tuple[NgramsConfig, ...], embed_dim: int, dtype: jnp.dtype, unsure: int = 0
) -> dict[str, Kept]:
    """What is kept of each text, with so many tokens that may turn out wrong, by name, whole on each device."""
    if not configs:
        return {}
    first, count = configs[0], jnp.dtype(jnp.int32)
    convolved = (first.before + unsure, first.streams, embed_dim)
    found = {
        CONVOLVED: (len(configs), convolved, jnp.dtype(dtype)),
        TOKENS: (1, (first.hash.before + unsure,), count),
    }
    return found | ({name + START: (layers, (), count) for name, (layers, *_) in found.items()} if unsure else {})
