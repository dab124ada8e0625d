"""The eyes of GLM's families against transformers."""

import json

import numpy as np
import pytest
from glm_checkpoints import FAMILIES, IMAGE, PREPARATION, folder_of, inputs, made
from hypothesis import given, settings
from hypothesis import strategies as st
from seeing import Eyes, close, noise, written
from served import CLOSE, SIZES, Family, asked, held_to_transformers, replies

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.vision.glm_images import GlmImages
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

IMAGES = [(40, 40), (24, 72), (90, 21), (5, 7)]


OFTEN = ("glm4v", "glm_ocr")  # the others repeat these


@pytest.fixture(
    scope="module", params=[kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.wide) for kind in FAMILIES]
)
def seen(request, tmp_path_factory):
    """(the folder's eyes, transformers' model) of each family."""
    model = made(request.param)
    return Eyes(written(model, tmp_path_factory.mktemp(request.param), {}, preprocessor_config=PREPARATION)), model


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(seen):
    eyes, model = seen
    for size in IMAGES:
        found = inputs([noise(*size)], [IMAGE])
        picture = eyes.sight.prepare(noise(*size))
        assert picture.grid == tuple(side // 2 for side in found["image_grid_thw"][0, 1:].tolist())
        numbers = eyes.sight.prepare.pixels.numbers(picture.inputs["pixels"])
        expected = found["pixel_values"].reshape(-1, 3, 2, 4, 4)[:, :, 0].permute(0, 2, 3, 1)
        np.testing.assert_allclose(numbers, expected.numpy(), atol=1 / 255)
        vectors = model.model.get_image_features(found["pixel_values"], found["image_grid_thw"]).pooler_output[0]
        for patches in {picture.patches, 256}:
            close(eyes.vectors(picture, patches), vectors.numpy())


def test_sight(seen):
    eyes, model = seen
    sight = eyes.sight
    assert (sight.token, sight.vector, sight.merged, sight.whole) == (IMAGE, IMAGE, 4, False)
    assert sight.axes == (model.config.model_type != "glm5_next")
    assert sight.tokens(sight.prepare(noise(40, 40))) == [IMAGE] * 25 and sight.sizes == (256,)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(12_544, 9_633_792), (401, 70_001)]))
def test_size(height: int, width: int, limits: tuple[int, int]):
    from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize

    told = {"size": dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))}
    images = GlmImages.of_frames(told, 14, 2, 2, 0)
    try:
        expected = smart_resize(2, height, width, 2, 28, *limits)
    except ValueError:
        with pytest.raises(ShardlmError, match="has one side of more than 200 times the other; crop it"):
            images.size(height, width)
    else:
        assert images.size(height, width) == expected


def test_options_that_are_not_known(tmp_path):
    path = written(made("glm_ocr"), tmp_path, {}, preprocessor_config=PREPARATION)
    config = json.loads((path / "config.json").read_text())
    for name, value in (("spin", 2), ("swiglu_limit", 3.0), ("depth", 0)):
        with pytest.raises(ShardlmError, match=f"{name}={value}"):
            sight_of(path, config | {"vision_config": config["vision_config"] | {name: value}})
    with pytest.raises(ShardlmError, match="has 'max_pixels', and glm_ocr takes size"):
        sight_of(path, config, {"max_pixels": 3})
    assert sight_of(path, config, {"size": {"shortest_edge": 64, "longest_edge": 2048}}).sizes == (64,)


FIRST, SECOND, THIRD = noise(40, 64), noise(24, 24, 1), noise(90, 21, 2)
ASKS = [
    ([1, 20, 92, IMAGE, 93, 21, 22], [FIRST]),
    ([92, IMAGE, 93, 23, 92, IMAGE, 93, 5, 6, 92, IMAGE, 93, 7], [SECOND, THIRD, FIRST]),
    ([7, 8, 9], []),
]


@pytest.mark.wide
@pytest.mark.parametrize("kind", FAMILIES)
def test_replies_are_those_of_transformers(kind, tmp_path):
    family = Family(*folder_of(kind, tmp_path), inputs)
    llm = LLM(family.folder, **SIZES)
    held_to_transformers(family, llm, ASKS, close=CLOSE.get(kind, 1e-4))
    found = replies(asked(llm, ASKS))
    if kind != "glm5_next":
        assert found == replies(asked(LLM(family.folder, mesh=MeshSpec(tensor=2), **SIZES), ASKS))
