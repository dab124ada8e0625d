"""Training on rewards with images in prompts: what is trained is what was sampled, to the log-probability."""

import pytest
import references
from rewarded import asked, config_of, steps, task_of

from shardlm.mesh import MeshSpec


@pytest.mark.parametrize("mesh", [MeshSpec(), MeshSpec(data=2, tensor=2)], ids=["one", "mesh"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_what_samples_is_what_is_trained(name, mesh, tmp_path):
    folder = references.folder(name, tmp_path)
    asked(name, folder, tmp_path)
    task = task_of(config_of(folder, tmp_path, mesh))
    found, _ = steps(task, 2)
    assert all(line["sampling_gap"] < 1e-5 and abs(line["ratio"] - 1) < 1e-5 for line in found)
