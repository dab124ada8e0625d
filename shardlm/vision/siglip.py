"""SigLIP's encoder (https://arxiv.org/abs/2303.15343): patches of a square, positions that are learned, and a norm at
the end. What projects its vectors is each family's."""

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
from shardlm.vision.tower import Patches, Tower, TowerConfig, block_names, norm_names, patch_names
from shardlm.vision.tower_weights import Tensors

# Which tensors are of an encoder like this and of what projects its vectors, in old and new names of both.
WITH_PROJECTOR = Tensors(
    ("vision_tower.", "multi_modal_projector."),
    r"^vision_tower\.head\.",
    ((r"^model\.", ""), (r"^vision_tower\.vision_model\.", "vision_tower.")),
)


def without_last(layers: int, later: int, *more: str) -> Tensors:
    """The same, `more` beside it, of a tower of which so many layers run and `later` ones do not: these, and the norm
    behind the last, are left aside."""
    last = "|".join(map(str, range(layers, layers + later))) or "none"
    unused = rf"^vision_tower\.(post_layernorm\.|head\.|embeddings\.position_ids$|encoder\.layers\.({last})\.)"
    return Tensors((*WITH_PROJECTOR.prefixes, *more), unused, WITH_PROJECTOR.renames)


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """tower: its layers, one of `patch` pixels a side; positions: how many are learned; last_norm: whether there is one
    after the last layer."""

    tower: TowerConfig
    patch: int
    positions: int
    last_norm: bool = True

    @classmethod
    def told(cls, own: Options, side: int, patch: int = 16, width: int = 768, heads: int = 12) -> "SiglipConfig":
        """By a vision_config, for squares of `side` pixels; the rest of it is for who asks to finish. `patch`, `width`
        and `heads` where it does not say them."""
        own.aside("vision_use_head")
        tower = TowerConfig(
            layers=own("num_hidden_layers", 12),
            width=own("hidden_size", width),
            heads=own("num_attention_heads", heads),
            mlp_dim=own("intermediate_size", 3072),
            norm=NormConfig("layer", own("layer_norm_eps", 1e-6)),
            activation=activation_of(own("hidden_act", "gelu_pytorch_tanh")),
        )
        patch = own("patch_size", patch)
        return cls(tower, patch, (side // patch) ** 2)

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """As square_images.py makes them."""
        return {"pixels": ((self.patch, self.patch, 3), np.float32), "positions": ((), np.int32)}

    def names(self, path: str, prefix: str, back: str = "out_proj") -> Names:
        """Of Siglip at `path`; `prefix` is before theirs, `back` is what brings heads together."""
        found = {
            **patch_names(f"{path}.patches", f"{prefix}embeddings.patch_embedding", bias=True),
            f"{path}.positions": Tensor(f"{prefix}embeddings.position_embedding.weight"),
            **block_names(
                self.tower,
                f"{path}.tower.block",
                f"{prefix}encoder.layers.{{layer}}.",
                attention_norm="layer_norm1",
                mlp_norm="layer_norm2",
                **{f"w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
                wo=f"self_attn.{back}",
                up="mlp.fc1",
                down="mlp.fc2",
            ),
        }
        last = norm_names(self.tower.norm, f"{path}.last_norm", f"{prefix}post_layernorm")
        return found | last if self.last_norm else found


@dataclasses.dataclass(frozen=True)
class OnSiglip:
    """An encoder whose tower is SigLIP's: of configurations that have more to them."""

    siglip: SiglipConfig

    @property
    def tower(self) -> TowerConfig:
        """Its layers."""
        return self.siglip.tower

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return self.siglip.inputs


class Siglip(nnx.Module):
    """Patches, "positions" [positions, D], tower and norm: [P, D]."""

    def __init__(self, config: SiglipConfig, params: Params):
        D = config.tower.width
        self.patches = Patches(config.patch, 3, D, True, params)
        self.positions = params((config.positions, D), (None, "norm"), normal(D**-0.5))
        self.tower = Tower(config.tower, params)
        if config.last_norm:
            self.last_norm = Norm(config.tower.norm, D, params)

    def __call__(
        self,
        inputs: Mapping[str, jax.Array],
        count: jax.Array,
        execution: Execution,
        tiles: Tiles | None = None,
        keep: Sequence[int] = (),
    ) -> jax.Array:
        """`tiles`: inside of which patches attend; with `keep` [P, len(keep) * D], after each of these layers and
        without the norm."""
        x = self.patches(inputs["pixels"], execution)
        x = x + in_use(self.positions, execution)[inputs["positions"]]
        x, kept = self.tower(x, count, execution, windows=tiles, keep=keep)
        if keep:
            return jnp.concatenate(list(kept), axis=-1)
        return self.last_norm(x, execution) if hasattr(self, "last_norm") else x
