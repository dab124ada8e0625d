"""Mamba 2: a state space model whose memory of a text does not grow with it (https://arxiv.org/abs/2405.21060), as
Granite 4 and Nemotron 3 have it in most layers. It is linear attention that takes nothing back (ops/summed_states.py):
what is called C, B and x there are queries, keys and values here, and dt is both what is taken of a value and, times a
rate, how much of the state decays."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from shardlm.flops import memory_width
from shardlm.layers.attention import kv_heads_name
from shardlm.layers.delta_net import DeltaNet, DeltaNetConfig, log_uniform
from shardlm.layers.param import Execution, Params, constant, drawn, gathered, in_use, normal, project
from shardlm.ops.gated_delta import BIAS, SKIP

STEPS = 1e-3, 0.1  # in which dt begins, as in Mamba 2's own initialisation


class Factors(NamedTuple):
    """On what projections make, and on what the layer makes (Falcon H1)."""

    q: float = 1.0
    k: float = 1.0
    v: float = 1.0
    gate: float = 1.0
    step: float = 1.0
    out: float = 1.0


@dataclasses.dataclass(frozen=True)
class MambaConfig(DeltaNetConfig):
    """The sizes are those of linear attention: num_heads of value_dim each (`headdim`), num_kv_heads groups of queries
    and keys, as wide as the state (`d_state`), whose outputs have a norm together.

    conv_bias  of the convolutions
    steps      the least and the largest dt
    norms      whether that norm is after the gate, before it, or not there
    factors    constants that are multiplied with
    """

    conv_bias: bool = True
    steps: tuple[float, float] = (0.0, float("inf"))
    norms: Literal["after_gate", "before_gate", "none"] = "after_gate"
    factors: Factors = Factors()

    takes_back = False

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        of_keys, of_values = self.num_kv_heads * self.head_dim, self.num_heads * self.value_dim
        return embed_dim * (2 * of_keys + 3 * of_values + self.num_heads)

    def macs_per_token(self) -> int:
        """Of the states (flops.py)."""
        return memory_width(self.num_heads, self.head_dim, self.value_dim, takes_back=False)


class Mamba(DeltaNet):
    """x [B, T, D] -> [B, T, D]; weights "wq" and "wk" (D, K, H), "wv" and the output's gate "wg" (D, N, V), "wo" (N, V,
    D), "decay" (D, N), "taps_q" and "taps_k" (K, H, W), "taps_v" (N, V, W), with biases "bias_q", "bias_k" and
    "bias_v", "decay_bias", "log_rate" and "skip" (N,), and "out_scale" (N, V) of the norm. Queries and keys of fewer
    groups than the devices that split heads are whole on each."""

    def __init__(self, config: MambaConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, K = embed_dim, config.num_heads, config.num_kv_heads
        H, V, W = config.head_dim, config.value_dim, config.conv_width
        self.config = config
        ways = params.rules.mesh.size(*params.rules.use.axes("heads"))
        self.kv_name = kv_heads_name(K, N, ways)
        self.kept_groups = K if self.kv_name == "kv_heads" else ways
        for name, heads, named, width in (("q", K, self.kv_name, H), ("k", K, self.kv_name, H), ("v", N, "heads", V)):
            params.projection(self, f"w{name}", (D, heads, width), ("embed", named, "head_dim"), normal(D**-0.5))
            taps = params((heads, width, W), (named, "head_dim", "norm"), normal(W**-0.5))
            setattr(self, f"taps_{name}", taps)
            if config.conv_bias:
                setattr(self, BIAS + name, params((heads, width), (named, "head_dim"), constant(0.0)))
        params.projection(self, "wg", (D, N, V), ("embed", "heads", "head_dim"), normal(D**-0.5))
        out_init = normal(out_scale * (N * V) ** -0.5)
        params.projection(self, "wo", (N, V, D), ("heads", "head_dim", "embed"), out_init, into=2)
        params.weight(self, "decay", (D, N), ("embed", "heads"), normal(D**-0.5))
        params.adapter(self, "decay", (D, N), ("embed", "heads"))
        self.decay_bias = params((N,), ("heads",), drawn(_steps))
        self.log_rate = params((N,), ("heads",), log_uniform(16.0))
        self.skip = params((N,), ("heads",), constant(1.0))
        if config.norms != "none":
            self.out_scale = params((N, V), ("heads", "head_dim"), constant(1.0))

    def _convolutions(self, execution: Execution) -> dict[str, jax.Array]:
        found = super()._convolutions(execution)
        if self.config.conv_bias:
            found |= {BIAS + name: in_use(getattr(self, BIAS + name), execution) for name in "qkv"}
        found = {name: self._one_each(a, 0, execution) if name[-1] in "qk" else a for name, a in found.items()}
        return found | {SKIP: gathered(self, "skip", execution)}

    def _projected(self, x: jax.Array, execution: Execution) -> dict[str, jax.Array]:
        made = super()._projected(x, execution)
        made = {name: _times(a, getattr(self.config.factors, name)) for name, a in made.items()}
        return made | {name: self._one_each(made[name], 2, execution) for name in "qk"}

    def _one_each(self, a: jax.Array, axis: int, execution: Execution) -> jax.Array:
        """Groups along an axis that are whole on each device, repeated so that each has its own one."""
        if self.kv_name == "kv_heads":
            return a
        a, act = jnp.repeat(a, self.kept_groups // a.shape[axis], axis=axis), execution.rules.act
        names = ("batch", "whole_seq", "kv_heads", "head_dim") if axis == 2 else ("kv_heads", "head_dim", None)
        return jax.reshard(a, act.spec(*names[: a.ndim]))

    def _rates(self, x: jax.Array, part: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
        del part  # nothing is made through a latent
        plain = execution.plain  # so few numbers that 8 bits would save nothing
        step = project("btd,dn->btn", x, self, "decay", plain).astype(jnp.float32)
        step = _times(step, self.config.factors.step)
        step = jax.nn.softplus(step + gathered(self, "decay_bias", execution).astype(jnp.float32))
        step = jnp.clip(step, *self.config.steps)
        return -jnp.exp(gathered(self, "log_rate", execution).astype(jnp.float32)) * step, step

    def _gated(self, out: jax.Array, gate: jax.Array, execution: Execution) -> jax.Array:
        """Outputs behind their gate and norm."""
        own, dtype, wide = self.config, out.dtype, out.astype(jnp.float32)
        opened = jax.nn.silu(_times(gate.astype(jnp.float32), own.factors.gate))
        if own.norms == "none":
            made = (wide * opened).astype(dtype)
        elif own.norms == "before_gate":
            made = (self._normed(wide, execution) * in_use(self.out_scale, execution) * opened).astype(dtype)
        else:
            made = self._normed(wide * opened, execution).astype(dtype) * in_use(self.out_scale, execution)
        return _times(made, own.factors.out)

    def _normed(self, out: jax.Array, execution: Execution) -> jax.Array:
        """Each group's outputs together, float32 [B, T, N, V]."""
        (B, T, N, V), K, act = out.shape, self.config.num_kv_heads, execution.rules.act
        groups, split = act.spec("batch", "whole_seq", self.kv_name), act.spec("batch", "whole_seq", "heads")
        apart = act.spec("batch", "whole_seq", self.kv_name, None)
        squares = jax.reshard(jnp.sum(jnp.square(out), axis=-1), groups)
        squares = jax.lax.reshape(squares, (B, T, K, N // K), out_sharding=apart)
        mean = jnp.sum(squares, axis=-1, keepdims=True) / (N // K * V)
        scale = jnp.broadcast_to(jax.lax.rsqrt(mean + self.config.norm.eps), squares.shape)
        scale = jax.reshard(jax.lax.reshape(scale, (B, T, N), out_sharding=groups), split)
        return out * scale[..., None]


def _times(a: jax.Array, factor: float) -> jax.Array:
    return a if factor == 1 else a * factor


def _steps(key, shape, spec):
    """Biases of softplus whose results are spread over STEPS by their logarithms."""
    least, most = map(jnp.log, STEPS)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, least, most, out_sharding=spec))
    return step + jnp.log(-jnp.expm1(-step))
