"""A table of n-grams stays where it rests: what is looked up on a mesh, and its gradient, is that of one device, and
nothing as large as a device's part of the table crosses devices."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.hlo.collectives import collectives
from shardlm.layers.ngrams import NgramsConfig, NgramTable
from shardlm.layers.param import Execution, Params
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.ops.ngram_hash import NgramHash
from shardlm.rules import Rules
from shardlm.train.check import check_model

REFERENCE = pathlib.Path(__file__).parent / "hf" / "references" / "qwen4_exp"
ROWS, HEADS, WIDTH = 4096, 2, 8
CONFIG = NgramsConfig(0, 0, NgramHash((3, 5), (ROWS // 2 - 1, ROWS // 2 - 3), 0), ROWS, HEADS * WIDTH, 2, 2, 1e-6)


def looked_up(spec: MeshSpec, served: bool = False):
    """(what is found, the table's gradient, the bytes of what devices exchange) of the same table and tokens."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.integers(0, ROWS, (8, 8, HEADS)), jnp.int32)
    weights = jnp.asarray(rng.standard_normal((8, 8, HEADS * WIDTH)), jnp.float32)
    with jax.set_mesh(mesh_of(spec)):
        rules = Rules.make("zero3", spec)
        rules = rules.for_decoding() if served else rules
        module = NgramTable(CONFIG, Params(nnx.Rngs(1), rules))
        graph, state = nnx.split(module)
        act = rules.act
        rows = jax.device_put(rows, act.spec("batch", "whole_seq", None))
        weights = jax.device_put(weights, act.spec("batch", "seq", None))

        def run(state, rows, weights):
            found = nnx.merge(graph, state)(rows, Execution(rules))
            return jnp.sum(found * weights), found

        step = jax.jit(jax.value_and_grad(run, has_aux=True)).lower(state, rows, weights).compile()
        (_, found), gradient = step(state, rows, weights)
        sent = [one.bytes for one in collectives(step.as_text(), spec.sizes()) if one.group_size > 1]
        return np.asarray(found), np.asarray(gradient["table"][...]), sent


@pytest.mark.parametrize(
    ("spec", "served"),
    [
        (MeshSpec(data=2, fsdp=2, tensor=2), False),
        (MeshSpec(expert=2, context=2, tensor=2), False),
        (MeshSpec(fsdp=2, tensor=4), True),
    ],
    ids=str,
)
def test_a_table_on_a_mesh(spec, served):
    found, gradient, _ = looked_up(MeshSpec())
    on_mesh, of_mesh, sent = looked_up(spec, served)
    np.testing.assert_array_equal(on_mesh, found)
    np.testing.assert_allclose(of_mesh, gradient, atol=1e-6)
    assert sent and max(sent) < 4 * ROWS * WIDTH / 8


def test_what_does_not_divide_or_compose_is_refused_by_name():
    shape = Pretrained(str(REFERENCE), length=16).transformer()
    with pytest.raises(ShardlmError, match="layer 0's n-grams has 8 columns, which cannot be split over data=16; give"):
        check_model(shape, Rules.make("zero3", MeshSpec(data=16)))
    with pytest.raises(ShardlmError, match="pipeline=2: layers of the model look at the tokens themselves"):
        check_model(shape, Rules.make("zero3", MeshSpec(pipeline=2)))
    with pytest.raises(ShardlmError, match="context_attention=ring: its devices see a part of the keys"):
        check_model(shape, Rules.make("zero3", MeshSpec(context=2)), "ring")
    with pytest.raises(ShardlmError, match="17 numbers of n-grams cannot be split over 2 heads"):
        dataclasses.replace(CONFIG, dim=17)
