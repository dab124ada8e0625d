"""Which device reads which image of a batch, at the edges: none at all, and one that no program is for."""

import jax
import numpy as np
import pytest
import references
from test_trained_images import LENGTH, ROWS, program_of
from trained import packed


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
