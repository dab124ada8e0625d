"""The norms that models put before, after or inside their layers."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.layers.param import Execution, Params, constant, in_use
from shardlm.ops.norm import layer_norm, rms_norm


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """kind "rms" (https://arxiv.org/abs/1910.07467) or "layer" (https://arxiv.org/abs/1607.06450), which has a
    bias unless `bias` is False (Cohere); `offset` is added to the scale: 1 where checkpoints store its distance from 1
    (Gemma). Without `scaled` there is none (Llama 4's queries and keys, OLMo's layers)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    bias: bool = True
    scaled: bool = True


class HeadNorms(nnx.Module):
    """x [..., N, H] -> the same shape: the norm of each head, with a scale of its own; weight "scale" (N, H), of which
    the first dimension is named `heads`."""

    def __init__(self, config: NormConfig, num_heads: int, head_dim: int, heads: str, params: Params):
        self.config = config
        self.scale = params((num_heads, head_dim), (heads, "norm"), constant(1.0))

    def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
        ones, x32 = jnp.ones(x.shape[-1:], jnp.float32), x.astype(jnp.float32)
        if self.config.kind == "layer":
            normed = layer_norm(x32, ones, jnp.zeros_like(ones), self.config.eps)
        else:
            normed = rms_norm(x32, ones, self.config.eps)
        return (normed * in_use(self.scale, execution).astype(jnp.float32)).astype(x.dtype)


class Norm(nnx.Module):
    """x [..., D] -> the same shape; weights "scale" (D,), unless it has none, and, for a layer norm, "bias" (D,)."""

    def __init__(self, config: NormConfig, dim: int, params: Params):
        self.config = config
        if config.scaled:
            self.scale = params((dim,), ("norm",), constant(1.0 - config.offset))
        if config.kind == "layer" and config.bias:
            self.bias = params((dim,), ("norm",), constant(0.0))

    def __call__(self, x: jax.Array, execution: Execution, name: str = "") -> jax.Array:
        """`name` is that of x's last dimension where devices may have a part of it each."""
        if self.config.scaled:
            scale = in_use(self.scale, execution)
        else:
            scale = jnp.ones(x.shape[-1:], x.dtype)
        if name:  # as x, for the sake of its gradient
            scale = jax.reshard(scale, execution.rules.act.spec(name))
        if self.config.offset:
            scale = scale + self.config.offset
        if self.config.kind == "layer":
            bias = in_use(self.bias, execution) if self.config.bias else jnp.zeros_like(scale)
            return layer_norm(x, scale, bias, self.config.eps)
        return rms_norm(x, scale, self.config.eps)
