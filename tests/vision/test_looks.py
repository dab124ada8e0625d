"""Which device reads which image of a batch, at the edges: none at all, and one that no program is for."""

import dataclasses

import jax
import numpy as np
import pytest
import references
from test_trained_images import LENGTH, ROWS, program_of
from trained import packed

from shardlm.errors import ShardlmError


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
