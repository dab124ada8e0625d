"""Positions on three axes against those of transformers."""

import types

import numpy as np
import pytest

from shardlm.vision.axes import axes_of
from shardlm.vision.picture import Picture, expanded

IMAGE, MERGE = 7, 2
CLASSES = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
}
PROMPTS = {
    "text": ([1, 2, 3], []),
    "one": ([1, 2, IMAGE, 3, 4], [(3, 5)]),
    "first": ([IMAGE, 3], [(1, 6)]),
    "last": ([4, IMAGE], [(6, 1)]),
    "several": ([1, IMAGE, 2, IMAGE, 3, 3, IMAGE, 4], [(2, 2), (4, 1), (3, 7)]),
}


def _prompt(name: str):
    ids, grids = PROMPTS[name]
    pictures = [Picture({"pixels": np.zeros((4 * r * c, 1))}, (r, c), b"") for r, c in grids]
    return expanded(ids, pictures, IMAGE, (IMAGE,), lambda picture: [IMAGE] * picture.vectors)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", CLASSES)
def test_as_transformers(kind: str, prompt: str):
    torch, transformers = (
        pytest.importorskip("torch", reason="what transformers made is in references/"),
        pytest.importorskip("transformers", reason="what transformers made is in references/"),
    )
    module = getattr(transformers.models, kind)
    model = getattr(getattr(module, f"modeling_{kind}"), CLASSES[kind])
    config = types.SimpleNamespace(
        vision_config=types.SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2), image_token_id=IMAGE
    )
    own = types.SimpleNamespace(config=config)
    own.get_vision_position_ids = types.MethodType(model.get_vision_position_ids, own)
    ids, placed = _prompt(prompt)
    grids = [(1, MERGE * r, MERGE * c) for r, c in PROMPTS[prompt][1]]
    theirs, after = model.get_rope_index(
        own,
        torch.tensor([ids]),
        (torch.tensor([ids]) == IMAGE).int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    axes, following = axes_of(len(ids), placed)
    assert axes.dtype == np.int32
    np.testing.assert_array_equal(axes, theirs[:, 0].numpy())
    assert following == len(ids) + int(after[0, 0])


def test_pictures_side_by_side():
    """Which transformers takes for one."""
    grids = [(2, 3), (1, 2)]
    pictures = [Picture({"pixels": np.zeros((r * c, 1))}, (r, c), b"") for r, c in grids]
    ids, placed = expanded([IMAGE, IMAGE, 1], pictures, IMAGE, (IMAGE,), lambda picture: [IMAGE] * picture.vectors)
    axes, following = axes_of(len(ids), placed)
    assert axes.tolist() == [
        [0, 0, 0, 0, 0, 0, 3, 3, 5],
        [0, 0, 0, 1, 1, 1, 3, 3, 5],
        [0, 1, 2, 0, 1, 2, 3, 4, 5],
    ]
    assert following == 6
