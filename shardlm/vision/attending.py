"""What the patches of an image attend to in a layer of an encoder."""

import dataclasses
import functools

import jax

from shardlm.ops.full_attention import full_attention, in_tiles
from shardlm.ops.window_attention import window_attention


@dataclasses.dataclass(frozen=True)
class Windows:
    """numbers int32 [P], ascending, of the window that each patch is in, of which none has more than `longest`."""

    numbers: jax.Array
    longest: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Windows of `size` rows each, all of which are there, whatever the count of patches."""

    size: int


@dataclasses.dataclass(frozen=True)
class Attending:
    """To all of the first `count` int32 patches; or inside of `windows`, but in a layer that is `whole` (bool).
    `implementation` as Execution.attention has it."""

    count: jax.Array
    implementation: str
    windows: Windows | Tiles | None = None
    whole: jax.Array | None = None

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
        """q [P, N, H], k and v [P, K, H]; returns [P, N, H]. Rows of padding get any finite numbers."""
        if isinstance(self.windows, Tiles):
            return in_tiles(q, k, v, scale, self.windows.size, self.implementation)
        options = {"scale": scale, "count": self.count}
        everywhere = functools.partial(full_attention, **options, implementation=self.implementation)
        if self.windows is None:
            return everywhere(q, k, v)
        own = {"windows": self.windows.numbers, "longest": self.windows.longest}
        return jax.lax.cond(self.whole, everywhere, functools.partial(window_attention, **options, **own), q, k, v)
