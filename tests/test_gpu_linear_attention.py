"""Linear attention compiled for NVIDIA GPUs without one: states go through chunks in one kernel, not in a loop."""

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import MARKS

from shardlm.ops.gated_delta import gated_delta
from shardlm.topology import topology

pytestmark = MARKS


@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize("dtype,kernels", [(jnp.bfloat16, 2), (jnp.float32, 0)], ids=["bf16", "fp32"])
def test_states_are_carried_by_a_kernel_in_16_bits(gpu, dtype, kernels):
    """Forward and back; of float32 by a loop each."""
    B, T, K, N, H, V = 1, 1024, 2, 4, 128, 128
    on = jax.sharding.SingleDeviceSharding(topology(gpu, 1, 1)[0])
    near = [(B, T, K, H), (B, T, K, H), (B, T, N, V)]
    wide = [(B, T, N), (B, T, N), (B, N, H, V)]
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape in near]
    given += [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on) for shape in wide]
    text = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=on)

    def loss(*given):
        return jnp.sum(gated_delta(*given)[0].astype(jnp.float32))

    found = jax.jit(jax.grad(loss, argnums=range(6))).lower(*given, text).compile().as_text()
    assert found.count('custom_call_target="__gpu$xla.gpu.triton"') == kernels
    assert found.count(" while(") == 2 - kernels
