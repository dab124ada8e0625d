"""Folders whose files have values that no image can be prepared by: refused when they are opened, and not with the
first image."""

import json

import pytest
import references

from shardlm.errors import ShardlmError
from shardlm.vision.registry import sight_of

PREPARING = "preprocessor_config.json"


@pytest.mark.parametrize(
    "name, file, told, message",
    [
        ("cohere2_vision", PREPARING, {"size": {"height": 8, "width": 8}}, r"'height': 8.* reads 16 x 16 pixels"),
        ("internvl", PREPARING, {"size": {"height": 8, "width": 8}}, r"'height': 8.* its encoder reads"),
        ("cohere2_vision", PREPARING, {"max_patches": 10**9}, "max_patches=1000000000 tiles of 16 pixels"),
        ("cohere2_vision", PREPARING, {"min_patches": 5}, "min_patches=5 to max_patches=4 tiles"),
        ("internvl", PREPARING, {"max_patches": -1}, "min_patches=1 to max_patches=-1 tiles"),
        ("lighton_ocr", PREPARING, {"size": -1}, "a value that nothing can be made of"),
        ("lfm2_vl", PREPARING, {"max_image_tokens": -1}, "a value that nothing can be made of"),
        ("cohere2_vision", "config.json", {"downsample_factor": -1}, "a value that nothing can be made of"),
        ("llava_next-granite", "config.json", {"vision_config": {"patch_size": 10**9}}, "nothing can be made of"),
        ("aya_vision", "config.json", {"downsample_factor": -1}, "nothing can be made of"),
        ("deepseek_vl", PREPARING, {"min_size": "small"}, "a value that nothing can be made of"),
        ("gemma4_unified", "config.json", {"vision_config": {"pooling_kernel_size": -1}}, "pooling_kernel_size=2, and"),
        ("ovis2", "config.json", {"vision_config": {"hidden_stride": 0}}, "nothing can be made of"),
        ("ovis2", PREPARING, {"max_patches": 10**9}, "max_patches=1000000000 tiles of 16 pixels"),
        (
            "paligemma-second",
            "config.json",
            {"vision_config": {"image_size": -4}},
            "nothing can be made of|resizes images",
        ),
        ("glm4v", "config.json", {"vision_config": {"image_size": float("nan")}}, "nothing can be made of"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_values_that_nothing_can_be_made_of(name, file, told, message, tmp_path):
    home = references.folder(name, tmp_path)
    found = json.loads((home / file).read_text())
    of_eyes = found.get("vision_config", {}) | told.get("vision_config", {})
    (home / file).write_text(json.dumps(found | told | ({"vision_config": of_eyes} if of_eyes else {})))
    with pytest.raises(ShardlmError, match=message):
        sight_of(home, json.loads((home / "config.json").read_text()))
