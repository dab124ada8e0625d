"""SigLIP on tiles of one size, one after the other."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.param import Execution, Params
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names
from shardlm.vision.attending import Tiles
from shardlm.vision.images import places
from shardlm.vision.siglip import Siglip, SiglipConfig
from shardlm.vision.tower import TowerConfig


@dataclasses.dataclass(frozen=True)
class SiglipTilesConfig:
    """tower: its layers, one of `patch` pixels a side, `across` of which a tile has a side; merge: of squares of so
    many patches a side those of one stand together; last_norm: whether there is one after the last layer."""

    tower: TowerConfig
    patch: int
    across: int
    merge: int = 1
    last_norm: bool = False

    @classmethod
    def told(cls, own: Options, side: int) -> "SiglipTilesConfig":
        """By a vision_config, for tiles of `side` pixels."""
        found = SiglipConfig.told(own, side)
        return cls(found.tower, found.patch, side // found.patch)

    @property
    def siglip(self) -> SiglipConfig:
        return SiglipConfig(self.tower, self.patch, self.across**2, self.last_norm)

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": self.siglip.inputs["pixels"]}

    @property
    def positions(self) -> np.ndarray:
        """The learned one of each patch of a tile, in the order of images.patches."""
        row, column = places(self.across, self.across, self.merge)
        return row * self.across + column

    def module(self, params: Params) -> nnx.Module:
        return SiglipTiles(self, params)

    def names(self, path: str, prefix: str) -> Names:
        """Of SiglipTiles at `path`; `prefix` is before theirs."""
        return self.siglip.names(f"{path}.siglip", prefix)


class SiglipTiles(nnx.Module):
    """SigLIP."""

    def __init__(self, config: SiglipTilesConfig, params: Params):
        self.config = config
        self.siglip = Siglip(config.siglip, params)

    def __call__(
        self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution, keep: Sequence[int] = ()
    ) -> jax.Array:
        """[P, D]; with `keep` [P, len(keep) * D], after each of these layers."""
        each = self.config.across**2
        positions = jnp.tile(self.config.positions, len(inputs["pixels"]) // each)
        return self.siglip({**inputs, "positions": positions}, count, execution, Tiles(each), keep)
