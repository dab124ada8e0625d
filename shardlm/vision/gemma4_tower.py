"""The layers of Gemma 4's encoder: norms before and after attention and feed-forward layer, norms of queries, keys and
values, scores as they come, and products whose numbers are cut to what they were while it was trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project
from shardlm.models.naming import Names, Tensor
from shardlm.ops.rope import rotated
from shardlm.ops.swiglu import Activation, gated
from shardlm.vision.attending import Attending

NORMS = {
    "attention_norm": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
PRODUCTS = {  # theirs, and how it lies
    **{f"w{letter}": (f"self_attn.{letter}_proj", "(N H) D -> D N H") for letter in "qkv"},
    "wo": ("self_attn.o_proj", "D (N H) -> N H D"),
    "gate": ("mlp.gate_proj", "F D -> D F"),
    "up": ("mlp.up_proj", "F D -> D F"),
    "down": ("mlp.down_proj", "D F -> F D"),
}
LIMITS = ("input_min", "input_max", "output_min", "output_max")


@dataclasses.dataclass(frozen=True)
class Gemma4TowerConfig:
    """width D, `heads` of head_dim that share kv_heads; theta of the rotation; clipped: whether products have
    limits."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    eps: float
    activation: Activation
    theta: float
    clipped: bool

    @property
    def each(self) -> int:
        """Dimensions of a head."""
        return self.head_dim

    @property
    def frequencies(self) -> np.ndarray:
        """Radians of each rotated pair, the same by column and by row: float32 [H / 4]."""
        half = self.head_dim // 2
        return (self.theta ** -(np.arange(0, half, 2) / half)).astype(np.float32)

    def block(self, params: Params) -> nnx.Module:
        return Gemma4TowerBlock(self, params)

    def names(self, path: str, prefix: str) -> Names:
        """Of the blocks at `path`; `prefix` is before theirs."""
        found = {f"{path}.{ours}.scale": Tensor(f"{prefix}{theirs}.weight") for ours, theirs in NORMS.items()}
        for ours, (theirs, layout) in PRODUCTS.items():
            found[f"{path}.{ours}"] = Tensor(f"{prefix}{theirs}.linear.weight", layout)
            if self.clipped:
                found |= {f"{path}.{ours}_{limit}": Tensor(f"{prefix}{theirs}.{limit}") for limit in LIMITS}
        return found


class Gemma4TowerBlock(nnx.Module):
    """One layer: norms (D,), of queries and keys (H,); "wq" (D, N, H), "wk" and "wv" (D, K, H), "wo" (N, H, D), "gate"
    and "up" (D, F), "down" (F, D), and with limits those of LIMITS after each product's name, ()."""

    def __init__(self, config: Gemma4TowerConfig, params: Params):
        D, N, K, H, F = config.width, config.heads, config.kv_heads, config.head_dim, config.mlp_dim
        norm = NormConfig("rms", config.eps)
        self.config = config
        for name in NORMS:
            setattr(self, name, Norm(norm, H if name in ("q_norm", "k_norm") else D, params))
        self.v_norm = Norm(dataclasses.replace(norm, scaled=False), H, params)
        params.projection(self, "wq", (D, N, H), ("embed", "heads", "head_dim"), normal(D**-0.5))
        for name in ("wk", "wv"):
            params.projection(self, name, (D, K, H), ("embed", "kv_heads", "head_dim"), normal(D**-0.5))
        params.projection(self, "wo", (N, H, D), ("heads", "head_dim", "embed"), normal(D**-0.5), into=2)
        for name in ("gate", "up"):
            params.projection(self, name, (D, F), ("embed", "mlp"), normal(D**-0.5))
        params.projection(self, "down", (F, D), ("mlp", "embed"), normal(F**-0.5))
        for name in PRODUCTS if config.clipped else ():
            for limit in LIMITS:
                value = constant(-jnp.inf if limit.endswith("min") else jnp.inf)
                setattr(self, f"{name}_{limit}", params((), (), value))

    def __call__(self, x: jax.Array, attend: Attending, execution: Execution, sines) -> jax.Array:
        """x [P, D] -> the same shape; sines [P, 1, 2, H / 4]."""
        own = self._attention(self.attention_norm(x, execution), attend, execution, sines)
        x = x + self.after_attention(own, execution)
        return x + self.after_mlp(self._feed_forward(self.mlp_norm(x, execution), execution), execution)

    def _attention(self, x, attend: Attending, execution: Execution, sines) -> jax.Array:
        q, k, v = (self._by("pd,dnh->pnh", x, f"w{letter}", execution) for letter in "qkv")
        q, k = (_turned(norm(a, execution), sines) for norm, a in ((self.q_norm, q), (self.k_norm, k)))
        out = attend(q, k, self.v_norm(v, execution), 1.0)
        return self._by("pnh,nhd->pd", out, "wo", execution)

    def _feed_forward(self, x: jax.Array, execution: Execution) -> jax.Array:
        gate, up = (self._by("pd,df->pf", x, name, execution) for name in ("gate", "up"))
        return self._by("pf,fd->pd", gated(gate, up, self.config.activation), "down", execution)

    def _by(self, letters: str, x: jax.Array, name: str, execution: Execution) -> jax.Array:
        """The product by a weight, both of its sides inside of their limits."""
        if not self.config.clipped:
            return project(letters, x, self, name, execution)
        low, high, out_low, out_high = (in_use(getattr(self, f"{name}_{limit}"), execution) for limit in LIMITS)
        return jnp.clip(project(letters, jnp.clip(x, low, high), self, name, execution), out_low, out_high)


def _turned(x: jax.Array, sines: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Heads [P, N, H], whose halves turn each by their own place."""
    return rotated(x.reshape(*x.shape[:-1], 2, -1), *sines).reshape(x.shape)
