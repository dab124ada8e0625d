"""Grouped-query attention: projections and rotary embedding around whatever the context attends to."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.block_indexer import BlockIndexer, BlockIndexerConfig
from shardlm.layers.context import INDEX, KEPT, Context, Pages
from shardlm.layers.fused import Late, late_norm, over, project_back, project_each, sums_each, taken
from shardlm.layers.head_indexer import HeadIndexer, HeadIndexerConfig
from shardlm.layers.norm import HeadNorms, Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project
from shardlm.ops import alibi
from shardlm.ops.kv_format import AXES
from shardlm.ops.norm import rms_norm
from shardlm.ops.rope import QueryGrowth, Rope, grown, rotated, sines
from shardlm.ops.rotate_write import Unrotated

_LETTERS: Mapping[str, str] = MappingProxyType({"q": "btd,dnh->btnh", "k": "btd,dkh->btkh", "v": "btd,dkh->btkh"})


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (https://arxiv.org/abs/2305.13245). num_kv_heads = num_heads is multi-head.

    rope       None: no rotary embedding
    window     how many positions a token sees, itself included; 0: all before it
    chunk      a token sees the positions of its own chunk of so many, into which a text is cut (Llama 4); 0: of all
    bias       of queries, keys and values; out_bias of the output
    qk_norm    of queries and keys before the rotation: of each head (Qwen 3, https://arxiv.org/abs/2505.09388), of each
               with a scale of its own (Command R+), or of all heads together (OLMo 2,
               https://arxiv.org/abs/2501.00656)
    norm_rotated  that norm comes after the rotation (Hunyuan)
    scale      of the scores; 0: head_dim ** -0.5
    softcap    scores are softcap * tanh(scores / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118); 0: as they are
    query_growth  of queries by their position, after the rotation (ops/rope.py)
    sinks      each head has a learned score that takes weight from the tokens (GPT-OSS,
               https://arxiv.org/abs/2309.17453)
    gate       each head's output is multiplied by the sigmoid of a projection (Qwen3-Next,
               https://arxiv.org/abs/2505.06708), of as many numbers or, by `gate_of_head`, of one (Step 3.5); or, by
               `gate_softplus`, by its softplus (Laguna)
    clip       queries, keys and values are from -clip to clip (OLMo); 0: whatever they are
    value_norm  values have a norm too, without a scale; and with keys_are_values they are keys before norm and rotation
               (Gemma 4)
    value_width  of each head's values, and so of its output, where it is less than head_dim; 0: head_dim. Pages keep
               them with zeros behind (MiMo-V2)
    value_scale  factor on values
    slopes     of each head, by which scores grow with the key's position (ALiBi, ops/alibi.py): the last dimensions of
               head_dim are those that it takes, and not projected; (): none. `with_slopes` makes such a one
    indexer    chooses the blocks of tokens that queries attend to (layers/block_indexer.py), or those of each kv head
               (layers/head_indexer.py); None: they attend to all
    ahead      inside of an image tokens see those after them, in models where they do (vision/sight.py, whole); False:
               here they never do (Gemma 4's layers without windows)
    beside     it reads an embedding too, side by side with the stream, each after a norm (layers/eagle.py): what it
               makes is added to the stream, or to that as it is read, after its norm
    keeps      a name, under which later layers find this one's keys and values; `reads`, of the last layer that keeps
               some: it attends to those and has none of its own (https://arxiv.org/abs/2405.12981)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = Rope()
    window: int = 0
    chunk: int = 0
    bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "each", "all"] = "none"
    norm: NormConfig = NormConfig()
    norm_rotated: bool = False
    scale: float = 0.0
    softcap: float = 0.0
    query_growth: QueryGrowth | None = None
    sinks: bool = False
    gate: bool = False
    gate_of_head: bool = False
    gate_softplus: bool = False
    clip: float = 0.0
    value_norm: bool = False
    keys_are_values: bool = False
    value_width: int = 0
    value_scale: float = 1.0
    slopes: tuple[float, ...] = ()
    indexer: BlockIndexerConfig | HeadIndexerConfig | None = None
    ahead: bool = True
    beside: Literal["none", "stream", "normed"] = "none"
    keeps: str = ""
    reads: str = ""

    def __post_init__(self):
        N, K = self.num_heads, self.num_kv_heads
        if min(N, self.head_dim) < 1:
            raise ShardlmError(f"num_heads={N}, head_dim={self.head_dim}: each must be at least 1")
        if K < 1 or N % K:
            divisors = ", ".join(str(d) for d in range(1, N + 1) if N % d == 0)
            raise ShardlmError(f"num_heads={N} is not a multiple of num_kv_heads={K}; choose kv heads from {divisors}")
        if not 0 <= self.value_width <= self.head_dim:
            raise ShardlmError(f"value_width={self.value_width} is more than head_dim={self.head_dim}, or below 0")
        if self.rope:
            self.rope.check(self.head_dim)
        if self.slopes and (len(self.slopes) != N or not self.scale or self.rope or self.qk_norm != "none"):
            raise ShardlmError(
                f"{len(self.slopes)} slopes of linear biases with num_heads={N}, scale={self.scale}, rope={self.rope}, "
                f"qk_norm={self.qk_norm!r}: it needs one a head, a scale above 0, no rope and no norms"
            )

    @classmethod
    def with_slopes(
        cls, num_heads: int, num_kv_heads: int, head_dim: int, slopes: tuple[float, ...], **fields
    ) -> "AttentionConfig":
        """With linear biases, of heads of so many numbers, which queries and keys have more than; `fields` are others,
        scale among them."""
        wide = head_dim + alibi.DIMS
        return cls(num_heads, num_kv_heads, wide, None, value_width=head_dim, slopes=slopes, **fields)

    @property
    def projected_dim(self) -> int:
        """Of a head's queries and keys, those that projections make."""
        return self.head_dim - alibi.DIMS if self.slopes else self.head_dim

    @property
    def reach(self) -> int:
        """How many positions a token sees at most, itself included; 0: all before it."""
        return self.window or self.chunk

    @property
    def value_dim(self) -> int:
        """Of each head; queries and keys have head_dim."""
        return self.value_width or self.head_dim

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        widths = {"q": self.num_heads * self.projected_dim, "k": self.num_kv_heads * self.projected_dim}
        widths["v"] = self.num_kv_heads * self.value_dim
        made = sum(widths[letter] for letter in self.made)
        chosen = self.indexer.parameters_per_token(embed_dim) if self.indexer else 0
        read = self.read_dim(embed_dim)
        return read * (made + self.gates) + embed_dim * self.num_heads * self.value_dim + chosen

    def read_dim(self, embed_dim: int) -> int:
        """Numbers of a token that queries, keys and values are made of."""
        return embed_dim if self.beside == "none" else 2 * embed_dim

    @property
    def gates(self) -> int:
        """Numbers of a token's gates."""
        return self.num_heads * (1 if self.gate_of_head else self.value_dim) if self.gate else 0

    @property
    def plain(self) -> bool:
        """Whether all that queries, keys and values have before they meet is in ops/rotate_write.py."""
        norm = self.qk_norm == "none" or (self.qk_norm == "head" and self.norm.kind == "rms" and self.norm.scaled)
        more = self.norm_rotated, self.query_growth, self.clip, self.value_norm, self.indexer, self.reads
        same = self.made == "qkv" and self.value_dim == self.head_dim and self.value_scale == 1
        fours = self.rope is None or (self.rope.dim or self.head_dim) % 4 == 0
        return norm and same and fours and not any(more)

    @property
    def made(self) -> str:
        """Of queries, keys and values, which are made by a projection each."""
        return "q" if self.reads else "qk" if self.keys_are_values else "qkv"


class Attention(nnx.Module):
    """x [B, T, R] -> [B, T, D]; weights "wq" (R, N, H), "wk" (R, K, H), "wv" (R, K, V), "wo" (N, V, D), with biases
    "bq" (N, H), "bk" (K, H), "bv" (K, V), "bo" (D,), with norms "q_norm" and "k_norm", with sinks "sinks" (N,), with a
    gate "wg" (R, N, V) or, of a head, (R, N, 1); "indexer" where blocks of tokens are chosen. R is D, but where it
    reads something beside."""

    takes_late = True  # the norm of x (fused.py)

    def __init__(self, config: AttentionConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, K, H = embed_dim, config.num_heads, config.num_kv_heads, config.projected_dim
        self.config, V, R = config, config.value_dim, config.read_dim(embed_dim)
        widths = {"k": H, "v": V}
        self.kv_name = kv_heads_name(K, N, params.rules.mesh.size(*params.rules.use.axes("heads")))
        params.projection(self, "wq", (R, N, H), ("embed", "heads", "head_dim"), normal(R**-0.5))
        for letter in config.made[1:]:
            shape = (R, K, widths[letter])
            params.projection(self, f"w{letter}", shape, ("embed", self.kv_name, "head_dim"), normal(R**-0.5))
        out_init = normal(out_scale * (N * V) ** -0.5)
        params.projection(self, "wo", (N, V, D), ("heads", "head_dim", "embed"), out_init, into=2)
        if config.bias:
            self.bq = params((N, H), ("heads", "head_dim"), constant(0.0))
            for letter in config.made[1:]:
                shape = (K, widths[letter])
                setattr(self, f"b{letter}", params(shape, (self.kv_name, "head_dim"), constant(0.0)))
        if config.out_bias:
            self.bo = params((D,), ("norm",), constant(0.0))
        if config.qk_norm == "each":
            self.q_norm = HeadNorms(config.norm, N, H, "heads", params)
            self.k_norm = HeadNorms(config.norm, K, H, self.kv_name, params)
        elif config.qk_norm != "none":
            self.q_norm = Norm(config.norm, H if config.qk_norm == "head" else N * H, params)
            if not config.reads:
                self.k_norm = Norm(config.norm, H if config.qk_norm == "head" else K * H, params)
        if config.gate:
            shape = (R, N, 1 if config.gate_of_head else V)
            params.projection(self, "wg", shape, ("embed", "heads", "head_dim"), normal(R**-0.5))
        if config.indexer:
            own = HeadIndexer if isinstance(config.indexer, HeadIndexerConfig) else BlockIndexer
            self.indexer = own(config.indexer, D, params)
        if config.sinks:
            self.sinks = params((N,), ("heads",), constant(0.0))

    def cache_entries(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Per token and layer: entry name -> ((K, H), name of the K dimension)."""
        entry = ((self.config.num_kv_heads, self.config.head_dim), self.kv_name)
        found, own = {"k": entry, "v": entry}, self.config.indexer
        if own is None:
            return found
        found |= {INDEX: ((1, own.head_dim), "kv_heads_whole")}
        turned = isinstance(own, BlockIndexerConfig) and own.rope.axes  # a block's key, as its first token
        return found | ({INDEX + AXES: ((1, 3), "kv_heads_whole")} if turned else {})

    def __call__(self, x, positions, ctx: Context, pages: Pages | None, layer, execution: Execution):
        """x [B, T, R] with the sequence split as between blocks, positions int32 [B, T]; returns ([B, T, D], or the
        product that makes it, pages, the keys and values that later layers read)."""
        config, rules = self.config, execution.rules
        x = over(x, rules.act.spec("batch", "whole_seq", "embed"))
        rotates = config.plain and ctx.rotates(pages, self.kv_name)
        turns = positions if ctx.turns is None else ctx.turns
        unrotated = self._unrotated(x, turns, execution) if rotates else None
        q, k, v = (unrotated, None, None) if unrotated else self._rotated(x, positions, turns, ctx, execution)
        options = {
            "scale": config.scale or config.head_dim**-0.5,
            "window": config.window,
            "chunk": config.chunk,
            "softcap": config.softcap,
            "sinks": in_use(self.sinks, execution) if config.sinks else None,
            "kv_name": self.kv_name,
            "kv_heads": config.num_kv_heads,
        }
        if config.indexer:
            index = self.indexer(taken(x), turns, execution)
            options["selection"], pages = ctx.select(index, positions, pages, layer)
        ctx = ctx if config.ahead else ctx.backwards()
        out, pages = ctx.attend(q, k, v, positions, pages, layer, **options)
        if config.gate:
            opened = jax.nn.softplus if config.gate_softplus else jax.nn.sigmoid
            out = out * opened(project("btd,dnh->btnh", taken(x), self, "wg", execution))
        # n before v: jnp.einsum sums in the alphabet's order, and in another one than wo's XLA:CPU copies wo.
        out = project_back("btnv,nvd->btd", out, self, "wo", execution)
        kept = {f"{KEPT}{config.keeps}": {"k": k, "v": v}} if config.keeps and not ctx.absorbs else {}
        return out + in_use(self.bo, execution) if config.out_bias else out, pages, kept

    def _unrotated(self, x: jax.Array | Late, turns: jax.Array, execution: Execution) -> Unrotated | None:
        """What a context that rotates them attends by; None where no kernel makes it."""
        config, each = self.config, {f"w{name}": how for name, how in _LETTERS.items()}
        sums = sums_each(x, self, each, execution)
        if sums is None:
            return None
        biases = {name: in_use(getattr(self, f"b{name}"), execution) for name in "qkv" if config.bias}
        norms = {name: late_norm(getattr(self, f"{name}_norm"), execution) for name in "qk" if config.qk_norm == "head"}
        turned = sines(turns, config.rope, config.head_dim) if config.rope else None
        return Unrotated({name[1:]: one for name, one in sums.items()}, biases, norms, turned)

    def _rotated(self, x: jax.Array | Late, positions: jax.Array, turns: jax.Array, ctx: Context, execution: Execution):
        """Queries [B, T, N, H], keys and values [B, T, K, H], None where they are another layer's and in pages."""
        config, made = self.config, self.projected(x, execution)
        v = made.pop("v", made.get("k"))
        sin_cos = self._sines(turns, ctx) if config.rope else None
        made = {name: self._turned(a, name, sin_cos, execution) for name, a in made.items()}
        q, (k, v) = made["q"], ctx.kept_by(config.reads) if config.reads else (made["k"], v)
        if config.value_norm and not config.reads:
            v = rms_norm(v, jnp.ones(v.shape[-1:], v.dtype), config.norm.eps)
        if config.value_scale != 1:
            v = v * config.value_scale
        if config.slopes:
            q, k = alibi.with_slopes(q, config.slopes, config.scale), alibi.with_positions(k, positions)
        return grown(q, positions, config.query_growth) if config.query_growth else q, k, v

    def _sines(self, turns: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """(sines, cosines) of the rotation, those of the step where they are made."""
        rope, head_dim = self.config.rope, self.config.head_dim
        return (ctx.sines and ctx.sines.get(rope, head_dim)) or sines(turns, rope, head_dim)

    def projected(self, x: jax.Array | Late, execution: Execution) -> dict[str, jax.Array]:
        """Queries [B, T, N, H], keys and values [B, T, K, H], those that it makes."""
        each = {f"w{name}": _LETTERS[name] for name in self.config.made}
        made = {name[1:]: a for name, a in project_each(x, self, each, execution).items()}
        if self.config.bias:
            made = {name: a + in_use(getattr(self, f"b{name}"), execution) for name, a in made.items()}
        if clip := self.config.clip:
            made = {name: jnp.clip(a, -clip, clip) for name, a in made.items()}
        return made

    def _turned(
        self, a: jax.Array, name: str, sin_cos: tuple[jax.Array, jax.Array] | None, execution: Execution
    ) -> jax.Array:
        """Queries or keys [B, T, K, H] after their norm and their rotation, where they have any."""
        config = self.config
        if not config.norm_rotated:
            a = self._normalised(a, name, execution)
        if sin_cos:
            a = rotated(a, *sin_cos)
        return self._normalised(a, name, execution) if config.norm_rotated else a

    def _normalised(self, a: jax.Array, name: str, execution: Execution) -> jax.Array:
        """a [B, T, K, H], each head's or all heads' mean square 1."""
        if self.config.qk_norm == "none":
            return a
        norm, heads = getattr(self, f"{name}_norm"), "heads" if name == "q" else self.kv_name
        if self.config.qk_norm in ("head", "each"):
            return norm(a, execution)
        act = execution.rules.act
        flat, split = act.spec("batch", "whole_seq", heads), act.spec("batch", "whole_seq", heads, "head_dim")
        a, shape = jax.lax.reshape(a, (*a.shape[:2], a.shape[2] * a.shape[3]), out_sharding=flat), a.shape
        return jax.lax.reshape(norm(a, execution, heads), shape, out_sharding=split)


def kv_heads_name(num_kv_heads: int, num_heads: int, tensor: int) -> str:
    """The dimension name of the kv heads: split as the heads are, over `tensor` devices, where they divide, else whole
    on each device.

    Raises ShardlmError when neither works.
    """
    if num_kv_heads % tensor == 0:
        return "kv_heads"
    if tensor % num_kv_heads == 0 and num_heads % tensor == 0:
        return "kv_heads_whole"
    works = ", ".join(
        str(t)
        for t in range(1, num_heads + 1)
        if num_heads % t == 0 and (num_kv_heads % t == 0 or t % num_kv_heads == 0)
    )
    raise ShardlmError(
        f"heads={num_heads} and kv_heads={num_kv_heads} cannot be split over tensor={tensor}; "
        f"choose tensor from {works}"
    )
