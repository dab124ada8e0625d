"""PaliGemma and PaliGemma 2 (https://arxiv.org/abs/2407.07726, https://arxiv.org/abs/2412.03555): SigLIP on squares of
one size, and a product into the text's width. All tokens of a prompt see each other; images stand before its text."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from shardlm.layers.param import Execution, Params
from shardlm.models.naming import Names
from shardlm.models.text_parts import text_config
from shardlm.vision.images import processing, spelt
from shardlm.vision.options import vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import WITH_PROJECTOR, OnSiglip, Siglip, SiglipConfig
from shardlm.vision.square_images import SquareImages
from shardlm.vision.tower import Linear, linear_names

# What a vision_config leaves to PaliGemma's own defaults.
USUAL = {"intermediate_size": 4096, "hidden_size": 1152, "patch_size": 14, "image_size": 224}
USUAL |= {"num_hidden_layers": 27, "num_attention_heads": 16}


@dataclasses.dataclass(frozen=True)
class PaligemmaConfig(OnSiglip):
    """siglip; width of vectors."""

    width: int

    tensors = WITH_PROJECTOR

    def module(self, params: Params) -> nnx.Module:
        return PaligemmaEncoder(self, params)

    def names(self) -> Names:
        return {
            **self.siglip.names("siglip", "vision_tower."),
            **linear_names("out", "multi_modal_projector.linear", bias=True),
        }


class PaligemmaEncoder(nnx.Module):
    """SigLIP and a product."""

    def __init__(self, config: PaligemmaConfig, params: Params):
        self.siglip = Siglip(config.siglip, params)
        self.out = Linear(config.tower.width, config.width, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        return self.out(self.siglip(inputs, count, execution), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` paligemma."""
    told, text = USUAL | dict(options["vision_config"]), text_config(options)
    own = vision_options(told, "siglip_vision_model")
    own.aside("num_image_tokens", "num_positions", "projector_hidden_act", "vocab_size")  # of no layer
    siglip = SiglipConfig.told(own, told["image_size"])
    own.finish()
    images = SquareImages.told(processing(folder, asked), told["image_size"], siglip.patch, 1)
    token = options.get("image_token_index") or options.get("image_token_id") or 256_000
    begin = options.get("bos_token_id") or text.get("bos_token_id") or 2
    [line_end] = spelt(folder, ["\n"])

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    def arranged(ids: Sequence[int]) -> list[int]:
        """The images, what begins a text, the text, and a line's end, as the processor writes them."""
        behind = max(i for i, id in enumerate(ids) if id == token) + 1
        before, text = [id for id in ids[:behind] if id != begin], list(ids[behind:])
        text = text if text[:1] == [begin] else [begin, *text]
        return [*before, *text, *(() if tuple(text[-len(line_end) :]) == tuple(line_end) else line_end)]

    config = PaligemmaConfig(siglip, text["hidden_size"])
    sizes = (siglip.positions,)
    return Sight(token, token, images, tokens, sizes, config, whole=True, prefix=True, arranged=arranged)
