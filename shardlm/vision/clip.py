"""CLIP's encoder (https://arxiv.org/abs/2103.00020): tiles of one size, each with a class token, and positions that are
learned. What projects its vectors is each family's."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor
from shardlm.vision.attending import Tiles
from shardlm.vision.options import activation_of
from shardlm.vision.tower import Patches, Tower, TowerConfig, block_names, norm_names, patch_names, with_class_tokens


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """tower: its layers, one of `patch` pixels a side, `across` of which a tile has a side."""

    tower: TowerConfig
    patch: int
    across: int

    @classmethod
    def told(cls, own: Options, side: int) -> "ClipConfig":
        """By a vision_config, for tiles of `side` pixels; what it leaves out is that of LLaVA 1.5's."""
        own.aside("vocab_size")
        tower = TowerConfig(
            layers=own("num_hidden_layers", 24),
            width=own("hidden_size", 1024),
            heads=own("num_attention_heads", 16),
            mlp_dim=own("intermediate_size", 4096),
            norm=NormConfig("layer", own("layer_norm_eps", 1e-5)),
            activation=activation_of(own("hidden_act", "quick_gelu")),
        )
        patch = own("patch_size", 14)
        return cls(tower, patch, side // patch)

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": ((self.patch, self.patch, 3), np.float32)}

    def module(self, params: Params) -> nnx.Module:
        return Clip(self, params)

    def names(self, path: str, prefix: str) -> Names:
        """Of Clip at `path`; `prefix` is before theirs."""
        embeddings = f"{prefix}embeddings."
        return {
            **patch_names(f"{path}.patches", f"{embeddings}patch_embedding", bias=False),
            f"{path}.of_class": Tensor(f"{embeddings}class_embedding"),
            f"{path}.positions": Tensor(f"{embeddings}position_embedding.weight"),
            **norm_names(self.tower.norm, f"{path}.first_norm", f"{prefix}pre_layrnorm"),
            **block_names(
                self.tower,
                f"{path}.tower.block",
                f"{prefix}encoder.layers.{{layer}}.",
                attention_norm="layer_norm1",
                mlp_norm="layer_norm2",
                **{f"w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
                wo="self_attn.out_proj",
                up="mlp.fc1",
                down="mlp.fc2",
            ),
        }


class Clip(nnx.Module):
    """Patches, "of_class" [D], "positions" [1 + places, D] with the class token's first, norm and tower."""

    def __init__(self, config: ClipConfig, params: Params):
        D = config.tower.width
        self.config = config
        self.patches = Patches(config.patch, 3, D, False, params)
        self.of_class = params((D,), ("norm",), normal(D**-0.5))
        self.positions = params((config.across**2 + 1, D), (None, "norm"), normal(D**-0.5))
        self.first_norm = Norm(config.tower.norm, D, params)
        self.tower = Tower(config.tower, params)

    def __call__(
        self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution, keep: Sequence[int] = ()
    ) -> jax.Array:
        """Whole tiles, one after the other: [P, D] without the class tokens; with `keep` [P, len(keep) * D], after each
        of these layers."""
        each, D = self.config.across**2, self.config.tower.width
        order = np.roll(np.arange(each + 1), -1)  # the class token's position is the first of the file's
        learned = in_use(self.of_class, execution), in_use(self.positions, execution)[order]
        x = with_class_tokens(self.patches(inputs["pixels"], execution), each, *learned)
        x = self.first_norm(x.reshape(-1, D), execution)
        x, kept = self.tower(x, count, execution, windows=Tiles(each + 1), keep=keep)
        x = jnp.concatenate(list(kept), axis=-1) if keep else x
        return x.reshape(-1, each + 1, x.shape[-1])[:, :-1].reshape(-1, x.shape[-1])
