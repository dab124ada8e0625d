"""Models whose checkpoints are in few bits open as their numbers, under the names of each family."""

import json

import jax
import numpy as np
import pytest
from few_bits import WAYS, in_few_bits, written

import shardlm
from shardlm.errors import ShardlmError
from shardlm.plan.serving.case import ServedModel


@pytest.mark.parametrize("name", WAYS)
def test_a_model_in_4_bits_opens_as_its_numbers(tmp_path, name):
    """Dense, by the expert and with fused weights; in its config.json on being written it is like any."""
    plain, few = in_few_bits(tmp_path, name)
    one, other = (shardlm.load(folder.path, dtype="float32") for folder in (plain, few))
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert np.array_equal(a, b)
    assert "quantization_config" not in other.source.to_hf()
    assert json.loads(other.source.config)["quantization_config"]
    of_both = (ServedModel.of_folder(folder.path) for folder in (plain, few))
    assert len({(model.shape, model.dtype) for model in of_both}) == 1


def test_a_bias_that_the_model_has_not_is_refused_unless_it_is_zero(tmp_path):
    _, few = in_few_bits(tmp_path, "llama")
    tensors = {name: stored.read(...) for name, stored in few.tensors.items()}
    name = "model.layers.1.mlp.up_proj.bias"
    tensors[name] = np.ones_like(tensors[name])
    folder = written(tmp_path / "biased", few.config, tensors)
    with pytest.raises(ShardlmError, match=rf"{name} is not known$"):
        shardlm.load(folder.path)
