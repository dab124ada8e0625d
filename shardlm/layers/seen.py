"""What tokens that stand for images are, instead of what the embedding says of them."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

# Of packed rows that images stand in (Packed.of_rows).
VECTORS, SEEN, TURNS, UNTIL = "vectors", "seen", "turns", "until"
BEFORE = "vectors_before"  # as VECTORS, by the encoder as it was before training


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """vectors [B, T, (1 + deep) * D], of which those of other tokens are anything; at bool [B, T], the tokens that
    stand for images. The first D numbers take the place of the embedding, the next are added to the stream after the
    first layers, D after each (DeepStack, https://arxiv.org/abs/2511.21631)."""

    vectors: jax.Array
    at: jax.Array

    @classmethod
    def of_rows(cls, rows: Mapping[str, jax.Array]) -> "Seen | None":
        """Of packed rows: their "vectors", and "seen" int32 [B, T], 1 where a token stands for one; None where they
        hold none."""
        return cls(rows[VECTORS], rows[SEEN] > 0) if VECTORS in rows else None

    def rows(self, width: int) -> dict[str, jax.Array]:
        """The same by name, nothing where no layer of a stream of this width is given vectors of its own."""
        if self.vectors.shape[-1] == width:
            return {}
        return {VECTORS: self.vectors, SEEN: self.at.astype(jnp.int32)}

    def past(self, layers: int, D: int) -> jax.Array | None:
        """`vectors` as they are for the layers behind so many, of which those count that are added to the stream of D
        numbers there; None where there are none."""
        left = self.vectors[..., layers * D :]
        return left if left.shape[-1] > D else None

    def embedded(self, x: jax.Array, width: int) -> jax.Array:
        """What enters the first block, x [B, T, D] or several streams that begin alike, D of `width` each, with the
        images' tokens in it."""
        own = jnp.tile(self.vectors[..., :width].astype(x.dtype), x.shape[-1] // width)
        own = jax.reshard(own, jax.typeof(x).sharding.spec)
        return jnp.where(self._at(x), own, x)

    def named(self, tokens: jax.Array) -> jax.Array:
        """Tokens int32 [B, T], where something else is looked up for them: those of images are the first, padding."""
        return jnp.where(jax.reshard(self.at, jax.typeof(tokens).sharding.spec), 0, tokens)

    def after(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """The stream x [B, T, D] after the layer of this number, int32 scalar."""
        D = x.shape[-1]
        count = self.vectors.shape[-1] // D - 1
        if not count:
            return x

        def added(x):
            own = jax.lax.dynamic_slice_in_dim(self.vectors, D * (1 + layer), D, axis=-1).astype(x.dtype)
            return x + jnp.where(self._at(x), jax.reshard(own, jax.typeof(x).sharding.spec), 0)

        return jax.lax.cond(layer < count, added, lambda x: x, x)

    def _at(self, x: jax.Array) -> jax.Array:
        spec = jax.typeof(x).sharding.spec
        return jax.reshard(self.at[..., None], jax.sharding.PartitionSpec(*spec[:2], None))
