"""Gated DeltaNet: linear attention whose memory of a text does not grow with it (https://arxiv.org/abs/2412.06464), as
Qwen3-Next has it (three of four layers; https://qwenlm.github.io/blog/qwen3_next); and Kimi Delta Attention, whose
memory decays by each number of a key (https://arxiv.org/abs/2510.26692)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.flops import memory_width
from shardlm.layers.context import MEMORIES, Context, Pages
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, drawn, gathered, in_use, normal, project


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """num_heads     heads of values, of which each has a state and an output
    num_kv_heads  heads of queries and keys; each serves as many heads of values that follow each other
    head_dim      of queries and keys
    value_dim     of values
    conv_width    tokens that a convolution sees, the token itself included
    norm          of each head's output, before its gate
    beta_scale    factor on what is taken of new values; with 2 a state may turn over (OLMo Hybrid,
                  https://arxiv.org/abs/2411.12537)
    by_channel    decays are of each number of a key, and made, as the output's gate is, through a latent as wide as a
                  key (Kimi Linear)
    straight      or without one, of the stream (Ling 3)
    least         the logarithm of a decay is no less: it is least * sigmoid(rate * x) in place of -rate * softplus(x)
                  (Ling 3); 0: the latter
    gate          what opens the output's gate

    Layers of Mamba 2 (layers/mamba.py) and short convolutions (layers/short_conv.py) have a configuration that is one
    of these, as they are remembered, split and served as these are.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    conv_width: int = 4
    norm: NormConfig = NormConfig(eps=1e-6)
    beta_scale: float = 1.0
    by_channel: bool = False
    gate: Literal["silu", "sigmoid"] = "silu"
    straight: bool = False
    least: float = 0.0

    def __post_init__(self):
        names = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "conv_width")
        sizes = {name: getattr(self, name) for name in names}
        if min(sizes.values()) < 1 or self.conv_width < 2 or self.num_heads % self.num_kv_heads:
            raise ShardlmError(
                f"{', '.join(f'{name}={n}' for name, n in sizes.items())}: each must be at least 1, conv_width at "
                "least 2, and num_heads a multiple of num_kv_heads"
            )

    @property
    def latents(self) -> bool:
        """Whether decays and gates are made through latents."""
        return self.by_channel and not self.straight

    takes_back = True  # of a state what it holds for a key (ops/gated_delta.py)
    window = None  # no keys are kept of which a token could see some
    rope = None
    softcap = 0.0

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        of_keys, of_values = self.num_kv_heads * self.head_dim, self.num_heads * self.value_dim
        if not self.by_channel:
            return embed_dim * (2 * of_keys + 3 * of_values + 2 * self.num_heads)
        if self.straight:
            return embed_dim * ((2 + 1) * of_keys + 2 * of_values + of_values + self.num_heads)
        latents = self.head_dim * (2 * embed_dim + self.num_heads * self.head_dim + of_values)
        return embed_dim * (2 * of_keys + 2 * of_values + self.num_heads) + latents

    def macs_per_token(self) -> int:
        """Of the states (flops.py)."""
        return memory_width(self.num_heads, self.head_dim, self.value_dim)


class DeltaNet(nnx.Module):
    """x [B, T, D] -> [B, T, D]; weights "wq" and "wk" (D, K, H), "wv" and the output's gate "wg" (D, N, V), "wo"
    (N, V, D), "decay" and "beta" (D, N), "taps_q" and "taps_k" (K, H, W), "taps_v" (N, V, W), "decay_bias" and
    "log_rate" (N,), "out_norm" of V. By channel "wg_down" and "decay_down" (D, H) with "wg" (H, N, V) and "decay"
    (H, N, H), and "decay_bias" (N, H); straight "wg" (D, N, V) and "decay" (D, N, H)."""

    def __init__(self, config: DeltaNetConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, K, H, V, W = embed_dim, config.num_heads, config.num_kv_heads, *_widths(config)
        self.config, self.kept_groups = config, K
        for name, heads, named, width in (("q", K, "kv_heads", H), ("k", K, "kv_heads", H), ("v", N, "heads", V)):
            params.projection(self, f"w{name}", (D, heads, width), ("embed", named, "head_dim"), normal(D**-0.5))
            taps = params((heads, width, W), (named, "head_dim", "norm"), normal(W**-0.5))
            setattr(self, f"taps_{name}", taps)
        self._make_gates(params, D)
        out_init = normal(out_scale * (N * V) ** -0.5)
        params.projection(self, "wo", (N, V, D), ("heads", "head_dim", "embed"), out_init, into=2)
        for name in ("beta",) if config.by_channel else ("decay", "beta"):
            params.weight(self, name, (D, N), ("embed", "heads"), normal(D**-0.5))  # too few to be worth few bits
            params.adapter(self, name, (D, N), ("embed", "heads"))
        # Decays of exp(-rate softplus(decay + bias)), from hardly any to all at once, as in Mamba 2's initialisation.
        own, named = ((N, H), ("heads", "head_dim")) if config.by_channel else ((N,), ("heads",))
        self.decay_bias = params(own, named, constant(1.0))
        self.log_rate = params((N,), ("heads",), log_uniform(16.0))
        self.out_norm = Norm(config.norm, V, params)

    def _make_gates(self, params: Params, D: int) -> None:
        N, (H, V, _) = self.config.num_heads, _widths(self.config)
        if not self.config.latents:
            of_heads = ("embed", "heads", "head_dim")
            params.projection(self, "wg", (D, N, V), of_heads, normal(D**-0.5))
            if self.config.straight:
                params.weight(self, "decay", (D, N, H), of_heads, normal(D**-0.5))
                params.adapter(self, "decay", (D, N, H), of_heads)
            return
        into, out_of = ("embed", "latent_whole"), ("latent", "heads", "head_dim")
        params.projection(self, "wg_down", (D, H), into, normal(D**-0.5))
        params.projection(self, "wg", (H, N, V), out_of, normal(H**-0.5))
        for name, shape, named in (("decay_down", (D, H), into), ("decay", (H, N, H), out_of)):
            params.weight(self, name, shape, named, normal(shape[0] ** -0.5))
            params.adapter(self, name, shape, named)

    def cache_entries(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Nothing is kept of each token."""
        return {}

    def memory_entries(self, dtype: jnp.dtype, unsure: int = 0) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Of each text, with so many tokens that may turn out wrong: {name: (shape, dtype)}, split as context.py's
        MEMORIES say."""
        N, K, (H, V, W) = self.config.num_heads, self.kept_groups, _widths(self.config)
        before, wide = W - 1 + unsure, jnp.dtype(jnp.float32)
        convolved = {"conv_q": (before, K, H), "conv_k": (before, K, H), "conv_v": (before, N, V)}
        found = {"state": ((N, H, V), wide)} | {name: (shape, jnp.dtype(dtype)) for name, shape in convolved.items()}
        if unsure:
            decays = (unsure, N, H) if self.config.by_channel else (unsure, N)
            found |= {"log_decay": (decays, wide), "beta": ((unsure, N), wide)}
            found |= {"start": ((), jnp.dtype(jnp.int32))}
        assert found.keys() <= MEMORIES.keys()
        return found

    def __call__(self, x, positions, ctx: Context, pages: Pages | None, layer, execution: Execution):
        """x [B, T, D] with the sequence split as between blocks, positions int32 [B, T]; returns (x's shape, pages,
        {})."""
        rules = execution.rules
        part, x = x, jax.reshard(x, rules.act.spec("batch", "whole_seq", "embed"))
        made, taps = self._projected(x, execution), self._convolutions(execution)
        log_decay, beta = self._rates(x, part, execution)
        out, pages = ctx.recur(made, taps, log_decay, beta, positions, pages, layer)
        gate = self._gates(x, part, "wg", execution)
        stream = rules.act.spec("batch", "seq", "embed")
        return project("btnv,nvd->btd", self._gated(out, gate, execution), self, "wo", execution, stream), pages, {}

    def _projected(self, x: jax.Array, execution: Execution) -> dict[str, jax.Array]:
        letters = {"q": "btd,dkh->btkh", "k": "btd,dkh->btkh", "v": "btd,dnv->btnv"}
        return {name: project(how, x, self, f"w{name}", execution) for name, how in letters.items()}

    def _convolutions(self, execution: Execution) -> dict[str, jax.Array]:
        return {name: in_use(getattr(self, f"taps_{name}"), execution) for name in "qkv"}

    def _gated(self, out: jax.Array, gate: jax.Array, execution: Execution) -> jax.Array:
        opened = jax.nn.sigmoid if self.config.gate == "sigmoid" else jax.nn.silu
        return self.out_norm(out, execution) * opened(gate.astype(jnp.float32)).astype(gate.dtype)

    def _rates(self, x: jax.Array, part: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
        """(the logarithm of what is kept of the state, what is taken of the new value), float32 [B, T, N], the first
        by channel [B, T, N, H]."""
        plain = execution.plain  # so few numbers that 8 bits would save nothing
        beta = project("btd,dn->btn", x, self, "beta", plain).astype(jnp.float32)
        rate = jnp.exp(gathered(self, "log_rate", execution).astype(jnp.float32))
        bias = gathered(self, "decay_bias", execution).astype(jnp.float32)
        if self.config.by_channel:
            decay, rate = self._gates(x, part, "decay", plain), rate[:, None]
        else:
            decay = project("btd,dn->btn", x, self, "decay", plain)
        beta = jax.nn.sigmoid(beta)
        beta = beta if self.config.beta_scale == 1 else beta * self.config.beta_scale
        decay = decay.astype(jnp.float32) + bias
        if least := self.config.least:
            return least * jax.nn.sigmoid(rate * decay), beta
        return -rate * jax.nn.softplus(decay), beta

    def _gates(self, x: jax.Array, part: jax.Array, name: str, execution: Execution) -> jax.Array:
        """x [B, T, D], and the `part` of its sequence that a device has between blocks -> [B, T, N, V]. Where there is
        a latent, it is made of parts and gathered, which is narrower: of whole rows, which all heads' devices would
        make alike, XLA sums each gradient of the stream by itself (four all-reduces for one reduce-scatter)."""
        if not self.config.latents:
            return project("btd,dnv->btnv", x, self, name, execution)
        latent = project("btd,dr->btr", part, self, f"{name}_down", execution)
        latent = jax.reshard(latent, execution.rules.act.spec("batch", "whole_seq", None))
        return project("btr,rnv->btnv", latent, self, name, execution)


def _widths(config: DeltaNetConfig) -> tuple[int, int, int]:
    return config.head_dim, config.value_dim, config.conv_width


def log_uniform(most: float):
    """Logarithms of numbers that are uniform up to `most`."""

    def draw(key, shape, spec):
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, most, out_sharding=spec))

    return drawn(draw)
