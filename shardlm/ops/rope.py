"""Rotary position embedding, and the ways to stretch it beyond the length a model was trained with."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.errors import ShardlmError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
STRETCHED = ("dynamic", "longrope")  # kinds that depend on the longest row


@dataclasses.dataclass(frozen=True)
class Rope:
    """Which frequencies rotate a head. `transformers`' modeling_rope_utils.py is the definition that published
    checkpoints are trained with; the fields carry its options.

    theta             base of the frequencies
    dim               leading dimensions of the head that are rotated; 0: all
    kind              default   theta ** (-2i / dim)
                      linear    positions divided by `factor` (https://arxiv.org/abs/2306.15595)
                      dynamic   a larger base for lengths beyond the original one ("NTK-aware")
                      llama3    low frequencies divided, high ones kept, a ramp between (Llama 3.1)
                      yarn      the same by rotations over the original length (https://arxiv.org/abs/2309.00071)
                      longrope  a factor for each frequency (https://arxiv.org/abs/2402.13753)
                      proportional  the lowest frequencies are 0: of the head's pairs only a `share` turns (Gemma 4)
    original_length   tokens that the model was trained with before it was stretched
    length            longest row of this use, which decides for dynamic and longrope; 0: the original length
    low, high         llama3: the ramp, in rotations over the original length
    fast, slow        yarn: the ramp, the same way
    truncate          yarn: the ramp begins and ends at whole dimensions
    short, long       longrope: a divisor for each frequency, up to the original length and beyond
    magnitude         factor on sines and cosines
    share             proportional: of the pairs
    backwards         heads are turned the other way (nanochat)
    axes              which of three axes' positions turns each pair, where tokens have any (M-RoPE,
                      https://arxiv.org/abs/2409.12191, section 2.1); (): the first's
    """

    theta: float = 10_000.0
    dim: int = 0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_length: int = 0
    length: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    magnitude: float = 1.0
    share: float = 1.0
    backwards: bool = False
    axes: tuple[int, ...] = ()

    def check(self, head_dim: int) -> None:
        """Raises ShardlmError where the rotated dimensions do not fit the head."""
        dim = self.dim or head_dim
        if dim % 2 or dim > head_dim:
            raise ShardlmError(
                f"rotary embedding of {dim} dimensions in head_dim={head_dim}: it needs an even number of at most "
                f"{head_dim - head_dim % 2}"
            )
        for name in ("short", "long"):
            count = len(getattr(self, name))
            if self.kind == "longrope" and count != dim // 2:
                raise ShardlmError(f"longrope has {count} {name} factors; rotating {dim} dimensions needs {dim // 2}")
        if self.axes and len(self.axes) != dim // 2:
            raise ShardlmError(f"mrope_section has {len(self.axes)} pairs; rotating {dim} dimensions needs {dim // 2}")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each rotated pair, float32 [dim / 2]."""
        dim = self.dim or head_dim
        exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
        plain = self.theta**-exponent
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "dynamic":
            length = max(self.length, self.original_length)
            stretch = self.factor * length / self.original_length - (self.factor - 1)
            plain = (self.theta * stretch ** (dim / (dim - 2))) ** -exponent
        elif self.kind == "llama3":
            rotations = self.original_length * plain / (2 * math.pi)
            kept = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
            plain = plain * (kept + (1 - kept) / self.factor)
        elif self.kind == "yarn":
            kept = 1 - self._ramp(dim)
            plain = plain * (kept + (1 - kept) / self.factor)
        elif self.kind == "longrope":
            beyond = max(self.length, self.original_length) > self.original_length
            plain = plain / np.array(self.long if beyond else self.short)
        elif self.kind == "proportional":
            plain = np.where(np.arange(dim // 2) < int(self.share * dim // 2), plain / self.factor, 0.0)
        return (-plain if self.backwards else plain).astype(np.float32)

    def _ramp(self, dim: int) -> np.ndarray:
        """yarn: 0 for the frequencies that are kept, 1 for those that are divided (appendix A.2)."""

        def dimension(rotations: float) -> float:
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.fast), dimension(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)


@dataclasses.dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their position by 1 + weight * log(1 + floor(position / length)), so that scores over long
    texts stay apart (Llama 4's way, after https://arxiv.org/abs/2501.19399). `first`: the number of the first one."""

    weight: float
    length: int
    first: int = 0


def grown(q: jax.Array, positions: jax.Array, config: QueryGrowth) -> jax.Array:
    """q [B, T, N, H], positions int32 [B, T]; returns q's shape and dtype."""
    factor = 1 + config.weight * jnp.log1p(((positions + config.first) // config.length).astype(jnp.float32))
    return q * factor[:, :, None, None].astype(q.dtype)


def by_logarithm(q: jax.Array, positions: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Queries q [B, T, N, H] times scale * log(position + 1) + bias, of which each head has its own [N], float32: so
    that scores over long texts stay apart (https://arxiv.org/abs/2501.19399). positions int32 [B, T]; returns q's shape
    and dtype."""
    factor = jnp.log((positions + 1).astype(jnp.float32))[:, :, None] * scale.astype(jnp.float32)
    return q * (factor + bias.astype(jnp.float32))[..., None].astype(q.dtype)


def sines(
    positions: jax.Array, config: Rope, head_dim: int, faster: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(sines, cosines) of the rotated pairs, with their magnitude: float32 [B, T, 1, dim / 2] of positions [B, T], or
    on three axes [B, T, 3]. `faster` float32 [dim / 2]: factors on the frequencies, where they are learned."""
    angle = _angles(positions, config, head_dim, faster)
    return jnp.sin(angle) * config.magnitude, jnp.cos(angle) * config.magnitude


def _angles(positions: jax.Array, config: Rope, head_dim: int, faster: jax.Array | None = None) -> jax.Array:
    """float32 [B, T, 1, dim / 2]."""
    frequency = config.frequencies(head_dim)
    frequency = frequency if faster is None else frequency * faster
    if positions.ndim == 3:
        axes = config.axes or (0,) * len(config.frequencies(head_dim))
        positions = positions[:, :, np.array(axes)]
        return positions[:, :, None].astype(jnp.float32) * frequency
    return positions[:, :, None, None].astype(jnp.float32) * frequency


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sines:
    """`sines` of a step's tokens, of each rotation that layers have, (a Rope, the width of a head).

    For XLA:CPU, which else makes them in whatever reads them: anew for each layer, each head and each number, and of
    queries for each page apart. Of 768 x 12 layers turning queries took 1.0 of the 24 ms of a step of 8 rows and takes
    0.15 (traced). XLA:CPU takes optimization barriers out before it puts operations together, but no loops: half of
    the frequencies come with each turn of one (of an odd number all in one turn, which it takes out too)."""

    rotations: tuple[tuple[Rope, int], ...] = dataclasses.field(metadata={"static": True})
    made: tuple[tuple[jax.Array, jax.Array], ...]

    @classmethod
    def of(cls, rotations: tuple[tuple[Rope, int], ...], positions: jax.Array) -> "Sines":
        """At positions [B, T], or [B, T, 3]."""
        return cls(rotations, tuple(_in_halves(_angles(positions, *one), one[0].magnitude) for one in rotations))

    def get(self, rope: Rope, head_dim: int) -> tuple[jax.Array, jax.Array] | None:
        """None: they are not of those that were made."""
        return dict(zip(self.rotations, self.made, strict=True)).get((rope, head_dim))


def _in_halves(angle: jax.Array, magnitude: float) -> tuple[jax.Array, jax.Array]:
    """(sines, cosines) of angle [B, T, 1, F]."""
    halves = 2 if angle.shape[-1] % 2 == 0 else 1
    split = jnp.moveaxis(angle.reshape(*angle.shape[:-1], halves, -1), -2, 0)
    both = jax.lax.map(lambda half: (jnp.sin(half) * magnitude, jnp.cos(half) * magnitude), split)
    return tuple(jnp.moveaxis(made, 0, -2).reshape(angle.shape) for made in both)


def rope(x: jax.Array, positions: jax.Array, config: Rope, faster: jax.Array | None = None) -> jax.Array:
    """Rotates the two halves of each head's rotated dimensions by position (https://arxiv.org/abs/2104.09864, eq. 34,
    in the half-split order that Llama checkpoints of Hugging Face use). Angles and products are float32.

    x [B, T, N, H], positions int32 [B, T] or [B, T, 3]; returns x's shape and dtype. `faster` as `sines` has it.
    """
    return rotated(x, *sines(positions, config, x.shape[-1], faster))


def rotated(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """The same by `sines`."""
    dim = 2 * sin.shape[-1]
    first, second = jnp.split(x[..., :dim].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if dim == x.shape[-1] else jnp.concatenate([turned, x[..., dim:]], axis=-1)


def rope_of_tail(x: jax.Array, positions: jax.Array, config: Rope, back: bool = False) -> jax.Array:
    """The same of the last `config.dim` dimensions of a head; `back` turns them the other way (DeepSeek V4)."""
    still, tail = jnp.split(x, [x.shape[-1] - config.dim], axis=-1)
    turned = rope(tail, -positions if back else positions, config)
    return jnp.concatenate([still, turned], axis=-1)
