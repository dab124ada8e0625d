"""Which device reads which image of a batch, at the edges: none at all, and one that no program is for."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import references
from seen_chats import png, said, shards_of, sight, tokenizer
from test_trained_images import LENGTH, ROWS, program_of
from trained import packed

from shardlm.data.config import DataConfig
from shardlm.data.prepare import Prepared
from shardlm.errors import ShardlmError
from shardlm.models.pretrained import Pretrained
from shardlm.train.config import RunConfig
from shardlm.train.seeing import sight_of_run
from shardlm.train.task import Texts


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return program_of(references.folder("gemma3", tmp_path_factory.mktemp("gemma3")))


def test_rows_of_text_have_no_images(program):
    """A run's text, where its other data have images: loaders say nothing of images then."""
    batch, _ = packed(program.seeing.sight, [([3, 4, 5], [])], [[0]] * len(ROWS), LENGTH)
    with jax.set_mesh(program.mesh):
        found = program.on_devices(batch, tuple(range(len(ROWS))), None)
    shapes = program.batch_shapes()
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    assert not found["seen"].any() and not found["vectors"].any()
    np.testing.assert_array_equal(found["until"], np.broadcast_to(np.arange(LENGTH), found["until"].shape))


def test_images_of_more_patches_than_are_read(program):
    """Of shards that were made with another data.max_pixels, in every process, whoever would read them."""
    sight = program.seeing.sight
    ids, images = references.asks("gemma3")[0]
    _, [image, *_] = packed(sight, [(ids, images)], [[0]] * len(ROWS), LENGTH)
    patches, most = image.patches, sight.sizes[-1]
    small = dataclasses.replace(program.seeing.readers(program.slots), sight=dataclasses.replace(sight, sizes=(1,)))
    with pytest.raises(ShardlmError, match=f"has {patches} patches, and at most 1 are read.* restore data.max_pixels"):
        dataclasses.replace(small, here=frozenset())([image])
    assert patches <= most


def test_images_to_validate_by_that_no_row_holds_are_refused_first(program, tmp_path):
    """And not when a run comes to its first validation."""
    (tmp_path / "a.png").write_bytes(png(32, 48))
    ask = said("user", {"type": "image", "path": "a.png"}, "fox")
    shards = shards_of([{"messages": [ask, said("assistant", "dog")]}], tmp_path, sight())
    text = dataclasses.replace(program.config.data, packing="cut")
    cut = dataclasses.replace(program, config=dataclasses.replace(program.config, data=text))
    short = dataclasses.replace(program.config.train, seq_len=16)
    short = dataclasses.replace(program, config=dataclasses.replace(program.config, train=short))
    for one, message in ((cut, "packing=cut would cut images in two"), (short, "longer than a row of 16 tokens")):
        with pytest.raises(ShardlmError, match=message):
            Texts(one, Prepared(tokenizer(), tmp_path, None, shards)).evaluator({})


def run_of(name, folder, **data):
    home = references.folder(name, folder)
    return home, RunConfig(Pretrained(str(home)), data=DataConfig(chat_template=str(home), packing="whole", **data))


@pytest.mark.parametrize(
    "name, pixels, message",
    [
        ("glm4v", 2000, "data.max_pixels=2000: images of a glm4v are prepared as .*preprocessor_config.json says; set"),
        ("gemma3", 2000, "data.max_pixels=2000: images of a gemma3 are prepared as "),
        ("qwen2_5_vl", 100, "data.max_pixels=100: .*256 to 100 pixels; the second needs 256 or more$"),
    ],
)
def test_pixels_that_a_model_does_not_take(name, pixels, message, tmp_path):
    _, config = run_of(name, tmp_path, max_pixels=pixels)
    with pytest.raises(ShardlmError, match=message):
        sight_of_run(config)


def test_text_is_trained_where_images_cannot_be_read(tmp_path, caplog):
    """Conversations without images beside an encoder of which something is not known here."""
    home, _ = run_of("qwen2_5_vl", tmp_path)
    found = json.loads((home / "config.json").read_text())
    found["vision_config"]["spin"] = 2
    (home / "config.json").write_text(json.dumps(found))
    config = RunConfig(Pretrained(str(home)), data=DataConfig(chat_template=str(home), packing="whole"))
    assert sight_of_run(config) is None
    assert "images are not read" in caplog.text and "spin=2" in caplog.text and "limit_mm" not in caplog.text
    (home / "model.safetensors").unlink()
    assert sight_of_run(config) is None and f"{home} has no weights now" in caplog.text
