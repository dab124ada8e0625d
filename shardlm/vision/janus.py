"""The encoders of Janus (https://arxiv.org/abs/2501.17811, the half that understands images) and DeepSeek-VL
(https://arxiv.org/abs/2403.05525): SigLIP on squares of one size, and two products into the text's width."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import NormConfig
from shardlm.layers.param import Execution, Params
from shardlm.models.naming import Names
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import Activation, activate
from shardlm.vision.images import named, processing, token_ids
from shardlm.vision.janus_images import JanusImages
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import OnSiglip, Siglip, SiglipConfig
from shardlm.vision.tower import Linear, TowerConfig, linear_names
from shardlm.vision.tower_weights import Tensors

JANUS = "janus"
ENDS = {"boi": "<begin_of_image>", "eoi": "<end_of_image>"}


@dataclasses.dataclass(frozen=True)
class JanusConfig(OnSiglip):
    """siglip; width of vectors; activation between the products. kind: `model_type`, which names go by."""

    kind: str
    width: int
    activation: Activation

    tensors = Tensors(
        ("vision_model.", "aligner."),
        r"^vision_model\.head\.",
        ((r"^model\.", ""), (r"^vision_model\.vision_model\.", "vision_model.")),
    )

    def module(self, params: Params) -> nnx.Module:
        return JanusEncoder(self, params)

    def names(self) -> Names:
        janus = self.kind == JANUS
        first, second = ("fc1", "hidden_layers.0") if janus else ("linear1", "linear2")
        return {
            **self.siglip.names("siglip", "vision_model.", "projection_layer" if janus else "out_proj"),
            **linear_names("first", f"aligner.{first}", bias=True),
            **linear_names("second", f"aligner.{second}", bias=True),
        }


class JanusEncoder(nnx.Module):
    """SigLIP and two products."""

    def __init__(self, config: JanusConfig, params: Params):
        self.config = config
        self.siglip = Siglip(config.siglip, params)
        self.first = Linear(config.tower.width, config.width, True, params)
        self.second = Linear(config.width, config.width, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        x = self.first(self.siglip(inputs, count, execution), execution)
        return self.second(activate(x, self.config.activation), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` janus, in which a token stands before an image and one behind it, and deepseek_vl."""
    kind, width = options["model_type"], text_config(options)["hidden_size"]
    side = options["vision_config"].get("image_size") or (384 if kind == JANUS else 224)
    config = _janus(options, side, width) if kind == JANUS else _deepseek(options, side, width)
    images = JanusImages.told(processing(folder, asked), side, config.siglip.patch)
    token = options.get("image_token_id") or (100_581 if kind == JANUS else 100_015)
    ends = [named(folder, f"{end}_token", usual) for end, usual in ENDS.items()] if kind == JANUS else []
    around = token_ids(folder, ends)

    def tokens(picture) -> list[int]:
        return [*around[:1], *[token] * picture.vectors, *around[1:]]

    return Sight(token, token, images, tokens, (config.siglip.positions,), config)


def _deepseek(options: Mapping[str, Any], side: int, width: int) -> JanusConfig:
    own = vision_options(options["vision_config"], "siglip_vision_model")
    siglip = SiglipConfig.told(own, side)
    own.finish()
    return JanusConfig(siglip, "deepseek_vl", width, "gelu")


def _janus(options: Mapping[str, Any], side: int, width: int) -> JanusConfig:
    own = vision_options(options["vision_config"], "janus_vision_model")
    own.aside("projection_dropout", "hidden_dropout_rate", "use_vision_head")
    own.only("use_qk_norm", False)
    own.only("depth", 2)
    inner = own("hidden_size", 1024)
    tower = TowerConfig(
        layers=own("num_hidden_layers", 24),
        width=inner,
        heads=own("num_attention_heads", 16),
        mlp_dim=int(inner * own("mlp_ratio", 4.0)),
        norm=NormConfig("layer", own("layer_norm_eps", 1e-6)),
        activation=activation_of(own("hidden_act", "gelu")),
        bias=bool(own("attention_bias", True)),
    )
    patch = own("patch_size", 16)
    siglip = SiglipConfig(tower, patch, (side // patch) ** 2)
    told = own("num_image_tokens", siglip.positions)
    own.finish()
    if told != siglip.positions:
        raise ShardlmError(
            f"config.json has num_image_tokens={told} of images of {side} pixels in patches of {patch}, which are "
            f"{siglip.positions}"
        )
    return JanusConfig(siglip, JANUS, width, tower.activation)
