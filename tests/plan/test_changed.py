"""A configuration with other values is what the library's own function makes of it."""

import dataclasses

import pytest

from shardlm.config import load
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.plan.changed import changed
from shardlm.plan.sketch import Sketch

CONFIG = load("configs/tiny.py")


def test_it_is_what_replace_makes_and_leaves_the_first_as_it_was():
    before = dataclasses.replace(CONFIG)
    made = changed(CONFIG, remat="none", mesh=MeshSpec(fsdp=8))
    wanted = dataclasses.replace(CONFIG, remat="none", mesh=MeshSpec(fsdp=8))
    assert made == wanted and hash(made) == hash(wanted) and made != CONFIG == before


def test_what_is_no_field_and_what_was_remembered_are_refused():
    with pytest.raises(TypeError, match=r"RunConfig has no fields remats: use dataclasses.replace"):
        changed(CONFIG, remats="none")
    sketch = Sketch.of(dataclasses.replace(CONFIG, mesh=MeshSpec()), GPUS["h100"])
    assert sketch.schedule
    with pytest.raises(TypeError, match="Sketch has no fields schedule"):
        changed(sketch, gpus_per_host=4)
