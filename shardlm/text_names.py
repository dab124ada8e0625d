"""What the tensors of a checkpoint are called where its language model is written alone, and which are no part."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from shardlm.models import registry

# In published checkpoints, and not part of the language model: buffers, the halves of what also sees, and ERNIE's
# modules that predict further tokens.
_OF_EYES = (
    *("vision_tower", "vision_model", "vision_encoder", "vision_projection", "vision_embedder", "visual", "connector"),
    *("multi_modal_projector", "mm_projector", "vit_large_projector", "embed_vision", "embed_audio", "audio_tower"),
    *("aligner", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head"),
    *("visual_embeddings_table", "talker", "token2wav", "code2wav"),
)
_NOT_OURS = re.compile(
    r"\.rotary_emb\.inv_freq$|(^|\.)h\.\d+\.attn\.(bias|masked_bias)$|"
    rf"(^|\.)({'|'.join(_OF_EYES)}|mtp(_\w+)?)\.|"
    r"(^|\.)image_newline$|^(model\.)?(mlp_AR|projector|patch_merge_mlp)\."
)
# How names begin in the files of language models without a head.
_BARE = ("layers.", "embed_tokens", "norm.", "embedding_norm.", "per_layer_", "altup_", "hyper_connection_mixer.")


def text_name(options: Mapping[str, Any]) -> Callable[[str], str | None]:
    """By a config.json: what a tensor is called in a checkpoint of its language model alone; None: it is no part of
    that."""
    modules, published = registry.modules(options), registry.published_name(options)
    unused = registry.unused(options)

    def called(name: str) -> str | None:
        if _NOT_OURS.search(name) and not (modules and name.startswith(modules.prefix)):
            return None
        name = published(name) if published else _alone(name)
        return None if unused and unused.match(name) else name

    return called


def _alone(name: str) -> str:
    name = re.sub(r"^thinker\.", "", name)
    name = re.sub(r"^(model\.)?language_model\.(?=model\.|lm_head\.)|^model\.(language|text)_model\.", "", name)
    name = re.sub(r"^model\.blocks\.", "model.layers.", name)  # as transformers 5.23 writes Kimi K2.5's
    if name.startswith(_BARE):
        name = f"model.{name}"
    if re.match(r"(h\.\d|wte|wpe|ln_f)", name):
        name = f"transformer.{name}"
    return name
