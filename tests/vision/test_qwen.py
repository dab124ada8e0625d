"""The encoders of Qwen's models against transformers: small random checkpoints, read from their folders."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwen_checkpoints import FAMILIES, IMAGE, MROPE, TEXT, folder_of, inputs
from seeing import Eyes, close, noise

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.plan.serving.case import ServedModel
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sight_of

SIZES = [(40, 40), (24, 72), (64, 64), (90, 21)]


# Whose eyes are those of others here, but for names.
ALIKE = ("qwen4_exp", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
EACH = [pytest.param(kind, marks=pytest.mark.wide) if kind in ALIKE else kind for kind in FAMILIES]


@pytest.fixture(scope="module", params=EACH)
def made(request, tmp_path_factory):
    """A folder of each family, and transformers' model that wrote it."""
    return folder_of(request.param, tmp_path_factory.mktemp(request.param))


def _theirs(model, pixels: np.ndarray) -> np.ndarray:
    """[vectors, (1 + deep) * D]."""
    import torch

    found = inputs([pixels], [IMAGE])
    with torch.no_grad():
        read = getattr(model, "get_image_features", None) or model.model.get_image_features
        made = read(found["pixel_values"], found["image_grid_thw"])
    deep = [each[0] for each in getattr(made, "deepstack_features", None) or []]
    return torch.cat([made.pooler_output[0], *deep], -1).numpy()


def test_vectors(made):
    """Of images of several sizes, by programs for as many patches and for more."""
    path, model = made
    eyes = Eyes(path)
    for size in SIZES:
        picture, expected = eyes.sight.prepare(noise(*size)), _theirs(model, noise(*size))
        assert expected.shape == (picture.vectors, 32 * (1 + eyes.sight.deep))
        for patches in {picture.patches, 256}:
            close(eyes.vectors(picture, patches), expected, 2e-5)


def test_vectors_on_a_mesh(made):
    path, model = made
    eyes = Eyes(path, MeshSpec(tensor=2))
    close(eyes.vectors(eyes.sight.prepare(noise(24, 72))), _theirs(model, noise(24, 72)), 2e-5)


def test_sight(made):
    path, _ = made
    config = json.loads((path / "config.json").read_text())
    sight = sight_of(path, config)
    picture = sight.prepare(noise(40, 40))
    assert (sight.token, sight.vector, sight.merged, sight.whole) == (IMAGE, IMAGE, 4, False)
    assert sight.axes == (config["model_type"] != "exaone4_5")
    assert sight.tokens(picture) == [IMAGE] * 25 and sight.sizes[-1] == 256


def test_options_that_are_not_known(tmp_path: pathlib.Path):
    path, _ = folder_of("qwen3_5", tmp_path)
    config = json.loads((path / "config.json").read_text())
    for option, message in ({"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes"), ({"spin": 2}, "spin=2"):
        with pytest.raises(ShardlmError, match=message):
            sight_of(path, config | {"vision_config": config["vision_config"] | option})


@pytest.mark.parametrize(
    "file, told, message",
    [
        ("config.json", {"depth": "27"}, "depth='27'; it needs a whole number"),
        ("config.json", {"num_heads": 0}, "num_heads=0; it needs a whole number"),
        ("config.json", {"spatial_merge_size": 0}, "spatial_merge_size=0; it needs a whole number"),
        ("preprocessor_config.json", {"size": "large", "min_pixels": 0}, "a value that nothing can be made of"),
        ("preprocessor_config.json", {"image_std": "half"}, "a value that nothing can be made of"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, r"image_mean=\(0.5,\)"),
        ("preprocessor_config.json", {"max_pixels": 10}, "256 to 10 pixels"),
    ],
)
def test_damaged_files(file, told, message, tmp_path: pathlib.Path):
    """Are refused by name, and it is said how to do without."""
    folder, _ = folder_of("qwen2_5_vl", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if file == "config.json":
        config["vision_config"] |= told
        (folder / file).write_text(json.dumps(config))
    else:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | told))
    with pytest.raises(ShardlmError, match=f'{message}.*image": 0}} serves its text without'):
        sight_of(folder, config)
    with pytest.raises(ShardlmError, match=message):
        ServedModel.of_folder(folder, 48)
    assert ServedModel.of_folder(folder, 48, sees=False).seen is None


# As published with Qwen2-VL 7B, Qwen2.5-VL 7B and Qwen3-VL 4B, and what their files say of preparing images.
PUBLISHED = {
    "qwen2_vl": (
        {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584}
        | {"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
        {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    ),
    "qwen2_5_vl": (
        {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
        | {"in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14}
        | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2}
        | {"temporal_patch_size": 2},
        {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    ),
    "qwen3_vl": (
        {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024}
        | {"in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "qwen3_vl"}
        | {"num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2},
        {"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16, "temporal_patch_size": 2}
        | {"merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published(kind: str, tmp_path: pathlib.Path):
    """The encoder has as many weights as transformers', and takes images of up to 16,384 tokens."""
    torch, transformers = (
        pytest.importorskip("torch", reason="what transformers made is in references/"),
        pytest.importorskip("transformers", reason="what transformers made is in references/"),
    )
    vision, told = PUBLISHED[kind]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    sight = sight_of(tmp_path, {"model_type": kind, "vision_config": vision})
    encoder = Encoder.make(sight.encoder, jnp.bfloat16, MeshSpec().build(jax.devices()[:1]))
    name, text, _ = FAMILIES[kind]
    text = {**TEXT, **text, "rope_parameters": dict(MROPE)}
    with torch.device("meta"):
        theirs = getattr(transformers, f"{name}Model")(
            getattr(transformers, f"{name}Config")(vision_config=dict(vision), text_config=text)
        )
    assert encoder.bytes == 2 * sum(a.numel() for a in theirs.visual.parameters())
    assert (sight.sizes[0], sight.sizes[-1]) == (1024, 65_536) and sight.deep == 3 * (kind == "qwen3_vl")


def test_how_large_images_become_may_be_said_otherwise(tmp_path):
    path, _ = folder_of("qwen2_5_vl", tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert sight_of(path, config, {"max_pixels": 1024}).sizes[-1] == 64
    assert sight_of(path, config, {"max_pixels": 1024}).prepare(noise(90, 90)).patches <= 64
    with pytest.raises(ShardlmError, match="has 'longest', and qwen2_5_vl takes min_pixels, max_pixels, size"):
        sight_of(path, config, {"longest": 3})
