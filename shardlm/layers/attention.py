"""Grouped-query attention: projections and rotary embedding around whatever the context attends to."""

import dataclasses
from typing import Literal

import jax
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.context import Context, Pages
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project
from shardlm.ops.rope import QueryGrowth, Rope, grown, rope


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (https://arxiv.org/abs/2305.13245). num_kv_heads = num_heads is multi-head.

    rope       None: no rotary embedding
    window     how many positions a token sees, itself included; 0: all before it
    bias       of queries, keys and values; out_bias of the output
    qk_norm    of queries and keys before the rotation: of each head (Qwen 3, https://arxiv.org/abs/2505.09388), or of
               all heads together (OLMo 2, https://arxiv.org/abs/2501.00656)
    norm_rotated  that norm comes after the rotation (Hunyuan)
    scale      of the scores; 0: head_dim ** -0.5
    softcap    scores are softcap * tanh(scores / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118); 0: as they are
    query_growth  of queries by their position, after the rotation (ops/rope.py)
    sinks      each head has a learned score that takes weight from the tokens (GPT-OSS,
               https://arxiv.org/abs/2309.17453)
    gate       each head's output is multiplied by the sigmoid of a projection (Qwen3-Next,
               https://arxiv.org/abs/2505.06708)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = Rope()
    window: int = 0
    bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    norm: NormConfig = NormConfig()
    norm_rotated: bool = False
    scale: float = 0.0
    softcap: float = 0.0
    query_growth: QueryGrowth | None = None
    sinks: bool = False
    gate: bool = False

    def __post_init__(self):
        N, K = self.num_heads, self.num_kv_heads
        if min(N, self.head_dim) < 1:
            raise ShardlmError(f"num_heads={N}, head_dim={self.head_dim}: each must be at least 1")
        if K < 1 or N % K:
            divisors = ", ".join(str(d) for d in range(1, N + 1) if N % d == 0)
            raise ShardlmError(f"num_heads={N} is not a multiple of num_kv_heads={K}; choose kv heads from {divisors}")
        if self.rope:
            self.rope.check(self.head_dim)

    @property
    def value_dim(self) -> int:
        """Of each head; queries and keys have head_dim."""
        return self.head_dim

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        of_queries = 3 if self.gate else 2
        return embed_dim * self.head_dim * (of_queries * self.num_heads + 2 * self.num_kv_heads)


class Attention(nnx.Module):
    """x [B, T, D] -> [B, T, D]; weights "wq" (D, N, H), "wk" and "wv" (D, K, H), "wo" (N, H, D), with biases "bq"
    (N, H), "bk" and "bv" (K, H), "bo" (D,), with norms "q_norm" and "k_norm", with sinks "sinks" (N,), with a gate "wg"
    (D, N, H)."""

    def __init__(self, config: AttentionConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, K, H = embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.kv_name = kv_heads_name(K, N, params.rules.mesh.size(*params.rules.use.axes("heads")))
        params.projection(self, "wq", (D, N, H), ("embed", "heads", "head_dim"), normal(D**-0.5))
        params.projection(self, "wk", (D, K, H), ("embed", self.kv_name, "head_dim"), normal(D**-0.5))
        params.projection(self, "wv", (D, K, H), ("embed", self.kv_name, "head_dim"), normal(D**-0.5))
        out_init = normal(out_scale * (N * H) ** -0.5)
        params.projection(self, "wo", (N, H, D), ("heads", "head_dim", "embed"), out_init, into=2)
        if config.bias:
            self.bq = params((N, H), ("heads", "head_dim"), constant(0.0))
            self.bk = params((K, H), (self.kv_name, "head_dim"), constant(0.0))
            self.bv = params((K, H), (self.kv_name, "head_dim"), constant(0.0))
        if config.out_bias:
            self.bo = params((D,), ("norm",), constant(0.0))
        if config.qk_norm != "none":
            self.q_norm = Norm(config.norm, H if config.qk_norm == "head" else N * H, params)
            self.k_norm = Norm(config.norm, H if config.qk_norm == "head" else K * H, params)
        if config.gate:
            params.projection(self, "wg", (D, N, H), ("embed", "heads", "head_dim"), normal(D**-0.5))
        if config.sinks:
            self.sinks = params((N,), ("heads",), constant(0.0))

    def cache_entries(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Per token and layer: entry name -> ((K, H), name of the K dimension)."""
        entry = ((self.config.num_kv_heads, self.config.head_dim), self.kv_name)
        return {"k": entry, "v": entry}

    def __call__(self, x, positions, ctx: Context, pages: Pages | None, layer, execution: Execution):
        """x [B, T, D] with the sequence split as between blocks, positions int32 [B, T]; returns (x's shape, pages)."""
        config, rules = self.config, execution.rules
        x = jax.reshard(x, rules.act.spec("batch", "whole_seq", "embed"))
        q, k, v = self._projected(x, execution)
        if not config.norm_rotated:
            q, k = self._normalised(q, k, execution)
        if config.rope:
            q, k = rope(q, positions, config.rope), rope(k, positions, config.rope)
        if config.norm_rotated:
            q, k = self._normalised(q, k, execution)
        if config.query_growth:
            q = grown(q, positions, config.query_growth)
        options = {
            "scale": config.scale or config.head_dim**-0.5,
            "window": config.window,
            "softcap": config.softcap,
            "sinks": in_use(self.sinks, execution) if config.sinks else None,
            "kv_name": self.kv_name,
        }
        out, pages = ctx.attend(q, k, v, positions, pages, layer, **options)
        if config.gate:
            out = out * jax.nn.sigmoid(project("btd,dnh->btnh", x, self, "wg", execution))
        stream = rules.act.spec("batch", "seq", "embed")
        # n before v: jnp.einsum sums in the alphabet's order, and in another one than wo's XLA:CPU copies wo.
        out = project("btnv,nvd->btd", out, self, "wo", execution, stream)
        return out + in_use(self.bo, execution) if config.out_bias else out, pages

    def _projected(self, x: jax.Array, execution: Execution):
        """Queries [B, T, N, H], keys and values [B, T, K, H]."""
        letters = {"q": "btd,dnh->btnh", "k": "btd,dkh->btkh", "v": "btd,dkh->btkh"}
        made = {name: project(how, x, self, f"w{name}", execution) for name, how in letters.items()}
        if self.config.bias:
            made = {name: a + in_use(getattr(self, f"b{name}"), execution) for name, a in made.items()}
        return made["q"], made["k"], made["v"]

    def _normalised(self, q: jax.Array, k: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
        """q [B, T, N, H] and k [B, T, K, H] after their norms, where they have any."""
        if self.config.qk_norm == "none":
            return q, k
        norms = ((q, self.q_norm, "heads"), (k, self.k_norm, self.kv_name))
        return tuple(self._of_one(a, norm, heads, execution) for a, norm, heads in norms)

    def _of_one(self, a: jax.Array, norm: Norm, heads: str, execution: Execution) -> jax.Array:
        """a [B, T, K, H], each head's or all heads' mean square 1."""
        if self.config.qk_norm == "head":
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
