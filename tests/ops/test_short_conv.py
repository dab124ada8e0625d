"""Short convolutions over rows that are split (ops/short_conv.py); what they compute is families' (tests/hf)."""

import jax
import jax.numpy as jnp
import pytest

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.ops.short_conv import from_device_before


def test_a_part_of_a_row_that_is_shorter_than_what_is_seen_is_refused():
    with jax.set_mesh(MeshSpec(context=4).build(jax.devices()[:4])):
        rows = jax.P(None, "context")
        x, ids = jnp.ones((1, 8, 2, 2), out_sharding=rows), jnp.ones((1, 8), jnp.int32, out_sharding=rows)

        def run(count):
            before = jax.shard_map(
                lambda x, ids: from_device_before(x, ids, count, "context"), in_specs=(rows, rows), out_specs=rows
            )
            return jax.eval_shape(before, x, ids)

        assert run(2).shape == (1, 8, 2, 2)
        with pytest.raises(ShardlmError, match="has 2 tokens of a row, split over context, and a short"):
            run(3)
