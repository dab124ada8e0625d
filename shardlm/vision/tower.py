"""The layers of an encoder of images: blocks of attention in both directions and a feed-forward layer, each after its
norm, stacked and run by one scan. What makes patches into vectors before them, and what comes after, is a family's."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project
from shardlm.models.naming import Names, Tensor
from shardlm.ops.rope import rotated
from shardlm.ops.swiglu import Activation, activate, gated
from shardlm.vision.attending import Attending, Tiles, Windows


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """width D, of which `heads` heads have head_dim each (0: D / heads) and share kv_heads of keys and values (0: each
    has its own); `gated` as layers/mlp.py's; bias: whether
    queries, keys and values have one, out_bias: what goes back, mlp_bias: feed-forward layers; scaled: whether each
    dimension has a factor on what attention and feed-forward layer add (https://arxiv.org/abs/2103.17239); head_norm:
    that of queries and of keys, each head by itself; limit: to which both factors of a gated product are cut (ops/
    swiglu.py), 0: none."""

    layers: int
    width: int
    heads: int
    mlp_dim: int
    head_dim: int = 0
    norm: NormConfig = NormConfig("layer", 1e-6)
    activation: Activation = "gelu_tanh"
    gated: bool = False
    bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    scaled: bool = False
    kv_heads: int = 0
    head_norm: NormConfig | None = None
    limit: float = 0.0

    @property
    def each(self) -> int:
        """Dimensions of a head."""
        return self.head_dim or self.width // self.heads

    def block(self, params: Params) -> nnx.Module:
        """One layer."""
        return TowerBlock(self, params)


class Tower(nnx.Module):
    """x [P, D] through all layers. `config` says how many, and makes one (`block`)."""

    def __init__(self, config: Any, params: Params):
        self.layers = config.layers
        self.block = config.block(dataclasses.replace(params, stack=(config.layers,)))

    def __call__(
        self,
        x: jax.Array,
        count: jax.Array,
        execution: Execution,
        sines: tuple[jax.Array, jax.Array] | None = None,
        windows: Windows | Tiles | None = None,
        everywhere: Sequence[int] | jax.Array = (),
        keep: Sequence[int] = (),
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (x after the last layer, [len(keep), P, D]: x after those of `keep`).

        count int32, patches that there are; sines: (sines, cosines) [P, 1, H / 2] that queries and keys are turned by,
        None: they aren't; windows: that patches attend inside of but for the layers of `everywhere`, or in none where
        that is a bool scalar that is true.
        """
        graph, stacked = nnx.split(self.block)
        layers = self.layers
        slot = np.full(layers, len(keep), np.int32)  # past the last: dropped
        slot[list(keep)] = np.arange(len(keep))
        of_all = isinstance(everywhere, jax.Array)
        whole = jnp.broadcast_to(everywhere if of_all else np.isin(np.arange(layers), list(everywhere)), layers)

        def layer(carry, inputs):
            x, kept = carry
            state, slot, whole = inputs
            attend = Attending(count, execution.attention, windows, whole)
            x = nnx.merge(graph, state)(x, attend, execution, sines)
            return (x, kept.at[slot].set(x, mode="drop") if len(keep) else kept), None

        kept = jnp.zeros((len(keep), *x.shape), x.dtype)
        layer = layer if execution.remat == "none" else jax.checkpoint(layer, prevent_cse=False)
        (x, kept), _ = jax.lax.scan(layer, (x, kept), (stacked, jnp.asarray(slot), whole))
        return x, kept


class TowerBlock(nnx.Module):
    """One layer: weights "attention_norm", "wq" (D, N, H), "wk" and "wv" (D, K, H), "wo" (N, H, D), "mlp_norm", "gate"
    and "up" (D, F), "down" (F, D), where it has biases "bq" (N, H), "bk" and "bv" (K, H), "bo" (D,), "gate_bias" and
    "up_bias" (F,), "down_bias" (D,), with factors "attention_scale" and "mlp_scale" (D,), with norms of heads "q_norm"
    and "k_norm" (H,)."""

    def __init__(self, config: TowerConfig, params: Params):
        D, N, H, F = config.width, config.heads, config.each, config.mlp_dim
        self.config = config
        self.attention_norm, self.mlp_norm = (Norm(config.norm, D, params) for _ in range(2))
        K = config.kv_heads or N
        heads = {"q": (N, "heads"), "k": (K, "kv_heads"), "v": (K, "kv_heads")}
        for letter, (count, name) in heads.items():
            params.projection(self, f"w{letter}", (D, count, H), ("embed", name, "head_dim"), normal(D**-0.5))
        params.projection(self, "wo", (N, H, D), ("heads", "head_dim", "embed"), normal(D**-0.5), into=2)
        into = ("gate", "up") if config.gated else ("up",)
        for name in into:
            params.projection(self, name, (D, F), ("embed", "mlp"), normal(D**-0.5))
        params.projection(self, "down", (F, D), ("mlp", "embed"), normal(F**-0.5))
        if config.bias:
            for letter, (count, name) in heads.items():
                setattr(self, f"b{letter}", params((count, H), (name, "head_dim"), constant(0.0)))
        if config.head_norm:
            self.q_norm, self.k_norm = (Norm(config.head_norm, H, params) for _ in range(2))
        if config.out_bias:
            self.bo = params((D,), ("norm",), constant(0.0))
        if config.scaled:
            self.attention_scale, self.mlp_scale = (params((D,), ("norm",), constant(1.0)) for _ in range(2))
        if config.mlp_bias:
            for name in into:
                setattr(self, f"{name}_bias", params((F,), ("mlp",), constant(0.0)))
            self.down_bias = params((D,), ("norm",), constant(0.0))

    def __call__(self, x: jax.Array, attend: Attending, execution: Execution, sines) -> jax.Array:
        """x [P, D] -> the same shape; sines as Tower has them."""
        own = self._attention(self.attention_norm(x, execution), attend, execution, sines)
        x = x + self._scaled(own, "attention_scale", execution)
        own = self._feed_forward(self.mlp_norm(x, execution), execution)
        return x + self._scaled(own, "mlp_scale", execution)

    def _scaled(self, x: jax.Array, name: str, execution: Execution) -> jax.Array:
        return x * in_use(getattr(self, name), execution) if self.config.scaled else x

    def _attention(self, x, attend: Attending, execution: Execution, sines) -> jax.Array:
        q, k, v = (_by("pd,dnh->pnh", x, self, f"w{letter}", f"b{letter}", execution) for letter in "qkv")
        if self.config.head_norm:
            q, k = self.q_norm(q, execution), self.k_norm(k, execution)
        if sines is not None:
            q, k = (rotated(a, *sines) for a in (q, k))
        out = attend(q, k, v, self.config.each**-0.5)
        return _by("pnh,nhd->pd", out, self, "wo", "bo", execution)

    def _feed_forward(self, x: jax.Array, execution: Execution) -> jax.Array:
        up = _by("pd,df->pf", x, self, "up", "up_bias", execution)
        if self.config.gated:
            gate = _by("pd,df->pf", x, self, "gate", "gate_bias", execution)
            up = gated(gate, up, self.config.activation, self.config.limit)
        else:
            up = activate(up, self.config.activation)
        return _by("pf,fd->pd", up, self, "down", "down_bias", execution)


class Linear(nnx.Module):
    """x [..., D] -> [..., F]; weights "kernel" (D, F) and, with one, "bias" (F,)."""

    def __init__(self, into: int, out: int, bias: bool, params: Params):
        params.projection(self, "kernel", (into, out), ("embed", "mlp"), normal(into**-0.5))
        if bias:
            self.bias = params((out,), ("norm",), constant(0.0))

    def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
        return _by("pd,df->pf", x, self, "kernel", "bias", execution)


class Patches(nnx.Module):
    """Pixels [P, size, size, colours] -> [P, D]: a convolution whose steps are its size; weights "kernel" (size, size,
    colours, D) and, with one, "bias" (D,)."""

    def __init__(self, size: int, colours: int, width: int, bias: bool, params: Params):
        shape, names = (size, size, colours, width), (None, None, None, "norm")
        self.kernel = params(shape, names, normal((size * size * colours) ** -0.5), into=3)
        if bias:
            self.bias = params((width,), ("norm",), constant(0.0))

    def __call__(self, pixels: jax.Array, execution: Execution) -> jax.Array:
        out = jnp.einsum("pyxc,yxcd->pd", pixels.astype(execution.dtype), in_use(self.kernel, execution))
        return out + in_use(self.bias, execution) if hasattr(self, "bias") else out


def with_class_tokens(x: jax.Array, each: int, of_class: jax.Array, positions: jax.Array) -> jax.Array:
    """Patches [P, D] of tiles of `each`, a class token [D] behind those of each, positions [each + 1, D] added to both:
    [tiles, each + 1, D]."""
    x = x.reshape(-1, each, x.shape[-1])
    own = jnp.broadcast_to(of_class, (len(x), 1, x.shape[-1]))
    return jnp.concatenate([x, own], axis=1) + positions


def _by(letters: str, x: jax.Array, module: nnx.Module, weight: str, bias: str, execution: Execution) -> jax.Array:
    y = project(letters, x, module, weight, execution)
    return y + in_use(getattr(module, bias), execution) if hasattr(module, bias) else y


def shared(table: jax.Array, near: jax.Array, shares: jax.Array) -> jax.Array:
    """What patches have of learned positions [N, D]: of those that are `near`, int32 [P, K], their shares, float32
    [P, K]: [P, D]. A sum of K, so that no [P, K, D] is made."""
    shares = shares.astype(table.dtype)
    return sum(shares[:, i, None] * table[near[:, i]] for i in range(shares.shape[1]))


def sines_of(places: Sequence[jax.Array], frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(sines, cosines) float32 [P, 1, H / 2] of patches at these places [P], by axis; frequencies [axes, H / 2],
    radians a step of each rotated pair."""
    steps = zip(places, frequencies.astype(np.float32), strict=True)
    angle = sum(place[:, None, None].astype(jnp.float32) * step for place, step in steps)
    return jnp.sin(angle), jnp.cos(angle)


def block_names(config: TowerConfig, path: str, prefix: str, **theirs: str) -> dict[str, Tensor]:
    """Of the blocks at `path`: what checkpoints have after `prefix`, which ends in a layer's number and a dot. `theirs`
    by our name: attention_norm, wq, wk, wv, wo, mlp_norm, gate, up and down, attention_scale and mlp_scale, q_norm and
    k_norm."""
    scales = {ours: theirs.pop(ours) for ours in ("attention_scale", "mlp_scale") if ours in theirs}
    layouts = dict.fromkeys(("wq", "wk", "wv"), "(N H) D -> D N H") | {"wo": "D (N H) -> N H D"}
    layouts |= dict.fromkeys(("gate", "up"), "F D -> D F") | {"down": "D F -> F D"}
    found = {f"{path}.{ours}": Tensor(f"{prefix}{name}") for ours, name in scales.items()}
    for ours, name in theirs.items():
        if ours.endswith("norm"):
            kind = config.head_norm if ours in ("q_norm", "k_norm") else config.norm
            found |= norm_names(kind, f"{path}.{ours}", f"{prefix}{name}")
            continue
        found[f"{path}.{ours}"] = Tensor(f"{prefix}{name}.weight", layouts[ours])
        own = ours.replace("w", "b", 1) if ours.startswith("w") else f"{ours}_bias"
        if {"w": config.out_bias if ours == "wo" else config.bias}.get(ours[0], config.mlp_bias):
            of_heads = ours in ("wq", "wk", "wv")
            found[f"{path}.{own}"] = Tensor(f"{prefix}{name}.bias", "(N H) -> N H" if of_heads else "")
    return found


def norm_names(config: NormConfig, path: str, name: str) -> Names:
    """Of a norm at `path`."""
    found = {f"{path}.scale": Tensor(f"{name}.weight")}
    return found | ({f"{path}.bias": Tensor(f"{name}.bias")} if config.kind == "layer" and config.bias else {})


def linear_names(path: str, name: str, bias: bool) -> Names:
    """Of a Linear at `path`."""
    found = {f"{path}.kernel": Tensor(f"{name}.weight", "F D -> D F")}
    return found | ({f"{path}.bias": Tensor(f"{name}.bias")} if bias else {})


def patch_names(path: str, name: str, bias: bool) -> Names:
    """Of Patches at `path`."""
    found = {f"{path}.kernel": Tensor(f"{name}.weight", "D C Y X -> Y X C D")}
    return found | ({f"{path}.bias": Tensor(f"{name}.bias")} if bias else {})
