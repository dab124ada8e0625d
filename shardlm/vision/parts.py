"""Which of an encoder's weights a run trains (train.encoder), by the names of its checkpoint's tensors. No jax."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from shardlm.models.naming import Names

EncoderPart = Literal["frozen", "projector", "all"]
Path = tuple

# What brings a tower's vectors into the text's width, by the names of the map (tower_weights.py): DeepStack's mergers
# too, as ms-swift's aligners; not LLaVA-NeXT's image_newline, GLM's downsample and Llama 4's vision_adapter, which
# other trainers count with the tower.
PROJECTOR = re.compile(
    r"((multi_modal_projector|mm_projector|embed_vision|connector|projector|aligner|visual_embeddings_table)\."
    r"|visual\.(merger|merger_list|deepstack_merger_list)\.|vision_tower\.head_(linear|norm)\.)"
)
# Numbers of a checkpoint that are no weights: buffers of transformers' (limits and standards of Gemma 4).
BUFFER = re.compile(r"\.(input|output)_(min|max)$|^vision_tower\.std_")


def trained_paths(paths: Iterable[Path], names: Names, part: EncoderPart) -> frozenset[Path]:
    """Those of an encoder's weights that are trained; `names` is its map (encoder.py's Seeing)."""
    if part == "frozen":
        return frozenset()
    named: Mapping[Path, str] = {path: names[".".join(map(str, path))].name for path in paths}
    if part == "projector":
        return frozenset(path for path, name in named.items() if PROJECTOR.match(name))
    return frozenset(path for path, name in named.items() if not BUFFER.search(name))
