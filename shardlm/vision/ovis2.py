"""Ovis 2's encoder (https://arxiv.org/abs/2405.20797; transformers' modeling_ovis2.py is the definition): AIMv2 on
tiles of one size, of which squares of patches have probabilities of words of their own, whose embeddings are mixed by
them."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.vision.attending import Tiles
from shardlm.vision.images import places, processing, token_ids
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.ovis2_images import AROUND, Ovis2Images
from shardlm.vision.sight import Sight
from shardlm.vision.tiles import tile_sizes
from shardlm.vision.tower import Linear, Patches, Tower, TowerConfig, block_names, linear_names, norm_names, patch_names
from shardlm.vision.tower_weights import Tensors

WORDS = NormConfig("layer", 1e-5)
NAMES = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")  # as AROUND
IDS = (151_666, 151_667, 151_668, 151_669, 151_670)


@dataclasses.dataclass(frozen=True)
class Ovis2Config:
    """tower: its layers, one of `patch` pixels a side, `across` of which a tile has a side; merge: patches a side that
    one vector is made of; words: of an image, behind which the table has AROUND; width of vectors."""

    tower: TowerConfig
    patch: int
    across: int
    merge: int
    words: int
    width: int

    tensors = Tensors(("vision_tower.", "visual_embeddings_table."), r"\.position_ids$")

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": ((self.patch, self.patch, 3), np.float32), "near": ((), np.int32)}

    @property
    def together(self) -> int:
        """Patches that one of those rows stands for that are multiplied by what is behind the tower."""
        return self.merge**2

    @property
    def order(self) -> np.ndarray:
        """The learned position of each patch, in the order of images.patches."""
        row, column = places(self.across, self.across, self.merge)
        return row * self.across + column

    def module(self, params: Params) -> nnx.Module:
        return Ovis2Encoder(self, params)

    def names(self) -> Names:
        eyes, norm = "vision_tower.transformer.", self.tower.norm
        return {
            **patch_names("patches", f"{eyes}embeddings.patch_embedding", bias=True),
            **norm_names(norm, "first_norm", f"{eyes}embeddings.rms_norm"),
            "positions": Tensor(f"{eyes}embeddings.position_embedding.weight"),
            **block_names(
                self.tower,
                "tower.block",
                f"{eyes}encoder.layers.{{layer}}.",
                attention_norm="rms_norm1",
                mlp_norm="rms_norm2",
                **{f"w{letter}": f"attention.{letter}_proj" for letter in "qkv"},
                wo="attention.out_proj",
                **{part: f"ffn.{part}_proj" for part in ("gate", "up", "down")},
            ),
            **norm_names(norm, "last_norm", f"{eyes}rms_norm"),
            **linear_names("head", "vision_tower.head_linear", bias=False),
            **norm_names(WORDS, "head_norm", "vision_tower.head_norm"),
            "table": Tensor("visual_embeddings_table.weight"),
        }


class Ovis2Encoder(nnx.Module):
    """Patches and their norm, "positions" [across * across, D], tower, norm, a product with its norm, and "table"
    [words + AROUND, width]."""

    def __init__(self, config: Ovis2Config, params: Params):
        D = config.tower.width
        self.config = config
        self.patches = Patches(config.patch, 3, D, True, params)
        self.first_norm, self.last_norm = (Norm(config.tower.norm, D, params) for _ in range(2))
        self.positions = params((config.across**2, D), (None, "norm"), normal(D**-0.5))
        self.tower = Tower(config.tower, params)
        self.head = Linear(config.merge**2 * D, config.words, False, params)
        self.head_norm = Norm(WORDS, config.words, params)
        rows = config.words + len(AROUND)
        self.table = params((rows, config.width), (None, "norm"), normal(1.0), into=1)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        """Of tiles the whole ones among the rows, and for each row the vector that is `near`, or one of AROUND."""
        each, pixels = self.config.across**2, inputs["pixels"]
        pixels = pixels[: len(pixels) // each * each]
        x = self.first_norm(self.patches(pixels, execution), execution)
        x = x + jnp.tile(in_use(self.positions, execution)[self.config.order], (len(pixels) // each, 1))
        x, _ = self.tower(x, count, execution, windows=Tiles(each))
        x = self.last_norm(x, execution).reshape(len(pixels) // each, -1, self.config.merge**2 * x.shape[-1])
        words, around = jnp.split(in_use(self.table, execution), [self.config.words])

        def mixed(tile):  # [vectors, ...]: of one tile at a time, as there are some 65,000 words
            shares = self.head_norm(self.head(tile, execution), execution).astype(jnp.float32)
            return jnp.einsum("pw,wf->pf", jax.nn.softmax(shares, axis=-1).astype(words.dtype), words)

        vectors = jax.lax.map(mixed, x)
        return jnp.concatenate([around, vectors.reshape(-1, self.config.width)])[inputs["near"]]


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` ovis2. Tokens around vectors take vectors too."""
    config = _config(options)
    images = Ovis2Images.told(processing(folder, asked), config.patch * config.across, config.patch, config.merge)
    around, told = token_ids(folder, NAMES), tuple(options.get("visual_indicator_token_ids") or IDS)
    if around != told:
        raise ShardlmError(
            f"config.json has visual_indicator_token_ids={list(told)}, and {', '.join(NAMES)} are {list(around)} in "
            "the tokenizer; download both again"
        )
    vector = options.get("image_token_id") or 151_665
    [token] = token_ids(folder, ["<image>"])

    def tokens(picture) -> list[int]:
        near = picture.inputs["near"][: picture.vectors].tolist()
        return [around[each] if each < len(around) else vector for each in near]

    counts = (size // config.across**2 for size in tile_sizes(images.most, config.across**2))
    sizes = tuple(count * config.across**2 + count + len(AROUND) for count in counts)
    return Sight(token, vector, images, tokens, sizes, config, fewer=True, also=around)


def _config(options: Mapping[str, Any]) -> Ovis2Config:
    told = options["vision_config"]
    own = vision_options(told, "ovis2_vision")
    own.only("tokenize_function", "softmax")
    own.only("num_visual_indicator_tokens", len(AROUND))
    bias = bool(own("qkv_bias", False))
    tower = TowerConfig(
        layers=own("num_hidden_layers", 24),
        width=own("hidden_size", 1024),
        heads=own("num_attention_heads", 8),
        mlp_dim=own("intermediate_size", 2816),
        norm=NormConfig("rms", own("rms_norm_eps", 1e-5)),
        activation=activation_of(own("hidden_act", "silu")),
        gated=True,
        bias=bias,
        out_bias=bias,
        mlp_bias=bool(own("mlp_bias", False)),
    )
    patch, merge, words = own("patch_size", 14), own("hidden_stride", 1), own("vocab_size", 16_384) - len(AROUND)
    own.finish()
    across = (told.get("image_size") or 224) // patch
    if across % merge:
        raise ShardlmError(f"config.json has hidden_stride={merge} of tiles of {across} patches; it must divide")
    return Ovis2Config(tower, patch, across, merge, words, text_config(options)["hidden_size"])
